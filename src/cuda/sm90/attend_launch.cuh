// Launches of pass 1 for one element type: the instantiation that fits the rows and the head size.
#pragma once

#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/sm90/attend.cuh"

namespace dropkv::cuda {

template <typename T, int kBoxes, bool kPair, bool kExclude, bool kValues>
__global__ void __launch_bounds__(kThreads, 1)
    AttendKernel(const __grid_constant__ AttendLaunch launch, const __grid_constant__ CUtensorMap k,
                 const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap queries) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  ChainStart();
  AttendBlock<T, kBoxes, kPair, kExclude, kValues> block(launch, shared);
  if (!block.Start()) return;
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == kConsumers) block.Produce(&k, &v, &queries);
  } else {
    TakeRegisters<kConsumerRegisters>();
    block.Consume();
  }
}

template <typename T, int kBoxes, bool kPair, bool kExclude, bool kValues>
cudaError_t LaunchAttend(const AttendLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, cudaStream_t stream) {
  constexpr int32_t kBytes = AttendLayout<kBoxes, kPair>::kBytes;
  const auto kernel = AttendKernel<T, kBoxes, kPair, kExclude, kValues>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess)
    return error;
  const CacheParams& cache = launch.params.cache;
  const int64_t blocks = int64_t{cache.sequences} * cache.kv_heads * launch.params.partials.splits * launch.row_blocks;
  CUtensorMap queries;
  if (const cudaError_t error =
          MakeRowMap(cache.dtype, launch.params.state.q16, cache.key_dim,
                     int64_t{launch.params.rows.group} * launch.params.rows.rows,
                     int64_t{cache.sequences} * cache.kv_heads, AttendLayout<kBoxes, kPair>::kRows, &queries);
      error != cudaSuccess)
    return error;
  return LaunchChained(kernel, static_cast<uint32_t>(blocks), kThreads, kBytes, stream, launch, k, v, queries);
}

template <typename T, int kBoxes, bool kPair>
cudaError_t AttendForRows(const AttendLaunch& launch, bool exclude, const CUtensorMap& k, const CUtensorMap& v,
                          cudaStream_t stream) {
  if (launch.params.partials.out == nullptr) return LaunchAttend<T, kBoxes, kPair, false, false>(launch, k, v, stream);
  return exclude ? LaunchAttend<T, kBoxes, kPair, true, true>(launch, k, v, stream)
                 : LaunchAttend<T, kBoxes, kPair, false, true>(launch, k, v, stream);
}

template <typename T, int kBoxes>
cudaError_t AttendForBoxes(AttendLaunch launch, bool exclude, const CUtensorMap& k, const CUtensorMap& v,
                           cudaStream_t stream) {
  const int32_t rows = launch.params.rows.group * launch.params.rows.rows;
  launch.row_blocks = rows <= 64 ? 1 : (rows + 127) / 128;
  return rows <= 64 ? AttendForRows<T, kBoxes, false>(launch, exclude, k, v, stream)
                    : AttendForRows<T, kBoxes, true>(launch, exclude, k, v, stream);
}

template <typename T>
cudaError_t AttendForType(const AttendLaunch& launch, bool exclude, const CUtensorMap& k, const CUtensorMap& v,
                          cudaStream_t stream) {
  const int32_t dim = std::max(launch.params.cache.key_dim, launch.params.cache.value_dim);
  if (dim <= 64) return AttendForBoxes<T, 1>(launch, exclude, k, v, stream);
  if (dim <= 128) return AttendForBoxes<T, 2>(launch, exclude, k, v, stream);
  return AttendForBoxes<T, 4>(launch, exclude, k, v, stream);
}

}  // namespace dropkv::cuda
