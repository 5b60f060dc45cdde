// How decode attention is cut: a list into splits by its own length alone, so that its bits do not depend on what else
// is in the batch. The splits of all lists, one list behind the other, are the items that blocks take.
#pragma once

#include <algorithm>

#include "cuda/any/decode_row.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda::decode {

inline constexpr int32_t kWarps = kThreads / 32;
inline constexpr int32_t kTileTokens = 16;                    // of a warp's step
inline constexpr int32_t kStepTokens = kTileTokens * kWarps;  // of a block's
inline constexpr int32_t kMaxRows = 16;                       // query heads of a KV head: M of the product

// Tokens of a split. Short lists are cut finely, so that a few of them still occupy the device; longer ones coarsely,
// so that the merge of their partial sums stays small.
struct SplitTier {
  int32_t longest;  // list
  int32_t tokens;
};
inline constexpr SplitTier kSplitTiers[] = {{4096, 128}, {16384, 256}, {65536, 512}};
inline constexpr int32_t kLongSplit = 1024;

__host__ __device__ constexpr int32_t SplitTokens(int32_t tokens) {
  if (tokens <= kSplitTiers[0].longest) return kSplitTiers[0].tokens;
  if (tokens <= kSplitTiers[1].longest) return kSplitTiers[1].tokens;
  return tokens <= kSplitTiers[2].longest ? kSplitTiers[2].tokens : kLongSplit;
}

__host__ __device__ constexpr int32_t DivideUp(int32_t a, int32_t b) { return (a + b - 1) / b; }

// An empty list has one split: somebody must write its zeros.
__host__ __device__ constexpr int32_t SplitCount(int32_t tokens) {
  return tokens > 0 ? DivideUp(tokens, SplitTokens(tokens)) : 1;
}

// Most splits of a list of up to `tokens` tokens: the count falls where a tier ends.
constexpr int32_t MaxSplitCount(int32_t tokens) {
  int32_t most = SplitCount(tokens);
  for (const SplitTier& tier : kSplitTiers) most = std::max(most, SplitCount(std::min(tokens, tier.longest)));
  return most;
}

struct DecodeArgs {
  DecodeParams params;
  int32_t lists;
  int32_t stages;     // tiles of a warp's ring
  float logit_scale;  // logit in units of log2(e): soft cap 0: logit_scale * x, else cap2 * tanh(logit_scale * x)
  float cap2;
  int32_t* tickets;  // [2] items handed out, blocks that have finished; 0 between launches
  int32_t* arrived;  // [lists] splits that have finished; 0 between launches
  float2* states;    // [MaxPartials(), g] max, sum
  float* sums;       // [MaxPartials(), g, dv]
};

inline int64_t MaxItems(const DecodeParams& params) {
  return int64_t{params.cache.sequences} * params.cache.kv_heads * MaxSplitCount(params.cache.max_tokens);
}

// The kernel of sm_90 cuts the tiles of all lists evenly instead: this many tiles of 64 tokens a block at least, and
// two partial sums a block at most.
inline constexpr int32_t kShareTokens = 64;
inline constexpr int32_t kLeastTiles = 2;
inline constexpr int64_t kMostBlocks = 512;

inline int64_t MaxBlocks(const DecodeParams& params) {
  const int64_t tiles = std::max(1, DivideUp(params.cache.max_tokens, kShareTokens));
  const int64_t blocks = (params.cache.sequences * tiles * params.cache.kv_heads + kLeastTiles - 1) / kLeastTiles;
  return std::clamp<int64_t>(blocks, 1, kMostBlocks);
}

// Partial sums of either kernel.
inline int64_t MaxPartials(const DecodeParams& params) { return std::max(MaxItems(params), 2 * MaxBlocks(params)); }

