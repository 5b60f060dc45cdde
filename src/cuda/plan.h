// What planning and running share.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"
#include "dropkv/cuda.h"

namespace dropkv::cuda {

// Sizes, strides and the layout's own fields; the message names the field.
Status CheckCache(const Cache& cache);
Status CheckQueries(const Cache& cache, int32_t query_heads);
Status CheckWorkspace(const void* workspace);

Status FromCuda(cudaError_t error, const char* what);

// The parameters that the plan alone decides.
SelectParams ToSelect(const Plan& plan);
CompactParams ToCompact(const Plan& plan);

}  // namespace dropkv::cuda
