// Launch of pass 1 on Hopper.
#include "cuda/sm90/attend.cuh"

namespace dropkv::cuda {

template <typename T>
cudaError_t AttendForType(const AttendLaunch& launch, bool exclude, const CUtensorMap& k, const CUtensorMap& v,
                          cudaStream_t stream);  // attend_f16.cu, attend_bf16.cu

const char* RefusesAttendSm90(const AttendParams& params) { return RefusesTensorMap(params.cache); }

cudaError_t LaunchAttendSm90(const AttendParams& params, bool exclude, cudaStream_t stream) {
  // Of 60 MB of L2, less room for everything else.
  constexpr int64_t kStaysInL2 = int64_t{36} << 20;
  const CacheParams& cache = params.cache;
  CUtensorMap k;
  CUtensorMap v;
  if (const cudaError_t error = MakeTensorMaps(cache, &k, &v); error != cudaSuccess) return error;
  const int64_t split_tile_bytes = int64_t{cache.sequences} * cache.kv_heads * params.partials.splits *
                                   (cache.key_dim + cache.value_dim) * kTileTokens * 2;
  const AttendLaunch launch{params, 1, static_cast<int32_t>(kStaysInL2 / split_tile_bytes)};
  return cache.dtype == DType::kF16 ? AttendForType<__half>(launch, exclude, k, v, stream)
                                    : AttendForType<__nv_bfloat16>(launch, exclude, k, v, stream);
}

}  // namespace dropkv::cuda
