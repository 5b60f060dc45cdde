// Selection by all CTAs of one cooperative launch, which meet between the passes: histogram of the first digit, of the
// second and of the third, counts of every chunk, positions. Every CTA searches the histograms for itself.
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "cuda/any/select_work.cuh"

namespace dropkv::cuda {

struct SelectMemory {
  uint32_t* histograms = nullptr;    // [lists]: digit 0; digits 1 and 2 of the list's search, then of the layer's
  uint32_t* chunk_counts = nullptr;  // [chunks] as SelectWork::Judge counts
  int32_t* kept = nullptr;           // [lists]
  size_t bytes = 0;
};

class LayerSelector : SelectWork {
 public:
  __device__ LayerSelector(const SelectParams& params, const SelectPlan& plan, const SelectMemory& memory,
                           unsigned char* shared)
      : SelectWork(params, plan, shared),
        memory_(memory),
        search_(reinterpret_cast<int32_t*>(shared + plan.search)),
        taken_(reinterpret_cast<int32_t*>(shared + plan.taken)),
        counts_(reinterpret_cast<uint32_t*>(shared + plan.chunk_counts)),
        first_list_(first_chunk_ / plan.list_chunks),
        end_list_((end_chunk_ - 1) / plan.list_chunks + 1) {}

  __device__ void Run() {
    const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    Clear();
    FirstPass(grid, grid.barrier_arrive());
    grid.sync();
    const HeadRule rule = params_.heads;
    if (rule != HeadRule::kUniform) {
      FindDigits(grid, rule == HeadRule::kAda, true);
      Share();
    }
    if (rule != HeadRule::kAda) FindDigits(grid, true, false);
    CountPass();
    grid.sync();
    WritePass();
  }

 private:
  __device__ uint32_t* HistogramOf(int32_t list, int32_t digit, Search search) const {
    int64_t at = list * plan_.histogram_words;
    if (digit > 0) at += DigitBins(0) + static_cast<int64_t>(search) * (DigitBins(1) + DigitBins(2));
    return memory_.histograms + (digit == 2 ? at + DigitBins(1) : at);
  }
  __device__ LayerSearch LayerOf(int32_t sequence) const {
    const int32_t index = sequence - SequenceOf(first_list_);
    return {search_ + 1 + index * LayerSearch::Words(params_.kv_heads), params_.kv_heads};
  }

  // f(list, first chunk, end of chunks) for every list of this CTA, with the chunks that the CTA has of it.
  template <typename F>
  __device__ void ForLists(F&& f) {
    for (int32_t list = first_list_; list < end_list_; ++list)
      f(list, max(first_chunk_, list * plan_.list_chunks), min(end_chunk_, (list + 1) * plan_.list_chunks));
  }
  // f(sequence, budget) for those whose heads share what they keep.
  template <typename F>
  __device__ void ForSharedLayers(F&& f) {
    const int32_t last = SequenceOf(end_list_ - 1);
    for (int32_t sequence = SequenceOf(first_list_); sequence <= last; ++sequence) {
      const SelectBudget budget = BudgetOf(params_, sequence);
      if (budget.shared(params_.heads)) f(sequence, budget);
    }
  }

  // This CTA's share of the histograms in memory, and the state of its searches.
  __device__ void Clear() {
    auto* words = reinterpret_cast<uint4*>(memory_.histograms);
    const int64_t count = plan_.lists * plan_.histogram_words / 4;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSelectThreads + thread_; i < count;
         i += static_cast<int64_t>(gridDim.x) * kSelectThreads)
      words[i] = {};
    for (int32_t i = thread_; i < plan_.cta_chunks; i += kSelectThreads) counts_[i] = 0;
    if (params_.heads != HeadRule::kUniform) {
      const int32_t sequences = SequenceOf(end_list_ - 1) - SequenceOf(first_list_) + 1;
      for (int32_t i = thread_; i < sequences * LayerSearch::Words(params_.kv_heads); i += kSelectThreads)
        search_[1 + i] = 0;
    }
    for (int32_t list = first_list_ + thread_; list < end_list_; list += kSelectThreads) {
      const SelectBudget budget = BudgetOfList(list);
      const int32_t rank = params_.heads == HeadRule::kUniform ? budget.others : budget.safe;
      limits_[list - first_list_] = LimitOfRank(rank);
      taken_[list - first_list_] = rank;
    }
  }

