// Checks of what a caller hands in, and the host's decisions for a shape.
#include "cuda/plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cuda/device_attribute.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "dropkv/cache_view.h"

namespace dropkv::cuda {
namespace {

Status CheckRange(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                         ", got " + std::to_string(value));
}

Status CheckDim(const char* name, int32_t dim) {
  DROPKV_RETURN_IF_ERROR(CheckRange(name, dim, 8, kMaxHeadDim));
  if (dim % 8 == 0) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected a multiple of 8, got " + std::to_string(dim));
}

Status CheckSizes(const Cache& cache) {
  if (cache.dtype != DType::kF16 && cache.dtype != DType::kBF16)
    return Unsupported("cache.dtype: expected f16 or bf16, got " + std::string(DTypeName(cache.dtype)));
  DROPKV_RETURN_IF_ERROR(CheckRange("cache.sequences", cache.sequences, 1, 1 << 20));
  DROPKV_RETURN_IF_ERROR(CheckRange("cache.kv_heads", cache.kv_heads, 1, 1 << 12));
  DROPKV_RETURN_IF_ERROR(CheckDim("cache.key_dim", cache.key_dim));
  DROPKV_RETURN_IF_ERROR(CheckDim("cache.value_dim", cache.value_dim));
  DROPKV_RETURN_IF_ERROR(CheckRange("cache.max_tokens", cache.max_tokens, 1, 1 << 26));
  constexpr int64_t kMost = int64_t{1} << 30;  // counts of a layer, and numbers of lists, fit 32 bits
  DROPKV_RETURN_IF_ERROR(
      CheckRange("cache.kv_heads * cache.max_tokens", int64_t{cache.kv_heads} * cache.max_tokens, 1, kMost));
  return CheckRange("cache.sequences * cache.kv_heads", int64_t{cache.sequences} * cache.kv_heads, 1, kMost);
}

Status CheckGroups(const Cache& cache, int32_t query_heads) {
  const int64_t most = int64_t{cache.kv_heads} * kMaxGroup;
  DROPKV_RETURN_IF_ERROR(CheckRange("query_heads", query_heads, cache.kv_heads, most));
  if (query_heads % cache.kv_heads == 0) return Status::Ok();
  return InvalidArgument("query_heads: expected a multiple of kv_heads (" + std::to_string(cache.kv_heads) + "), got " +
                         std::to_string(query_heads));
}

Status CheckTensor(const char* name, const Cache& cache, const Tensor& tensor) {
  if (tensor.data == nullptr) return InvalidArgument(std::string(name) + ".data: expected a device pointer, got null");
  if (tensor.token_stride > 0 && tensor.head_stride >= 0 && tensor.sequence_stride >= 0) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected strides of 0 or more, and token_stride of 1 or more, got " +
                         std::to_string(tensor.sequence_stride) + ", " + std::to_string(tensor.head_stride) + ", " +
                         std::to_string(tensor.token_stride) + (cache.blocks != nullptr ? " (paged)" : ""));
}

Status CheckGenerated(const Cache& cache) {
  return CheckRange("cache.max_generated", cache.max_generated, 0, cache.max_tokens);
}

}  // namespace

Status CheckCache(const Cache& cache) {
  DROPKV_RETURN_IF_ERROR(CheckSizes(cache));
  DROPKV_RETURN_IF_ERROR(CheckTensor("cache.k", cache, cache.k));
  DROPKV_RETURN_IF_ERROR(CheckTensor("cache.v", cache, cache.v));
  DROPKV_RETURN_IF_ERROR(CheckGenerated(cache));
  const int kinds = (cache.starts != nullptr) + (cache.blocks != nullptr) + (cache.offsets != nullptr);
  if (kinds > 1)
    return InvalidArgument("cache: expected one of starts, blocks and offsets at most, got " + std::to_string(kinds));
  if (cache.starts != nullptr || cache.offsets != nullptr)
    DROPKV_RETURN_IF_ERROR(CheckRange("cache.rows_in_pool", cache.rows_in_pool, 1, INT32_MAX));
  if (cache.blocks == nullptr) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(CheckRange("cache.block_size", cache.block_size, 1, 1 << 20));
  DROPKV_RETURN_IF_ERROR(CheckRange("cache.blocks_stride", cache.blocks_stride, 1, INT32_MAX));
  return CheckRange("cache.blocks_in_pool", cache.blocks_in_pool, 1, INT32_MAX);
}

Status CheckQueries(const Cache& cache, int32_t query_heads) { return CheckGroups(cache, query_heads); }

