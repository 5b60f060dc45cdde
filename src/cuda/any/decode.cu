// Decode attention for every shape and view: a block per query head.
#include "cuda/any/decode_row.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(decode::kThreads) DecodeAnyKernel(const __grid_constant__ DecodeParams params) {
  __shared__ decode::RowScratch scratch;
  ChainStart();
  const auto list = static_cast<int32_t>(blockIdx.x / params.group);
  decode::AttendRow<T>(params, list / params.cache.kv_heads, list % params.cache.kv_heads,
                       static_cast<int32_t>(blockIdx.x % params.group), scratch);
}

}  // namespace

cudaError_t LaunchDecodeAny(const DecodeParams& params, cudaStream_t stream) {
  const CacheParams& cache = params.cache;
  if (cache.key_dim > kMaxHeadDim || cache.value_dim > kMaxHeadDim) return cudaErrorInvalidValue;
  const int64_t blocks = int64_t{cache.sequences} * cache.kv_heads * params.group;
  if (blocks == 0) return cudaSuccess;
  return WithType(cache.dtype, [&](auto element) {
    return LaunchChained(DecodeAnyKernel<decltype(element)>, dim3(static_cast<unsigned>(blocks)), decode::kThreads, 0,
                         stream, params);
  });
}

}  // namespace dropkv::cuda