  __device__ void FlushHistogram(int32_t list, int32_t digit, Search search) {
    const uint32_t* bins = HistogramIn(search);
    uint32_t* out = HistogramOf(list, digit, search);
    for (int32_t i = thread_; i < DigitBins(digit); i += kSelectThreads)
      if (bins[i] != 0) atomicAdd(out + i, bins[i]);
  }

  // Makes all keys; histograms of the first digit. `cleared` ends when all CTAs have cleared their share.
  template <typename Token>
  __device__ void FirstPass(const cooperative_groups::grid_group& grid, Token&& cleared) {
    TokenFlags flags;
    TileLoads loads;
    IssueLoads(first_chunk_, &loads);
    bool waited = false;
    ForLists([&](int32_t list, int32_t begin, int32_t end) {
      const SelectBudget budget = BudgetOfList(list);
      ClearHistogram(Search::kList);
      for (int32_t chunk = begin; chunk < end; ++chunk)
        AddToHistogram(ChunkAt(chunk), FirstKeys(chunk, budget, &loads, &flags), budget, 0, 0, Search::kList);
      if (!waited) grid.barrier_wait(std::forward<Token>(cleared));
      waited = true;
      __syncthreads();
      FlushHistogram(list, 0, Search::kList);
    });
    CountFlags(flags);
  }

  // Histograms of a digit of those keys that share the digits found so far.
  __device__ void HistogramPass(int32_t digit, bool of_lists, bool of_layers) {
    ForLists([&](int32_t list, int32_t begin, int32_t end) {
      const SelectBudget budget = BudgetOfList(list);
      const SelectLimit limit = limits_[list - first_list_];
      const bool list_open = of_lists && limit.equal != 0;
      const bool layer_open = of_layers && budget.shared(params_.heads);
      if (!list_open && !layer_open) return;
      const uint32_t layer_key = layer_open ? *LayerOf(SequenceOf(list)).key : 0;
      if (list_open) ClearHistogram(Search::kList);
      if (layer_open) ClearHistogram(Search::kLayer);
      __syncthreads();
      for (int32_t chunk = begin; chunk < end; ++chunk) {
        const uint4 keys = Keys(chunk, budget);
        if (list_open) AddToHistogram(ChunkAt(chunk), keys, budget, digit, limit.key, Search::kList);
        if (layer_open) AddToHistogram(ChunkAt(chunk), keys, budget, digit, layer_key, Search::kLayer);
      }
      __syncthreads();
      if (list_open) FlushHistogram(list, digit, Search::kList);
      if (layer_open) FlushHistogram(list, digit, Search::kLayer);
    });
  }

  // All digits of the lists' limits, of the layers' keys, or of both side by side.
  __device__ void FindDigits(const cooperative_groups::grid_group& grid, bool of_lists, bool of_layers) {
    for (int32_t digit = 0; digit < kDigits; ++digit) {
      for (int32_t list = first_list_; of_lists && list < end_list_; ++list)
        FindDigit<Histogram::kGlobal>(HistogramOf(list, digit, Search::kList), digit, limits_ + list - first_list_,
                                      warp_sums_);
      if (of_layers)
        ForSharedLayers([&](int32_t sequence, const SelectBudget& budget) {
          FindLayerDigit(HistogramOf(sequence * params_.kv_heads, digit, Search::kLayer), plan_.histogram_words, digit,
                         params_.kv_heads, budget, LayerOf(sequence), warp_sums_, search_);
        });
      if (digit + 1 == kDigits) return;
      HistogramPass(digit + 1, of_lists, of_layers);
      grid.sync();
    }
  }

