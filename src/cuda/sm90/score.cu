// Launch of pass 2 on Hopper.
#include <algorithm>

#include "cuda/device_attribute.h"
#include "cuda/sm90/score.cuh"

namespace dropkv::cuda {

template <typename T, bool kWeighted>
cudaError_t ScoreForType(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                         cudaStream_t stream);  // score_f16.cu, score_bf16.cu; with weights score_weights_f16.cu, ...

namespace {

template <typename T>
cudaError_t ScoreForWeights(const ScoreLaunch& launch, const CUtensorMap& k, const CUtensorMap& v, int32_t blocks,
                            cudaStream_t stream) {
  return launch.params.rows.weights != nullptr ? ScoreForType<T, true>(launch, k, v, blocks, stream)
                                               : ScoreForType<T, false>(launch, k, v, blocks, stream);
}

}  // namespace

const char* RefusesScoreSm90(const ScoreParams& params) { return RefusesTensorMap(params.cache); }

cudaError_t LaunchScoreSm90(const ScoreParams& params, cudaStream_t stream) {
  CUtensorMap k;
  CUtensorMap v;
  if (const cudaError_t error = MakeTensorMaps(params.cache, &k, &v); error != cudaSuccess) return error;
  int32_t processors = 0;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMultiProcessorCount, &processors); error != cudaSuccess)
    return error;
  const int64_t tiles = int64_t{params.cache.sequences} * params.cache.kv_heads *
                        ((params.cache.max_tokens + kTileTokens - 1) / kTileTokens);
  const auto blocks = static_cast<int32_t>(std::clamp<int64_t>(tiles, 1, processors));
  const int32_t rows = params.rows.group * params.rows.rows;
  const int32_t most = std::max(params.cache.key_dim, params.cache.value_dim) <= 128 ? 256 : 64;
  for (int32_t first = 0; first < rows; first += most) {
    const ScoreLaunch launch{params, first, std::min(most, rows - first), first > 0};
    const cudaError_t error = params.cache.dtype == DType::kF16
                                  ? ScoreForWeights<__half>(launch, k, v, blocks, stream)
                                  : ScoreForWeights<__nv_bfloat16>(launch, k, v, blocks, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dropkv::cuda
