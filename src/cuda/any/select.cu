// From raw scores to ascending lists of kept tokens, in one launch for all sequences and heads: a CTA for every list
// where lists are short and do not share a budget, else all CTAs together.
#include <algorithm>

#include "cuda/any/select_layer.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

constexpr int64_t kMaxLayerTokens = int64_t{1} << 30;  // of all heads of a sequence: their counts fit 32 bits
constexpr int32_t kShortListChunks = 4;
constexpr uint32_t kSharedAlignment = 16;
constexpr size_t kMemoryAlignment = 256;
constexpr uint32_t kChunkKeyBytes = kSelectChunk * sizeof(uint32_t);

// A list by one CTA. Only without shared budgets: where its positions begin then follows from the lengths alone.
class ListSelector : SelectWork {
 public:
  __device__ ListSelector(const SelectParams& params, const SelectPlan& plan, unsigned char* shared)
      : SelectWork(params, plan, shared),
        list_(static_cast<int32_t>(blockIdx.x)),
        budget_(BudgetOfList(static_cast<int32_t>(blockIdx.x))) {}

  __device__ void Run() {
    MakeKeys();
    for (int32_t digit = 0; digit < kDigits; ++digit) {
      __syncthreads();
      FindDigit<Histogram::kShared>(HistogramIn(Search::kList), digit, limits_, warp_sums_);
      if (digit + 1 == kDigits || limits_->equal == 0) break;
      ClearHistogram(Search::kList);
      __syncthreads();
      for (int32_t chunk = first_chunk_; chunk < end_chunk_; ++chunk)
        AddToHistogram(ChunkAt(chunk), Keys(chunk, budget_), budget_, digit + 1, limits_->key, Search::kList);
    }
    const int64_t base = KeptBefore();
    WriteEnds(list_, budget_, base, Kept(budget_, budget_.others));
    int2 before{0, 0};
    for (int32_t chunk = first_chunk_; chunk < end_chunk_; ++chunk) WriteChunk(chunk, budget_, *limits_, base, &before);
  }

 private:
  // And the histogram of the first digit.
  __device__ void MakeKeys() {
    TokenFlags flags;
    TileLoads loads;
    IssueLoads(first_chunk_, &loads);
    ClearHistogram(Search::kList);
    if (thread_ == 0) *limits_ = LimitOfRank(budget_.others);
    for (int32_t chunk = first_chunk_; chunk < end_chunk_; ++chunk)
      AddToHistogram(ChunkAt(chunk), FirstKeys(chunk, budget_, &loads, &flags), budget_, 0, 0, Search::kList);
    CountFlags(flags);
  }

  // In all lists before this one; every warp for itself.
  __device__ int64_t KeptBefore() const {
    const int32_t sequence = SequenceOf(list_);
    int64_t sum = 0;
    for (int32_t i = thread_ % 32; i < sequence; i += 32) {
      const SelectBudget budget = BudgetOf(params_, i);
      sum += Kept(budget, budget.others);
    }
    sum = __shfl_sync(kAllLanes, WarpInclusiveSum(sum), 31);
    return sum * params_.kv_heads + static_cast<int64_t>(list_ % params_.kv_heads) * Kept(budget_, budget_.others);
  }

  int32_t list_;
  SelectBudget budget_;
};

__global__ void __launch_bounds__(kSelectThreads)
    SelectListKernel(const __grid_constant__ SelectParams params, const __grid_constant__ SelectPlan plan) {
  extern __shared__ uint4 select_shared[];
  ChainStart();
  ListSelector(params, plan, reinterpret_cast<unsigned char*>(select_shared)).Run();
}

__global__ void __launch_bounds__(kSelectThreads, 1)
    SelectLayerKernel(const __grid_constant__ SelectParams params, const __grid_constant__ SelectPlan plan,
                      const __grid_constant__ SelectMemory memory) {
  extern __shared__ uint4 select_shared[];
  ChainStart();
  LayerSelector(params, plan, memory, reinterpret_cast<unsigned char*>(select_shared)).Run();
}

