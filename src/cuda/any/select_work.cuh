// What the passes over a CTA's tokens have in common: where its chunks lie, their keys, histograms and positions.
#pragma once

#include "cuda/any/select_search.cuh"

namespace dropkv::cuda {

// The work of the CTAs and their shared memory, in bytes from its start.
struct SelectPlan {
  int32_t lists = 0;
  int32_t list_chunks = 0;      // chunks of one list
  int32_t chunks = 0;           // of all lists
  int32_t cta_chunks = 0;       // consecutive ones
  int32_t key_chunks = 0;       // the first ones of a CTA, whose keys stay in shared memory
  int64_t histogram_words = 0;  // of one list, in global memory
  uint32_t tile = 0, histograms = 0, warp_sums = 0, search = 0, limits = 0, taken = 0, chunk_counts = 0, keys = 0;
  uint32_t shared_bytes = 0;
};

enum class Search : int32_t { kList = 0, kLayer = 1 };  // of a list's limit, of a layer's key

class SelectWork {
 protected:
  // Where a chunk's tokens lie.
  struct Chunk {
    int32_t list;
    int32_t first_token;
  };

  __device__ SelectWork(const SelectParams& params, const SelectPlan& plan, unsigned char* shared)
      : params_(params),
        plan_(plan),
        tile_(reinterpret_cast<float*>(shared + plan.tile)),
        histograms_(reinterpret_cast<uint32_t*>(shared + plan.histograms)),
        warp_sums_(reinterpret_cast<int32_t*>(shared + plan.warp_sums)),
        limits_(reinterpret_cast<SelectLimit*>(shared + plan.limits)),
        keys_(reinterpret_cast<uint4*>(shared + plan.keys)),
        thread_(static_cast<int32_t>(threadIdx.x)),
        first_chunk_(static_cast<int32_t>(blockIdx.x) * plan.cta_chunks),
        end_chunk_(min(first_chunk_ + plan.cta_chunks, plan.chunks)) {}

  __device__ Chunk ChunkAt(int32_t chunk) const {
    return {chunk / plan_.list_chunks, chunk % plan_.list_chunks * kSelectChunk};
  }
  __device__ int32_t SequenceOf(int32_t list) const { return list / params_.kv_heads; }
  __device__ SelectBudget BudgetOfList(int32_t list) const { return BudgetOf(params_, SequenceOf(list)); }
  __device__ int32_t ThreadToken(const Chunk& chunk) const { return chunk.first_token + kKeysPerThread * thread_; }
  __device__ int32_t PooledTokens(int32_t tokens) const {
    return params_.pool.past_only ? tokens - params_.window : tokens;
  }

  __device__ void IssueLoads(int32_t chunk, TileLoads* loads) const {
    const Chunk at = ChunkAt(chunk);
    loads->Issue(params_.raw + static_cast<int64_t>(at.list) * params_.max_tokens, at.first_token,
                 SequenceCandidates(params_, SequenceOf(at.list)), params_.pool);
  }

  // Keys of this thread's tokens, when it makes them for the first time. loads: of this chunk; then of the next one.
  __device__ uint4 FirstKeys(int32_t chunk, const SelectBudget& budget, TileLoads* loads, TokenFlags* flags) {
    const Chunk at = ChunkAt(chunk);
    StoreTile(*loads, at, budget.tokens, flags);
    if (chunk + 1 < end_chunk_) IssueLoads(chunk + 1, loads);
    float4 pooled;
    const uint4 keys = KeysOfTile(&pooled);
    const int32_t index = chunk - first_chunk_;
    if (index < plan_.key_chunks) keys_[index * kSelectThreads + thread_] = keys;
    if (params_.pooled != nullptr) StorePooled(at, budget.tokens, pooled);
    return keys;
  }

  // The same keys in a later pass. Every thread of the CTA must call it.
  __device__ uint4 Keys(int32_t chunk, const SelectBudget& budget) {
    const int32_t index = chunk - first_chunk_;
    if (index < plan_.key_chunks) return keys_[index * kSelectThreads + thread_];
    TileLoads loads;
    TokenFlags counted_before;
    IssueLoads(chunk, &loads);
    StoreTile(loads, ChunkAt(chunk), budget.tokens, &counted_before);
    float4 pooled;
    return KeysOfTile(&pooled);
  }

  __device__ void CountFlags(const TokenFlags& flags) const {
    const int32_t nonfinite = __reduce_add_sync(kAllLanes, flags.nonfinite);
    const int32_t dominant = __reduce_add_sync(kAllLanes, flags.dominant);
    if (params_.counters == nullptr || thread_ % 32 != 0) return;
    if (nonfinite != 0) atomicAdd(&params_.counters->nonfinite_tokens, static_cast<unsigned long long>(nonfinite));
    if (dominant != 0) atomicAdd(&params_.counters->dominant_tokens, static_cast<unsigned long long>(dominant));
  }

  __device__ uint32_t* HistogramIn(Search search) const {
    return histograms_ + static_cast<int32_t>(search) * kSelectBins;
  }
  // Each thread clears the bins that it alone reads at the end of a histogram.
  __device__ void ClearHistogram(Search search) {
#pragma unroll
    for (int32_t i = 0; i < kSelectBins; i += kSelectThreads) HistogramIn(search)[i + thread_] = 0;
  }
  // found: the digits before this one.
  __device__ void AddToHistogram(const Chunk& chunk, const uint4& keys, const SelectBudget& budget, int32_t digit,
                                 uint32_t found, Search search) {
    const uint32_t key[kKeysPerThread] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
    for (int32_t k = 0; k < kKeysPerThread; ++k)
      if (budget.candidate(ThreadToken(chunk) + k) && InQuestion(key[k], digit, found))
        atomicAdd(HistogramIn(search) + DigitOf(key[k], digit), 1U);
  }

