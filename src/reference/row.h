// What the reference functions share: a layer's cache as float64, and the softmax of one query row over it.
#pragma once

#include <cstdint>
#include <vector>

#include "dropkv/cache_view.h"

namespace dropkv::reference {

// Keys and values of a view as float64, head-major and contiguous.
struct Layer {
  int32_t kv_heads = 0;
  int32_t tokens = 0;
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  std::vector<double> k;        // [Hkv, n, d]
  std::vector<double> v;        // [Hkv, n, dv]
  std::vector<uint8_t> finite;  // [Hkv, n]; 0 where the key or the value has a NaN or Inf: the token takes no part

  const double* key(int32_t head, int32_t token) const {
    return k.data() + (static_cast<int64_t>(head) * tokens + token) * key_dim;
  }
  const double* value(int32_t head, int32_t token) const {
    return v.data() + (static_cast<int64_t>(head) * tokens + token) * value_dim;
  }
  bool takes_part(int32_t head, int32_t token) const {
    return finite[static_cast<int64_t>(head) * tokens + token] != 0;
  }
};

Layer LoadLayer(const KvView& kv);

// Softmax of one query row and its output (algorithm.md section 1).
struct Row {
  bool skipped = false;        // the query has a NaN or Inf: the row judges nothing, everything below is 0
  std::vector<double> weight;  // [n] p; 0 where a token is hidden or takes no part
  std::vector<double> out;     // [dv] a
  double lse = 0.0;            // log of the denominator, the sink's share included; -inf where it is empty

  // The token with p > 1/2, if there is one. 1 - p is then a sum over the other tokens, never a difference, so that it
  // keeps its digits however close p is to 1.
  int32_t top = -1;
  double top_rest = 0.0;            // 1 - p
  bool alone = false;               // nothing else is visible and there is no sink: p = 1 exactly
  std::vector<double> without_top;  // [dv] output after removing it; 0 where nothing else is left

  double rest(int32_t token) const { return token == top ? top_rest : 1.0 - weight[token]; }
};

// q [d] float32 of query head `query_head`, which reads KV head `kv_head`; tokens 0 .. visible-1.
// `allowed` [n], optional: tokens with 0 take no part either.
Row SoftmaxRow(const Layer& layer, const float* q, int32_t query_head, int32_t kv_head, int32_t visible,
               const AttentionSpec& spec, const uint8_t* allowed = nullptr);

// The same for row i of query head h of `rows`.
Row SoftmaxRow(const Layer& layer, const ObservationRows& rows, const AttentionSpec& spec, int32_t query_head,
               int32_t row);

// How much row i counts, and the sum over all rows.
double RowWeight(const ObservationRows& rows, int32_t row);
double RowWeightSum(const ObservationRows& rows);

double Dot(const double* a, const double* b, int32_t dim);
double Distance(const double* a, const double* b, int32_t dim);  // |a - b|
double Norm(const double* a, int32_t dim);

}  // namespace dropkv::reference
