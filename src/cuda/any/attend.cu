// The second opinion on every shape, and the careful path beside the tensor-core kernels.
#include <algorithm>

#include "cuda/any/flagged.cuh"
#include "cuda/any/softmax.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

// lse2, out, out16, norm of a row whose softmax is known.
template <typename T>
__device__ void StoreRow(const RowView<T>& view, int64_t row, const Peak& peak, const Others& others,
                         RowShared& shared) {
  const RowState& state = view.params.state;
  const int32_t dim = view.params.cache.value_dim;
  const float largest = fmaxf(peak.top, others.base);
  const float top = exp2f(peak.top - largest);
  const float rest = others.base == -INFINITY ? 0.0F : exp2f(others.base - largest);
  const float sum = top + others.sum * rest;
  float square = 0.0F;
  const int32_t i = threadIdx.x;
  if (view.values && i < dim) {
    const float out = (ToFloat(view.value(peak.token)[i]) * top + shared.sums[0][i] * rest) / sum;
    const T rounded = FromFloat<T>(out);
    state.out[row * dim + i] = out;
    static_cast<T*>(state.out16)[row * dim + i] = rounded;
    square = ToFloat(rounded) * ToFloat(rounded);
  }
  square = BlockSum(square, shared.totals);
  if (i != 0) return;
  state.lse2[row] = largest + log2f(sum);
  state.norm[row] = square;
}

template <typename T>
__device__ void AttendRow(const RowView<T>& view, int32_t list, RowShared& shared) {
  const AttendParams& params = view.params;
  const int64_t row = RowIndex(params, list, view.row);
  if (params.top_split != nullptr && threadIdx.x == 0) params.top_split[row] = -1;
  Peak peak;
  if (params.row_ok[row] != 0) {
    LoadQuery(view, shared);
    peak = FindPeak(view, -1, shared);
  }
  if (peak.token < 0) return StoreSilentRow<T>(params, row, threadIdx.x, kBlock);
  const Others others = SumOthers(view, peak, shared);
  StoreRow(view, row, peak, others, shared);
  if (!view.values) return;
  const TopShare share = ShareOf(peak, others);
  const float contribution = PeakContribution(view, peak, others, share, shared);
  if (threadIdx.x != 0) return;
  // With rows from outside the score finds the tops, here as in the other heads.
  const bool apart = share.rest < share.p && params.given_lse == nullptr;
  params.state.top[row] = apart ? peak.token : -1;
  params.state.contribution[row] = apart ? contribution : 0.0F;
}

template <typename T>
__global__ void __launch_bounds__(kBlock, 1)
    AttendAnyKernel(const __grid_constant__ AttendParams params, bool only_redo) {
  __shared__ RowShared shared;
  ChainStart();
  FlaggedParts rows(only_redo ? params.redo : nullptr, params.cache.sequences * params.cache.kv_heads,
                    params.rows.group * params.rows.rows);
  while (rows.Next()) {
    AttendRow(RowView<T>(params, rows.list(), rows.part()), rows.list(), shared);
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchAttendAny(const AttendParams& params, bool only_redo, cudaStream_t stream) {
  constexpr int64_t kRedoBlocks = 128;
  const int64_t rows = int64_t{params.cache.sequences} * params.cache.kv_heads * params.rows.group * params.rows.rows;
  if (rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(only_redo ? std::min(rows, kRedoBlocks) : rows);
  return WithType(params.cache.dtype, [&](auto element) {
    return LaunchChained(AttendAnyKernel<decltype(element)>, dim3(blocks), kBlock, 0, stream, params, only_redo);
  });
}

}  // namespace dropkv::cuda
