// Views of a key-value cache and of the observation rows that look at it. Views never own memory.
//
// Letters (docs/algorithm.md): Hq query heads, Hkv KV heads, g = Hq / Hkv, n cached tokens, d and dv key and value head
// sizes, w observation rows.
#pragma once

#include <cstdint>

#include "dropkv/dtype.h"
#include "dropkv/export.h"
#include "dropkv/status.h"

namespace dropkv {

// Keys or values of one layer of one sequence. Element (head, token, dim) lies at
//   head * head_stride + cell(token) * token_stride + dim * dim_stride      (strides in elements).
// Every layout in use is a choice of strides:
//   head-major   [Hkv, n, d]            head_stride n*d, token_stride d,     dim_stride 1
//   token-major  [n, Hkv, d] (llama.cpp) head_stride d,   token_stride Hkv*d, dim_stride 1
//   transposed   [Hkv, d, n] (llama.cpp V without flash attention) head_stride d*n, token_stride 1, dim_stride n
// q8_0 needs dim_stride 1, and head size and the other strides multiples of 32.
struct KvTensor {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t dim_stride = 1;
};

struct MutableKvTensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t dim_stride = 1;

  operator KvTensor() const { return {data, dtype, head_stride, token_stride, dim_stride}; }  // NOLINT: implicit
};

// One layer of one sequence. Keys are stored after RoPE.
struct KvView {
  int32_t kv_heads = 0;   // Hkv
  int32_t tokens = 0;     // n
  int32_t key_dim = 0;    // d
  int32_t value_dim = 0;  // dv
  KvTensor k;
  KvTensor v;
  const int32_t* cells = nullptr;  // [n] cell of every token; null: token j lies in cell j
};

struct MutableKvView {
  int32_t kv_heads = 0;
  int32_t tokens = 0;  // capacity in tokens
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  MutableKvTensor k;
  MutableKvTensor v;

  operator KvView() const { return {kv_heads, tokens, key_dim, value_dim, k, v, nullptr}; }  // NOLINT: implicit
};

// The queries that judge the tokens: any set of rows, each with its own count of visible tokens. The window is the
// simplest case: the last w prompt positions, row i sees n-w+i+1 tokens. A row of a token generated behind the prompt
// also sees the generated tokens before it and itself.
struct ObservationRows {
  const float* q = nullptr;          // [Hq, w, d] after RoPE and any query norm; dims contiguous
  int64_t head_stride = 0;           // elements between query heads
  int64_t row_stride = 0;            // elements between rows
  int32_t query_heads = 0;           // Hq
  int32_t rows = 0;                  // w
  const int32_t* visible = nullptr;  // [w]; row i attends to tokens 0 .. visible[i]-1
  const float* weights = nullptr;    // [w] finite, >= 0, not all 0: how much row i counts; null: 1 each
};

// How a logit is made: l = scale * <q, k>, then cap * tanh(l / cap) where soft_cap > 0; a sink is one more logit per
// query head in the denominator, without a value.
struct AttentionSpec {
  float scale = 1.0F;
  float soft_cap = 0.0F;         // 0: none
  const float* sinks = nullptr;  // [Hq] or null
};

// Largest shapes that the kernels take.
inline constexpr int32_t kMaxHeadDim = 256;
inline constexpr int32_t kMaxGroup = 16;
inline constexpr int32_t kMaxRows = 128;

// Checks shapes, strides, dtypes and the visible counts; the message names the field.
DROPKV_API Status CheckKvView(const KvView& kv);
DROPKV_API Status CheckRows(const ObservationRows& rows, const KvView& kv);

}  // namespace dropkv
