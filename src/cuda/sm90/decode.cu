// Launch of decode attention on Hopper.
#include "cuda/sm90/decode.cuh"

namespace dropkv::cuda {
namespace sm90 {

template <typename T>
cudaError_t DecodeForType(const decode::DecodeArgs& args, int64_t max_blocks, const CUtensorMap& k,
                          const CUtensorMap& v,
                          cudaStream_t stream);  // decode_f16.cu, decode_bf16.cu

}  // namespace sm90

const char* RefusesDecodeSm90(const DecodeParams& params) {
  const CacheParams& cache = params.cache;
  if (cache.dtype != DType::kF16 && cache.dtype != DType::kBF16)
    return "elements that are neither float16 nor bfloat16";
  if (params.group > decode::kMaxRows) return "more than 16 query heads of a KV head";
  if (int64_t{cache.sequences} * cache.kv_heads > kMaxDecodeLists) return "more than 16384 lists";
  if (reinterpret_cast<uintptr_t>(params.q) % 16 != 0) return "queries that do not start at a multiple of 16 bytes";
  if (reinterpret_cast<uintptr_t>(params.out) % 4 != 0 || reinterpret_cast<uintptr_t>(params.out32) % 8 != 0)
    return "outputs that do not start at a multiple of two elements";
  if (reinterpret_cast<uintptr_t>(params.workspace) % 256 != 0)
    return "a workspace that does not start at a multiple of 256 bytes";
  return RefusesTensorMap(cache);
}

cudaError_t LaunchDecodeSm90(const DecodeParams& params, cudaStream_t stream) {
  const CacheParams& cache = params.cache;
  if (cache.sequences == 0 || cache.kv_heads == 0) return cudaSuccess;
  CUtensorMap k;
  CUtensorMap v;
  if (const cudaError_t error = MakeTensorMaps(cache, &k, &v); error != cudaSuccess) return error;
  const decode::DecodeArgs args = decode::MakeArgs(params);
  const int64_t max_blocks = decode::MaxBlocks(params);
  return cache.dtype == DType::kF16 ? sm90::DecodeForType<__half>(args, max_blocks, k, v, stream)
                                    : sm90::DecodeForType<__nv_bfloat16>(args, max_blocks, k, v, stream);
}

}  // namespace dropkv::cuda
