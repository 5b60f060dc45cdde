// Launches of decode attention for one element type: the instantiation that fits the rows and the head size.
#pragma once

#include <algorithm>

#include "cuda/sm90/decode.cuh"

namespace dropkv::cuda::sm90 {

template <typename T, int kBoxes, int kHalves>
__global__ void __launch_bounds__(kDecodeThreads, kBlocksPerProcessor<kBoxes>)
    DecodeKernel(const __grid_constant__ decode::DecodeArgs args, const __grid_constant__ CUtensorMap q,
                 const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  DecodeBlock<T, kBoxes, kHalves> block(args, shared);
  if (threadIdx.x == 0) block.Start();
  if (threadIdx.x == kConsumers) {
    PrefetchMap(&q);
    PrefetchMap(&k);
    PrefetchMap(&v);
  }
  ChainStart();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    block.Produce(&q, &k, &v);
  } else {
    block.Consume();
  }
}

template <typename T, int kBoxes, int kHalves>
cudaError_t LaunchDecode(const decode::DecodeArgs& args, int64_t max_blocks, const CUtensorMap& k, const CUtensorMap& v,
                         cudaStream_t stream) {
  using Layout = DecodeLayout<kBoxes, kHalves>;
  const auto kernel = DecodeKernel<T, kBoxes, kHalves>;
  const DecodeParams& params = args.params;
  int32_t processors = 0;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMultiProcessorCount, &processors); error != cudaSuccess)
    return error;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      error != cudaSuccess)
    return error;
  CUtensorMap q;
  if (const cudaError_t error =
          MakeRowMap(params.cache.dtype, params.q, params.cache.key_dim, params.group, args.lists, Layout::kRows, &q);
      error != cudaSuccess)
    return error;
  const int64_t blocks = std::clamp<int64_t>(max_blocks, 1, int64_t{processors} * kBlocksPerProcessor<kBoxes>);
  return LaunchChained(kernel, dim3(static_cast<unsigned>(blocks)), kDecodeThreads, Layout::kBytes, stream, args, q, k,
                       v);
}

template <typename T, int kBoxes>
cudaError_t DecodeForBoxes(const decode::DecodeArgs& args, int64_t max_blocks, const CUtensorMap& k,
                           const CUtensorMap& v, cudaStream_t stream) {
  return args.params.group <= 8 ? LaunchDecode<T, kBoxes, 1>(args, max_blocks, k, v, stream)
                                : LaunchDecode<T, kBoxes, 2>(args, max_blocks, k, v, stream);
}

template <typename T>
cudaError_t DecodeForType(const decode::DecodeArgs& args, int64_t max_blocks, const CUtensorMap& k,
                          const CUtensorMap& v, cudaStream_t stream) {
  const int32_t dim = std::max(args.params.cache.key_dim, args.params.cache.value_dim);
  if (dim <= 64) return DecodeForBoxes<T, 1>(args, max_blocks, k, v, stream);
  if (dim <= 128) return DecodeForBoxes<T, 2>(args, max_blocks, k, v, stream);
  return DecodeForBoxes<T, 4>(args, max_blocks, k, v, stream);
}

}  // namespace dropkv::cuda::sm90
