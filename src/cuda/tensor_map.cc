#include "cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

namespace dropkv::cuda {
namespace {

// The driver's function, found at run time: no link to the driver's library.
PFN_cuTensorMapEncodeTiled_v12000 FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

const char* Refuses(const CacheParams& cache, const Tensor& tensor, int32_t dim) {
  if (dim % 8 != 0) return "a head size that is no multiple of 8";
  if (dim > 256) return "a head size above 256";
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0)
    return "a cache that does not start at a multiple of 16 bytes";
  if (tensor.token_stride % 8 != 0 || tensor.head_stride % 8 != 0 || tensor.sequence_stride % 8 != 0)
    return "a stride that is no multiple of 16 bytes";
  if (tensor.token_stride < dim) return "tokens that overlap";
  if (cache.blocks != nullptr &&
      (cache.block_size < kTileTokens ? kTileTokens % cache.block_size : cache.block_size % kTileTokens) != 0)
    return "pages that are neither a divisor nor a multiple of 64 tokens";
  if (cache.blocks != nullptr && cache.block_size % 8 != 0) return "pages that are no multiple of 8 tokens";
  return nullptr;
}

}  // namespace

const char* RefusesTensorMap(const CacheParams& cache) {
  if (const char* reason = Refuses(cache, cache.k, cache.key_dim)) return reason;
  return Refuses(cache, cache.v, cache.value_dim);
}

namespace {

cudaError_t Encode(DType dtype, const void* data, const cuuint64_t (&sizes)[4], const cuuint64_t (&strides)[3],
                   int32_t box_tokens, CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t box[4] = {kBoxDims, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A dimension of size 1 never uses its stride, but the stride must be a positive multiple of 16 bytes.
cuuint64_t StrideBytes(int64_t elements) { return static_cast<cuuint64_t>(std::max<int64_t>(elements, 8) * 2); }

cudaError_t MakeTensorMap(const CacheParams& cache, const Tensor& tensor, int32_t dim, CUtensorMap* map) {
  cuuint64_t tokens = cache.max_tokens;
  cuuint64_t heads = cache.kv_heads;
  cuuint64_t sequences = cache.sequences;
  if (cache.offsets != nullptr) {
    tokens = cache.rows_in_pool;
    heads = sequences = 1;
  } else if (cache.starts != nullptr) {
    tokens = cache.rows_in_pool;
    sequences = 1;
  } else if (cache.blocks != nullptr) {
    tokens = cache.block_size;
    sequences = cache.blocks_in_pool;
  }
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), std::max<cuuint64_t>(tokens, 1), heads, sequences};
  const cuuint64_t strides[3] = {StrideBytes(tensor.token_stride), StrideBytes(tensor.head_stride),
                                 StrideBytes(tensor.sequence_stride)};
  return Encode(cache.dtype, tensor.data, sizes, strides, BoxTokens(cache), map);
}

}  // namespace

cudaError_t MakeTensorMaps(const CacheParams& cache, CUtensorMap* k, CUtensorMap* v) {
  if (const cudaError_t error = MakeTensorMap(cache, cache.k, cache.key_dim, k); error != cudaSuccess) return error;
  return MakeTensorMap(cache, cache.v, cache.value_dim, v);
}

cudaError_t MakeRowMap(DType dtype, const void* data, int32_t dim, int64_t rows, int64_t lists, int32_t box_rows,
                       CUtensorMap* map) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(lists), 1};
  const cuuint64_t strides[3] = {StrideBytes(dim), StrideBytes(dim * rows), StrideBytes(dim * rows * lists)};
  return Encode(dtype, data, sizes, strides, box_rows, map);
}

}  // namespace dropkv::cuda
