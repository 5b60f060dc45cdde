#include "cuda/sm90/attend_launch.cuh"

namespace dropkv::cuda {

template cudaError_t AttendForType<__half>(const AttendLaunch&, bool, const CUtensorMap&, const CUtensorMap&,
                                           cudaStream_t);

}  // namespace dropkv::cuda
