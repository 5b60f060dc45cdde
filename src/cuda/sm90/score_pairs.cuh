// The arithmetic of pass 2 on Hopper: a tile's products, shares of its pairs, and their sums along a thread's
// registers.
#pragma once

#include "cuda/kernels.h"
#include "cuda/sm90/tile.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace dropkv::cuda {

// Below it p (1 + p) is p / (1 - p) to 2^-20, in units of log2.
inline constexpr float kSmallShare2 = -10.0F;
// Below log2(kFoundShare), by more than rounding.
inline constexpr float kFoundShare2 = -0.98F;
// In place of lse = +inf: finite, so that the product with an infinite key still shows as infinite.
inline constexpr float kJudgesNothing = 3e38F;

template <int kRows, bool kWeighted>
struct RowWeights {};
// Aligned: the arrays behind it are read by pairs.
template <int kRows>
struct alignas(16) RowWeights<kRows, true> {
  float weight[kRows];
  float weight_sum;  // of a query head's rows
};

// What a block keeps of a head's rows.
template <int kRows, bool kWeighted>
struct RowTable : RowWeights<kRows, kWeighted> {
  float negative_lse2[kRows];
  float norm[kRows];
  float contribution[kRows];
  int32_t visible[kRows];
  int32_t top[kRows];
  int32_t least_visible;
  int32_t has_top;
};

template <typename T>
__device__ inline float2 Unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000U));
  }
}

// |v|^2 of the thread's two tokens. Two lanes a token of the warp's 16, each half of the dims; conflict-free in the
// swizzled tile.
template <typename T, int kBoxes>
__device__ inline void ValueNorms(const unsigned char* values, float (&norm)[2]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t row = static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
  float sum[2] = {0.0F, 0.0F};
#pragma unroll
  for (int c = 0; c < kBoxes * 4; ++c) {
    const int32_t chunk = lane / 16 * kBoxes * 4 + c;
    const uint4 data =
        *reinterpret_cast<const uint4*>(values + chunk / 8 * kBoxBytes + row * kRowBytes + (chunk % 8 ^ row % 8) * 16);
    const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (const uint32_t word : words) {
      const float2 x = Unpack<T>(word);
      sum[0] = fmaf(x.x, x.x, sum[0]);
      sum[1] = fmaf(x.y, x.y, sum[1]);
    }
  }
  float all = sum[0] + sum[1];
  all += __shfl_xor_sync(0xFFFFFFFF, all, 16);
  norm[0] = __shfl_sync(0xFFFFFFFF, all, lane / 4);
  norm[1] = __shfl_sync(0xFFFFFFFF, all, lane / 4 + 8);
}

// D [64, N] = tile of tokens times rows, both [boxes][.., 64]. Dims beyond the head size are zeros in both.
template <typename T, int N, int kBoxes>
__device__ inline void TileTimesRows(float (&d)[N / 2], const unsigned char* tile, const unsigned char* rows,
                                     int32_t row_box_bytes) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint64_t a = TileDescriptor(tile + box * kBoxBytes);
    const uint64_t b = TileDescriptor(rows + box * row_box_bytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaShared<T, N>::Run(d, a + 2 * k, b + 2 * k, box + k);
  }
}

// The thread's two tokens over its share of the rows, with W = (p / (1 - p))^2, times the row's weight:
// sum W |a - v|^2 = sum W (|a|^2 - 2 Y) + |v|^2 sum W.
struct TokenSums {
  float sum[2] = {0.0F, 0.0F};     // of W (|a|^2 - 2 Y); of p, where that is the score
  float weight[2] = {0.0F, 0.0F};  // of W
  float top[2] = {0.0F, 0.0F};     // of the pairs that are counted otherwise
  uint32_t dominant = 0;           // bit h: token h has a row in which it is nearly all
};

// Exponents to shares; x is read as X and becomes p.
template <int N>
__device__ inline float Shares(float (&x)[N / 2], const float* negative_lse2, float scale2) {
  float largest = -INFINITY;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const float2 shift = *reinterpret_cast<const float2*>(negative_lse2 + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float exponent = fmaf(x[4 * n + i], scale2, i % 2 == 0 ? shift.x : shift.y);
      largest = fmaxf(largest, exponent);
      x[4 * n + i] = Exp2(exponent);
    }
  }
  return largest;
}

// Rows were handed in: takes pairs with p > kFoundShare out and notes their tokens, the lowest of several.
template <int N>
__device__ void TakeFound(float (&p)[N / 2], const ScoreParams& params, int64_t first, int32_t list,
                          const int32_t (&token)[2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    if (!(p[i] > kFoundShare && p[i] < INFINITY)) continue;
    p[i] = 0.0F;
    const int64_t row = first + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    atomicMin(reinterpret_cast<unsigned int*>(params.state.top) + row, static_cast<unsigned int>(token[i % 4 / 2]));
    atomicOr(params.has_tops + list, 1);
  }
}

// The same with the soft cap; hidden pairs, and pairs that are counted otherwise, become 0.
template <int N, typename Table>
__device__ void CarefulShares(float (&x)[N / 2], const Table& table, int32_t row0, const RowParams& rows,
                              const int32_t (&token)[2], TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t row = row0 + n * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2;
      const int32_t h = i / 2;
      const float exponent = Logit2(rows, x[4 * n + i]) + table.negative_lse2[row];
      float p = Exp2(exponent);
      if (token[h] >= table.visible[row]) p = 0.0F;
      if (token[h] == table.top[row]) {
        p = 0.0F;
        const float contribution = table.contribution[row];
        sums.top[h] += fabsf(contribution);
        if (signbit(contribution)) sums.dominant |= 1U << h;
      }
      x[4 * n + i] = p;
    }
}

// row_weights: of the same rows as norm, or null.
template <int N, bool kSmall, bool kWeighted>
__device__ inline void AddPairs(const float* p, const float (&y)[N / 2], const float* norm, const float* row_weights,
                                TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const float2 row_norm = *reinterpret_cast<const float2*>(norm + n * 8 + threadIdx.x % 4 * 2);
    float2 row_weight;
    if constexpr (kWeighted) row_weight = *reinterpret_cast<const float2*>(row_weights + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float share = p[4 * n + i];
      const float odds = kSmall ? fmaf(share, share, share) : share * Reciprocal(1.0F - share);
      float weight = odds * odds;
      if constexpr (kWeighted) weight *= i % 2 == 0 ? row_weight.x : row_weight.y;
      sums.sum[i / 2] = fmaf(weight, fmaf(-2.0F, y[4 * n + i], i % 2 == 0 ? row_norm.x : row_norm.y), sums.sum[i / 2]);
      sums.weight[i / 2] += weight;
    }
  }
}

template <int N, bool kWeighted>
__device__ inline void AddShares(const float (&p)[N / 2], const float* row_weights, TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    float2 row_weight;
    if constexpr (kWeighted) row_weight = *reinterpret_cast<const float2*>(row_weights + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWeighted) {
        sums.sum[i / 2] = fmaf(i % 2 == 0 ? row_weight.x : row_weight.y, p[4 * n + i], sums.sum[i / 2]);
      } else {
        sums.sum[i / 2] += p[4 * n + i];
      }
    }
  }
}

}  // namespace dropkv::cuda
