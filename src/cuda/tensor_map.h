// Descriptions of caches for Hopper's copy engine, and why a cache cannot have one.
#pragma once

#include <cuda.h>

#include "cuda/params.h"

namespace dropkv::cuda {

// Tokens of a tile, and of a box unless a page is smaller.
inline constexpr int32_t kTileTokens = 64;
inline constexpr int32_t kBoxDims = 64;  // 128 bytes, one swizzled row

// Null where both tensors of the cache can be described; else what is in the way.
const char* RefusesTensorMap(const CacheParams& cache);

// Maps (dim, token, head, sequence or block) of keys and values; boxes of [BoxTokens, 64] elements, 128-byte swizzle.
cudaError_t MakeTensorMaps(const CacheParams& cache, CUtensorMap* k, CUtensorMap* v);

// Map (dim, row, list, 1) of rows [lists, rows, dim], contiguous, of the cache's dtype; boxes of [box_rows, 64]
// elements.
cudaError_t MakeRowMap(DType dtype, const void* data, int32_t dim, int64_t rows, int64_t lists, int32_t box_rows,
                       CUtensorMap* map);

inline int32_t BoxTokens(const CacheParams& cache) {
  return cache.blocks != nullptr && cache.block_size < kTileTokens ? cache.block_size : kTileTokens;
}

}  // namespace dropkv::cuda
