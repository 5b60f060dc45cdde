// Which rows judge, flags at their neutral values, and the state of rows that the engine's prefill hands in.
#include "cuda/any/clear.cuh"
#include "cuda/any/vector.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

constexpr int32_t kPrepareWarps = 8;

// Rows of the state begin at multiples of 16 bytes, and head sizes are multiples of 8.
template <typename T>
__device__ void Store8(T* to, const float (&x)[kVector]) {
  T rounded[kVector];
#pragma unroll
  for (int32_t e = 0; e < kVector; ++e) rounded[e] = FromFloat<T>(x[e]);
  uint4 words;
  memcpy(&words, rounded, sizeof words);
  *reinterpret_cast<uint4*>(to) = words;
}

// Copies a query to q16, zeros in its place where it is not finite: false. A lane's share of a row is one vector: 32
// lanes hold the largest head size.
template <typename T>
__device__ bool CopyFiniteQuery(const AttendParams& params, int32_t list, int32_t row, int32_t lane) {
  const int32_t dim = params.cache.key_dim;
  const int32_t first = lane * kVector;
  const T* q = static_cast<const T*>(params.rows.q) +
               QueryOffset(params.rows, list / params.cache.kv_heads, list % params.cache.kv_heads, row);
  float x[kVector] = {};
  if (first < dim) Load8(q, first, dim, x);
  const bool finite = __all_sync(kAllLanes, AllFinite(x));
  if (first >= dim) return finite;
#pragma unroll
  for (float& element : x) element = finite ? element : 0.0F;
  Store8(static_cast<T*>(params.state.q16) + RowIndex(params, list, row) * dim + first, x);
  return finite;
}

// Writes the whole RowState of a judging row; false where its lse or output is not finite.
template <typename T, typename Given>
__device__ bool StoreGivenRow(const AttendParams& params, int64_t row, int32_t lane) {
  const int32_t dim = params.cache.value_dim;
  const RowState& state = params.state;
  const float lse = params.given_lse[row];
  const int32_t first = lane * kVector;
  float x[kVector] = {};
  float square = 0.0F;
  if (first < dim) {
    Load8(static_cast<const Given*>(params.given_out) + row * dim, first, dim, x);
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) {
      const float rounded = ToFloat(FromFloat<T>(x[e]));
      square = fmaf(rounded, rounded, square);
    }
    Store8(static_cast<T*>(state.out16) + row * dim + first, x);
    auto* out = reinterpret_cast<float4*>(state.out + row * dim + first);
    out[0] = {x[0], x[1], x[2], x[3]};
    out[1] = {x[4], x[5], x[6], x[7]};
  }
  square = LaneSum<32>(square);
  if (lane == 0) {
    state.lse2[row] = lse * kLog2E;
    state.norm[row] = square;
    state.top[row] = -1;
    state.contribution[row] = 0.0F;
  }
  return __all_sync(kAllLanes, AllFinite(x)) && isfinite(lse);
}

template <typename T>
__device__ bool GivenRow(const AttendParams& params, int64_t row, int32_t lane) {
  return params.given_dtype == DType::kF32 ? StoreGivenRow<T, float>(params, row, lane)
                                           : StoreGivenRow<T, T>(params, row, lane);
}

// redo and has_tops are 0 when it starts.
template <typename T>
__global__ void __launch_bounds__(kPrepareWarps * 32, 1) PrepareKernel(const __grid_constant__ AttendParams params) {
  ChainStart();
  const auto list = static_cast<int32_t>(blockIdx.x);
  const int32_t sequence = list / params.cache.kv_heads;
  const int32_t head = list % params.cache.kv_heads;
  const int32_t lane = threadIdx.x % 32;
  const int32_t rows = params.rows.group * params.rows.rows;
  const int32_t tokens = Length(params.cache, sequence, head);
  unsigned skipped = 0;
  bool odd = false;
  for (int32_t i = blockIdx.y * kPrepareWarps + threadIdx.x / 32; i < rows; i += gridDim.y * kPrepareWarps) {
    const int64_t row = RowIndex(params, list, i);
    const bool ok = CopyFiniteQuery<T>(params, list, i, lane);
    skipped += ok ? 0 : 1;
    if (lane == 0) {
      params.row_ok[row] = ok ? 1 : 0;
      params.top_split[row] = -1;
    }
    if (params.given_lse == nullptr) continue;
    if (!ok || VisibleTokens(params.rows, sequence, head, i, tokens) == 0) {
      StoreSilentRow<T>(params, row, lane, 32);
    } else if (!GivenRow<T>(params, row, lane)) {
      odd = true;
    }
  }
  if (lane == 0 && skipped > 0 && params.counters != nullptr)
    atomicAdd(&params.counters->skipped_rows, static_cast<unsigned long long>(skipped));
  if (lane == 0 && odd) params.redo[list] = 1;
}

}  // namespace

cudaError_t LaunchPrepare(const AttendParams& params, cudaStream_t stream) {
  const int32_t lists = params.cache.sequences * params.cache.kv_heads;
  const int32_t rows = params.rows.group * params.rows.rows;
  const ClearList clear{{{params.counters, params.counters != nullptr ? sizeof(Counters) : 0},
                         {params.redo, lists * sizeof(int32_t)},
                         {params.has_tops, lists * sizeof(int32_t)}}};
  if (const cudaError_t error = LaunchClear(clear, stream); error != cudaSuccess) return error;
  if (lists == 0 || rows == 0) return cudaSuccess;
  const int32_t parts = (rows + kPrepareWarps - 1) / kPrepareWarps;
  return WithType(params.cache.dtype, [&](auto element) {
    return LaunchChained(PrepareKernel<decltype(element)>, dim3(lists, parts), kPrepareWarps * 32, 0, stream, params);
  });
}

}  // namespace dropkv::cuda
