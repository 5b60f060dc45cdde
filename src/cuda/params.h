// Plain data that kernels take by value. Every pointer is to device memory; nothing here owns anything.
//
// Letters (docs/algorithm.md): B sequences, Hq query heads, Hkv KV heads, g = Hq / Hkv, w observation rows of a query
// head, r = g * w rows of a KV head, n tokens of a sequence that are candidates: all but the generated ones at its end.
// Row i of KV head u is row i % w of query head u * g + i / w, so that [B, Hq, w] and [B, Hkv, r] are the same memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dropkv/cuda.h"
#include "dropkv/dtype.h"
#include "dropkv/policy.h"

namespace dropkv::cuda {

using CacheParams = Cache;

struct RowParams {
  const void* q = nullptr;  // cache dtype, after RoPE; dims contiguous, strides in elements
  int64_t q_sequence_stride = 0;
  int64_t q_head_stride = 0;
  int64_t q_row_stride = 0;
  int32_t group = 1;                 // g
  int32_t rows = 1;                  // w
  const int32_t* visible = nullptr;  // [B, visible_heads, w]; null: the rows are those of the last w tokens
  int32_t visible_heads = 1;         // Hkv where every KV head's list has counts of its own
  float scale = 1.0F;
  float soft_cap = 0.0F;           // 0: none
  const float* sinks = nullptr;    // [Hq] or null
  const float* weights = nullptr;  // [B, w] of the scores, or null; pass 1 does not know them
};

// What pass 1 knows of every row; written by attend, or from what the engine's prefill handed in. [B, Hkv, r] each.
struct RowState {
  float* lse2 = nullptr;          // log2 of the softmax denominator, the sink included; +inf: the row judges nothing
  float* out = nullptr;           // [.., dv] float32: a
  void* out16 = nullptr;          // [.., dv] cache dtype: a, rounded
  void* q16 = nullptr;            // [.., d] cache dtype: the query; zeros where it has NaN or Inf
  float* norm = nullptr;          // |out16|^2, of the rounded one
  int32_t* top = nullptr;         // the token with p > 1/2, else -1
  float* contribution = nullptr;  // of the pair (row, top): p^2 |v - a_without|^2; sign bit set where 1 - p <= 1e-6
};

// Softmax state of every row over one range of keys, [B, Hkv, splits, padded r]: sums of exp2(l - max), in units of
// log2: l = scale * log2(e) * <q, k>.
struct Partials {
  float* max = nullptr;  // -inf: the range has no token that the row sees
  float* sum = nullptr;
  float* out = nullptr;  // [.., dv], not normalised; null: denominators alone, from the keys
  int32_t splits = 1;
  int32_t split_tokens = 0;  // of a split in the middle (SplitOf): a multiple of every kernel's tile
  int32_t padded_rows = 0;   // r rounded up to a multiple of 64
};

// Every split begins at a multiple of it.
inline constexpr int32_t kSplitUnit = 64;

// Tokens of the last split: the window, where a row's own token and its neighbours hold much of its weight.
inline constexpr int32_t kLastSplit = 2 * kSplitUnit;

// split_tokens for `splits` splits of up to max_tokens.
constexpr int32_t SplitTokens(int32_t max_tokens, int32_t splits) {
  const int32_t units = (max_tokens + kSplitUnit - 1) / kSplitUnit;
  const int32_t middle = splits < 3 ? splits : splits - 2;
  return ((splits < 3 ? units : units > 3 ? units - 3 : 1) + middle - 1) / middle * kSplitUnit;
}

// Counters of a run, summed over sequences and heads.
struct Counters {
  unsigned long long nonfinite_tokens;
  unsigned long long dominant_tokens;
  unsigned long long skipped_rows;
};

struct AttendParams {
  CacheParams cache;
  RowParams rows;
  RowState state;
  Partials partials;
  const float* given_lse = nullptr;  // natural log [B, Hq, w]
  const void* given_out = nullptr;   // [B, Hq, w, dv], contiguous
  DType given_dtype = DType::kF32;   // of given_out: kF32 or the cache's
  uint8_t* row_ok = nullptr;         // [B, Hkv, r] 0: the query has NaN or Inf
  int32_t* redo = nullptr;           // [B, Hkv] 1: a token, or a given row, is not finite: the careful kernel attends
  int32_t* top_split = nullptr;      // [B, Hkv, r] split that holds the row's top token (p > 1/2), or -1
  int32_t* has_tops = nullptr;       // [B, Hkv] 1: some row has one
  Counters* counters = nullptr;
};

struct ScoreParams {
  CacheParams cache;
  RowParams rows;
  RowState state;
  Signal signal = Signal::kDropKv;
  bool find_tops = false;  // rows were handed in: pairs with p > kFoundShare go to state.top, and count nothing here
  const uint8_t* row_ok = nullptr;
  int32_t* has_tops = nullptr;  // [B, Hkv], with find_tops
  float* raw = nullptr;         // [B, Hkv, max_tokens]; NaN: not finite; sign bit: dominant
};

// Share beyond which a pair of handed-in rows is taken out of the matrix path: at most one token of a row.
inline constexpr float kFoundShare = 0.51F;

// From raw scores to lists.
struct SelectParams {
  int32_t sequences = 0;
  int32_t kv_heads = 0;
  int32_t max_tokens = 0;
  const int32_t* lengths = nullptr;  // [B] or null, and generated: as in Cache
  const int32_t* generated = nullptr;
  int32_t max_generated = 0;
  const float* raw = nullptr;  // [B, Hkv, max_tokens] as ScoreParams::raw
  // Policy and budget
  int32_t window = 0;
  int32_t sink = 0;
  Pooling pool;
  HeadRule heads = HeadRule::kUniform;
  double alpha = 0.2;
  double fraction = 0.0;      // > 0: share kept; else budget_tokens
  int64_t budget_tokens = 0;  // tokens per KV head
  // Results
  int64_t* offsets = nullptr;    // [B * Hkv + 1]
  int32_t* positions = nullptr;  // [capacity], list (b, h) ascending from offsets[b * Hkv + h]
  int64_t capacity = 0;
  float* pooled = nullptr;  // [B, Hkv, max_tokens] or null
  void* workspace = nullptr;
  Counters* counters = nullptr;  // nonfinite_tokens, dominant_tokens
};

size_t SelectWorkspaceBytes(const SelectParams& params);
cudaError_t LaunchSelect(const SelectParams& params, cudaStream_t stream);

// Kept rows of `source` to rows offsets[i] .. of the destination, [total, d] and [total, dv] contiguous rows.
struct CompactParams {
  CacheParams source;
  const int64_t* offsets = nullptr;
  const int32_t* positions = nullptr;
  int64_t max_list = 0;  // upper bound of a list's length
  void* k = nullptr;     // null: in place, row i of list (b, h) becomes token i of (b, h)
  void* v = nullptr;
  int32_t* workspace = nullptr;  // in place: CompactWorkspaceBytes, set to zero by the launch
};

size_t CompactWorkspaceBytes(const CompactParams& params);
cudaError_t LaunchCompact(const CompactParams& params, cudaStream_t stream);

// One token's query heads over a ragged cache.
struct DecodeParams {
  CacheParams cache;        // ragged: offsets set, token_stride the row's; or padded with lengths
  const void* q = nullptr;  // [B, Hq, d] contiguous, cache dtype
  void* out = nullptr;      // [B, Hq, dv] contiguous, cache dtype
  float* out32 = nullptr;   // [B, Hq, dv] float32, or null; one of both is set
  int32_t group = 1;
  float scale = 1.0F;
  float soft_cap = 0.0F;
  const float* sinks = nullptr;
  void* workspace = nullptr;
};

}  // namespace dropkv::cuda