int32_t CeilDiv(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

bool ListsAlone(const SelectParams& params, const SelectPlan& plan) {
  return params.heads == HeadRule::kUniform && plan.list_chunks <= kShortListChunks;
}

// What follows from the shape alone.
SelectPlan PlanOfShape(const SelectParams& params) {
  SelectPlan plan;
  plan.lists = params.sequences * params.kv_heads;
  plan.list_chunks = std::max(1, CeilDiv(params.max_tokens, kSelectChunk));
  plan.chunks = plan.lists * plan.list_chunks;
  const int64_t searches = params.heads == HeadRule::kUniform ? 1 : 2;
  plan.histogram_words = DigitBins(0) + searches * (DigitBins(1) + DigitBins(2));
  return plan;
}

SelectMemory LayOutMemory(const SelectParams& params, const SelectPlan& plan) {
  SelectMemory memory;
  if (ListsAlone(params, plan)) return memory;
  auto* base = static_cast<unsigned char*>(params.workspace);
  const auto take = [&](size_t bytes) {
    unsigned char* at = base == nullptr ? nullptr : base + memory.bytes;
    memory.bytes += (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
    return at;
  };
  memory.histograms = reinterpret_cast<uint32_t*>(take(plan.lists * plan.histogram_words * sizeof(uint32_t)));
  memory.chunk_counts = reinterpret_cast<uint32_t*>(take(plan.chunks * sizeof(uint32_t)));
  memory.kept = reinterpret_cast<int32_t*>(take(plan.lists * sizeof(int32_t)));
  return memory;
}

// Shared memory of a CTA with plan.cta_chunks chunks; the keys take what is left of `limit`, as far as they need it.
void LayOutShared(const SelectParams& params, uint32_t limit, SelectPlan* plan) {
  const int32_t lists = std::min(plan->lists, (plan->cta_chunks + plan->list_chunks - 2) / plan->list_chunks + 1);
  const int32_t sequences = std::min(params.sequences, (lists + params.kv_heads - 2) / params.kv_heads + 1);
  const bool shared = params.heads != HeadRule::kUniform;
  const auto take = [&](int64_t bytes) {
    const uint32_t at = plan->shared_bytes;
    plan->shared_bytes += static_cast<uint32_t>((bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment);
    return at;
  };
  plan->shared_bytes = 0;
  plan->tile = take(SelectTileFloats(params.pool) * int64_t{sizeof(float)});
  plan->histograms = take((shared ? 2 : 1) * kSelectBins * int64_t{sizeof(uint32_t)});
  plan->warp_sums = take((shared ? std::max(2, params.kv_heads) : 2) * kSelectWarps * int64_t{sizeof(int32_t)});
  plan->search = take((1 + sequences * LayerSearch::Words(shared ? params.kv_heads : 0)) * int64_t{sizeof(int32_t)});
  plan->limits = take(lists * int64_t{sizeof(SelectLimit)});
  plan->taken = take(lists * int64_t{sizeof(int32_t)});
  plan->chunk_counts = take(plan->cta_chunks * int64_t{sizeof(uint32_t)});
  const int32_t left =
      limit > plan->shared_bytes ? static_cast<int32_t>((limit - plan->shared_bytes) / kChunkKeyBytes) : 0;
  plan->key_chunks = std::min(plan->cta_chunks, left);
  plan->keys = take(int64_t{plan->key_chunks} * kChunkKeyBytes);
}

struct DeviceLimits {
  int32_t multiprocessors = 0;
  int32_t shared_bytes = 0;  // of a CTA
};

cudaError_t ReadLimits(DeviceLimits* limits) {
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMultiProcessorCount, &limits->multiprocessors);
      error != cudaSuccess)
    return error;
  return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits->shared_bytes);
}

}  // namespace

size_t SelectWorkspaceBytes(const SelectParams& params) {
  SelectParams nowhere = params;
  nowhere.workspace = nullptr;
  return LayOutMemory(nowhere, PlanOfShape(params)).bytes;
}

cudaError_t LaunchSelect(const SelectParams& params, cudaStream_t stream) {
  if (params.sequences < 1 || params.kv_heads < 1 || params.max_tokens < 0 ||
      int64_t{params.kv_heads} * params.max_tokens > kMaxLayerTokens)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = ReadLimits(&limits); error != cudaSuccess) return error;
  SelectPlan plan = PlanOfShape(params);
  const bool alone = ListsAlone(params, plan);
  plan.cta_chunks = alone ? plan.list_chunks : CeilDiv(plan.chunks, limits.multiprocessors);
  LayOutShared(params, limits.shared_bytes, &plan);
  if (plan.shared_bytes > static_cast<uint32_t>(limits.shared_bytes)) return cudaErrorInvalidValue;
  const SelectMemory memory = LayOutMemory(params, plan);
  // Always the device's limit: launches from several threads must not lower it for one another.
  const void* kernel =
      alone ? reinterpret_cast<const void*>(SelectListKernel) : reinterpret_cast<const void*>(SelectLayerKernel);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes);
      error != cudaSuccess)
    return error;
  const dim3 grid(CeilDiv(plan.chunks, plan.cta_chunks));
  if (alone) return LaunchChained(SelectListKernel, grid, kSelectThreads, plan.shared_bytes, stream, params, plan);
  return LaunchCooperative(SelectLayerKernel, grid, kSelectThreads, plan.shared_bytes, stream, params, plan, memory);
}

}  // namespace dropkv::cuda
