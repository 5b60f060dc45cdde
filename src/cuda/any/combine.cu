// Rows from the partial softmax states of all splits.
#include "cuda/any/partials.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

// The split with the row's largest logit, where that token holds more than half of the row; else -1.
__device__ int32_t SplitOfTop(const SplitRow& row, const MergedRow& merged, int32_t lane) {
  if (!(merged.sum < 2.0F * exp2f(merged.top - merged.base))) return -1;
  int32_t split = INT32_MAX;
  for (int32_t s = lane; s < row.splits; s += 32)
    if (row.max(s) == merged.top) split = min(split, s);
  split = __reduce_min_sync(kAllLanes, split);
  return split == INT32_MAX ? -1 : split;
}

// Elements that one instruction stores.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

template <typename T>
__device__ void StoreRow(const AttendParams& params, int64_t row, const MergedRow& merged, int32_t list, int32_t lane) {
  const RowState& state = params.state;
  const int32_t dim = params.partials.out != nullptr ? params.cache.value_dim : 0;
  bool finite = isfinite(merged.sum) && isfinite(merged.base);
  float square = 0.0F;
#pragma unroll
  for (int32_t c = 0; c < kMergeChunks; ++c) {
    const int32_t first = (c * 32 + lane) * 4;
    if (first >= dim) continue;  // all of them where only denominators are wanted
    Four<float> out;
    Four<T> rounded;
#pragma unroll
    for (int32_t e = 0; e < 4; ++e) {
      out.x[e] = merged.out[c][e] / merged.sum;
      rounded.x[e] = FromFloat<T>(out.x[e]);
      finite = finite && isfinite(out.x[e]);
      square = fmaf(ToFloat(rounded.x[e]), ToFloat(rounded.x[e]), square);
    }
    *reinterpret_cast<Four<float>*>(state.out + row * dim + first) = out;
    *reinterpret_cast<Four<T>*>(static_cast<T*>(state.out16) + row * dim + first) = rounded;
  }
  square = LaneSum<32>(square);
  finite = __all_sync(kAllLanes, finite);
  if (lane != 0) return;
  if (!finite) params.redo[list] = 1;
  state.lse2[row] = merged.base + log2f(merged.sum);
  state.norm[row] = square;
  state.top[row] = -1;
  state.contribution[row] = 0.0F;
}

template <typename T>
__global__ void __launch_bounds__(kMergeWarps * 32, 4) CombineKernel(const __grid_constant__ AttendParams params) {
  ChainStart();
  const int32_t rows = params.rows.group * params.rows.rows;
  const int32_t blocks = (rows + kMergeWarps - 1) / kMergeWarps;
  const auto list = static_cast<int32_t>(blockIdx.x / blocks);
  const int32_t i = static_cast<int32_t>(blockIdx.x % blocks) * kMergeWarps + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = threadIdx.x % 32;
  if (i >= rows) return;
  const int64_t index = RowIndex(params, list, i);
  const bool judges = params.row_ok[index] != 0;  // looked at behind the merge: its loads need not wait for this one
  const SplitRow row(params, list, i);
  const MergedRow merged = Merge(row, params, lane);
  // No token at all; one with NaN for its logit leaves the maximum alone and shows in the sum.
  const bool empty = merged.top == -INFINITY && !isnan(merged.sum);
  if (!judges || empty) return StoreSilentRow<T>(params, index, lane, 32);
  StoreRow<T>(params, index, merged, list, lane);
  const int32_t split = SplitOfTop(row, merged, lane);
  if (split < 0 || lane != 0) return;
  params.top_split[index] = split;
  params.has_tops[list] = 1;
}

}  // namespace

cudaError_t LaunchCombine(const AttendParams& params, cudaStream_t stream) {
  const int64_t lists = int64_t{params.cache.sequences} * params.cache.kv_heads;
  const int64_t rows = int64_t{params.rows.group} * params.rows.rows;
  const int64_t blocks = lists * ((rows + kMergeWarps - 1) / kMergeWarps);
  if (blocks == 0) return cudaSuccess;
  return WithType(params.cache.dtype, [&](auto element) {
    return LaunchChained(CombineKernel<decltype(element)>, dim3(static_cast<unsigned>(blocks)), kMergeWarps * 32, 0,
                         stream, params);
  });
}

}  // namespace dropkv::cuda
