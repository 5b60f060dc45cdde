#include "baseline/window_moments.h"

#include <algorithm>
#include <numeric>

namespace dropkv::baseline {
namespace {

struct Moments {
  double mean = 0;
  double variance = 0;
};

// Of the `judging` rows among p's `rows`; the others are 0. Two passes: the variance of nearly equal weights would
// cancel otherwise, and it is multiplied by hundreds.
Moments MomentsOf(const float* p, const uint8_t* judges, int32_t rows, int32_t judging) {
  if (judging == 0) return {};
  Moments moments;
  for (int32_t i = 0; i < rows; ++i) moments.mean += p[i];
  moments.mean /= judging;
  if (judging == 1) return moments;
  for (int32_t i = 0; i < rows; ++i) {
    const double away = judges[i] != 0 ? p[i] - moments.mean : 0.0;
    moments.variance += away * away;
  }
  moments.variance /= judging - 1;
  return moments;
}

// Which lanes judge [lanes], and how many of every query head [g].
struct Judges {
  std::vector<uint8_t> lanes;
  std::vector<int32_t> counts;

  Judges(const WindowAttention& attention, int32_t kv_head)
      : lanes(attention.lanes(), 0), counts(attention.group(), 0) {
    for (int32_t lane = 0; lane < attention.head_rows(); ++lane) {
      if (!attention.judges(kv_head, lane)) continue;
      lanes[lane] = 1;
      ++counts[lane / attention.rows()];
    }
  }
};

}  // namespace

WindowMoments MeasureMoments(WindowAttention& attention, int32_t past, double gamma, bool scores, bool preference) {
  const int32_t n = attention.tokens();
  const int32_t rows = attention.rows();
  const int32_t group = attention.group();
  const int32_t lanes = attention.lanes();
  const int32_t tiles = (n + cpu::kTile - 1) / cpu::kTile;
  WindowMoments result;
  if (scores) result.score.assign(static_cast<size_t>(attention.kv_heads()) * group * n, 0.0F);
  // One entry per tile, added in order at the end: the sums do not depend on the threads. Ranges are whole tiles.
  std::vector<double> entropies(static_cast<size_t>(attention.kv_heads()) * tiles, 0.0);
  std::vector<double> variances(entropies.size(), 0.0);
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    attention.Weights(range, begin, count, weights.data());
    const Judges judges(attention, range.kv_head);
    const int32_t counted = std::clamp(past - begin, 0, count);
    const size_t tile = static_cast<size_t>(range.kv_head) * tiles + begin / cpu::kTile;
    if (preference) entropies[tile] = attention.kernels().entropy(weights.data(), int64_t{counted} * lanes);
    for (int32_t h = 0; h < group; ++h)
      for (int32_t t = 0; t < count; ++t) {
        const int32_t lane = h * rows;
        const Moments moments =
            MomentsOf(weights.data() + t * lanes + lane, judges.lanes.data() + lane, rows, judges.counts[h]);
        if (t < counted) variances[tile] += moments.variance;
        if (scores)
          result.score[(static_cast<size_t>(range.kv_head) * group + h) * n + begin + t] =
              static_cast<float>(moments.mean + gamma * moments.variance);
      }
  });
  result.entropy = -std::accumulate(entropies.begin(), entropies.end(), 0.0);
  result.variance = std::accumulate(variances.begin(), variances.end(), 0.0);
  return result;
}

}  // namespace dropkv::baseline
