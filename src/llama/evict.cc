#include "llama/evict.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "baseline/score.h"
#include "llama/evict_recipe.h"

namespace dropkv::llama {
namespace {

double Mean(const std::vector<float>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The policy as the engine knows it.
Policy EnginePolicy(const baseline::Recipe& recipe) {
  Policy policy = recipe.policy;
  policy.signal = baseline::EngineSignal(recipe.scorer).value_or(policy.signal);
  return policy;
}

Status RunOnEngine(const Prefilled& prefilled, Engine* engine, std::span<EvictTask* const> tasks) {
  const baseline::Recipe& first = *tasks.front()->job->recipe;
  const Result<LayerInputs> inputs = LayerInputs::Make(prefilled, first);
  if (!inputs.ok()) return inputs.status();
  EvictShape shape = ShapeOf(prefilled);
  shape.rows = inputs->rows();
  // The certificate is measured over the prompt's captured rows, whoever judged.
  const bool same_rows = prefilled.generated == 0 && inputs->rows() == prefilled.rows();
  std::vector<Plan> plans;
  std::vector<EvictOutput> outputs(tasks.size());
  std::vector<EvictReport> reports(tasks.size());
  size_t workspace_bytes = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const EvictJob& job = *tasks[i]->job;
    Result<Plan> plan = engine->MakePlan(shape, EnginePolicy(*job.recipe), job.budget);
    if (!plan.ok()) return plan.status();
    workspace_bytes = std::max(workspace_bytes, plan->workspace_bytes);
    plans.push_back(std::move(*plan));
    if (!same_rows) continue;
    outputs[i].output_error = tasks[i]->certificate.error.data();
    outputs[i].evicted_mass = tasks[i]->certificate.mass.data();
  }
  std::vector<std::byte> workspace(workspace_bytes);
  const Result<std::vector<KeepList>> keeps = engine->RunAll(plans, inputs->layers(), workspace, outputs, reports);
  if (!keeps.ok()) return keeps.status();
  for (size_t i = 0; i < tasks.size(); ++i) {
    Evicted& evicted = tasks[i]->evicted;
    evicted.report = reports[i];
    evicted.keep = prefilled.WithoutGenerated((*keeps)[i]);
    evicted.score_seconds = reports[i].attend_s + reports[i].score_s + reports[i].select_s;
  }
  return same_rows ? Status::Ok() : Certify(prefilled, engine, tasks);
}

// Where every layer slides.
Result<Evicted> EvictNothing(const EvictJob& job, int32_t n) {
  Evicted evicted;
  const Result<KeepCount> count = ResolveBudget(job.budget, *job.recipe, ProtectedTokens(*job.recipe), n);
  if (!count.ok()) return count.status();
  evicted.report.budget = {n, count->raised};
  return evicted;
}

}  // namespace

int32_t ProtectedTokens(const baseline::Recipe& recipe) {
  const int32_t last = baseline::ProtectedLast(recipe);
  return std::max(1, last + recipe.policy.sink);  // a cache of nothing has no attention
}

Result<KeepCount> ResolveBudget(const Budget& budget, const baseline::Recipe& recipe, int32_t protected_tokens,
                                int32_t n) {
  const bool full = recipe.scorer == baseline::Scorer::kFull;
  Policy policy = recipe.policy;
  policy.signal = full ? Signal::kFull : Signal::kRecency;
  if (protected_tokens == policy.window + policy.sink || full) return dropkv::ResolveBudget(budget, policy, n);
  if (!budget.fraction && budget.tokens >= 1 && budget.tokens < protected_tokens)
    return InvalidArgument("budget: expected at least " + std::to_string(protected_tokens) +
                           " tokens per KV head for policy " + policy.name + ", which always keeps that many, got " +
                           std::to_string(budget.tokens));
  policy.window = protected_tokens - policy.sink;
  return dropkv::ResolveBudget(budget, policy, n);
}

bool SharesScores(const baseline::Recipe& a, const baseline::Recipe& b) {
  return baseline::RunsOnEngine(a) == baseline::RunsOnEngine(b) && baseline::SameScores(a, b);
}

Result<Evicted> Evict(const Prefilled& prefilled, Engine* engine, const baseline::Recipe& recipe,
                      const Budget& budget) {
  const EvictJob job{&recipe, budget};
  Result<std::vector<Evicted>> evicted = EvictAll(prefilled, engine, {&job, 1});
  if (!evicted.ok()) return evicted.status();
  return std::move(evicted->front());
}

Result<std::vector<Evicted>> EvictAll(const Prefilled& prefilled, Engine* engine, std::span<const EvictJob> jobs) {
  std::vector<Evicted> all;
  all.reserve(jobs.size());
  if (prefilled.layers.empty()) {
    for (const EvictJob& job : jobs) {
      Result<Evicted> evicted = EvictNothing(job, prefilled.size());
      if (!evicted.ok()) return evicted.status();
      all.push_back(std::move(*evicted));
    }
    return all;
  }
  const EvictShape shape = ShapeOf(prefilled);
  std::vector<EvictTask> tasks;
  tasks.reserve(jobs.size());
  for (const EvictJob& job : jobs) {
    tasks.push_back({&job, Certificate(static_cast<size_t>(shape.layers) * shape.query_heads), {}});
    tasks.back().evicted.certificate_rows = prefilled.rows();
  }
  std::vector<EvictTask*> left;
  left.reserve(tasks.size());
  for (EvictTask& task : tasks) left.push_back(&task);
  while (!left.empty()) {
    const baseline::Recipe& recipe = *left.front()->job->recipe;
    const auto apart = std::stable_partition(
        left.begin() + 1, left.end(), [&](const EvictTask* task) { return SharesScores(recipe, *task->job->recipe); });
    const std::span<EvictTask* const> group(left.begin(), apart);
    DROPKV_RETURN_IF_ERROR(baseline::RunsOnEngine(recipe) ? RunOnEngine(prefilled, engine, group)
                                                          : EvictByRecipe(prefilled, engine, group));
    left.erase(left.begin(), apart);
  }
  for (EvictTask& task : tasks) {
    task.evicted.output_error = Mean(task.certificate.error);
    task.evicted.evicted_mass = Mean(task.certificate.mass);
    all.push_back(std::move(task.evicted));
  }
  return all;
}

}  // namespace dropkv::llama
