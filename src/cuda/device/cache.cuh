// Where a token lies, how many there are, and which of them a row sees.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/params.h"

namespace dropkv::cuda {

__device__ inline int32_t Length(const CacheParams& cache, int32_t sequence, int32_t head) {
  if (cache.offsets != nullptr) {
    const int64_t list = static_cast<int64_t>(sequence) * cache.kv_heads + head;
    return static_cast<int32_t>(cache.offsets[list + 1] - cache.offsets[list]);
  }
  return cache.lengths != nullptr ? cache.lengths[sequence] : cache.max_tokens;
}

// How many of `tokens` tokens are candidates: all but the generated ones at the end. Of Cache and SelectParams.
template <typename Sizes>
__device__ inline int32_t Candidates(const Sizes& sizes, int32_t sequence, int32_t tokens) {
  if (sizes.max_generated == 0) return tokens;
  return max(0, tokens - (sizes.generated != nullptr ? sizes.generated[sequence] : sizes.max_generated));
}

// Offset in elements of a token's first dim.
__device__ inline int64_t TokenOffset(const CacheParams& cache, const Tensor& tensor, int32_t sequence, int32_t head,
                                      int32_t token) {
  if (cache.offsets != nullptr)
    return (cache.offsets[static_cast<int64_t>(sequence) * cache.kv_heads + head] + token) * tensor.token_stride;
  int64_t at = head * tensor.head_stride;
  if (cache.blocks != nullptr) {
    const int32_t block = cache.blocks[static_cast<int64_t>(sequence) * cache.blocks_stride + token / cache.block_size];
    return at + block * tensor.sequence_stride + token % cache.block_size * tensor.token_stride;
  }
  if (cache.starts != nullptr) return at + (cache.starts[sequence] + token) * tensor.token_stride;
  return at + sequence * tensor.sequence_stride + token * tensor.token_stride;
}

struct TokenRange {
  int32_t begin;
  int32_t end;  // begin or less: no token
};

// Tokens of a split. A row's dominant token is mostly an attention sink at the sequence's begin or one of the window,
// and its split is attended twice: the first tile and the last two are splits of their own.
__device__ inline TokenRange SplitOf(const Partials& partials, int32_t tokens, int32_t split) {
  if (partials.splits < 3) return {split * partials.split_tokens, min(tokens, (split + 1) * partials.split_tokens)};
  const int32_t units = (tokens + kSplitUnit - 1) / kSplitUnit;
  const int32_t last = max(kSplitUnit, units * kSplitUnit - kLastSplit);
  if (split == 0) return {0, min(tokens, kSplitUnit)};
  if (split == partials.splits - 1) return {last, tokens};
  const int32_t begin = kSplitUnit + (split - 1) * partials.split_tokens;
  return {begin, min(begin + partials.split_tokens, min(last, tokens))};
}

// Tokens 0 .. count-1 are seen by row `row` (of r) of this list.
__device__ inline int32_t VisibleTokens(const RowParams& rows, int32_t sequence, int32_t head, int32_t row,
                                        int32_t tokens) {
  const int32_t i = row % rows.rows;
  const int32_t counts = sequence * rows.visible_heads + min(head, rows.visible_heads - 1);
  const int32_t seen = rows.visible != nullptr ? rows.visible[counts * rows.rows + i] : tokens - rows.rows + i + 1;
  return max(0, min(tokens, seen));
}

// How much row `row` (of r) counts; 0 (or what is no number): it judges nothing.
__device__ inline float RowWeight(const RowParams& rows, int32_t sequence, int32_t row) {
  if (rows.weights == nullptr) return 1.0F;
  const float weight = rows.weights[sequence * rows.rows + row % rows.rows];
  return weight > 0.0F ? weight : 0.0F;
}

// Of the w rows of a query head. By a whole warp; the same in all lanes.
__device__ inline float RowWeightSum(const RowParams& rows, int32_t sequence) {
  double sum = 0.0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < rows.rows; i += 32) sum += RowWeight(rows, sequence, i);
  for (int32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  return static_cast<float>(sum);
}

// Offset in elements of a row's query.
__device__ inline int64_t QueryOffset(const RowParams& rows, int32_t sequence, int32_t kv_head, int32_t row) {
  const int32_t head = kv_head * rows.group + row / rows.rows;
  return sequence * rows.q_sequence_stride + head * rows.q_head_stride + row % rows.rows * rows.q_row_stride;
}

__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(float x) { return x; }

template <typename T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two elements in one register, `low` first.
template <typename T>
__device__ inline uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
}

inline constexpr float kLog2E = 1.4426950408889634F;

// A logit in units of log2(e): scale * <q, k>, capped where soft_cap > 0.
__device__ inline float Logit2(const RowParams& rows, float product) {
  if (rows.soft_cap > 0.0F) return rows.soft_cap * kLog2E * tanhf(product * rows.scale / rows.soft_cap);
  return product * (rows.scale * kLog2E);
}

}  // namespace dropkv::cuda
