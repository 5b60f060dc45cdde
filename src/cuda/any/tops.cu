// Contributions of the pairs with p > 1/2.
#include <algorithm>

#include "cuda/any/flagged.cuh"
#include "cuda/any/partials.cuh"
#include "cuda/any/softmax.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

// Parts of `part_rows` rows, the last one perhaps smaller.
__host__ __device__ int32_t PartsOf(int32_t rows, int32_t part_rows) { return (rows + part_rows - 1) / part_rows; }

// Logit of (row, token) by one warp: a lane's share is one vector.
template <typename T>
__device__ float WarpLogit(const RowView<T>& view, int32_t token, int32_t lane) {
  const int32_t dim = view.params.cache.key_dim;
  float q[kVector] = {};
  float k[kVector] = {};
  if (lane * kVector < dim) {
    Load8(view.query(), lane * kVector, dim, q);
    Load8(view.key(token), lane * kVector, dim, k);
  }
  float product = 0.0F;
#pragma unroll
  for (int32_t e = 0; e < kVector; ++e) product = fmaf(q[e], k[e], product);
  return Logit2(view.params.rows, LaneSum<32>(product));
}

template <typename T>
__device__ void FinishTop(const AttendParams& params, int32_t list, int32_t i, int32_t lane) {
  const int64_t index = RowIndex(params, list, i);
  const int32_t top = params.state.top[index];
  if (params.top_split[index] < 0 || top < 0) return;
  const RowView<T> view(params, list, i);
  const SplitRow row(params, list, i);
  const MergedRow others = Merge(row, params, lane);
  const Peak peak{WarpLogit(view, top, lane), top, others.top};
  const TopShare share = ShareOf(peak, {others.base, others.sum});
  float square = 0.0F;
  if (others.base != -INFINITY) {
    const T* value = view.value(top);
#pragma unroll
    for (int32_t c = 0; c < kMergeChunks; ++c) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        const int32_t at = (c * 32 + lane) * 4 + e;
        if (at >= params.cache.value_dim) continue;
        const float moved = share.p * (ToFloat(value[at]) - others.out[c][e] / others.sum);
        square = fmaf(moved, moved, square);
      }
    }
  }
  square = LaneSum<32>(square);
  if (lane == 0) params.state.contribution[index] = Contribution(square, share.rest);
}

// A warp for every row of a list with a top.
template <typename T>
__global__ void __launch_bounds__(kMergeWarps * 32) FinishTopsKernel(const __grid_constant__ AttendParams params) {
  ChainStart();
  const int32_t rows = params.rows.group * params.rows.rows;
  FlaggedParts parts(params.has_tops, params.cache.sequences * params.cache.kv_heads, PartsOf(rows, kMergeWarps));
  while (parts.Next()) {
    const int32_t i = parts.part() * kMergeWarps + static_cast<int32_t>(threadIdx.x) / 32;
    if (i < rows) FinishTop<T>(params, parts.list(), i, threadIdx.x % 32);
  }
}

// Beyond this share a - v has lost too many of the digits that the handed-in output had.
__device__ float LargestShare(const AttendParams& params) { return params.given_dtype == DType::kF32 ? 0.99F : 0.75F; }

// The contribution of the pair (row, its top) from the row's own state, by one warp. False: the pair's share is too
// large for that.
template <typename T>
__device__ bool StorePlainTop(const RowView<T>& view, int64_t row, int32_t token, int32_t lane) {
  constexpr float kLn2 = 0.6931471805599453F;
  const AttendParams& params = view.params;
  const float exponent = WarpLogit(view, token, lane) - params.state.lse2[row];
  if (!(exp2f(exponent) <= LargestShare(params))) return false;
  const int32_t dim = params.cache.value_dim;
  const float odds = exp2f(exponent) / -expm1f(kLn2 * exponent);
  float out[kVector] = {};
  float value[kVector] = {};
  if (lane * kVector < dim) {
    Load8(params.state.out + row * dim, lane * kVector, dim, out);
    Load8(view.value(token), lane * kVector, dim, value);
  }
  float square = 0.0F;
#pragma unroll
  for (int32_t e = 0; e < kVector; ++e) {
    const float moved = odds * (out[e] - value[e]);
    square = fmaf(moved, moved, square);
  }
  square = LaneSum<32>(square);
  if (lane == 0) params.state.contribution[row] = square;
  return true;
}

// The same from the tokens, by the block.
template <typename T>
__device__ void StoreCarefulTop(const RowView<T>& view, int64_t row, int32_t token, RowShared& shared) {
  LoadQuery(view, shared);
  const Peak peak = FindPeak(view, token, shared);
  const Others others = SumOthers(view, peak, shared);
  const float contribution = PeakContribution(view, peak, others, ShareOf(peak, others), shared);
  if (threadIdx.x == 0) view.params.state.contribution[row] = contribution;
}

