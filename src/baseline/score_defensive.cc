// DefensiveKV (FFY0/DefensiveKV): the worst case over rows and query heads instead of the mean.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "baseline/scorers.h"
#include "baseline/window_attention.h"
#include "baseline/window_scores.h"

namespace dropkv::baseline {
namespace {

constexpr double kFirstStageMass = 0.9;

// What one pass over the weights gives.
struct Sums {
  std::vector<double> mean;    // [Hkv, past] over the group and the rows
  std::vector<float> rescale;  // [Hkv, lanes] a row's sum over the past before pooling through that after it
  double bias = 0;             // attention mass on the `bias` tokens, mean over all heads and rows
};

// The share of token t that pooling over [0, past) spreads: less than 1 at both ends.
double PooledShare(const Pooling& pool, int32_t past, int32_t t) {
  const int32_t first = std::max(0, t - pool.before);
  const int32_t last = std::min(past - 1, t + pool.after);
  return static_cast<double>(last - first + 1) / (pool.before + pool.after + 1);
}

// bias_begin, bias_end: the tokens whose mass is the bias; generated ones may be among them.
Sums MeasureSums(WindowAttention& attention, const Pooling& pool, int32_t past, int32_t bias_begin, int32_t bias_end) {
  const int32_t lanes = attention.lanes();
  const int32_t end = std::max(attention.tokens(), bias_end);
  const int32_t head_rows = attention.head_rows();
  Sums sums{std::vector<double>(static_cast<size_t>(attention.kv_heads()) * past),
            std::vector<float>(static_cast<size_t>(attention.kv_heads()) * lanes, 0.0F), 0.0};
  std::vector<double> biases(attention.kv_heads(), 0.0);
  attention.ForEachRange(0, [&](const WindowAttention::Range& range) {
    std::vector<float> weights(static_cast<size_t>(cpu::kTile) * lanes);
    std::vector<double> before(lanes, 0.0);
    std::vector<double> after(lanes, 0.0);
    for (int32_t begin = 0; begin < end; begin += cpu::kTile) {
      const int32_t count = std::min(cpu::kTile, end - begin);
      attention.Weights(range, begin, count, weights.data());
      for (int32_t t = 0; t < count; ++t) {
        const float* p = weights.data() + static_cast<size_t>(t) * lanes;
        const int32_t j = begin + t;
        const double total = std::accumulate(p, p + head_rows, 0.0);
        if (j >= bias_begin && j < bias_end) biases[range.kv_head] += total;
        if (j >= past) continue;
        sums.mean[static_cast<size_t>(range.kv_head) * past + j] = total / head_rows;
        const double spread = PooledShare(pool, past, j);
        for (int32_t lane = 0; lane < lanes; ++lane) {
          before[lane] += p[lane];
          after[lane] += spread * p[lane];
        }
      }
    }
    for (int32_t lane = 0; lane < lanes; ++lane)
      if (after[lane] > 0.0)
        sums.rescale[static_cast<size_t>(range.kv_head) * lanes + lane] =
            static_cast<float>(before[lane] / after[lane]);
  });
  sums.bias = std::accumulate(biases.begin(), biases.end(), 0.0) / attention.kv_heads() / head_rows;
  return sums;
}

// Largest pooled and rescaled weight over the rows and the group, at least the head's mean of it.
void WorstCase(WindowAttention& attention, const Pooling& pool, int32_t past, const Sums& sums, LayerScores* scores) {
  const int32_t lanes = attention.lanes();
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    const int32_t counted = std::clamp(past - begin, 0, count);
    if (counted == 0) return;
    std::vector<float> weights(static_cast<size_t>(counted) * lanes);
    attention.PooledWeights(range, pool, past, begin, counted, weights.data());
    const float* rescale = sums.rescale.data() + static_cast<size_t>(range.kv_head) * lanes;
    double* out = scores->score.data() + static_cast<size_t>(range.kv_head) * scores->tokens + begin;
    for (int32_t t = 0; t < counted; ++t) {
      float worst = 0.0F;
      for (int32_t lane = 0; lane < lanes; ++lane)
        worst = std::max(worst, weights[static_cast<size_t>(t) * lanes + lane] * rescale[lane]);
      out[t] = worst;
    }
  });
  for (int32_t head = 0; head < scores->kv_heads; ++head) {
    double* out = scores->score.data() + static_cast<size_t>(head) * scores->tokens;
    const double mean = std::accumulate(out, out + past, 0.0) / std::max(1, past);
    for (int32_t j = 0; j < past; ++j) out[j] = std::max(out[j], mean);
  }
}

// Scores times the projected norm's share among the KV heads, token by token.
void WeighHeads(int32_t past, LayerScores* scores) {
  for (int32_t j = 0; j < past; ++j) {
    double total = 0.0;
    for (int32_t head = 0; head < scores->kv_heads; ++head)
      total += scores->projected_norm[static_cast<size_t>(head) * scores->tokens + j];
    for (int32_t head = 0; head < scores->kv_heads; ++head) {
      const size_t at = static_cast<size_t>(head) * scores->tokens + j;
      scores->score[at] *= total > 0.0 ? scores->projected_norm[at] / total : 1.0 / scores->kv_heads;
    }
  }
}

// Per head the tokens with the largest mean weights that together stay below the threshold, at most `limit`; none where
// it is never reached, as the code has it.
void MarkFirstStage(const Sums& sums, int32_t past, double threshold, int32_t limit, LayerScores* scores) {
  scores->first_stage.assign(scores->score.size(), 0);
  for (int32_t head = 0; head < scores->kv_heads; ++head) {
    const double* mean = sums.mean.data() + static_cast<size_t>(head) * past;
    const double total = std::accumulate(mean, mean + past, 0.0);
    std::vector<int32_t> order(past);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return mean[a] > mean[b]; });
    int32_t count = 0;
    double cumulative = 0.0;
    while (count < past && (cumulative += mean[order[count]] / total) < threshold) ++count;
    if (!(total > 0.0) || count == past) count = 0;
    for (int32_t i = 0; i < std::min(count, limit); ++i)
      scores->first_stage[static_cast<size_t>(head) * scores->tokens + order[i]] = 1;
  }
}

}  // namespace

Status ScoreDefensive(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                      LayerScores* scores) {
  const int32_t window = recipe.policy.window;
  WindowAttention attention(recipe, layer, false, pool);
  const int32_t n = scores->tokens;
  const int32_t past = std::max(0, n - window);
  // The code means the mass on the window but measures it after the window's columns were cut off. What is meant is
  // the mass on what is kept anyway, which generated tokens are too.
  const int32_t bias_begin = recipe.exact_bias ? past : std::max(0, past - window);
  const int32_t bias_end = recipe.exact_bias ? n + attention.generated() : past;
  const Sums sums = MeasureSums(attention, recipe.policy.pool, past, bias_begin, bias_end);
  WorstCase(attention, recipe.policy.pool, past, sums, scores);
  WeighHeads(past, scores);
  const auto limit = static_cast<int32_t>(std::max(0.0, std::trunc(n * keep_fraction - window)));
  MarkFirstStage(sums, past, kFirstStageMass - sums.bias, limit, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
