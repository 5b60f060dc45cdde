#include "baseline/head_reader.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "reference/reference.h"

namespace dropkv::baseline {

double Dot(const double* a, const double* b, int32_t dim) {
  double sum = 0.0;
  for (int32_t i = 0; i < dim; ++i) sum += a[i] * b[i];
  return sum;
}

void ForceNonFinite(const KvView& kv, ThreadPool* pool, LayerScores* scores) {
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const HeadReader reader(kv, static_cast<int32_t>(head));
    std::vector<float> row(std::max(kv.key_dim, kv.value_dim));
    uint8_t* forced = scores->forced.data() + head * kv.tokens;
    for (int32_t j = 0; j < kv.tokens; ++j)
      forced[j] = reader.Key(j, row.data()) && reader.Value(j, row.data()) ? 0 : 1;
  });
}

void FinishScores(LayerScores* scores) {
  for (size_t i = 0; i < scores->score.size(); ++i) {
    if (!std::isfinite(scores->score[i])) scores->forced[i] = 1;
    if (scores->forced[i] != 0) scores->score[i] = 0.0;
  }
  scores->nonfinite_tokens = std::count(scores->forced.begin(), scores->forced.end(), 1);
}

void PoolScores(const Recipe& recipe, int32_t begin, int32_t end, ThreadPool* pool, LayerScores* scores) {
  const Pooling& pooling = recipe.policy.pool;
  if (pooling.before == 0 && pooling.after == 0 && !pooling.past_only) return;
  ForEach(pool, scores->kv_heads, [&](int64_t head) {
    double* raw = scores->score.data() + head * scores->tokens + begin;
    const uint8_t* forced = scores->forced.data() + head * scores->tokens + begin;
    for (int32_t j = 0; j < end - begin; ++j)
      if (forced[j] != 0) raw[j] = 0.0;
    const std::vector<double> pooled = reference::Pool(raw, end - begin, pooling, recipe.policy.window);
    std::copy(pooled.begin(), pooled.end(), raw);
  });
}

void Standardise(int32_t begin, int32_t end, LayerScores* scores) {
  constexpr double kSmallestDeviation = 1e-6;
  const auto for_each = [&](auto&& f) {
    for (int32_t u = 0; u < scores->kv_heads; ++u)
      for (int32_t j = begin; j < end; ++j) {
        const int64_t at = int64_t{u} * scores->tokens + j;
        if (scores->forced[at] == 0) f(scores->score[at]);
      }
  };
  int64_t count = 0;
  double sum = 0.0;
  for_each([&](double x) {
    ++count;
    sum += x;
  });
  if (count == 0) return;
  const double mean = sum / static_cast<double>(count);
  double squares = 0.0;
  for_each([&](double x) { squares += (x - mean) * (x - mean); });
  const double deviation = count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : 0.0;
  for_each([&](double& x) { x = (x - mean) / std::max(kSmallestDeviation, deviation); });
}

}  // namespace dropkv::baseline
