// Allowed errors of the tensor-core kernels, and of rows that an engine hands in, against the float64 reference:
// reference/tolerance.h with what these keep in fewer bits than float32. Derived, never tuned.
//
// u16 is the unit roundoff of the cache's type: 2^-8 (bf16) or 2^-11 (f16). u = 2^-24.
//   product  tensor cores add exact products, but truncate: m terms have an error of at most m * 2u, which does not
//            average out. Logits (m = d) and <a, v> (m = dv) gain that beside the float32 bounds.
//   P        weights 2^(l - max) are rounded to the type before they meet V: u16 of every weight, and below f16's
//            smallest normal number 2^-25 of the split's largest. Sums of weights stay float32, so lse has none of it.
//              out: u16 * max |v| + n * 2^-25 * max |v|
//   a        the score's product takes a rounded: its error gains u16 * |a|. |a|^2 is of the rounded one.
//   top      p > 1/2: its a_without comes from the same products over the other tokens, with weights relative to their
//            own largest: the error of an out, never a multiple of 1/(1-p).
// Handed-in rows: an output of 16 bits has an error of u16 * |a|, one of 32 bits u * |a|; pairs up to p = 0.75 and 0.99
// take |a - v| from it.
// A row's weight multiplies the bounds of its terms; it is one more product of a term's chain, and its share of the
// weights' sum two roundings.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/row.h"
#include "reference/tolerance.h"