Status CheckWorkspace(const void* workspace) {
  if (workspace == nullptr) return InvalidArgument("workspace: expected a device pointer, got null");
  if (reinterpret_cast<uintptr_t>(workspace) % 256 == 0) return Status::Ok();
  return InvalidArgument("workspace: expected an address that is a multiple of 256");
}

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::Ok();
  return {Code::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

SelectParams ToSelect(const Plan& plan) {
  SelectParams params;
  params.sequences = plan.shape.sequences;
  params.kv_heads = plan.shape.kv_heads;
  params.max_tokens = plan.shape.max_tokens;
  params.max_generated = plan.shape.max_generated;
  params.window = plan.policy.window;
  params.sink = plan.policy.sink;
  params.pool = plan.policy.pool;
  params.heads = plan.policy.heads;
  params.alpha = plan.policy.alpha;
  params.fraction = plan.budget.fraction.value_or(0.0);
  params.budget_tokens = plan.budget.tokens;
  params.capacity = plan.capacity;
  return params;
}

CompactParams ToCompact(const Plan& plan) {
  CompactParams params;
  params.source = plan.shape;
  params.max_list = plan.shape.max_tokens;
  return params;
}

namespace {

// Splits of pass 1: as many as give every multiprocessor a block, were there one sequence: long ones in the middle, a
// short one at both ends. The number of sequences does not enter: a sequence's bits must not depend on its neighbours.
void CutTokens(Plan& plan) {
  const int32_t rows = plan.query_heads / plan.shape.kv_heads * plan.rows;
  const int32_t blocks = plan.shape.kv_heads * (rows <= 64 ? 1 : (rows + 127) / 128);
  const int32_t units = (plan.shape.max_tokens + kSplitUnit - 1) / kSplitUnit;
  const int32_t middle = std::clamp(plan.multiprocessors / blocks - 1, 1, std::max(1, units / 2));
  plan.splits = units <= 4 ? 1 : middle + 2;
  plan.split_tokens = SplitTokens(plan.shape.max_tokens, plan.splits);
}

Status ReadDevice(Plan& plan) {
  DROPKV_RETURN_IF_ERROR(
      FromCuda(DeviceAttribute(cudaDevAttrMultiProcessorCount, &plan.multiprocessors), "multiprocessors"));
  DROPKV_RETURN_IF_ERROR(FromCuda(ComputeCapability(&plan.compute_capability), "compute capability"));
  if (plan.compute_capability >= 80) return Status::Ok();
  return Unsupported("device: expected compute capability 8.0 or newer, got " +
                     std::to_string(plan.compute_capability / 10) + "." + std::to_string(plan.compute_capability % 10));
}

Status CheckKernel(const Plan& plan) {
  if (plan.force_kernel.empty() || plan.force_kernel == "any" || plan.force_kernel == "sm80") return Status::Ok();
  if (plan.force_kernel == "sm90" && plan.compute_capability == 90) return Status::Ok();
  return {Code::kNotFound, "force_kernel: expected any, sm80 or, on compute capability 9.0, sm90, got " +
                               plan.force_kernel + " (compute capability " +
                               std::to_string(plan.compute_capability / 10) + "." +
                               std::to_string(plan.compute_capability % 10) + ")"};
}

// Every list of the longest sequence, with as many generated tokens as there may be: no other sequence keeps more,
// since a token less of the prompt is at most one less that the budget keeps. Never more than the tokens there are.
Status CountKept(Plan& plan) {
  const int32_t n = plan.shape.max_tokens - plan.shape.max_generated;
  const auto longest = ResolveBudget(plan.budget, plan.policy, n);
  if (!longest.ok()) return longest.status();
  const int64_t protect = int64_t{plan.policy.window} + plan.policy.sink;
  const int64_t keep = std::min<int64_t>(n, std::max<int64_t>(longest->keep, protect));
  // Rule O's total drifts by the rounding of every head's share.
  const int64_t head = plan.policy.heads == HeadRule::kAdaO ? std::min<int64_t>(n, keep + 1) : keep;
  plan.capacity = int64_t{plan.shape.sequences} * plan.shape.kv_heads * (head + plan.shape.max_generated);
  return Status::Ok();
}

}  // namespace

Result<Plan> MakePlan(const Cache& cache, int32_t query_heads, int32_t rows, bool rows_given, const Policy& policy,
                      const Budget& budget, std::string_view force_kernel) {
  DROPKV_RETURN_IF_ERROR(CheckSizes(cache));
  DROPKV_RETURN_IF_ERROR(CheckGenerated(cache));
  DROPKV_RETURN_IF_ERROR(CheckGroups(cache, query_heads));
  DROPKV_RETURN_IF_ERROR(CheckPolicy(policy));
  if (policy.signal != Signal::kDropKv && policy.signal != Signal::kAttention)
    return Unsupported("policy.signal: expected one that reads queries (dropkv, attention)");
  DROPKV_RETURN_IF_ERROR(CheckRange("rows", rows, 1, kMaxRows));
  Plan plan;
  plan.shape = cache;
  plan.query_heads = query_heads;
  plan.rows = rows;
  plan.rows_given = rows_given;
  plan.policy = policy;
  plan.budget = budget;
  plan.force_kernel = force_kernel;
  DROPKV_RETURN_IF_ERROR(ReadDevice(plan));
  DROPKV_RETURN_IF_ERROR(CheckKernel(plan));
  DROPKV_RETURN_IF_ERROR(CountKept(plan));
  CutTokens(plan);
  plan.workspace_bytes = CutMemory(plan, ToSelect(plan), ToCompact(plan), nullptr).bytes;
  return plan;
}

}  // namespace dropkv::cuda