  enum class Place : int32_t { kOut, kEqual, kSure };  // beside the limit; protected tokens are sure

  // Of this thread's tokens. The low half of the result counts the sure ones, the high half those equal to the limit.
  __device__ uint32_t Judge(const Chunk& chunk, const uint4& keys, const SelectBudget& budget, uint32_t limit,
                            Place* places) const {
    const uint32_t key[kKeysPerThread] = {keys.x, keys.y, keys.z, keys.w};
    uint32_t counts = 0;
#pragma unroll
    for (int32_t k = 0; k < kKeysPerThread; ++k) {
      const int32_t token = ThreadToken(chunk) + k;
      const bool ranked = budget.candidate(token);
      const bool sure = token < budget.tokens && (!ranked || key[k] > limit);
      const bool equal = ranked && key[k] == limit;
      places[k] = sure ? Place::kSure : equal ? Place::kEqual : Place::kOut;
      counts += (sure ? 1U : 0U) + (equal ? 1U << 16 : 0U);
    }
    return counts;
  }

  // A list's length, where it keeps `taken` candidates.
  __device__ int32_t Kept(const SelectBudget& budget, int32_t taken) const {
    return (budget.all ? budget.tokens : params_.window + params_.sink + taken) + budget.generated;
  }

  // Positions of one chunk; the list begins at `base`. before: the list's sure and equal tokens in earlier chunks, then
  // with those of this one. Two sets of sums by turns: a warp may be one chunk ahead of another.
  __device__ void WriteChunk(int32_t chunk, const SelectBudget& budget, const SelectLimit& limit, int64_t base,
                             int2* before) {
    const Chunk at = ChunkAt(chunk);
    int32_t* sums = warp_sums_ + chunk % 2 * kSelectWarps;
    Place places[kKeysPerThread];
    const uint32_t counts = Judge(at, Keys(chunk, budget), budget, limit.key, places);
    const uint32_t through = WarpInclusiveSum(counts);
    if (thread_ % 32 == 31) sums[thread_ / 32] = static_cast<int32_t>(through);
    __syncthreads();
    const uint32_t ahead = static_cast<uint32_t>(SumBeforeWarp(sums, thread_ / 32)) + through - counts;
    int32_t sure = before->x + static_cast<int32_t>(ahead & 0xFFFFU);
    int32_t equal = before->y + static_cast<int32_t>(ahead >> 16);
#pragma unroll
    for (int32_t k = 0; k < kKeysPerThread; ++k) {
      const int64_t to = base + sure + min(equal, limit.equal);
      const bool kept = places[k] == Place::kSure || (places[k] == Place::kEqual && equal < limit.equal);
      if (kept && to < params_.capacity) params_.positions[to] = ThreadToken(at) + k;
      if (places[k] == Place::kSure) ++sure;
      if (places[k] == Place::kEqual) ++equal;
    }
    const auto total = static_cast<uint32_t>(SumBeforeWarp(sums, kSelectWarps));
    before->x += static_cast<int32_t>(total & 0xFFFFU);
    before->y += static_cast<int32_t>(total >> 16);
  }

  // And the generated tokens, with which every list ends.
  __device__ void WriteEnds(int32_t list, const SelectBudget& budget, int64_t base, int32_t kept) const {
    const int64_t end = base + kept;
    for (int32_t i = thread_; i < budget.generated; i += kSelectThreads) {
      const int64_t to = end - budget.generated + i;
      if (to < params_.capacity) params_.positions[to] = budget.tokens + i;
    }
    if (thread_ != 0) return;
    params_.offsets[list] = base;
    if (list + 1 == plan_.lists) params_.offsets[list + 1] = end;
  }

  const SelectParams& params_;
  const SelectPlan& plan_;
  float* tile_;
  uint32_t* histograms_;  // [1 or 2, kSelectBins]
  int32_t* warp_sums_;    // [max(2, Hkv), kSelectWarps]
  SelectLimit* limits_;   // [lists of this CTA]
  uint4* keys_;           // [key_chunks, kSelectThreads]
  int32_t thread_;
  int32_t first_chunk_, end_chunk_;

 private:
  // The two barriers keep the tile from those who still read the previous one, and from those who read this one.
  __device__ void StoreTile(const TileLoads& loads, const Chunk& chunk, int32_t tokens, TokenFlags* flags) {
    __syncthreads();
    loads.Store(tile_, chunk.first_token, PooledTokens(tokens), params_.pool, flags);
    __syncthreads();
  }

  __device__ uint4 KeysOfTile(float4* pooled) const {
    const float* own = tile_ + kKeysPerThread * thread_;
    *pooled = PoolFour(own, params_.pool);
    const float* raw = own + params_.pool.after;
    return {MakeKey(raw[0], pooled->x), MakeKey(raw[1], pooled->y), MakeKey(raw[2], pooled->z),
            MakeKey(raw[3], pooled->w)};
  }

  __device__ void StorePooled(const Chunk& chunk, int32_t tokens, const float4& pooled) const {
    float* out = params_.pooled + static_cast<int64_t>(chunk.list) * params_.max_tokens;
    const float value[kKeysPerThread] = {pooled.x, pooled.y, pooled.z, pooled.w};
#pragma unroll
    for (int32_t k = 0; k < kKeysPerThread; ++k) {
      const int32_t token = ThreadToken(chunk) + k;
      if (token < tokens) out[token] = token < PooledTokens(tokens) ? value[k] : 0.0F;
    }
  }
};

}  // namespace dropkv::cuda