namespace dropkv::cuda {

struct Precision {
  bool tensor_cores = false;
  double weight = 0.0;       // u16 where P is rounded
  double flush = 0.0;        // largest weight that becomes 0, of the largest one
  double out = 0.0;          // relative error of a before the score's distance
  double plain_limit = 0.6;  // p up to which |a - v| may be taken from a itself
};

inline double UnitRoundoff(DType dtype) { return dtype == DType::kF16 ? 0x1p-11 : 0x1p-8; }

inline Precision PrecisionOf(bool tensor_cores, DType dtype) {
  if (!tensor_cores) return {};
  const double unit = UnitRoundoff(dtype);
  return {true, unit, dtype == DType::kF16 ? 0x1p-25 : 0.0, unit, 0.6};
}

// given: the handed-in output's dtype.
inline Precision WithGivenRows(Precision precision, DType given, DType cache) {
  precision.out = std::max(precision.out, given == DType::kF32 ? 0x1p-24 : UnitRoundoff(cache));
  precision.plain_limit = given == DType::kF32 ? 0.995 : 0.76;
  return precision;
}

// Bounds of a layer with one KV head, and what the reference says about every row's top token.
struct RowBounds {
  std::vector<double> out;       // [r] allowed error of an element
  std::vector<double> lse;       // [r]
  std::vector<double> loss;      // [n] of the DropKV score
  std::vector<double> share;     // [n] of the attention score
  std::vector<int32_t> top;      // [r]
  std::vector<double> top_rest;  // [r] 1 - p of it
  std::vector<double> weight;    // [r]; 0 where the row judges nothing
};

// Magnitudes of one row; its logits come from its own query.
inline reference::Magnitudes MagnitudesOf(const reference::Layer& layer, const ObservationRows& rows,
                                          const AttentionSpec& spec, int32_t head, int32_t row) {
  const float* q = rows.q + head * rows.head_stride + row * rows.row_stride;
  const std::vector<double> query(q, q + layer.key_dim);
  const double scaled = spec.scale * reference::Norm(query.data(), layer.key_dim);
  reference::Magnitudes m{layer.tokens, layer.key_dim, layer.value_dim, 0.0, 0.0, 0.0};
  for (int32_t j = 0; j < rows.visible[row]; ++j) {
    if (!layer.takes_part(0, j)) continue;
    m.logit = std::max(m.logit, scaled * reference::Norm(layer.key(0, j), layer.key_dim));
    m.value_norm = std::max(m.value_norm, reference::Norm(layer.value(0, j), layer.value_dim));
    for (int32_t c = 0; c < layer.value_dim; ++c) m.value_max = std::max(m.value_max, std::abs(layer.value(0, j)[c]));
  }
  if (spec.sinks != nullptr) m.logit = std::max(m.logit, static_cast<double>(std::abs(spec.sinks[head])));
  return m;
}

struct RowErrors {
  double logit = 0.0;   // beside reference::LogitTolerance
  double weight = 0.0;  // rho
  double out = 0.0;     // relative to the largest value
};

inline RowErrors ErrorsOf(const reference::Magnitudes& m, const Precision& precision) {
  RowErrors errors;
  if (precision.tensor_cores) errors.logit = m.key_dim * 2 * reference::kUnitRoundoff * m.logit;
  errors.weight = reference::WeightTolerance(m) + 2 * errors.logit;
  errors.out = errors.weight + precision.weight + reference::Gamma(m.tokens + 2.0) +
               m.tokens * (precision.flush + reference::kSmallestNormal);
  return errors;
}

// Error of one pair's part of the DropKV score.
inline double PairBound(const reference::Layer& layer, const reference::Row& row, const reference::Magnitudes& m,
                        const Precision& precision, int32_t token, int32_t pairs) {
  const RowErrors errors = ErrorsOf(m, precision);
  const double* value = layer.value(0, token);
  const double p = row.weight[token];
  const double rest = row.rest(token);
  const double size = reference::Norm(row.out.data(), layer.value_dim) + reference::Norm(value, layer.value_dim);
  const double distance = reference::Distance(row.out.data(), value, layer.value_dim);
  const double sums = reference::Gamma(pairs + 4.0);
  const double form = reference::Gamma(m.value_dim + pairs + 3.0) +
                      (precision.tensor_cores ? m.value_dim * 2 * reference::kUnitRoundoff : 0.0);
  double bound = 0.0;
  if (p <= precision.plain_limit) {
    const double da = errors.out * m.value_norm + precision.out * reference::Norm(row.out.data(), layer.value_dim);
    const double squared = form * size * size + 2 * distance * da + da * da;
    const double relative = 2 * errors.weight / rest + sums;
    bound = p / rest * (p / rest) * (relative * distance * distance + (1.0 + relative) * squared) +
            reference::kSmallestNormal * size * size;
  }
  if (p > 0.4) {
    const double without =
        token == row.top ? reference::Distance(value, row.without_top.data(), layer.value_dim) : distance / rest;
    const double moved = errors.out * m.value_norm + reference::Gamma(m.value_dim + 2.0) * (size + without);
    const double relative = 2 * errors.weight + sums;
    bound = std::max(bound,
                     p * p * (relative * without * without + (1.0 + relative) * (2 * without * moved + moved * moved)));
  }
  return bound + reference::kSmallestNormal;
}

inline RowBounds BoundsOf(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec,
                          const Precision& precision) {
  const reference::Layer layer = reference::LoadLayer(kv);
  const int32_t pairs = rows.query_heads * rows.rows + (rows.weights != nullptr ? 3 : 0);
  const double weight_sum = rows.query_heads * reference::RowWeightSum(rows);
  RowBounds bounds;
  bounds.loss.assign(kv.tokens, 0.0);
  bounds.share.assign(kv.tokens, 0.0);
  for (int32_t h = 0; h < rows.query_heads; ++h)
    for (int32_t i = 0; i < rows.rows; ++i) {
      const reference::Row row = reference::SoftmaxRow(layer, rows, spec, h, i);
      const reference::Magnitudes m = row.skipped ? reference::Magnitudes{} : MagnitudesOf(layer, rows, spec, h, i);
      const RowErrors errors = ErrorsOf(m, precision);
      bounds.out.push_back(row.skipped ? 0.0 : errors.out * m.value_max);
      bounds.lse.push_back(row.skipped ? 0.0 : reference::LseTolerance(m) + errors.logit);
      bounds.top.push_back(row.top);
      bounds.top_rest.push_back(row.top < 0 ? 1.0 : row.top_rest);
      const double weight = row.skipped ? 0.0 : reference::RowWeight(rows, i);
      bounds.weight.push_back(weight);
      if (row.skipped) continue;
      for (int32_t j = 0; j < rows.visible[i]; ++j) {
        if (!layer.takes_part(0, j)) continue;
        const double share = row.weight[j] * (errors.weight + reference::Gamma(pairs + 2.0));
        bounds.share[j] += weight * (share + reference::kSmallestNormal) / weight_sum;
        if (!row.alone) bounds.loss[j] += weight * PairBound(layer, row, m, precision, j, pairs) / rows.query_heads;
      }
    }
  return bounds;
}

}  // namespace dropkv::cuda
