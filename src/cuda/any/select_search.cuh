// Finds the key of a rank digit by digit, from histograms of the digits in global memory. A whole CTA calls each
// function; every CTA that needs a result finds it for itself, which is cheaper than to wait for another one.
#pragma once

#include "cuda/any/select_budget.cuh"
#include "cuda/any/select_keys.cuh"
#include "cuda/any/vector.cuh"

namespace dropkv::cuda {

inline constexpr int32_t kDigits = 3;
inline constexpr int32_t kSelectBins = 2048;  // of the widest digit: 4 a thread
inline constexpr int32_t kSelectWarps = kSelectThreads / 32;
static_assert(kSelectBins == 4 * kSelectThreads);

__device__ constexpr int32_t DigitShift(int32_t digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
__host__ __device__ constexpr int32_t DigitBits(int32_t digit) { return digit == 2 ? 10 : 11; }
__host__ __device__ constexpr int32_t DigitBins(int32_t digit) { return 1 << DigitBits(digit); }
__device__ constexpr uint32_t DigitOf(uint32_t key, int32_t digit) {
  return key >> DigitShift(digit) & (DigitBins(digit) - 1U);
}
// The digits above agree with those found so far.
__device__ constexpr bool InQuestion(uint32_t key, int32_t digit, uint32_t found) {
  return digit == 0 || key >> DigitShift(digit - 1) == found;
}

// What a list keeps of its candidates: those with a larger key, and the first `equal` with this key. While the key is
// searched: its first digits, and the rank among the candidates that share them.
struct SelectLimit {
  uint32_t key;
  int32_t equal;
};

// Before any digit is known.
__device__ inline SelectLimit LimitOfRank(int32_t rank) {
  return rank > 0 ? SelectLimit{0, rank} : SelectLimit{kNonFiniteKey, 0};
}

enum class Histogram { kShared, kGlobal };  // kGlobal: other CTAs added to it, so that only L2 has the sums

// Bins of one thread, from the largest digit of thread 0 down to 0. A digit with fewer bins leaves threads without.
template <Histogram kPlace>
struct BinsOfThread {
  uint32_t count[4];  // of bins top, top-1, top-2, top-3
  int32_t top;

  __device__ BinsOfThread(const uint32_t* histogram, int32_t digit, int32_t thread) : count{} {
    top = DigitBins(digit) - 1 - 4 * thread;
    if (top < 0) return;
    const auto* four = reinterpret_cast<const uint4*>(histogram + top - 3);
    const uint4 loaded = kPlace == Histogram::kShared ? *four : __ldcg(four);
    count[0] = loaded.w, count[1] = loaded.z, count[2] = loaded.y, count[3] = loaded.x;
  }
  __device__ int32_t sum() const { return static_cast<int32_t>(count[0] + count[1] + count[2] + count[3]); }
};

// Sum of the counts of the warps before `warp`.
__device__ inline int32_t SumBeforeWarp(const int32_t* warp_sums, int32_t warp) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  return __reduce_add_sync(kAllLanes, lane < warp ? warp_sums[lane] : 0);
}

// The next digit of one list's limit. warp_sums: kSelectWarps in shared memory.
template <Histogram kPlace>
__device__ inline void FindDigit(const uint32_t* histogram, int32_t digit, SelectLimit* limit, int32_t* warp_sums) {
  const int32_t rank = limit->equal;
  if (rank == 0) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const BinsOfThread<kPlace> bins(histogram, digit, thread);
  const int32_t through = WarpInclusiveSum(bins.sum());
  if (thread % 32 == 31) warp_sums[thread / 32] = through;
  __syncthreads();
  const int32_t before = SumBeforeWarp(warp_sums, thread / 32) + through - bins.sum();
  if (before < rank && rank <= before + bins.sum()) {
    int32_t bin = bins.top;
    int32_t above = before;
#pragma unroll
    for (int32_t i = 0; i < 3; ++i) {
      const int32_t next = above + static_cast<int32_t>(bins.count[i]);
      if (bin == bins.top - i && next < rank) above = next, --bin;
    }
    *limit = {limit->key << DigitBits(digit) | static_cast<uint32_t>(bin), rank - above};
  }
  __syncthreads();
}

// The search over all heads of a sequence, in shared memory: for the key T, the largest one for which
// sum_h max(safe, candidates of head h with a key >= T) reaches the layer's budget.
struct LayerSearch {
  uint32_t* key;   // T, or its first digits
  int32_t* above;  // [Hkv] candidates with larger first digits
  int32_t* same;   // [Hkv] candidates with the same; at the end how many candidates each head keeps

