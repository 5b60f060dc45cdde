#include "cli/score.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <span>

#include "baseline/allocate.h"
#include "baseline/layer_budgets.h"
#include "baseline/score.h"
#include "cli/flags.h"
#include "cli/score_report.h"
#include "reference/reference.h"

namespace dropkv::cli {
namespace {

using baseline::LayerRule;
using baseline::LayerScores;
using baseline::Recipe;

// How much is kept, as the scorers and the rules of allocation want it.
struct Amount {
  double kept = 0;      // tokens per KV head on average
  double fraction = 0;  // of the tokens
  double removed = 0;   // 1 - fraction, as typed where it was typed
  bool clamp = true;    // protected tokens are kept whatever the budget
  bool raised = false;  // to the protected tokens
};

// What the recipe keeps in every head by index, as a policy of the engine's.
Policy BudgetPolicy(const Recipe& recipe) {
  Policy policy = recipe.policy;
  policy.signal = recipe.scorer == baseline::Scorer::kFull ? Signal::kFull : Signal::kRecency;
  policy.window = baseline::ProtectedLast(recipe);
  return policy;
}

Result<Amount> AmountOf(const ScoreOptions& options, int32_t n) {
  if (options.compression_ratio) {
    const double ratio = *options.compression_ratio;
    return Amount{n * (1.0 - ratio), 1.0 - ratio, ratio, false, false};
  }
  const Result<KeepCount> count = ResolveBudget(options.budget, BudgetPolicy(options.recipe), n);
  if (!count.ok()) return FlagStatus("--budget", count.status());
  const int32_t kept = std::max(count->keep, 1);  // a cache of nothing has no attention
  const double share = baseline::ShareOf(kept, n);
  return Amount{static_cast<double>(kept), share, 1.0 - share, true, count->raised};
}

// Head sizes that the kernels take.
bool FitsKernels(const ScoreInput& input) {
  return input.padded_key_dim <= kMaxHeadDim && input.padded_value_dim <= kMaxHeadDim;
}

// And query heads.
bool GroupFits(const ScoreInput& input) { return input.query_heads <= kMaxGroup * input.kv_heads; }

// The float64 reference has no limits, but knows the engine's scores only.
bool ReferenceScores(const Recipe& recipe) {
  const bool mean_first = recipe.group_before_pool || recipe.policy.pool.kind == PoolKind::kMean;
  return baseline::EngineSignal(recipe.scorer).has_value() && recipe.group == baseline::GroupRule::kMean &&
         mean_first && !recipe.critical;
}

LayerScores ScoreByReference(const Recipe& recipe, const baseline::Layer& layer) {
  Policy policy = recipe.policy;
  policy.signal = *baseline::EngineSignal(recipe.scorer);
  const int32_t n = layer.kv.tokens;
  LayerScores scores;
  scores.kv_heads = layer.kv.kv_heads;
  scores.tokens = n;
  const reference::Scores raw = reference::Score(layer.kv, layer.rows, layer.attention, policy, layer.index);
  for (int32_t head = 0; head < layer.kv.kv_heads; ++head) {
    const double* first = raw.raw.data() + int64_t{head} * n;
    const std::vector<double> pooled = policy.needs_queries() ? reference::Pool(first, n, policy.pool, policy.window)
                                                              : std::vector<double>(first, first + n);
    scores.score.insert(scores.score.end(), pooled.begin(), pooled.end());
  }
  scores.forced.resize(raw.flags.size());
  for (size_t i = 0; i < raw.flags.size(); ++i) {
    if (raw.flags[i] == 0) continue;
    const bool nonfinite = (raw.flags[i] & reference::kNonFinite) != 0;
    scores.forced[i] = 1;
    scores.score[i] = nonfinite ? std::numeric_limits<double>::quiet_NaN() : raw.raw[i];
    scores.nonfinite_tokens += nonfinite ? 1 : 0;
  }
  scores.is_protected.resize(n);
  const int32_t last = baseline::ProtectedLast(recipe);
  for (int32_t j = 0; j < n; ++j) scores.is_protected[j] = j < policy.sink || j >= n - last ? 1 : 0;
  return scores;
}

Result<LayerScores> ScoreTokens(const ScoreOptions& options, const ScoreInput& input, const Amount& amount,
                                ThreadPool* pool) {
  const Recipe& recipe = options.recipe;
  const baseline::Needs needs = baseline::NeedsOf(recipe);
  const bool reads_queries = needs.window_queries || needs.all_queries || needs.pre_rope_queries;
  const bool fits = FitsKernels(input) && (GroupFits(input) || !reads_queries);
  if (!fits && !ReferenceScores(recipe))
    return Unsupported(options.input + ": policy " + recipe.name() + ": expected head sizes of at most " +
                       std::to_string(kMaxHeadDim) + " and at most " + std::to_string(kMaxGroup) +
                       " query heads per KV head, got " + std::to_string(input.key_dim) + ", " +
                       std::to_string(input.value_dim) + " and " + std::to_string(input.query_heads / input.kv_heads) +
                       "; dropkv and snapkv take any");
  const Result<baseline::PromptStatistics> statistics = GatherStatistics(recipe, input, pool);
  if (!statistics.ok()) return statistics.status();
  std::vector<int32_t> visible;
  baseline::Layer layer;
  layer.kv = input.View();
  layer.rows = input.LastRows(std::max(recipe.policy.window, kCertificateRows), &visible);
  layer.attention = input.Attention();
  layer.wo = input.Projection();
  layer.rope = input.rope;
  layer.k_pre = input.k_pre.empty() ? nullptr : input.k_pre.data();
  layer.statistics = &*statistics;
  layer.index = input.layer;
  if (fits) return baseline::Score(recipe, layer, amount.fraction, pool);
  layer.rows = input.LastRows(recipe.policy.window, &visible);
  return ScoreByReference(recipe, layer);
}

// The file is one layer of a model: rules that share among layers have to do with what is known of the others.
Result<baseline::Selection> SelectTokens(const Recipe& recipe, const ScoreInput& input, const LayerScores& scores,
                                         Amount amount, std::vector<std::string>* remarks) {
  Recipe alone = recipe;
  if (recipe.layers == LayerRule::kPyramid || recipe.layers == LayerRule::kPyramidOriginal) {
    const Result<int32_t> share = baseline::LayerShare(recipe, input.layer, input.layers, input.tokens, amount.kept);
    if (!share.ok()) return share.status();
    remarks->push_back(fmt::format("layer {} of {} gets {} tokens per KV head", input.layer, input.layers, *share));
    alone.layers = LayerRule::kSame;
    amount.kept = *share;
  } else if (recipe.layers != LayerRule::kSame) {
    remarks->push_back("the policy shares among the layers of a model; here this layer keeps the average");
  }
  return baseline::Select(alone, {&scores, 1}, amount.kept, amount.clamp, amount.fraction);
}

Status Certify(const ScoreOptions& options, const ScoreInput& input, Engine* engine, ScoreResult* result) {
  std::vector<int32_t> visible;
  const int32_t wanted = std::clamp(options.recipe.policy.window, kCertificateRows, kMaxRows);
  const ObservationRows rows = input.LastRows(std::min(wanted, input.tokens), &visible);
  result->certificate_rows = rows.rows;
  if (rows.rows == 0) {
    result->remarks.emplace_back("the file has no queries: what the eviction does to the outputs is not measured");
    return Status::Ok();
  }
  result->output_error.resize(input.query_heads);
  result->evicted_mass.resize(input.query_heads);
  const LayerInput layer{input.View(), rows, input.Attention(), nullptr, nullptr, input.layer};
  if (FitsKernels(input) && GroupFits(input)) {
    const EvictShape shape{
        1, input.query_heads, input.kv_heads, input.tokens, input.padded_key_dim, input.padded_value_dim};
    return engine->Certify(shape, {&layer, 1}, result->keep, result->output_error.data(), result->evicted_mass.data());
  }
  const reference::Certificate measured = reference::Certify(layer.kv, rows, layer.attention, result->keep, 0);
  const auto narrow = [](double x) { return static_cast<float>(x); };
  std::transform(measured.output_error.begin(), measured.output_error.end(), result->output_error.begin(), narrow);
  std::transform(measured.evicted_mass.begin(), measured.evicted_mass.end(), result->evicted_mass.begin(), narrow);
  return Status::Ok();
}

}  // namespace

Result<ScoreResult> ScoreLayer(const ScoreOptions& options, const ScoreInput& input, Engine* engine) {
  const Result<Amount> amount = AmountOf(options, input.tokens);
  if (!amount.ok()) return amount.status();
  const Result<LayerScores> scores = ScoreTokens(options, input, *amount, engine->pool());
  if (!scores.ok()) return scores.status();
  ScoreResult result;
  result.remarks = input.notes;
  result.nonfinite_tokens = scores->nonfinite_tokens;
  if (options.parity) {
    Result<std::vector<float>> padded = baseline::ParityScores(options.recipe, *scores, amount->removed);
    if (!padded.ok()) return padded.status();
    result.score = std::move(*padded);
  } else {
    result.score.assign(scores->score.begin(), scores->score.end());
  }
  if (amount->raised)
    result.remarks.push_back(fmt::format("the budget was raised to the {} tokens that {} always keeps", amount->kept,
                                         options.recipe.name()));
  Result<baseline::Selection> selection = SelectTokens(options.recipe, input, *scores, *amount, &result.remarks);
  if (!selection.ok()) return selection.status();
  result.keep = std::move(selection->keep);
  result.remarks.insert(result.remarks.end(), selection->warnings.begin(), selection->warnings.end());
  if (result.nonfinite_tokens > 0)
    result.remarks.push_back(fmt::format("{} tokens with NaN or Inf were kept", result.nonfinite_tokens));
  DROPKV_RETURN_IF_ERROR(Certify(options, input, engine, &result));
  return result;
}

Status Score(const std::vector<std::string>& arguments) {
  const Result<std::optional<ScoreOptions>> parsed = ParseScore(arguments);
  if (!parsed.ok()) return parsed.status();
  if (!*parsed) {
    std::fputs(ScoreHelp().c_str(), stdout);
    return Status::Ok();
  }
  const ScoreOptions& options = **parsed;
  const Result<ScoreInput> input = LoadScoreInput(options);
  if (!input.ok()) return input.status();
  Result<Engine> engine = Engine::Create({options.threads, {}});
  if (!engine.ok()) return engine.status();
  const Result<ScoreResult> result = ScoreLayer(options, *input, &*engine);
  if (!result.ok()) return result.status();
  DROPKV_RETURN_IF_ERROR(WriteScore(options, *input, *result));
  const std::string text = options.json ? ScoreJson(options, *input, *result) : ScoreText(options, *input, *result);
  std::fputs(text.c_str(), stdout);
  return Status::Ok();
}

}  // namespace dropkv::cli
