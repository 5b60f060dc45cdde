// Words set to zero by a kernel, which can be chained; a memset between two kernels cannot.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/launch.cuh"

namespace dropkv::cuda {

inline constexpr int32_t kClearThreads = 256;

// Up to three ranges of words; bytes are multiples of 4, as the addresses are.
struct ClearRange {
  void* memory;
  size_t bytes;
};
struct ClearList {
  ClearRange ranges[3];
};

static __global__ void __launch_bounds__(kClearThreads) ClearKernel(ClearList list) {
  ChainStart();
  const size_t first = static_cast<size_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  const size_t step = static_cast<size_t>(gridDim.x) * kClearThreads;
  for (const ClearRange& range : list.ranges)
    for (size_t i = first; i < range.bytes / sizeof(uint32_t); i += step) static_cast<uint32_t*>(range.memory)[i] = 0;
}

static inline cudaError_t LaunchClear(const ClearList& list, cudaStream_t stream) {
  constexpr size_t kMaxBlocks = 128;
  size_t bytes = 0;
  for (const ClearRange& range : list.ranges) bytes = std::max(bytes, range.bytes);
  const size_t blocks =
      std::clamp<size_t>((bytes / sizeof(uint32_t) + kClearThreads - 1) / kClearThreads, 1, kMaxBlocks);
  return LaunchChained(ClearKernel, dim3(static_cast<unsigned>(blocks)), kClearThreads, 0, stream, list);
}

static inline cudaError_t LaunchClear(void* memory, size_t bytes, cudaStream_t stream) {
  return LaunchClear(ClearList{{{memory, bytes}, {nullptr, 0}, {nullptr, 0}}}, stream);
}

}  // namespace dropkv::cuda
