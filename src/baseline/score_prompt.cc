// Scores from column sums over all rows of the prompt.
#include <cmath>
#include <string>
#include <vector>

#include "baseline/head_reader.h"
#include "baseline/scorers.h"
#include "baseline/statistics.h"

namespace dropkv::baseline {
namespace {

Status CheckStatistics(const Recipe& recipe, const Layer& layer) {
  if (layer.statistics == nullptr) return InvalidArgument("q: expected statistics of all rows of the prompt, got none");
  return layer.statistics->Serves(recipe, layer.kv);
}

}  // namespace

// H2O as KVCache-Factory computes it: the sum over all rows, so that old tokens gain by seniority.
Status ScoreAttentionSum(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(CheckStatistics(recipe, layer));
  ForceNonFinite(layer.kv, pool, scores);
  scores->score = layer.statistics->column_sums();
  PoolScores(recipe, 0, layer.kv.tokens, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

// kvpress's observed attention: the mean over the n - j rows that see token j.
Status ScoreAttentionMean(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(CheckStatistics(recipe, layer));
  ForceNonFinite(layer.kv, pool, scores);
  const int32_t n = layer.kv.tokens;
  scores->score = layer.statistics->column_sums();
  for (size_t i = 0; i < scores->score.size(); ++i) scores->score[i] /= n - static_cast<int32_t>(i % n);
  PoolScores(recipe, 0, n, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

// VATP's public code: the sum over all rows (H2O), or the last `block` rows' sum divided by block whatever the prompt's
// length (Scissorhands), times |v|_1. Over a group the mean; the norm is the KV head's.
Status ScoreVatp(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(CheckStatistics(recipe, layer));
  const KvView& kv = layer.kv;
  ForceNonFinite(kv, pool, scores);
  const bool recent = recipe.block != 0;
  const double rows = recent ? recipe.block : 1.0;
  scores->score = recent ? layer.statistics->recent_sums() : layer.statistics->column_sums();
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const HeadReader reader(kv, static_cast<int32_t>(head));
    std::vector<float> value(kv.value_dim);
    for (int32_t j = 0; j < kv.tokens; ++j) {
      reader.Value(j, value.data());
      double norm = 0.0;
      for (const float x : value) norm += std::abs(x);
      scores->score[head * kv.tokens + j] *= norm / rows;
    }
  });
  PoolScores(recipe, 0, kv.tokens, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
