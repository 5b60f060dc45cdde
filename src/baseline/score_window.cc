// Scorers that read the softmax weights p of the window's rows and nothing else: SnapKV, TOVA, FINCH, CAKE.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "baseline/scorers.h"
#include "baseline/window_attention.h"
#include "baseline/window_moments.h"
#include "baseline/window_scores.h"

namespace dropkv::baseline {
namespace {

// [Hq, n] mean over the rows of p, each as much as it counts, head by head.
std::vector<float> MeansOfHeads(WindowAttention& attention, const float* counts) {
  const int32_t lanes = attention.lanes();
  const int32_t rows = attention.rows();
  const int32_t n = attention.tokens();
  const std::vector<double> shares =
      counts != nullptr ? std::vector<double>(counts, counts + rows) : std::vector<double>(rows, 1.0);
  const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<float> means(static_cast<size_t>(attention.kv_heads()) * attention.group() * n);
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    attention.Weights(range, begin, count, weights.data());
    for (int32_t h = 0; h < attention.group(); ++h) {
      float* out = means.data() + (static_cast<size_t>(range.kv_head) * attention.group() + h) * n + begin;
      for (int32_t t = 0; t < count; ++t) {
        const float* p = weights.data() + t * lanes + h * rows;
        double sum = 0.0;
        for (int32_t i = 0; i < rows; ++i) sum += shares[i] * p[i];
        out[t] = static_cast<float>(sum / all);
      }
    }
  });
  return means;
}

}  // namespace

// SnapKV (FasterDecoding/SnapKV, kvpress): the mean over the rows of p.
Status ScoreAttention(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                      LayerScores* scores) {
  const ObservationRows rows = JudgingRows(recipe, layer);
  const int32_t group = rows.query_heads / layer.kv.kv_heads;
  if (!NeedsEveryHead(recipe)) {
    const RawScores raw = EngineScores(layer.kv, layer.generated, rows, layer.attention, Signal::kAttention, pool);
    PoolAndReduce(recipe, raw.raw, group, pool, scores);
    Force(raw.flags, nullptr, scores);
    return Status::Ok();
  }
  WindowAttention attention(recipe, layer, false, pool);
  PoolAndReduce(recipe, MeansOfHeads(attention, rows.weights), group, pool, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

// TOVA (schwartz-lab-NLP/TOVA, kvpress): p of the last row, the mean over all query heads of the layer; every KV head
// gets the same scores. Where tokens were generated, the last row is the last of theirs.
Status ScoreLastRow(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                    LayerScores* scores) {
  RawScores raw =
      EngineScores(layer.kv, layer.generated, JudgingRows(recipe, layer), layer.attention, Signal::kAttention, pool);
  const int32_t n = scores->tokens;
  for (int32_t j = 0; j < n; ++j) {
    double sum = 0.0;
    for (int32_t head = 0; head < scores->kv_heads; ++head) {
      const float p = raw.raw[static_cast<size_t>(head) * n + j];
      sum += std::isfinite(p) ? p : 0.0;
    }
    for (int32_t head = 0; head < scores->kv_heads; ++head)
      raw.raw[static_cast<size_t>(head) * n + j] = static_cast<float>(sum / scores->kv_heads);
  }
  PoolAndReduce(recipe, raw.raw, 1, pool, scores);
  Force(raw.flags, nullptr, scores);
  return Status::Ok();
}

// FINCH (kvpress): row i counts times the number of keys before it, since p is the smaller the more keys share it.
// Generated keys share it as well, so a generated row counts them too.
Status ScoreFinch(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                  LayerScores* scores) {
  const ObservationRows rows = JudgingRows(recipe, layer);
  WindowAttention attention(recipe, layer, false, pool);
  const int32_t lanes = attention.lanes();
  std::vector<float> factors(lanes, 0.0F);
  for (int32_t lane = 0; lane < attention.head_rows(); ++lane) {
    const int32_t earlier = std::max(0, rows.visible[lane % rows.rows] - 1);
    factors[lane] = static_cast<float>(earlier) / static_cast<float>(attention.head_rows());
  }
  std::vector<float> raw(scores->score.size());
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    attention.Weights(range, begin, count, weights.data());
    attention.kernels().dots(weights.data(), factors.data(), 0, count, lanes,
                             raw.data() + static_cast<size_t>(range.kv_head) * scores->tokens + begin);
  });
  PoolAndReduce(recipe, raw, attention.group(), pool, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

// CAKE (antgroup/cakekv): mean over the rows of p plus gamma times the unbiased variance over them. The layer's
// preference is over the tokens that can be evicted, whichever rows judge.
Status ScoreVariance(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                     LayerScores* scores) {
  WindowAttention attention(recipe, layer, false, pool);
  const int32_t past = std::max(0, scores->tokens - recipe.policy.window);
  const bool shares_layers = recipe.layers == LayerRule::kCake;
  const WindowMoments moments = MeasureMoments(attention, past, recipe.gamma, true, shares_layers);
  PoolAndReduce(recipe, moments.score, attention.group(), pool, scores);
  scores->entropy = moments.entropy;
  scores->variance = moments.variance;
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
