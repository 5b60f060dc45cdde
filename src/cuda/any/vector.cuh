// What the kernels of this folder share: rows of elements as float32, sums in a fixed order, and the choice of a dtype.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device/cache.cuh"
#include "cuda/device/launch.cuh"

namespace dropkv::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;
inline constexpr int32_t kVector = 8;          // elements of a load: 16 bytes of a 16-bit type
inline constexpr float kDominantRest = 1e-6F;  // docs/algorithm.md section 3: p >= 1 - 1e-6

// Elements first .. first+7 of a row of `dim`; zeros behind its end.
template <typename T>
__device__ inline void Load8(const T* row, int32_t first, int32_t dim, float (&x)[kVector]) {
  constexpr int32_t kWords = kVector * sizeof(T) / sizeof(int4);
  const T* at = row + first;
  if (first + kVector <= dim && reinterpret_cast<uintptr_t>(at) % sizeof(int4) == 0) {
    int4 words[kWords];
    T elements[kVector];
#pragma unroll
    for (int32_t i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const int4*>(at)[i];
    memcpy(elements, words, sizeof(elements));
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) x[e] = ToFloat(elements[e]);
    return;
  }
#pragma unroll
  for (int32_t e = 0; e < kVector; ++e) x[e] = first + e < dim ? ToFloat(at[e]) : 0.0F;
}

__device__ inline bool AllFinite(const float (&x)[kVector]) {
  bool finite = true;
#pragma unroll
  for (int32_t e = 0; e < kVector; ++e) finite = finite && isfinite(x[e]);
  return finite;
}

// Sum over this lane and those before it. Every lane of the warp takes part.
template <typename T>
__device__ inline T WarpInclusiveSum(T value) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
  for (int32_t distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Sum over `lanes` neighbouring lanes (a power of two), in all of them. Every lane of the warp takes part.
template <int32_t lanes>
__device__ inline float LaneSum(float x) {
#pragma unroll
  for (int32_t step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// A contribution: the sign bit says that the token is the row's output.
__device__ inline float Contribution(float value, float rest) { return rest <= kDominantRest ? -value : value; }

__device__ inline float SinkLogit2(const RowParams& rows, int32_t query_head) {
  return rows.sinks != nullptr ? rows.sinks[query_head] * kLog2E : -INFINITY;
}

// Index of (sequence, KV head) and of one of its rows.
__device__ inline int64_t RowIndex(const AttendParams& params, int32_t list, int32_t row) {
  return static_cast<int64_t>(list) * (params.rows.group * params.rows.rows) + row;
}

// What a row that judges nothing looks like: p = 0 for every token.
template <typename T>
__device__ inline void StoreSilentRow(const AttendParams& params, int64_t row, int32_t thread, int32_t threads) {
  const int32_t dim = params.cache.value_dim;
  for (int32_t i = thread; i < dim; i += threads) {
    params.state.out[row * dim + i] = 0.0F;
    static_cast<T*>(params.state.out16)[row * dim + i] = FromFloat<T>(0.0F);
  }
  if (thread != 0) return;
  params.state.lse2[row] = INFINITY;
  params.state.norm[row] = 0.0F;
  params.state.top[row] = -1;
  params.state.contribution[row] = 0.0F;
}

// What launch(T{}) returns, for the cache's element type.
template <typename F>
cudaError_t WithType(DType dtype, F&& launch) {
  if (dtype == DType::kF16) return launch(__half{});
  if (dtype == DType::kBF16) return launch(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

}  // namespace dropkv::cuda
