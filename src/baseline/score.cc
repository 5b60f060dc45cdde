#include "baseline/score.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "baseline/output_metric.h"
#include "baseline/projection_norm.h"
#include "baseline/scorers.h"
#include "baseline/statistics.h"
#include "baseline/window_attention.h"
#include "core/parallel.h"

namespace dropkv::baseline {
namespace {

// Nothing is evicted: every token is protected.
Status ScoreFull(const Recipe& /*recipe*/, const Layer& /*layer*/, double /*keep_fraction*/, ThreadPool* /*pool*/,
                 LayerScores* scores) {
  std::fill(scores->is_protected.begin(), scores->is_protected.end(), uint8_t{1});
  return Status::Ok();
}

struct Row {
  Scorer scorer;
  ScoreFunction function;
};

constexpr Row kTable[] = {
    {Scorer::kFull, &ScoreFull},
    {Scorer::kDropKv, &ScoreDropKv},
    {Scorer::kDropKvCompat, &ScoreDropKvCompat},
    {Scorer::kDropKvWo, &ScoreDropKvWo},
    {Scorer::kAttention, &ScoreAttention},
    {Scorer::kRecency, &ScoreRecency},
    {Scorer::kRandom, &ScoreRandom},
    {Scorer::kProjection, &ScoreProjection},
    {Scorer::kProjectionCode, &ScoreProjectionCode},
    {Scorer::kCaote, &ScoreCaote},
    {Scorer::kAttentionSum, &ScoreAttentionSum},
    {Scorer::kAttentionMean, &ScoreAttentionMean},
    {Scorer::kLastRow, &ScoreLastRow},
    {Scorer::kKeyNorm, &ScoreKeyNorm},
    {Scorer::kKeyDiff, &ScoreKeyDiff},
    {Scorer::kLag, &ScoreLag},
    {Scorer::kExpected, &ScoreExpected},
    {Scorer::kCur, &ScoreCur},
    {Scorer::kCompactor, &ScoreCompactor},
    {Scorer::kLocalAttention, &ScoreLocalAttention},
    {Scorer::kCapKv, &ScoreCapKv},
    {Scorer::kFinch, &ScoreFinch},
    {Scorer::kVatp, &ScoreVatp},
    {Scorer::kObCache, &ScoreObCache},
    {Scorer::kDefensive, &ScoreDefensive},
    {Scorer::kVariance, &ScoreVariance},
};

Status Missing(const Recipe& recipe, const std::string& what) {
  return InvalidArgument("policy " + recipe.name() + " needs " + what + ", which is missing");
}

// Weights mean nothing to a maximum, a variance or an order of rows; the others' formulas have no place for them.
bool TakesRowWeights(const Recipe& recipe) {
  const Scorer scorer = recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer;
  return scorer == Scorer::kDropKv || scorer == Scorer::kDropKvWo || scorer == Scorer::kAttention;
}

// The rows that judge, and their shape.
Status CheckJudges(const Recipe& recipe, const Layer& layer) {
  if (layer.row_count < 0 || layer.row_count > kMaxRows)
    return InvalidArgument("row_count: expected 0 to " + std::to_string(kMaxRows) + " rows that judge, got " +
                           std::to_string(layer.row_count));
  if (layer.row_count == 0 && layer.generated > 0 && recipe.rows.generated() > 0)
    return InvalidArgument("row_count: expected how many rows judge, window and generated ones (" +
                           RowsText(recipe.rows, recipe.policy.window) + " of policy " + recipe.name() + "), got 0");
  const int32_t wanted = JudgingCount(recipe, layer);
  if (layer.rows.q == nullptr)
    return Missing(recipe, "q [Hq, w, d] of the last " + std::to_string(wanted) + " rows of the prompt");
  if (layer.rows.visible == nullptr) return InvalidArgument("rows.visible: expected a pointer, got null");
  if (layer.rows.rows < wanted)
    return InvalidArgument("q: expected at least " + std::to_string(wanted) + " rows, " +
                           (layer.row_count > 0 ? "row_count" : "the window") + " of policy " + recipe.name() +
                           ", got " + std::to_string(layer.rows.rows));
  if (layer.rows.weights != nullptr && !TakesRowWeights(recipe))
    return InvalidArgument("rows.weights: expected none for policy " + recipe.name() +
                           ": dropkv's, dropkv-wo's and snapkv's scores alone weigh rows");
  return CheckRows(JudgingRows(recipe, layer), layer.kv);  // more rows than the engine takes may be there
}

Status CheckProjection(const Recipe& recipe, const Layer& layer) {
  const bool has_metric = recipe.scorer == Scorer::kDropKvWo && layer.output_metric != nullptr && !recipe.critical;
  const int32_t dim = layer.kv.value_dim;
  if (has_metric) {
    const OutputMetric& metric = *layer.output_metric;
    if (metric.value_dim() == dim && metric.heads() == layer.rows.query_heads) return Status::Ok();
    return InvalidArgument("output_metric: expected [Hq, dv] = [" + std::to_string(layer.rows.query_heads) + ", " +
                           std::to_string(dim) + "], got [" + std::to_string(metric.heads()) + ", " +
                           std::to_string(metric.value_dim()) + "]");
  }
  if (!layer.wo || !layer.wo.read_row) return Missing(recipe, "wo [hidden, Hq*dv]");
  const bool knows_heads = layer.rows.q != nullptr;
  const int32_t heads = knows_heads ? layer.rows.query_heads : layer.wo.columns / dim;
  if (layer.wo.columns == heads * dim && heads > 0 && heads % layer.kv.kv_heads == 0) return Status::Ok();
  const std::string expected = knows_heads ? std::to_string(heads) + " * " + std::to_string(dim)
                                           : "a multiple of " + std::to_string(layer.kv.kv_heads * dim);
  return InvalidArgument("wo: expected [hidden, Hq*dv] with Hq*dv = " + expected + ", got " +
                         std::to_string(layer.wo.columns) + " columns");
}

Status CheckInput(const Recipe& recipe, const Layer& layer, double keep_fraction) {
  DROPKV_RETURN_IF_ERROR(CheckRecipe(recipe));
  if (!(keep_fraction >= 0.0 && keep_fraction <= 1.0))
    return InvalidArgument("keep_fraction: expected 0 to 1, the share kept, got " + std::to_string(keep_fraction));
  DROPKV_RETURN_IF_ERROR(CheckKvView(layer.kv));
  if (layer.generated < 0 || layer.generated >= layer.kv.tokens)
    return InvalidArgument("generated: expected 0 to " + std::to_string(layer.kv.tokens - 1) +
                           ", less than all tokens of kv, got " + std::to_string(layer.generated));
  const Needs needs = NeedsOf(recipe);
  if (needs.window_queries) DROPKV_RETURN_IF_ERROR(CheckJudges(recipe, layer));
  if (needs.output_projection) DROPKV_RETURN_IF_ERROR(CheckProjection(recipe, layer));
  if (needs.pre_rope_keys && layer.k_pre == nullptr && layer.rope.dims == 0)
    return Missing(recipe, "k_pre [Hkv, n, d], or rope to undo it");
  if (!needs.all_queries && !needs.pre_rope_queries) return Status::Ok();
  if (layer.statistics == nullptr)
    return Missing(recipe, std::string(needs.pre_rope_queries ? "q_pre" : "q") +
                               " [Hq, n, d] of all rows, gathered in statistics");
  return layer.statistics->Serves(recipe, layer.Prompt());
}

LayerScores Prepare(const Recipe& recipe, const KvView& kv) {
  LayerScores scores;
  scores.kv_heads = kv.kv_heads;
  scores.tokens = kv.tokens;
  const size_t count = static_cast<size_t>(kv.kv_heads) * kv.tokens;
  scores.score.assign(count, 0.0);
  scores.forced.assign(count, 0);
  scores.is_protected.assign(kv.tokens, 0);
  const int32_t last = ProtectedLast(recipe);
  std::fill_n(scores.is_protected.begin(), std::min(recipe.policy.sink, kv.tokens), uint8_t{1});
  std::fill(scores.is_protected.end() - std::min(last, kv.tokens), scores.is_protected.end(), uint8_t{1});
  return scores;
}

}  // namespace

double ShareOf(int32_t keep, int32_t tokens) {
  double share = static_cast<double>(keep) / tokens;
  while (static_cast<int32_t>(share * tokens) < keep) share = std::nextafter(share, 2.0);
  return share;
}

bool ReadsBudget(const Recipe& recipe) {
  switch (recipe.scorer) {
    case Scorer::kCompactor:
    case Scorer::kDefensive:
      return true;
    case Scorer::kKeyDiff:
      return recipe.block > 0;
    case Scorer::kFull:
    case Scorer::kDropKv:
    case Scorer::kDropKvCompat:
    case Scorer::kDropKvWo:
    case Scorer::kAttention:
    case Scorer::kRecency:
    case Scorer::kRandom:
    case Scorer::kProjection:
    case Scorer::kProjectionCode:
    case Scorer::kCaote:
    case Scorer::kAttentionSum:
    case Scorer::kAttentionMean:
    case Scorer::kLastRow:
    case Scorer::kKeyNorm:
    case Scorer::kLag:
    case Scorer::kExpected:
    case Scorer::kCur:
    case Scorer::kLocalAttention:
    case Scorer::kCapKv:
    case Scorer::kFinch:
    case Scorer::kVatp:
    case Scorer::kObCache:
    case Scorer::kVariance:
      return false;
  }
  return true;
}

bool SameScores(const Recipe& a, const Recipe& b) {
  if (ReadsBudget(a) || ReadsBudget(b)) return false;
  const auto behind = [](const Recipe& recipe) { return std::pair(recipe.rows.window, recipe.rows.generated() > 0); };
  // CAKE's rule has its preferences measured beside the scores.
  const auto measured = [](const Recipe& recipe) { return recipe.layers == LayerRule::kCake; };
  if (behind(a) != behind(b) || measured(a) != measured(b)) return false;
  Recipe same = b;  // but for what Select alone reads, and for words
  same.rows = a.rows;
  same.policy.name = a.policy.name;
  same.policy.signal = a.policy.signal;
  same.policy.heads = a.policy.heads;
  same.policy.alpha = a.policy.alpha;
  same.flat_heads = a.flat_heads;
  same.layers = a.layers;
  same.pyramid_beta = a.pyramid_beta;
  same.cake_tau1 = a.cake_tau1;
  same.cake_tau2 = a.cake_tau2;
  same.recent_share = a.recent_share;
  same.first_stage = a.first_stage;
  same.signal = a.signal;
  same.source = a.source;
  same.tier = a.tier;
  return same == a;
}

Result<LayerScores> Score(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool) {
  DROPKV_RETURN_IF_ERROR(CheckInput(recipe, layer, keep_fraction));
  // Without rows nothing looks at generated tokens: the prompt is scored as if there were none.
  if (layer.generated > 0 && !JudgesByRows(recipe)) {
    Layer prompt = layer;
    prompt.kv = layer.Prompt();
    prompt.generated = 0;
    return Score(recipe, prompt, keep_fraction, pool);
  }
  std::optional<ThreadPool> one;
  if (pool == nullptr) pool = &one.emplace(1);
  LayerScores scores = Prepare(recipe, layer.Prompt());
  if (recipe.critical || recipe.scorer == Scorer::kDefensive)
    scores.projected_norm = ProjectedNorms(layer.Prompt(), layer.wo, pool);
  const auto* const row = std::find_if(std::begin(kTable), std::end(kTable),
                                       [&](const Row& entry) { return entry.scorer == recipe.scorer; });
  if (row == std::end(kTable))
    return InvalidArgument("scorer: expected one of the table, got " + std::to_string(static_cast<int>(recipe.scorer)));
  DROPKV_RETURN_IF_ERROR(row->function(recipe, layer, keep_fraction, pool, &scores));
  return scores;
}

}  // namespace dropkv::baseline
