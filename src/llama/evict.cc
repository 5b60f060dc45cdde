#include "llama/evict.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

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

Status RunOnEngine(const Prefilled& prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget,
                   Certificate* certificate, Evicted* evicted) {
  const Result<LayerInputs> inputs = LayerInputs::Make(prefilled, recipe);
  if (!inputs.ok()) return inputs.status();
  EvictShape shape = ShapeOf(prefilled);
  shape.rows = inputs->rows();
  const Policy policy = EnginePolicy(recipe);
  const Result<Plan> plan = engine->MakePlan(shape, policy, budget);
  if (!plan.ok()) return plan.status();
  // The certificate is measured over the prompt's captured rows, whoever judged.
  const bool same_rows = prefilled.generated == 0 && inputs->rows() == prefilled.rows();
  std::vector<std::byte> workspace(plan->workspace_bytes);
  EvictOutput output;
  output.output_error = same_rows ? certificate->error.data() : nullptr;
  output.evicted_mass = same_rows ? certificate->mass.data() : nullptr;
  Result<KeepList> keep = engine->Run(*plan, inputs->layers(), workspace, output, &evicted->report);
  if (!keep.ok()) return keep.status();
  evicted->keep = prefilled.WithoutGenerated(*keep);
  evicted->score_seconds = evicted->report.attend_s + evicted->report.score_s + evicted->report.select_s;
  return same_rows ? Status::Ok() : Certify(prefilled, engine, certificate, evicted);
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

Result<Evicted> Evict(const Prefilled& prefilled, Engine* engine, const baseline::Recipe& recipe,
                      const Budget& budget) {
  Evicted evicted;
  const int32_t n = prefilled.size();
  if (prefilled.layers.empty()) {
    const Result<KeepCount> count = ResolveBudget(budget, recipe, ProtectedTokens(recipe), n);
    if (!count.ok()) return count.status();
    evicted.report.budget = {n, count->raised};
    return evicted;
  }
  const EvictShape shape = ShapeOf(prefilled);
  Certificate certificate(static_cast<size_t>(shape.layers) * shape.query_heads);
  evicted.certificate_rows = prefilled.rows();
  DROPKV_RETURN_IF_ERROR(baseline::RunsOnEngine(recipe)
                             ? RunOnEngine(prefilled, engine, recipe, budget, &certificate, &evicted)
                             : EvictByRecipe(prefilled, engine, recipe, budget, &certificate, &evicted));
  evicted.output_error = Mean(certificate.error);
  evicted.evicted_mass = Mean(certificate.mass);
  return evicted;
}

}  // namespace dropkv::llama
