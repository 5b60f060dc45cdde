// Rows of keys, values and queries in shared memory, as ldmatrix reads them: dims padded with zeros to a multiple of
// 16, and 16 bytes behind every row, so that eight neighbouring rows lie in different banks.
#pragma once

#include <cstring>
#include <initializer_list>

#include "cuda/device/cache.cuh"
#include "cuda/sm80/mma.cuh"
#include "dropkv/cache_view.h"

namespace dropkv::cuda::sm80 {

inline constexpr int32_t kChunk = 8;  // elements of 16 bytes

__host__ __device__ inline int32_t PaddedDim(int32_t dim) { return (dim + 15) / 16 * 16; }
__host__ __device__ inline int32_t RowBytes(int32_t dim) { return (PaddedDim(dim) + kChunk) * 2; }

inline bool IsAligned(const void* data, std::initializer_list<int64_t> strides) {
  bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (const int64_t stride : strides) aligned = aligned && stride % kChunk == 0;
  return aligned;
}
inline bool IsAligned(const Tensor& tensor) {
  return IsAligned(tensor.data, {tensor.sequence_stride, tensor.head_stride, tensor.token_stride});
}
inline bool IsAligned(const RowParams& rows) {
  return IsAligned(rows.q, {rows.q_sequence_stride, rows.q_head_stride, rows.q_row_stride});
}

// Which of a launch's tensors have 16-byte aligned rows, and so asynchronous copies.
struct Alignment {
  bool keys;
  bool values;
  bool queries;
  bool outputs;
};

inline bool FitsMatrices(const CacheParams& cache) {
  const auto fits = [](int32_t dim) { return dim > 0 && dim <= kMaxHeadDim && dim % kChunk == 0; };
  return (cache.dtype == DType::kF16 || cache.dtype == DType::kBF16) && fits(cache.key_dim) && fits(cache.value_dim);
}

// Every eighth chunk of a row from `chunk` on; zeros where the row is not there. `from` may be read in any case.
template <typename T>
__device__ inline void CopyRow(uint32_t to, const T* from, bool there, int32_t dim, int32_t chunk, bool aligned) {
  for (; chunk < PaddedDim(dim) / kChunk; chunk += 8) {
    const bool real = there && chunk * kChunk < dim;
    const T* at = real ? from + chunk * kChunk : from;
    if (aligned) {
      CopyAsync16(to + chunk * 16, at, real);
      continue;
    }
    uint4 x = {0, 0, 0, 0};
    if (real) {
      T elements[kChunk];
#pragma unroll
      for (int32_t e = 0; e < kChunk; ++e) elements[e] = at[e];
      memcpy(&x, elements, sizeof(x));
    }
    Store16(to + chunk * 16, x);
  }
}

// One tensor of one (sequence, KV head).
template <typename T>
struct TokenRows {
  const CacheParams& cache;
  const Tensor& tensor;
  int32_t dim;
  int32_t sequence;
  int32_t head;
  int32_t tokens;  // zeros behind them: what lies there may be NaN
  bool aligned;

  // By `threads` threads, a multiple of 8.
  __device__ void Load(uint32_t to, int32_t first, int32_t count, int32_t thread, int32_t threads) const {
#pragma unroll 4
    for (int32_t row = thread / 8; row < count; row += threads / 8) {
      const int32_t token = first + row;
      const T* from = static_cast<const T*>(tensor.data);
      if (token < tokens) from += TokenOffset(cache, tensor, sequence, head, token);
      CopyRow(to + row * RowBytes(dim), from, token < tokens, dim, thread % 8, aligned);
    }
  }
};

// A [16, 16] of the product, from 16 rows: the lane's address at dim 0.
__device__ inline uint32_t RowsAddress(uint32_t rows, int32_t row_bytes) {
  const uint32_t lane = threadIdx.x % 32;
  return rows + lane % 16 * row_bytes + lane / 16 * 16;
}

// B [16, 16], two n-tiles, from 16 rows that are its columns.
__device__ inline uint32_t ColumnsAddress(uint32_t rows, int32_t row_bytes) {
  const uint32_t lane = threadIdx.x % 32;
  return rows + (lane / 16 * 8 + lane % 8) * row_bytes + lane / 8 % 2 * 16;
}

// d [16, 8 n] = 16 rows at `a` times 8 n rows at `b`, over `dim` dims. Both addresses are the lane's own.
template <typename T, int n>
__device__ inline void MultiplyRows(float (&d)[n][4], uint32_t a, uint32_t b, int32_t dim) {
#pragma unroll
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (float& x : d[i]) x = 0.0F;
  const int32_t row_bytes = RowBytes(dim);
  const int32_t steps = PaddedDim(dim) / 16;
#pragma unroll 2
  for (int32_t step = 0; step < steps; ++step) {
    uint32_t left[4];
    LoadMatrices(left, a + step * 32);
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      uint32_t right[4];
      LoadMatrices(right, b + step * 32 + i * 8 * row_bytes);
      MultiplyAdd<T>(d[i], left, right[0], right[1]);
      MultiplyAdd<T>(d[i + 1], left, right[2], right[3]);
    }
  }
}

}  // namespace dropkv::cuda::sm80
