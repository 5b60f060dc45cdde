#include "cuda/sm90/decode_launch.cuh"

namespace dropkv::cuda::sm90 {

template cudaError_t DecodeForType<__half>(const decode::DecodeArgs&, int64_t, const CUtensorMap&, const CUtensorMap&,
                                           cudaStream_t);

}  // namespace dropkv::cuda::sm90