// Rows first .. first + kWarps - 1 of a list: a warp for each, then the block for those that need it. careful: kWarps
// words of shared memory.
template <typename T>
__device__ void StoreGivenTops(const AttendParams& params, int32_t list, int32_t first, int32_t* careful,
                               RowShared& shared) {
  const int32_t warp = threadIdx.x / 32;
  const int32_t i = first + warp;
  int32_t token = i < params.rows.group * params.rows.rows ? params.state.top[RowIndex(params, list, i)] : -1;
  if (token >= 0 && StorePlainTop(RowView<T>(params, list, i), RowIndex(params, list, i), token, threadIdx.x % 32))
    token = -1;
  if (threadIdx.x % 32 == 0) careful[warp] = token;
  if (__syncthreads_or(token >= 0) == 0) return;
  for (int32_t j = 0; j < kWarps; ++j) {
    if (careful[j] < 0) continue;
    StoreCarefulTop(RowView<T>(params, list, first + j), RowIndex(params, list, first + j), careful[j], shared);
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock) GivenTopsKernel(const __grid_constant__ AttendParams params) {
  __shared__ RowShared shared;
  __shared__ int32_t careful[kWarps];
  ChainStart();
  FlaggedParts parts(params.has_tops, params.cache.sequences * params.cache.kv_heads,
                     PartsOf(params.rows.group * params.rows.rows, kWarps));
  while (parts.Next()) {
    StoreGivenTops<T>(params, parts.list(), parts.part() * kWarps, careful, shared);
    __syncthreads();
  }
}

// The lowest row of every top token adds all rows with that token, in their order, times their weights. Rows of weight
// 0 have none. A generated token has no score.
__global__ void __launch_bounds__(kBlock)
    AddGivenTopsKernel(const __grid_constant__ AttendParams attend, const __grid_constant__ ScoreParams params) {
  ChainStart();
  const auto list = static_cast<int32_t>(blockIdx.x);
  if (attend.has_tops[list] == 0) return;
  const int32_t sequence = list / attend.cache.kv_heads;
  const int32_t tokens = Length(attend.cache, sequence, list % attend.cache.kv_heads);
  const int32_t candidates = Candidates(attend.cache, sequence, tokens);
  const int32_t rows = attend.rows.group * attend.rows.rows;
  const int32_t* tops = attend.state.top + RowIndex(attend, list, 0);
  const float* contributions = attend.state.contribution + RowIndex(attend, list, 0);
  for (int32_t i = threadIdx.x; i < rows; i += kBlock) {
    const int32_t token = tops[i];
    bool leads = token >= 0 && token < candidates;
    for (int32_t j = 0; leads && j < i; ++j) leads = tops[j] != token;
    if (!leads) continue;
    float sum = 0.0F;
    bool dominant = false;
    for (int32_t j = i; j < rows; ++j) {
      if (tops[j] != token) continue;
      sum = fmaf(RowWeight(attend.rows, sequence, j), fabsf(contributions[j]), sum);
      dominant = dominant || signbit(contributions[j]);
    }
    float* raw = params.raw + static_cast<int64_t>(list) * params.cache.max_tokens + token;
    const float score = *raw + sum / static_cast<float>(attend.rows.group);
    *raw = !isfinite(score) ? NAN : dominant ? -score : score;
  }
}

// Blocks for all parts of all lists, `most` at most: those that a device takes in one wave.
unsigned BlocksFor(const AttendParams& params, int32_t part_rows, int64_t most) {
  const int64_t lists = int64_t{params.cache.sequences} * params.cache.kv_heads;
  return static_cast<unsigned>(std::min(lists * PartsOf(params.rows.group * params.rows.rows, part_rows), most));
}

}  // namespace

cudaError_t LaunchFinishTops(const AttendParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 512;
  const unsigned blocks = BlocksFor(params, kMergeWarps, kMaxBlocks);
  if (blocks == 0) return cudaSuccess;
  return WithType(params.cache.dtype, [&](auto element) {
    return LaunchChained(FinishTopsKernel<decltype(element)>, dim3(blocks), kMergeWarps * 32, 0, stream, params);
  });
}

cudaError_t LaunchResolveGiven(const AttendParams& attend, const ScoreParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 128;
  const unsigned blocks = BlocksFor(attend, kWarps, kMaxBlocks);
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error = WithType(attend.cache.dtype, [&](auto element) {
    return LaunchChained(GivenTopsKernel<decltype(element)>, dim3(blocks), kBlock, 0, stream, attend);
  });
  if (error != cudaSuccess) return error;
  const auto lists = static_cast<unsigned>(attend.cache.sequences * attend.cache.kv_heads);
  return LaunchChained(AddGivenTopsKernel, dim3(lists), kBlock, 0, stream, attend, params);
}

}  // namespace dropkv::cuda
