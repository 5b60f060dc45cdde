// A warp's work on a tile: logits, softmax state and sums of the query heads of one KV head.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm80/decode_plan.cuh"
#include "cuda/sm80/mma.cuh"

namespace dropkv::cuda::decode {

// A tile in shared memory: 16 rows of keys, then 16 of values. A row ends with 16 unused bytes, so that the eight rows
// of a matrix lie in different banks. The sums of a warp, [16, kDim] float32 with 8 floats between rows, take the same
// space as a tile.
template <int kDim>
struct Tile {
  static constexpr int32_t kChunks = kDim / 8;  // of 16 bytes, in a row
  static constexpr int32_t kPitch = kDim * 2 + 16;
  static constexpr int32_t kValues = kTileTokens * kPitch;
  static constexpr int32_t kBytes = 2 * kValues;
  static constexpr int32_t kSumPitch = kDim + 8;
  static_assert(kMaxRows * kSumPitch * 4 == kBytes);
};

// A warp's rows: queries as the product's first operand, softmax state and sums. kHalves: rows 0-7, or 0-15; a lane
// holds row lane / 4 of each half.
template <typename T, int kDim, int kHalves>
struct WarpRows {
  uint32_t query[kDim / 16][2 * kHalves];
  float out[kDim / 8][4];
  float max[kHalves];
  float sum[kHalves];  // of this lane's tokens

  __device__ void Reset() {
#pragma unroll
    for (auto& columns : out)
#pragma unroll
      for (float& x : columns) x = 0.0F;
#pragma unroll
    for (int32_t half = 0; half < kHalves; ++half) {
      max[half] = -INFINITY;
      sum[half] = 0.0F;
    }
  }

  __device__ void LoadQuery(const DecodeParams& params, int32_t list) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t dim = params.cache.key_dim;
#pragma unroll
    for (int32_t half = 0; half < kHalves; ++half) {
      const int32_t row = lane / 4 + 8 * half;
      const T* from =
          static_cast<const T*>(params.q) + (static_cast<int64_t>(list) * params.group + row) * dim + lane % 4 * 2;
#pragma unroll
      for (int32_t i = 0; i < kDim / 8; ++i) {
        const bool exists = row < params.group && i * 8 < dim;
        query[i / 2][i % 2 * kHalves + half] = exists ? *reinterpret_cast<const uint32_t*>(from + i * 8) : 0U;
      }
    }
  }

  __device__ void Attend(const DecodeArgs& args, uint32_t tile, int32_t tokens);
  __device__ void Weigh(float (&logits)[2][4], uint32_t (&weights)[4]);
  __device__ void Leave(int32_t group, float* sums, float2* state) const;
};

// Logits in units of log2(e) to weights exp2(l - max), as the second product's first operand.
template <typename T, int kDim, int kHalves>
__device__ void WarpRows<T, kDim, kHalves>::Weigh(float (&logits)[2][4], uint32_t (&weights)[4]) {
  weights[1] = 0;
  weights[3] = 0;
#pragma unroll
  for (int32_t half = 0; half < kHalves; ++half) {
    float* low = logits[0] + 2 * half;
    float* high = logits[1] + 2 * half;
    float largest = fmaxf(fmaxf(low[0], low[1]), fmaxf(high[0], high[1]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    largest = fmaxf(largest, max[half]);
    const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
    const float rescale = Exp2(max[half] - base);
    max[half] = largest;
    low[0] = Exp2(low[0] - base);
    low[1] = Exp2(low[1] - base);
    high[0] = Exp2(high[0] - base);
    high[1] = Exp2(high[1] - base);
    sum[half] = sum[half] * rescale + ((low[0] + low[1]) + (high[0] + high[1]));
    weights[half] = Pack<T>(low[0], low[1]);
    weights[2 + half] = Pack<T>(high[0], high[1]);
#pragma unroll
    for (auto& columns : out) {
      columns[2 * half] *= rescale;
      columns[2 * half + 1] *= rescale;
    }
  }
}

template <typename T, int kDim, int kHalves>
__device__ void WarpRows<T, kDim, kHalves>::Attend(const DecodeArgs& args, uint32_t tile, int32_t tokens) {
  constexpr int32_t kPitch = Tile<kDim>::kPitch;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  float logits[2][4] = {};
  const uint32_t keys = tile + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int32_t i = 0; i < kDim / 16; ++i) {
    uint32_t a[4] = {query[i][0], 0, query[i][kHalves], 0};
    if constexpr (kHalves == 2) {
      a[1] = query[i][1];
      a[3] = query[i][3];
    }
    uint32_t b[4];
    sm80::LoadMatrices(b, keys + i * 32);
    sm80::MultiplyAdd<T>(logits[0], a, b[0], b[1]);
    sm80::MultiplyAdd<T>(logits[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i)
#pragma unroll
    for (int32_t j = 0; j < 2 * kHalves; ++j) {
      float& x = logits[i][j];
      // A logit that is not finite must stay so: the row is then redone.
      x = args.params.soft_cap > 0.0F ? fmaf(x, 0.0F, args.cap2 * tanhf(x * args.logit_scale)) : x * args.logit_scale;
      if (i * 8 + lane % 4 * 2 + j % 2 >= tokens) x = -INFINITY;
    }
  uint32_t weights[4];
  Weigh(logits, weights);
  const uint32_t values = tile + Tile<kDim>::kValues + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
  for (int32_t i = 0; i < kDim / 16; ++i) {
    uint32_t b[4];
    sm80::LoadMatricesTransposed(b, values + i * 32);
    sm80::MultiplyAdd<T>(out[2 * i], weights, b[0], b[1]);
    sm80::MultiplyAdd<T>(out[2 * i + 1], weights, b[2], b[3]);
  }
}

// Leaves sums [g, kDim] and states [g] to the other warps.
template <typename T, int kDim, int kHalves>
__device__ void WarpRows<T, kDim, kHalves>::Leave(int32_t group, float* sums, float2* state) const {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int32_t half = 0; half < kHalves; ++half) {
    const int32_t row = lane / 4 + 8 * half;
    float total = sum[half];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (row >= group) continue;
    if (lane % 4 == 0) state[row] = {max[half], total};
    float* to = sums + row * Tile<kDim>::kSumPitch + lane % 4 * 2;
#pragma unroll
    for (int32_t i = 0; i < kDim / 8; ++i)
      *reinterpret_cast<float2*>(to + i * 8) = {out[i][2 * half], out[i][2 * half + 1]};
  }
}

}  // namespace dropkv::cuda::decode
