// Words set to zero by a kernel, which can be chained; a memset between two kernels cannot.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/launch.cuh"

namespace dropkv::cuda {

inline constexpr int32_t kClearThreads = 256;

static __global__ void __launch_bounds__(kClearThreads) ClearKernel(uint32_t* words, int64_t count) {
  ChainStart();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kClearThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x; i < count; i += step) words[i] = 0;
}

// bytes: a multiple of 4, as the address is.
static inline cudaError_t LaunchClear(void* memory, size_t bytes, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 128;
  const auto count = static_cast<int64_t>(bytes / sizeof(uint32_t));
  const int64_t blocks = std::clamp<int64_t>((count + kClearThreads - 1) / kClearThreads, 1, kMaxBlocks);
  return LaunchChained(ClearKernel, dim3(static_cast<unsigned>(blocks)), kClearThreads, 0, stream,
                       static_cast<uint32_t*>(memory), count);
}

}  // namespace dropkv::cuda
