// Decode attention over what an eviction left: checks, and the kernel that takes the shape.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/device_attribute.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"

namespace dropkv::cuda {
namespace {

DecodeParams ToDecode(const Cache& cache, const DecodeInput& input, void* workspace) {
  DecodeParams params;
  params.cache = cache;
  params.q = input.q;
  params.out = input.out;
  params.group = cache.kv_heads > 0 ? input.query_heads / cache.kv_heads : 0;
  params.scale = input.scale;
  params.soft_cap = input.soft_cap;
  params.sinks = input.sinks;
  params.workspace = workspace;
  return params;
}

}  // namespace

size_t DecodeWorkspaceBytes(const Cache& cache, int32_t query_heads) {
  DecodeInput input;
  input.query_heads = query_heads;
  return DecodeWorkspaceBytes(ToDecode(cache, input, nullptr));
}

Status PrepareDecode(void* workspace, Stream stream) {
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  return FromCuda(cudaMemsetAsync(workspace, 0, kDecodeCounterBytes, stream), "workspace");
}

Status Decode(const Cache& cache, const DecodeInput& input, void* workspace, Stream stream) {
  DROPKV_RETURN_IF_ERROR(CheckCache(cache));
  DROPKV_RETURN_IF_ERROR(CheckQueries(cache, input.query_heads));
  if (input.q == nullptr) return InvalidArgument("input.q: expected a device pointer, got null");
  if (input.out == nullptr) return InvalidArgument("input.out: expected a device pointer, got null");
  if (!(input.scale > 0.0F))
    return InvalidArgument("input.scale: expected more than 0, got " + std::to_string(input.scale));
  if (!(input.soft_cap >= 0.0F))
    return InvalidArgument("input.soft_cap: expected 0 or more, got " + std::to_string(input.soft_cap));
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  const DecodeParams params = ToDecode(cache, input, workspace);
  int capability = 0;
  DROPKV_RETURN_IF_ERROR(FromCuda(ComputeCapability(&capability), "compute capability"));
  const bool sm90 = capability == 90 && RefusesDecodeSm90(params) == nullptr;
  const bool sm80 = !sm90 && SupportsDecodeSm80(params);
  if (sm90) return FromCuda(LaunchDecodeSm90(params, stream), "decode");
  return FromCuda(sm80 ? LaunchDecodeSm80(params, stream) : LaunchDecodeAny(params, stream), "decode");
}

}  // namespace dropkv::cuda
