#include "cuda/sm90/score_launch.cuh"

namespace dropkv::cuda {

template cudaError_t ScoreForType<__nv_bfloat16, false>(const ScoreLaunch&, const CUtensorMap&, const CUtensorMap&,
                                                        int32_t, cudaStream_t);

}  // namespace dropkv::cuda