  // The layers' keys are known: what every list takes. Rule K has its limit then, rule O only its rank.
  __device__ void Share() {
    ForSharedLayers(
        [&](int32_t sequence, const SelectBudget& budget) { ShareLayer(params_, budget, LayerOf(sequence)); });
    for (int32_t list = first_list_ + thread_; list < end_list_; list += kSelectThreads) {
      const SelectBudget budget = BudgetOfList(list);
      if (!budget.shared(params_.heads)) continue;
      const LayerSearch layer = LayerOf(SequenceOf(list));
      const int32_t head = list % params_.kv_heads;
      const int32_t count = layer.same[head];
      taken_[list - first_list_] = count;
      if (params_.heads == HeadRule::kAdaO) {
        limits_[list - first_list_] = LimitOfRank(count);
      } else if (count > budget.safe) {
        limits_[list - first_list_] = {*layer.key, count - layer.above[head]};
      }
    }
    __syncthreads();
  }

  __device__ void CountPass() {
    ForLists([&](int32_t list, int32_t begin, int32_t end) {
      const SelectBudget budget = BudgetOfList(list);
      const uint32_t limit = limits_[list - first_list_].key;
      for (int32_t chunk = begin; chunk < end; ++chunk) {
        Place places[kKeysPerThread];
        const uint32_t counts =
            __reduce_add_sync(kAllLanes, Judge(ChunkAt(chunk), Keys(chunk, budget), budget, limit, places));
        if (thread_ % 32 == 0 && counts != 0) atomicAdd(counts_ + chunk - first_chunk_, counts);
      }
      if (begin == list * plan_.list_chunks && thread_ == 0)
        memory_.kept[list] = Kept(budget, taken_[list - first_list_]);
    });
    __syncthreads();
    for (int32_t i = thread_; i < end_chunk_ - first_chunk_; i += kSelectThreads)
      memory_.chunk_counts[first_chunk_ + i] = counts_[i];
  }

  // Sums that every warp takes for itself.
  __device__ int64_t KeptBefore(int32_t list) const {
    int64_t sum = 0;
    for (int32_t i = thread_ % 32; i < list; i += 32) sum += __ldcg(memory_.kept + i);
    return __shfl_sync(kAllLanes, WarpInclusiveSum(sum), 31);
  }
  __device__ int2 CountsBefore(int32_t first, int32_t chunk) const {
    int2 sum{0, 0};
    for (int32_t i = first + thread_ % 32; i < chunk; i += 32) {
      const uint32_t counts = __ldcg(memory_.chunk_counts + i);
      sum.x += static_cast<int32_t>(counts & 0xFFFFU);
      sum.y += static_cast<int32_t>(counts >> 16);
    }
    return {__reduce_add_sync(kAllLanes, sum.x), __reduce_add_sync(kAllLanes, sum.y)};
  }

  __device__ void WritePass() {
    int64_t base = KeptBefore(first_list_);
    ForLists([&](int32_t list, int32_t begin, int32_t end) {
      const SelectBudget budget = BudgetOfList(list);
      const SelectLimit limit = limits_[list - first_list_];
      const int32_t first = list * plan_.list_chunks;
      const int32_t kept = __ldcg(memory_.kept + list);
      if (begin == first) WriteEnds(list, budget, base, kept);
      int2 before = CountsBefore(first, begin);
      for (int32_t chunk = begin; chunk < end; ++chunk) WriteChunk(chunk, budget, limit, base, &before);
      base += kept;
    });
  }

  const SelectMemory& memory_;
  int32_t* search_;   // one word, then the LayerSearch of every sequence of this CTA
  int32_t* taken_;    // [lists of this CTA] candidates kept
  uint32_t* counts_;  // [chunks of this CTA], as SelectMemory::chunk_counts
  int32_t first_list_, end_list_;
};

}  // namespace dropkv::cuda
