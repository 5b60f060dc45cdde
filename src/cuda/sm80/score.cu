// Launch of pass 2 with mma.sync: how many rows a block holds, how many tokens it reads.
#include <algorithm>

#include "cuda/device_attribute.h"
#include "cuda/sm80/score.cuh"

namespace dropkv::cuda {
namespace {

using namespace sm80;  // NOLINT: this file is a kernel of that folder

template <typename T, int n, bool values, bool weighted>
__global__ void __launch_bounds__(kScoreWarps * 32, 1) ScoreKernel(const __grid_constant__ ScoreLaunch launch) {
  extern __shared__ __align__(16) unsigned char shared[];
  ScoreBlock<T, n, values, weighted>(launch, shared).Run();
}

// Rows of a warp's share of the product, in n-tiles: as few idle rows as possible, then as few parts.
int32_t TilesFor(int32_t rows) {
  if (rows <= 16) return 2;
  return (rows + 31) / 32 * 32 < (rows + 63) / 64 * 64 ? 4 : 8;
}

int32_t SharedBytes(const ScoreParams& params, int32_t resident) {
  const bool values = params.signal == Signal::kDropKv;
  const int32_t row = RowBytes(params.cache.key_dim) + (values ? RowBytes(params.cache.value_dim) : 0);
  return resident * row + kStepTokens * row * (values ? 1 : 2) + TableBytes(resident, params.rows.weights != nullptr);
}

int32_t Attribute(cudaDeviceAttr attribute) {
  int value = 0;
  return DeviceAttribute(attribute, &value) == cudaSuccess ? value : 0;
}

// Rows that fit beside the warps' tiles; 0: not even one part.
int32_t ResidentRows(const ScoreParams& params) {
  const int32_t rows = params.rows.group * params.rows.rows;
  const int32_t part = TilesFor(rows) * 8;
  const int32_t limit = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int32_t resident = (rows + part - 1) / part * part;
  while (resident > 0 && SharedBytes(params, resident) > limit) resident -= part;
  return resident;
}

template <typename T, int n, bool values, bool weighted>
cudaError_t Launch(const ScoreLaunch& launch, cudaStream_t stream) {
  const int32_t bytes = SharedBytes(launch.params, launch.resident);
  const auto kernel = ScoreKernel<T, n, values, weighted>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess)
    return error;
  const CacheParams& cache = launch.params.cache;
  const int64_t blocks =
      int64_t{cache.sequences} * cache.kv_heads * ((cache.max_tokens + launch.range - 1) / launch.range);
  kernel<<<static_cast<unsigned>(blocks), kScoreWarps * 32, bytes, stream>>>(launch);
  return cudaGetLastError();
}

template <typename T, bool values, bool weighted>
cudaError_t LaunchForRows(const ScoreLaunch& launch, cudaStream_t stream) {
  switch (TilesFor(launch.params.rows.group * launch.params.rows.rows)) {
    case 2:
      return Launch<T, 2, values, weighted>(launch, stream);
    case 4:
      return Launch<T, 4, values, weighted>(launch, stream);
    default:
      return Launch<T, 8, values, weighted>(launch, stream);
  }
}

template <typename T, bool values>
cudaError_t LaunchFor(const ScoreLaunch& launch, cudaStream_t stream) {
  return launch.params.rows.weights != nullptr ? LaunchForRows<T, values, true>(launch, stream)
                                               : LaunchForRows<T, values, false>(launch, stream);
}

}  // namespace

bool SupportsScoreSm80(const ScoreParams& params) { return FitsMatrices(params.cache) && ResidentRows(params) > 0; }

cudaError_t LaunchScoreSm80(const ScoreParams& params, cudaStream_t stream) {
  const CacheParams& cache = params.cache;
  const int64_t tokens = int64_t{cache.sequences} * cache.kv_heads * cache.max_tokens;
  if (tokens == 0 || params.rows.group * params.rows.rows == 0) return cudaSuccess;
  // Two blocks or more for every multiprocessor, while a block still reads many tokens for the rows that it loads.
  const int64_t share = tokens / (2 * std::max(1, Attribute(cudaDevAttrMultiProcessorCount)));
  const int64_t range = std::clamp<int64_t>(share / kStepTokens, 1, 16) * kStepTokens;
  const ScoreLaunch launch{params,
                           {IsAligned(cache.k), IsAligned(cache.v), IsAligned(params.rows),
                            IsAligned(params.state.out16, {cache.value_dim})},
                           static_cast<int32_t>(range),
                           ResidentRows(params)};
  const bool values = params.signal == Signal::kDropKv;
  if (cache.dtype == DType::kF16)
    return values ? LaunchFor<__half, true>(launch, stream) : LaunchFor<__half, false>(launch, stream);
  return values ? LaunchFor<__nv_bfloat16, true>(launch, stream) : LaunchFor<__nv_bfloat16, false>(launch, stream);
}

}  // namespace dropkv::cuda
