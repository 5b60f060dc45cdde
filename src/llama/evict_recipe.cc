#include "llama/evict_recipe.h"

#include <algorithm>
#include <string>

#include "core/clock.h"

namespace dropkv::llama {
namespace {

int32_t CountProtected(const baseline::LayerScores& scores) {
  return static_cast<int32_t>(std::count(scores.is_protected.begin(), scores.is_protected.end(), 1));
}

// Tokens of all heads of a layer.
int64_t LayerTotal(const KeepList& keep, int32_t layer) {
  int64_t total = 0;
  for (int32_t head = 0; head < keep.kv_heads(); ++head) total += static_cast<int64_t>(keep.head(layer, head).size());
  return total;
}

Status WrongCount(const baseline::Recipe& recipe, const std::string& where, int64_t expected, int64_t got) {
  return {Code::kInternal, "policy " + recipe.name() + ": " + where + " expected " + std::to_string(expected) +
                               " kept tokens, got " + std::to_string(got)};
}

bool RoundsForItself(const baseline::Recipe& recipe) {
  return recipe.chunk > 0 || (recipe.policy.heads == HeadRule::kAdaO && !recipe.flat_heads);
}

Status CheckProtected(const baseline::Recipe& recipe, const baseline::LayerScores& scores, const KeepList& keep,
                      int32_t layer, int32_t head) {
  const std::span<const int32_t> list = keep.head(layer, head);
  if (static_cast<int64_t>(list.size()) < CountProtected(scores)) return Status::Ok();
  for (int32_t token = 0; token < scores.tokens; ++token) {
    if (scores.is_protected[token] == 0 || std::binary_search(list.begin(), list.end(), token)) continue;
    return {Code::kInternal, "policy " + recipe.name() + ": layer " + std::to_string(layer) + ", head " +
                                 std::to_string(head) + " lost the protected token " + std::to_string(token)};
  }
  return Status::Ok();
}

// By a recipe that keeps `keep` tokens per KV head.
Result<std::vector<baseline::LayerScores>> ScoreLayers(const Prefilled& prefilled, Engine* engine,
                                                       const baseline::Recipe& recipe, int32_t keep) {
  const baseline::Needs needs = baseline::NeedsOf(recipe);
  const Result<LayerInputs> inputs =
      needs.window_queries ? LayerInputs::Make(prefilled, recipe) : LayerInputs::Make(prefilled, 0, false);
  if (!inputs.ok()) return inputs.status();
  std::vector<baseline::LayerScores> scores;
  for (const LayerInput& input : inputs->layers()) {
    const Result<baseline::Layer> layer = RecipeLayer(prefilled, recipe, input.layer_index, input);
    if (!layer.ok()) return layer.status();
    Result<baseline::LayerScores> scored =
        baseline::Score(recipe, *layer, baseline::ShareOf(keep, prefilled.size()), engine->pool());
    if (!scored.ok())
      return Status(scored.status().code(), "policy " + recipe.name() + ", layer " + std::to_string(input.layer_index) +
                                                ": " + scored.status().message());
    scores.push_back(std::move(*scored));
  }
  return scores;
}

Status SelectFrom(const std::vector<baseline::LayerScores>& scores, const EvictJob& job, int32_t n, Evicted* evicted) {
  const auto start = Clock::now();
  const baseline::Recipe& recipe = *job.recipe;
  EvictReport& report = evicted->report;
  // Some protect more than the recipe alone tells: a whole partition, the first chunk.
  int32_t protected_tokens = ProtectedTokens(recipe);
  for (const baseline::LayerScores& layer : scores) {
    protected_tokens = std::max(protected_tokens, CountProtected(layer));
    report.nonfinite_tokens += layer.nonfinite_tokens;
  }
  const Result<KeepCount> count = ResolveBudget(job.budget, recipe, protected_tokens, n);
  if (!count.ok()) return count.status();
  report.budget = *count;
  Result<baseline::Selection> selection = baseline::Select(recipe, scores, count->keep, true);
  if (!selection.ok()) return selection.status();
  DROPKV_RETURN_IF_ERROR(CheckCounts(recipe, scores, *selection));
  evicted->keep = std::move(selection->keep);
  evicted->warnings = std::move(selection->warnings);
  report.select_s = SecondsSince(start);
  evicted->score_seconds = report.score_s + report.select_s;
  return Status::Ok();
}

}  // namespace

EvictShape ShapeOf(const Prefilled& prefilled) {
  const LayerInfo& first = prefilled.tap->layers().at(prefilled.layers.front());
  return {static_cast<int32_t>(prefilled.layers.size()),
          first.query_heads,
          first.kv_heads,
          prefilled.size(),
          first.key_dim,
          first.value_dim,
          prefilled.generated};
}

Result<LayerInputs> LayerInputs::Make(const Prefilled& prefilled, int32_t window, bool generated) {
  LayerInputs inputs;
  const int32_t n = prefilled.size();
  const int32_t captured = prefilled.rows();
  const int32_t of_prompt = std::min(window, n);
  if (of_prompt > captured)
    return Status(Code::kFailedPrecondition, "the prefill kept " + std::to_string(captured) +
                                                 " rows of queries, the policy's window needs " +
                                                 std::to_string(of_prompt));
  const int32_t rows = of_prompt + (generated ? prefilled.generated : 0);
  for (int32_t i = 0; i < rows; ++i) inputs.visible_.push_back(n - of_prompt + i + 1);
  for (const int32_t number : prefilled.layers) {
    LayerInfo& layer = prefilled.tap->layers().at(number);
    const Result<KvView> view = layer.View(layer.cells);
    if (!view.ok()) return view.status();
    LayerInput& input = inputs.layers_.emplace_back();
    input.kv = *view;
    input.layer_index = number;
    input.attention = layer.Attention();
    if (rows == 0) continue;
    const int64_t row_stride = static_cast<int64_t>(layer.query_heads) * layer.key_dim;
    const float* q = prefilled.capture->queries(number).data() + (captured - of_prompt) * row_stride;
    input.rows = {q, layer.key_dim, row_stride, layer.query_heads, rows, inputs.visible_.data()};
  }
  return inputs;
}

Result<LayerInputs> LayerInputs::Make(const Prefilled& prefilled, const baseline::Recipe& recipe) {
  const bool alone = prefilled.generated > 0 && !recipe.rows.window;
  return Make(prefilled, alone ? 0 : recipe.policy.window, true);
}

Status Certify(const Prefilled& prefilled, Engine* engine, std::span<EvictTask* const> tasks) {
  const auto start = Clock::now();
  const Result<LayerInputs> inputs = LayerInputs::Make(prefilled, prefilled.rows(), false);
  if (!inputs.ok()) return inputs.status();
  std::vector<const KeepList*> lists;
  std::vector<EvictOutput> outputs;
  for (EvictTask* task : tasks) {
    lists.push_back(&task->evicted.keep);
    outputs.push_back({.output_error = task->certificate.error.data(), .evicted_mass = task->certificate.mass.data()});
  }
  if (inputs->rows() > 0)
    DROPKV_RETURN_IF_ERROR(engine->CertifyAll(ShapeOf(prefilled), inputs->layers(), lists, outputs));
  const double each = SecondsSince(start) / static_cast<double>(tasks.size());
  for (EvictTask* task : tasks) task->evicted.report.certificate_s += each;
  return Status::Ok();
}

Result<baseline::Layer> RecipeLayer(const Prefilled& prefilled, const baseline::Recipe& recipe, int32_t number,
                                    const LayerInput& input) {
  const LayerInfo& info = prefilled.tap->layers().at(number);
  baseline::Layer layer;
  layer.kv = input.kv;
  layer.rows = input.rows;
  layer.row_count = input.rows.rows;
  layer.generated = prefilled.generated;
  layer.attention = input.attention;
  layer.rope = info.rope;
  layer.index = number;
  if (prefilled.statistics != nullptr) layer.statistics = prefilled.statistics->find(number);
  baseline::StatisticsPlan plan;
  plan.Add(recipe);
  if (plan.any() && layer.statistics == nullptr)
    return Status(Code::kFailedPrecondition,
                  "policy " + recipe.name() + " needs statistics of all queries, which the prefill did not gather");
  if (!baseline::NeedsOf(recipe).output_projection) return layer;
  if (!prefilled.weights)
    return Status(Code::kFailedPrecondition,
                  "policy " + recipe.name() + " needs W_O, which the prefill did not ask the model's file for");
  Result<baseline::OutputProjection> wo = prefilled.weights->Layer(number, info.query_heads * info.value_dim);
  if (!wo.ok()) return wo.status();
  layer.wo = std::move(*wo);
  return layer;
}

Status CheckCounts(const baseline::Recipe& recipe, std::span<const baseline::LayerScores> scores,
                   const baseline::Selection& selection) {
  const KeepList& keep = selection.keep;
  const bool flat_layers = recipe.layers == baseline::LayerRule::kFlat;
  const bool uniform = !recipe.flat_heads && recipe.policy.heads == HeadRule::kUniform;
  if (flat_layers && keep.total() != selection.budgets.total)
    return WrongCount(recipe, "the model", selection.budgets.total, keep.total());
  for (int32_t layer = 0; layer < keep.layers(); ++layer) {
    const std::string where = "layer " + std::to_string(layer);
    const int64_t total = LayerTotal(keep, layer);
    for (int32_t head = 0; head < keep.kv_heads(); ++head)
      DROPKV_RETURN_IF_ERROR(CheckProtected(recipe, scores[layer], keep, layer, head));
    if (flat_layers) continue;
    const int64_t per_head = selection.budgets.keep[layer];
    const int64_t expected = per_head * keep.kv_heads();
    const int64_t slack = RoundsForItself(recipe) ? std::max(1, recipe.chunk) * keep.kv_heads() : 0;
    if (std::abs(total - expected) > slack) return WrongCount(recipe, where + ":", expected, total);
    if (!uniform || slack > 0) continue;
    for (int32_t head = 0; head < keep.kv_heads(); ++head) {
      const auto kept = static_cast<int64_t>(keep.head(layer, head).size());
      if (kept != per_head) return WrongCount(recipe, where + ", head " + std::to_string(head) + ":", per_head, kept);
    }
  }
  return Status::Ok();
}

Status EvictByRecipe(const Prefilled& prefilled, Engine* engine, std::span<EvictTask* const> tasks) {
  const int32_t n = prefilled.size();
  const EvictShape shape = ShapeOf(prefilled);
  std::vector<EvictTask*> judged;
  for (EvictTask* task : tasks) {
    const baseline::Recipe& recipe = *task->job->recipe;
    const Result<KeepCount> count = ResolveBudget(task->job->budget, recipe, ProtectedTokens(recipe), n);
    if (!count.ok()) return count.status();
    task->evicted.report.kernel = engine->kernel();
    task->evicted.report.budget = *count;
    if (count->keep < n) {
      judged.push_back(task);
    } else {
      task->evicted.keep = KeepList::All(shape.layers, shape.kv_heads, n);
    }
  }
  if (judged.empty()) return Status::Ok();
  const auto start = Clock::now();
  const EvictTask& first = *judged.front();
  const Result<std::vector<baseline::LayerScores>> scores =
      ScoreLayers(prefilled, engine, *first.job->recipe, first.evicted.report.budget.keep);
  if (!scores.ok()) return scores.status();
  const double score_s = SecondsSince(start);
  for (EvictTask* task : judged) {
    task->evicted.report.score_s = score_s;
    DROPKV_RETURN_IF_ERROR(SelectFrom(*scores, *task->job, n, &task->evicted));
  }
  return Certify(prefilled, engine, judged);
}

}  // namespace dropkv::llama
