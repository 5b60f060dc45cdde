#include <algorithm>
#include <cmath>
#include <limits>

#include "core/random.h"
#include "reference/reference.h"
#include "reference/row.h"

namespace dropkv::reference {
namespace {

constexpr double kDominantRest = 1e-6;  // algorithm.md section 3, exact mode: p >= 1 - 1e-6

// One pair's part of algorithm.md section 3: (p / (1-p))^2 |a - v_j|^2. Where p > 1/2 the same number is
// p^2 |v_j - a_without_j|^2, since a - v_j = (1-p) (a_without_j - v_j): no division by a small 1-p.
double DropKvPair(const Layer& layer, const Row& row, int32_t kv_head, int32_t token) {
  const double* value = layer.value(kv_head, token);
  const double weight = row.weight[token];
  if (token == row.top) {
    if (row.alone) return 0.0;
    const double loss = weight * Distance(value, row.without_top.data(), layer.value_dim);
    return loss * loss;
  }
  const double loss = weight / row.rest(token) * Distance(row.out.data(), value, layer.value_dim);
  return loss * loss;
}

// Adds one query row to the raw scores of its KV head's first `seen` tokens.
void AddRow(const Layer& layer, const Row& row, int32_t kv_head, int32_t seen, Signal signal, double share, double* raw,
            uint8_t* flags) {
  for (int32_t j = 0; j < seen; ++j) {
    if (!layer.takes_part(kv_head, j)) continue;
    raw[j] += share * (signal == Signal::kDropKv ? DropKvPair(layer, row, kv_head, j) : row.weight[j]);
    if (signal == Signal::kDropKv && j == row.top && row.top_rest <= kDominantRest) flags[j] |= kDominant;
  }
}

// A raw score as it is handed on, in float32: one beyond that is infinite.
void Finish(bool takes_part, double& raw, uint8_t& flags) {
  if (!takes_part) raw = std::numeric_limits<double>::quiet_NaN();
  if (raw > std::numeric_limits<float>::max()) raw = std::numeric_limits<double>::infinity();
  if (!std::isfinite(raw)) flags |= kNonFinite;
}

// Scores of the first n tokens that look at queries. DropKV: the sum over rows, times their weights, and the mean over
// the group (algorithm.md section 3). Attention: the mean over rows, by their weights, and group (SnapKV).
Scores ScoreByRows(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec, Signal signal, int32_t n) {
  const Layer layer = LoadLayer(kv);
  const size_t count = static_cast<size_t>(kv.kv_heads) * n;
  Scores scores{std::vector<double>(count, 0.0), std::vector<uint8_t>(count, 0)};
  const int32_t group = rows.query_heads / kv.kv_heads;
  const double total = signal == Signal::kDropKv ? group : group * RowWeightSum(rows);
  for (int32_t h = 0; h < rows.query_heads; ++h) {
    const int32_t u = h / group;
    const int64_t first = static_cast<int64_t>(u) * n;
    for (int32_t i = 0; i < rows.rows; ++i) {
      const double weight = RowWeight(rows, i);
      const Row row = SoftmaxRow(layer, rows, spec, h, i);
      if (row.skipped || weight == 0.0) continue;
      AddRow(layer, row, u, std::min(rows.visible[i], n), signal, weight / total, scores.raw.data() + first,
             scores.flags.data() + first);
    }
  }
  for (int32_t u = 0; u < kv.kv_heads; ++u)
    for (int32_t j = 0; j < n; ++j) {
      const size_t at = static_cast<size_t>(u) * n + j;
      Finish(layer.takes_part(u, j), scores.raw[at], scores.flags[at]);
    }
  return scores;
}

}  // namespace

Scores Score(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec, const Policy& policy,
             int32_t layer_index, int32_t generated) {
  const int32_t n = kv.tokens - generated;
  if (policy.needs_queries()) return ScoreByRows(kv, rows, spec, policy.signal, n);
  const size_t count = static_cast<size_t>(kv.kv_heads) * n;
  Scores scores{std::vector<double>(count, 0.0), std::vector<uint8_t>(count, 0)};
  if (policy.signal == Signal::kFull) return scores;
  for (int32_t u = 0; u < kv.kv_heads; ++u)
    for (int32_t j = 0; j < n; ++j) {
      const bool recency = policy.signal == Signal::kRecency;
      scores.raw[static_cast<size_t>(u) * n + j] = recency ? j : RandomScore(policy.seed, layer_index, u, j);
    }
  return scores;
}

}  // namespace dropkv::reference
