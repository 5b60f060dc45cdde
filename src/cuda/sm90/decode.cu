// Launch of decode attention on Hopper.
#include "cuda/sm90/decode.cuh"

namespace dropkv::cuda {
namespace sm90 {

template <typename T>
cudaError_t DecodeForType(const decode::DecodeArgs& args, int64_t max_items, const CUtensorMap& k, const CUtensorMap& v,
                          cudaStream_t stream);  // decode_f16.cu, decode_bf16.cu

namespace {

int64_t MaxItems(const DecodeParams& params) {
  return int64_t{params.cache.sequences} * params.cache.kv_heads * decode::MaxSplitCount(params.cache.max_tokens);
}

// The workspace as LaunchDecodeSm80 divides it: either may run after the other.
decode::DecodeArgs MakeArgs(const DecodeParams& params) {
  constexpr size_t kCounterBytes = 256 + size_t{decode::kMaxLists} * sizeof(int32_t);
  auto* memory = static_cast<unsigned char*>(params.workspace);
  decode::DecodeArgs args{};
  args.params = params;
  args.lists = params.cache.sequences * params.cache.kv_heads;
  args.logit_scale = params.soft_cap > 0.0F ? params.scale / params.soft_cap : params.scale * kLog2E;
  args.cap2 = params.soft_cap * kLog2E;
  args.tickets = reinterpret_cast<int32_t*>(memory);
  args.arrived = reinterpret_cast<int32_t*>(memory + 256);
  args.sums = reinterpret_cast<float*>(memory + kCounterBytes);
  args.states = reinterpret_cast<float2*>(args.sums + MaxItems(params) * params.group * params.cache.value_dim);
  return args;
}

}  // namespace
}  // namespace sm90

const char* RefusesDecodeSm90(const DecodeParams& params) {
  const CacheParams& cache = params.cache;
  if (cache.dtype != DType::kF16 && cache.dtype != DType::kBF16)
    return "elements that are neither float16 nor bfloat16";
  if (params.group > decode::kMaxRows) return "more than 16 query heads of a KV head";
  if (int64_t{cache.sequences} * cache.kv_heads > decode::kMaxLists) return "more than 16384 lists";
  if (reinterpret_cast<uintptr_t>(params.q) % 16 != 0) return "queries that do not start at a multiple of 16 bytes";
  if (reinterpret_cast<uintptr_t>(params.workspace) % 256 != 0)
    return "a workspace that does not start at a multiple of 256 bytes";
  return RefusesTensorMap(cache);
}

cudaError_t LaunchDecodeSm90(const DecodeParams& params, cudaStream_t stream) {
  const CacheParams& cache = params.cache;
  if (cache.sequences == 0 || cache.kv_heads == 0) return cudaSuccess;
  CUtensorMap k;
  CUtensorMap v;
  if (const cudaError_t error = MakeTensorMap(cache, cache.k, cache.key_dim, &k); error != cudaSuccess) return error;
  if (const cudaError_t error = MakeTensorMap(cache, cache.v, cache.value_dim, &v); error != cudaSuccess) return error;
  const decode::DecodeArgs args = sm90::MakeArgs(params);
  const int64_t max_items = sm90::MaxItems(params);
  return cache.dtype == DType::kF16 ? sm90::DecodeForType<__half>(args, max_items, k, v, stream)
                                    : sm90::DecodeForType<__nv_bfloat16>(args, max_items, k, v, stream);
}

}  // namespace dropkv::cuda