  __device__ LayerSearch(int32_t* memory, int32_t kv_heads)
      : key(reinterpret_cast<uint32_t*>(memory)), above(memory + 1), same(memory + 1 + kv_heads) {}
  __host__ __device__ static constexpr int32_t Words(int32_t kv_heads) { return 1 + 2 * kv_heads; }
};

// Bin of this digit of T. warp_sums: [Hkv, kSelectWarps], left filled; found: one word, both in shared memory.
// histograms of the sequence's heads lie `stride` words apart.
__device__ inline int32_t FindLayerBin(const uint32_t* histograms, int64_t stride, int32_t digit, int32_t kv_heads,
                                       const SelectBudget& budget, const LayerSearch& search, int32_t* warp_sums,
                                       int32_t* found) {
  constexpr int32_t kHeadsAtOnce = 4;  // their loads and sums overlap
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t budget_of_layer = kv_heads * budget.others;
  int32_t kept_before = 0;  // of all heads: if T lay above this thread's bins
  int32_t kept[4] = {};     // if T lay in bin top - i
  for (int32_t first = 0; first < kv_heads; first += kHeadsAtOnce) {
    uint32_t counts[kHeadsAtOnce][4];
    int32_t before[kHeadsAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kHeadsAtOnce; ++i) {
      const int32_t head = min(first + i, kv_heads - 1);
      const BinsOfThread<Histogram::kGlobal> bins(histograms + head * stride, digit, thread);
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) counts[i][k] = bins.count[k];
      const int32_t through = WarpInclusiveSum(bins.sum());
      before[i] = through - bins.sum();
      if (thread % 32 == 31) warp_sums[head * kSelectWarps + thread / 32] = through;
    }
    __syncthreads();
#pragma unroll
    for (int32_t i = 0; i < kHeadsAtOnce; ++i) {
      const int32_t head = min(first + i, kv_heads - 1);
      int32_t above = search.above[head] + SumBeforeWarp(warp_sums + head * kSelectWarps, thread / 32) + before[i];
      if (first + i >= kv_heads) continue;
      kept_before += max(budget.safe, above);
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) {
        above += static_cast<int32_t>(counts[i][k]);
        kept[k] += max(budget.safe, above);
      }
    }
  }
  if (kept_before < budget_of_layer && kept[3] >= budget_of_layer) {
    int32_t bin = DigitBins(digit) - 1 - 4 * thread;
#pragma unroll
    for (int32_t i = 0; i < 3; ++i)
      if (kept[i] < budget_of_layer) --bin;
    *found = bin;
  }
  __syncthreads();
  return *found;
}

// The next digit of T.
__device__ inline void FindLayerDigit(const uint32_t* histograms, int64_t stride, int32_t digit, int32_t kv_heads,
                                      const SelectBudget& budget, const LayerSearch& search, int32_t* warp_sums,
                                      int32_t* found) {
  const int32_t bin = FindLayerBin(histograms, stride, digit, kv_heads, budget, search, warp_sums, found);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t owner = (DigitBins(digit) - 1 - bin) / 128;  // the warp that holds the bin
  for (int32_t head = warp; head < kv_heads; head += kSelectWarps) {
    const BinsOfThread<Histogram::kGlobal> bins(histograms + head * stride, digit, owner * 32 + lane);
    int32_t larger = lane < owner ? warp_sums[head * kSelectWarps + lane] : 0;
    int32_t same = 0;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (bins.top - i > bin) larger += static_cast<int32_t>(bins.count[i]);
      if (bins.top - i == bin) same = static_cast<int32_t>(bins.count[i]);
    }
    larger = __reduce_add_sync(kAllLanes, larger);
    same = __reduce_add_sync(kAllLanes, same);
    if (lane == 0) search.above[head] += larger, search.same[head] = same;
  }
  if (threadIdx.x == 0) *search.key = *search.key << DigitBits(digit) | static_cast<uint32_t>(bin);
  __syncthreads();
}

// When T is known: search.same becomes the heads' counts. Tokens with the key T go to the lower heads first, but for
// those that a head already has among its safe ones.
__device__ inline void ShareLayer(const SelectParams& params, const SelectBudget& budget, const LayerSearch& search) {
  if (threadIdx.x == 0) {
    int32_t spare = params.kv_heads * budget.others;
    for (int32_t head = 0; head < params.kv_heads; ++head) spare -= max(budget.safe, search.above[head]);
    for (int32_t head = 0; head < params.kv_heads; ++head) {
      const int32_t above = search.above[head];
      const int32_t sure = max(budget.safe, above);
      const int32_t taken = min(max(above + search.same[head] - sure, 0), spare);
      spare -= taken;
      const int32_t count = sure + taken;
      search.same[head] = params.heads == HeadRule::kAdaO ? DrawnCount(params, budget, count) : count;
    }
  }
  __syncthreads();
}

}  // namespace dropkv::cuda
