// Launches of pass 2 for one element type: the instantiation that fits the rows and the head size.
#pragma once

#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/sm90/score.cuh"

namespace dropkv::cuda {

template <typename T, typename Shape, bool kValues>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    ScoreKernel(const __grid_constant__ ScoreLaunch launch, const __grid_constant__ CUtensorMap k,
                const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap queries,
                const __grid_constant__ CUtensorMap outputs) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  ChainStart();
  ScoreBlock<T, Shape, kValues> block(launch, shared);
  block.Start();
  if (threadIdx.x >= Shape::kComputing) {
    GiveRegisters<Shape::kProducerRegisters>();
    if (threadIdx.x == Shape::kComputing) block.Produce(&k, &v, &queries, &outputs);
  } else {
    TakeRegisters<Shape::kRegisters>();
    block.Consume();
  }
}

template <typename T, typename Shape, bool kValues>
cudaError_t LaunchScore(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                        cudaStream_t stream) {
  const auto kernel = ScoreKernel<T, Shape, kValues>;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
      error != cudaSuccess)
    return error;
  const CacheParams& cache = launch.params.cache;
  const int64_t rows = int64_t{launch.params.rows.group} * launch.params.rows.rows;
  const int64_t lists = int64_t{cache.sequences} * cache.kv_heads;
  CUtensorMap queries;
  CUtensorMap outputs;
  if (const cudaError_t error =
          MakeRowMap(cache.dtype, launch.params.state.q16, cache.key_dim, rows, lists, Shape::kRows, &queries);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error =
          MakeRowMap(cache.dtype, launch.params.state.out16, cache.value_dim, rows, lists, Shape::kRows, &outputs);
      error != cudaSuccess)
    return error;
  return LaunchChained(kernel, blocks, Shape::kThreads, Shape::kBytes, stream, launch, k, v, queries, outputs);
}

template <typename T, int kBoxes, bool kValues, bool kWeighted>
cudaError_t ScoreForRows(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                         cudaStream_t stream) {
  // As many groups as the ring has tiles for, beside the rows. At 128 rows three groups, each with half of its outputs'
  // products at a time: their registers would not do for all.
  constexpr int kMost = kBoxes == 4 ? 2 : 3;
  if (launch.count <= 32)
    return LaunchScore<T, ScoreShape<kBoxes, 32, 1, kMost, 32, kWeighted>, kValues>(launch, k, v, blocks, stream);
  if (launch.count <= 64)
    return LaunchScore<T, ScoreShape<kBoxes, 64, 1, 2, 64, kWeighted>, kValues>(launch, k, v, blocks, stream);
  if constexpr (kBoxes <= 2) {
    if (launch.count <= 128)
      return LaunchScore<T, ScoreShape<kBoxes, 128, 1, 3, 64, kWeighted>, kValues>(launch, k, v, blocks, stream);
    return LaunchScore<T, ScoreShape<kBoxes, 128, 2, 2, 128, kWeighted>, kValues>(launch, k, v, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T, bool kValues, bool kWeighted>
cudaError_t ScoreForBoxes(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                          cudaStream_t stream) {
  const int32_t dim = std::max(launch.params.cache.key_dim, launch.params.cache.value_dim);
  if (dim <= 64) return ScoreForRows<T, 1, kValues, kWeighted>(launch, k, v, blocks, stream);
  if (dim <= 128) return ScoreForRows<T, 2, kValues, kWeighted>(launch, k, v, blocks, stream);
  return ScoreForRows<T, 4, kValues, kWeighted>(launch, k, v, blocks, stream);
}

template <typename T, bool kWeighted>
cudaError_t ScoreForType(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                         cudaStream_t stream) {
  return launch.params.signal == Signal::kDropKv ? ScoreForBoxes<T, true, kWeighted>(launch, k, v, blocks, stream)
                                                 : ScoreForBoxes<T, false, kWeighted>(launch, k, v, blocks, stream);
}

}  // namespace dropkv::cuda
