// Launches that follow each other without a gap: a kernel's blocks are put in place while the kernel before it still
// runs (programmatic dependent launch, sm_90 and newer).
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/device_attribute.h"

namespace dropkv::cuda {

// The first thing that every thread of a chained kernel does, on every path. It lets the next kernel's blocks take free
// places, then waits until the kernels before this one have completed and their writes are seen.
//
// Why the next kernel may be let in before anything is done: it waits in its turn, and what it waits for is this
// grid's completion, not this call. A grid completes after its own wait, hence after all grids before it. So behind the
// wait no earlier kernel of the stream is running: none of their results is read too early, and nothing that they still
// read is overwritten. The next grid gets in when the last block of this one has started: it takes no place from it.
//
// The wait orders ordinary accesses. Loads through the read-only path (__ldg, const __restrict__, ld.global.nc) are for
// data that nobody writes, and must not touch what an earlier kernel wrote.
__device__ inline void ChainStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the current device runs machine code in which ChainStart waits. Code for an older architecture, also where a
// newer device compiles it from PTX, does not: launched early, it would run beside the kernel before it. Only an exact
// match says which code it is. Of one source file: others may be compiled for other devices.
static inline bool DeviceChains() {
  constexpr int kCompiledFor[] = {__CUDA_ARCH_LIST__};
  int capability = 0;
  if (ComputeCapability(&capability) != cudaSuccess || capability < 90) return false;
  for (const int architecture : kCompiledFor)
    if (architecture == 10 * capability) return true;
  return false;
}

template <typename... P, typename... A>
static cudaError_t LaunchWith(cudaLaunchAttribute* attribute, unsigned attributes, void (*kernel)(P...), dim3 grid,
                              dim3 block, size_t shared, cudaStream_t stream, A&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attributes;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...);
  if (error != cudaSuccess) cudaGetLastError();  // reported here, and not once more to whoever asks next
  return error;
}

// For kernels that call ChainStart, and for them alone.
template <typename... P, typename... A>
static cudaError_t LaunchChained(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                                 A&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return LaunchWith(&attribute, DeviceChains() ? 1 : 0, kernel, grid, block, shared, stream, std::forward<A>(args)...);
}

// For kernels whose blocks wait for each other. Nothing documents that blocks which get in early, while others still
// lack a place, keep the promise that all of them run together: it starts behind the kernel before it, as usual. The
// kernel after it may be chained.
template <typename... P, typename... A>
static cudaError_t LaunchCooperative(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                                     A&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return LaunchWith(&attribute, 1, kernel, grid, block, shared, stream, std::forward<A>(args)...);
}

}  // namespace dropkv::cuda
