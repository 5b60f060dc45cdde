#include "reference/tolerance.h"

#include "core/element.h"
#include "reference/row.h"

namespace dropkv::reference {
namespace {

// Row magnitudes: the largest logit comes from this row's own query, the rest from its KV head.
Magnitudes RowMagnitudes(const Layer& layer, const ObservationRows& rows, const AttentionSpec& spec, int32_t head,
                         int32_t row) {
  const int32_t u = head / (rows.query_heads / layer.kv_heads);
  const float* q = rows.q + head * rows.head_stride + row * rows.row_stride;
  const std::vector<double> query(q, q + layer.key_dim);
  const double scaled = std::abs(spec.scale) * Norm(query.data(), layer.key_dim);
  Magnitudes m{layer.tokens, layer.key_dim, layer.value_dim, 0.0, 0.0, 0.0};
  for (int32_t j = 0; j < rows.visible[row]; ++j) {
    if (!layer.takes_part(u, j)) continue;
    m.logit = std::max(m.logit, scaled * Norm(layer.key(u, j), layer.key_dim));
    m.value_norm = std::max(m.value_norm, Norm(layer.value(u, j), layer.value_dim));
    for (int32_t c = 0; c < layer.value_dim; ++c) m.value_max = std::max(m.value_max, std::abs(layer.value(u, j)[c]));
  }
  if (spec.sinks != nullptr) m.logit = std::max(m.logit, static_cast<double>(std::abs(spec.sinks[head])));
  return m;
}

// Adds the bound of one row's pairs with the first `seen` tokens to `raw` [n], times `share`.
void AddPairs(const Layer& layer, const Row& row, const Magnitudes& m, int32_t u, int32_t seen, int32_t pairs,
              const Policy& policy, double share, double* raw) {
  const double out_norm = Norm(row.out.data(), layer.value_dim);
  for (int32_t j = 0; j < seen; ++j) {
    if (!layer.takes_part(u, j) || row.alone) continue;
    const double p = row.weight[j];
    if (policy.signal == Signal::kAttention) {
      raw[j] += share * (p * (WeightTolerance(m) + Gamma(pairs + 2.0)) + kSmallestNormal);
      continue;
    }
    const double* value = layer.value(u, j);
    const double without = j == row.top ? Distance(value, row.without_top.data(), layer.value_dim)
                                        : Distance(value, row.out.data(), layer.value_dim) / row.rest(j);
    const double distance = Distance(value, row.out.data(), layer.value_dim);
    raw[j] +=
        share * PairTolerance(m, p, row.rest(j), distance, without, out_norm, Norm(value, layer.value_dim), pairs);
  }
}

}  // namespace

double PairTolerance(const Magnitudes& m, double weight, double rest, double distance, double without, double out_norm,
                     double value, int32_t pairs) {
  // Which side of 1/2 a kernel sees depends on its own p: near it either form may have run.
  constexpr double kOverlap = 0.1;
  const double rho = WeightTolerance(m);
  const double da = OutNormTolerance(m);
  const double sums = Gamma(pairs + 4.0);
  double bound = 0.0;
  if (weight <= 0.5 + kOverlap) {
    const double ratio = weight / rest;
    const double form = Gamma(m.value_dim + pairs + 3.0) * (out_norm + value) * (out_norm + value);
    const double squared = form + 2 * distance * da + da * da;
    const double relative = 2 * rho / rest + sums;
    bound = ratio * ratio * (relative * distance * distance + (1.0 + relative) * squared) +
            kSmallestNormal * (out_norm + value) * (out_norm + value);
  }
  if (weight > 0.5 - kOverlap) {
    const double moved = da + Gamma(m.value_dim + 2.0) * (out_norm + value + without);
    const double relative = 2 * rho + sums;
    bound =
        std::max(bound, weight * weight *
                            (relative * without * without + (1.0 + relative) * (2 * without * moved + moved * moved)));
  }
  return bound + kSmallestNormal;
}

Tolerances LayerTolerances(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec,
                           const Policy& policy, int32_t generated) {
  const Layer layer = LoadLayer(kv);
  const int32_t n = kv.tokens - generated;
  const int32_t group = rows.query_heads / kv.kv_heads;
  const double total = policy.signal == Signal::kAttention ? group * RowWeightSum(rows) : group;
  // A weight is one more product of a pair's chain, and its share of their sum two roundings.
  const int32_t pairs = group * rows.rows + (rows.weights != nullptr ? 3 : 0);
  Tolerances bounds;
  bounds.raw.assign(static_cast<size_t>(kv.kv_heads) * n, 0.0);
  for (int32_t h = 0; h < rows.query_heads; ++h) {
    const int32_t u = h / group;
    for (int32_t i = 0; i < rows.rows; ++i) {
      const Row row = SoftmaxRow(layer, rows, spec, h, i);
      const Magnitudes m = row.skipped ? Magnitudes{} : RowMagnitudes(layer, rows, spec, h, i);
      bounds.out.push_back(row.skipped ? 0.0 : OutTolerance(m));
      bounds.lse.push_back(row.skipped ? 0.0 : LseTolerance(m));
      if (row.skipped || !policy.needs_queries()) continue;
      AddPairs(layer, row, m, u, std::min(rows.visible[i], n), pairs, policy, RowWeight(rows, i) / total,
               bounds.raw.data() + static_cast<size_t>(u) * n);
    }
  }
  return bounds;
}

}  // namespace dropkv::reference
