// The second product of an attention on Hopper: weights in registers times a tile of values in shared memory.
#pragma once

#include "cuda/sm90/tile.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace dropkv::cuda {

// out [64 rows, boxes of 64 dims] += p V, p [64, 64] as WgmmaRegisters takes it; complete on return. By a warpgroup.
template <typename T, int kBoxes>
__device__ inline void AddProduct(float (&out)[kBoxes][32], const uint32_t (&p)[16], const unsigned char* values) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) KeepRegisters(out[box]);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      WgmmaRegisters<T>::Run(out[box], p + 4 * k, TileDescriptor(values + box * kBoxBytes) + k * (16 * kRowBytes / 16));
  WgmmaCommit();
  WgmmaWait<0>();
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) KeepRegisters(out[box]);
}

// Zeros behind the tile's first `tokens` rows: memory behind a list's end may hold anything, and 0 * NaN is NaN. By
// `threads` threads, of which this is number `thread`; they meet before the tensor cores read.
template <int kBoxes>
__device__ inline void ZeroTail(unsigned char* values, int32_t tokens, int32_t thread, int32_t threads) {
  for (int32_t i = thread; i < kBoxes * kBoxBytes / 16; i += threads)
    if (i * 16 % kBoxBytes / kRowBytes >= tokens) reinterpret_cast<uint4*>(values)[i] = make_uint4(0, 0, 0, 0);
  FenceProxyAsync();
}

}  // namespace dropkv::cuda
