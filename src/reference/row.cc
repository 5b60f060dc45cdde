#include "reference/row.h"

#include <cmath>
#include <limits>

#include "core/element.h"

namespace dropkv::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr int32_t kSinkIndex = -1;  // stands for the sink's logit among token indices

// Reads [heads, n, dim] of `tensor`; clears `finite` where an element is not.
std::vector<double> LoadTensor(const KvView& kv, const KvTensor& tensor, int32_t dim, std::vector<uint8_t>& finite) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(kv.kv_heads) * kv.tokens * dim);
  for (int32_t head = 0; head < kv.kv_heads; ++head)
    for (int32_t token = 0; token < kv.tokens; ++token)
      for (int32_t c = 0; c < dim; ++c) {
        const float value = LoadElement(tensor, kv.cells, head, token, c);
        if (!std::isfinite(value)) finite[static_cast<size_t>(head) * kv.tokens + token] = 0;
        values.push_back(value);
      }
  return values;
}

double Capped(double logit, double cap) { return cap > 0.0 ? cap * std::tanh(logit / cap) : logit; }

struct Logits {
  std::vector<double> token;  // [n]; -inf: takes no part
  double sink = kMinusInfinity;

  // Calls f(index, logit) for every logit that is in the denominator; the sink's index is kSinkIndex.
  template <typename F>
  void ForEach(F&& f) const {
    for (size_t j = 0; j < token.size(); ++j)
      if (token[j] != kMinusInfinity) f(static_cast<int32_t>(j), token[j]);
    if (sink != kMinusInfinity) f(kSinkIndex, sink);
  }
};

struct LogSum {
  double value = kMinusInfinity;  // log sum exp
  double largest = kMinusInfinity;
  int32_t argmax = kSinkIndex;
  bool empty = true;
};

// Over all logits but that of `excluded` (pass -2 to exclude none).
LogSum LogSumExp(const Logits& logits, int32_t excluded) {
  LogSum result;
  logits.ForEach([&](int32_t j, double logit) {
    if (j == excluded || (!result.empty && logit <= result.largest)) return;
    result = {0.0, logit, j, false};
  });
  if (result.empty) return result;
  double sum = 0.0;
  logits.ForEach([&](int32_t j, double logit) {
    if (j != excluded) sum += std::exp(logit - result.largest);
  });
  result.value = result.largest + std::log(sum);
  return result;
}

// sum_j exp(l_j - lse) v_j over the tokens but `excluded`.
std::vector<double> WeightedValues(const Layer& layer, int32_t kv_head, const Logits& logits, double lse,
                                   int32_t excluded) {
  std::vector<double> out(layer.value_dim, 0.0);
  logits.ForEach([&](int32_t j, double logit) {
    if (j == excluded || j == kSinkIndex) return;
    const double weight = std::exp(logit - lse);
    const double* value = layer.value(kv_head, j);
    for (int32_t c = 0; c < layer.value_dim; ++c) out[c] += weight * value[c];
  });
  return out;
}

}  // namespace

Layer LoadLayer(const KvView& kv) {
  Layer layer{kv.kv_heads, kv.tokens, kv.key_dim, kv.value_dim, {}, {}, {}};
  layer.finite.assign(static_cast<size_t>(kv.kv_heads) * kv.tokens, 1);
  layer.k = LoadTensor(kv, kv.k, kv.key_dim, layer.finite);
  layer.v = LoadTensor(kv, kv.v, kv.value_dim, layer.finite);
  return layer;
}

Row SoftmaxRow(const Layer& layer, const float* q, int32_t query_head, int32_t kv_head, int32_t visible,
               const AttentionSpec& spec, const uint8_t* allowed) {
  constexpr int32_t kNone = -2;
  Row row;
  row.weight.assign(layer.tokens, 0.0);
  row.out.assign(layer.value_dim, 0.0);
  row.without_top.assign(layer.value_dim, 0.0);
  std::vector<double> query(q, q + layer.key_dim);
  for (const double component : query) row.skipped = row.skipped || !std::isfinite(component);
  if (row.skipped) return row;

  Logits logits;
  logits.token.assign(layer.tokens, kMinusInfinity);
  for (int32_t j = 0; j < visible; ++j) {
    if (!layer.takes_part(kv_head, j) || (allowed != nullptr && allowed[j] == 0)) continue;
    logits.token[j] = Capped(static_cast<double>(spec.scale) * Dot(query.data(), layer.key(kv_head, j), layer.key_dim),
                             spec.soft_cap);
  }
  if (spec.sinks != nullptr) logits.sink = spec.sinks[query_head];

  const LogSum all = LogSumExp(logits, kNone);
  row.lse = all.value;
  if (all.empty) return row;

  // The largest logit's token holds more than half when the others together weigh less than it does.
  const LogSum others = LogSumExp(logits, all.argmax);
  if (all.argmax != kSinkIndex && others.value < all.largest) {
    row.top = all.argmax;
    row.alone = others.empty;
    row.lse = all.largest + std::log1p(std::exp(others.value - all.largest));
    row.top_rest = std::exp(others.value - row.lse);
    if (!others.empty) row.without_top = WeightedValues(layer, kv_head, logits, others.value, all.argmax);
  }
  logits.ForEach([&](int32_t j, double logit) {
    if (j != kSinkIndex) row.weight[j] = std::exp(logit - row.lse);
  });
  row.out = WeightedValues(layer, kv_head, logits, row.lse, kNone);
  return row;
}

Row SoftmaxRow(const Layer& layer, const ObservationRows& rows, const AttentionSpec& spec, int32_t query_head,
               int32_t row) {
  const int32_t group = rows.query_heads / layer.kv_heads;
  const float* q = rows.q + query_head * rows.head_stride + row * rows.row_stride;
  return SoftmaxRow(layer, q, query_head, query_head / group, rows.visible[row], spec);
}

double RowWeight(const ObservationRows& rows, int32_t row) { return rows.weights == nullptr ? 1.0 : rows.weights[row]; }

double RowWeightSum(const ObservationRows& rows) {
  double sum = 0.0;
  for (int32_t i = 0; i < rows.rows; ++i) sum += RowWeight(rows, i);
  return sum;
}

double Dot(const double* a, const double* b, int32_t dim) {
  double sum = 0.0;
  for (int32_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

double Distance(const double* a, const double* b, int32_t dim) {
  double sum = 0.0;
  for (int32_t c = 0; c < dim; ++c) sum += (a[c] - b[c]) * (a[c] - b[c]);
  return std::sqrt(sum);
}

double Norm(const double* a, int32_t dim) { return std::sqrt(Dot(a, a, dim)); }

}  // namespace dropkv::reference