// With the workspace divided.
inline DecodeArgs MakeArgs(const DecodeParams& params) {
  auto* memory = static_cast<unsigned char*>(params.workspace);
  DecodeArgs args{};
  args.params = params;
  args.lists = params.cache.sequences * params.cache.kv_heads;
  args.logit_scale = params.soft_cap > 0.0F ? params.scale / params.soft_cap : params.scale * kLog2E;
  args.cap2 = params.soft_cap * kLog2E;
  args.tickets = reinterpret_cast<int32_t*>(memory);
  args.arrived = reinterpret_cast<int32_t*>(memory + 256);
  args.sums = reinterpret_cast<float*>(memory + kDecodeCounterBytes);
  args.states = reinterpret_cast<float2*>(args.sums + MaxPartials(params) * params.group * params.cache.value_dim);
  return args;
}

// A split of a list.
struct Item {
  int32_t id = -1;  // of all items; -1: none
  int32_t list = 0;
  int32_t split = 0;
  int32_t splits = 0;  // of the list
  int32_t begin = 0;   // tokens
  int32_t end = 0;
};

struct alignas(128) Shared {
  int32_t first[kThreads];         // item at which the lists of thread i begin
  float2 state[kWarps][kMaxRows];  // max, sum of every warp
  int32_t sums[kWarps];            // byte in shared memory where a warp left its sums; -1: it had no tokens
  int32_t totals[kWarps];
  int32_t ticket;
  int32_t last;
  uint32_t bad_rows;  // rows whose result is not finite, as bits
  RowScratch scratch;
};

__device__ inline int32_t ListLength(const CacheParams& cache, int32_t list) {
  return Length(cache, list / cache.kv_heads, list % cache.kv_heads);
}

// Fills shared.first; all items. Barriers inside.
__device__ inline int32_t CountItems(const DecodeArgs& args, Shared& shared) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t share = DivideUp(args.lists, kThreads);
  int32_t count = 0;
  for (int32_t i = 0; i < share; ++i) {
    const int32_t list = thread * share + i;
    if (list < args.lists) count += SplitCount(ListLength(args.params.cache, list));
  }
  const int32_t until = WarpInclusiveSum(count);
  if (thread % 32 == 31) shared.totals[thread / 32] = until;
  __syncthreads();
  int32_t before = 0;
  int32_t all = 0;
#pragma unroll
  for (int32_t warp = 0; warp < kWarps; ++warp) {
    if (warp < thread / 32) before += shared.totals[warp];
    all += shared.totals[warp];
  }
  shared.first[thread] = before + until - count;
  __syncthreads();
  return all;
}

// By a whole warp, all lanes alike.
__device__ inline Item FindItem(const DecodeArgs& args, const Shared& shared, int32_t id) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t share = DivideUp(args.lists, kThreads);
  int32_t owner = -1;  // the last thread whose lists begin at or before `id`; threads without lists begin behind all
#pragma unroll
  for (int32_t i = 0; i < kThreads; i += 32) owner += __popc(__ballot_sync(kAllLanes, shared.first[i + lane] <= id));
  int32_t rest = id - shared.first[owner];
  for (int32_t i = 0; i < share; i += 32) {
    const int32_t list = owner * share + i + lane;
    const int32_t tokens = i + lane < share && list < args.lists ? ListLength(args.params.cache, list) : -1;
    const int32_t splits = tokens >= 0 ? SplitCount(tokens) : 0;
    const int32_t until = WarpInclusiveSum(splits);
    const uint32_t holds = __ballot_sync(kAllLanes, rest < until);
    if (holds == 0) {
      rest -= __shfl_sync(kAllLanes, until, 31);
      continue;
    }
    const int32_t source = __ffs(static_cast<int32_t>(holds)) - 1;
    Item item;
    item.id = id;
    item.list = owner * share + i + source;
    item.splits = __shfl_sync(kAllLanes, splits, source);
    item.split = rest - (__shfl_sync(kAllLanes, until, source) - item.splits);
    const int32_t length = __shfl_sync(kAllLanes, tokens, source);
    item.begin = item.split * SplitTokens(length);
    item.end = min(length, item.begin + SplitTokens(length));
    return item;
  }
  return {};
}

}  // namespace dropkv::cuda::decode
