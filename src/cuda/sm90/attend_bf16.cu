#include "cuda/sm90/attend_launch.cuh"

namespace dropkv::cuda {

template cudaError_t AttendForType<__nv_bfloat16>(const AttendLaunch&, bool, const CUtensorMap&, const CUtensorMap&,
                                                  cudaStream_t);

}  // namespace dropkv::cuda
