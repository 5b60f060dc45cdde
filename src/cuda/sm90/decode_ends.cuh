// What follows an item's last tile, off the way of those who compute: whether its list is complete, and then the merge.
// An answer of the device's memory takes microseconds when all of it is busy. The warps that compute store their sums
// without waiting, and name the item here; warps that do nothing else ask the list's counter, for all items that have
// gathered since they asked last.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm80/decode_plan.cuh"

namespace dropkv::cuda::sm90 {

inline constexpr int32_t kConsumers = 128;  // threads that compute: as many as AttendRow takes
inline constexpr int32_t kEndWarps = 3;
inline constexpr int32_t kEndThreads = kEndWarps * 32;
inline constexpr int32_t kEndSlots = 8;  // items on the way from the ones to the others
static_assert(kConsumers == decode::kThreads);

// Named barriers.
inline constexpr int32_t kEndsBarrier = 2;  // of the end warps
inline constexpr int32_t kLastBarrier = 3;  // of these and those that compute

// Items that were counted together, the first of them the block's `first`-th.
struct EndRound {
  int32_t first;
  int32_t count;
  uint32_t complete;  // as bits: those that completed their lists
  int32_t is_last;    // the block has no more
};

struct EndTables {
  uint64_t full[kEndSlots];
  decode::Item items[kEndSlots];
  int32_t left;        // items that were named
  int32_t total;       // all of the block; -1: not known yet
  int32_t free;        // items whose slots were given back
  EndRound rounds[2];  // of this and the next
  EndRound last;
  uint32_t bad_rows;  // of a list: not finite
  int32_t redo;       // some list has such
  uint32_t redo_rows[kConsumers];
  decode::RowScratch scratch;
};

// Counts one more split of a list; true for the last one, behind which the sums of all splits are seen. Releases what
// its thread has seen of this split's sums.
__device__ inline bool CountSplit(int32_t* counter, int32_t splits) {
  int32_t before;
  asm volatile("atom.release.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  if (before != splits - 1) return false;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return true;
}

__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ inline float WarpSum(float x) {
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// kBatch: splits whose sums a thread loads together.
template <typename T, int kBatch>
class ItemEnds {
  static_assert(kBatch <= 32);
  // A list's counter, once it is complete and some rows must be redone: by which block, which rows.
  static constexpr uint32_t kRedo = uint32_t{1} << 31;
  static constexpr int32_t kAllWarps = kConsumers / 32 + kEndWarps;

 public:
  __device__ ItemEnds(const decode::DecodeArgs& args, EndTables& tables) : args_(args), tables_(tables) {}

  // By one thread.
  __device__ void Start() {
    for (uint64_t& barrier : tables_.full) BarrierInit(&barrier, 1);
    tables_.left = 0;
    tables_.total = -1;
    tables_.free = 0;
    tables_.bad_rows = 0;
    tables_.redo = 0;
  }

  // The block's `count`-th item, by the warp that has just stored its sums.
  __device__ void Leave(const decode::Item& item, int32_t count) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    while (count - LoadAcquire(&tables_.free) >= kEndSlots) {
    }
    const int32_t slot = count % kEndSlots;
    tables_.items[slot] = item;
    StoreRelease(&tables_.left, count + 1);
    BarrierArrive(tables_.full + slot);
  }

  // The block has had all its `count` items. By all threads that compute, when they no longer do: what is complete only
  // now is merged by all warps, since nothing else is left to do.
  __device__ void Finish(int32_t count) {
    if (threadIdx.x == 0) {
      while (count - LoadAcquire(&tables_.free) >= kEndSlots) {
      }
      StoreRelease(&tables_.total, count);
      BarrierArrive(tables_.full + count % kEndSlots);
    }
    NamedSync(kLastBarrier, kAllWarps * 32);
    MergeRound(tables_.last, static_cast<int32_t>(threadIdx.x) / 32, kAllWarps, kLastBarrier);
    if (tables_.redo != 0) RedoRows();
  }

  // By the end warps, `warp` of them. The last round's merges are shared with those that compute.
  __device__ void Run(int32_t warp) {
    int32_t first = 0;
    for (int32_t i = 0;; i ^= 1) {
      if (warp == 0) Count(first, tables_.rounds[i]);
      NamedSync(kEndsBarrier, kEndThreads);
      const EndRound round = tables_.rounds[i];
      const bool is_last = round.is_last != 0;
      if (is_last) NamedSync(kLastBarrier, kAllWarps * 32);
      MergeRound(round, is_last ? kConsumers / 32 + warp : warp, is_last ? kAllWarps : kEndWarps,
                 is_last ? kLastBarrier : kEndsBarrier);
      if (is_last) return;
      first += round.count;
      if (warp == 0 && threadIdx.x % 32 == 0) StoreRelease(&tables_.free, first);
    }
  }

 private:
  // By one warp: waits for the block's `first`-th item, and counts all from there on that have been named, each lane
  // one: they wait for their answers together.
  __device__ void Count(int32_t first, EndRound& round) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    BarrierWait(tables_.full + first % kEndSlots, first / kEndSlots & 1);
    const int32_t count = __shfl_sync(kAllLanes, LoadAcquire(&tables_.left), 0) - first;
    __syncwarp();  // what the first lane has seen of them, all have
    bool complete = false;
    if (lane < count) {
      const decode::Item item = tables_.items[(first + lane) % kEndSlots];
      complete = item.splits == 1 || CountSplit(args_.arrived + item.list, item.splits);
    }
    const uint32_t all = __ballot_sync(kAllLanes, complete);
    if (lane != 0) return;
    round = {first, count, all, static_cast<int32_t>(LoadAcquire(&tables_.total) == first + count)};
    if (round.is_last != 0) tables_.last = round;
  }

  // By `warps` warps, which meet at a named barrier.
  __device__ void MergeRound(const EndRound& round, int32_t warp, int32_t warps, int32_t barrier) {
    for (uint32_t left = round.complete; left != 0; left &= left - 1)
      Merge(tables_.items[(round.first + __ffs(static_cast<int32_t>(left)) - 1) % kEndSlots], warp, warps, barrier);
  }

  // A list's splits to its output. Rows that are not finite are left to the block's end: noted in the list's counter.
  __device__ void Merge(const decode::Item& item, int32_t warp, int32_t warps, int32_t barrier) {
    const int32_t parts = decode::DivideUp(args_.params.cache.value_dim, 64);
    bool finite = true;
    for (int32_t part = warp; part < args_.params.group * parts; part += warps) {
      const int32_t row = part / parts;
      if (MergeRow(item, row, part % parts * 64 + static_cast<int32_t>(threadIdx.x % 32) * 2)) continue;
      finite = false;
      atomicOr(&tables_.bad_rows, 1U << row);
    }
    const bool redo = NamedAny(barrier, warps * 32, !finite);
    if (warp == 0 && threadIdx.x % 32 == 0) {
      args_.arrived[item.list] = redo ? static_cast<int32_t>(kRedo | blockIdx.x << 16 | tables_.bad_rows) : 0;
      tables_.bad_rows = 0;
      if (redo) tables_.redo = 1;
    }
    NamedSync(barrier, warps * 32);
  }

  // Two columns of a row a lane; false where one is not finite. Splits in their order, kBatch at a time: their loads
  // are on their way together, and each lane weighs one of them. Past the first level of cache: other multiprocessors
  // wrote.
  __device__ bool MergeRow(const decode::Item& item, int32_t row, int32_t column) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t dim = args_.params.cache.value_dim;
    const int32_t group = args_.params.group;
    const int64_t first = static_cast<int64_t>(item.id - item.split) * group + row;
    const float* sums = args_.sums + first * dim + min(column, dim - 2);
    const int64_t step = int64_t{group} * dim;
    float max = -INFINITY;
    float sum = 0.0F;
    float2 out = {0.0F, 0.0F};
    for (int32_t split = 0; split < item.splits; split += kBatch) {
      const int32_t count = min(item.splits - split, kBatch);
      float2 state = {-INFINITY, 0.0F};
      float2 part[kBatch];
      if (lane < count) state = __ldcg(args_.states + first + static_cast<int64_t>(split + lane) * group);
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        if (i < count) part[i] = __ldcg(reinterpret_cast<const float2*>(sums));
        sums += step;
        asm volatile("" : "+l"(sums));  // or all addresses are computed ahead, and held
      }
      const float largest = WarpMax(fmaxf(max, state.x));
      const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
      const float keep = Exp2(max - base);
      const float take = Exp2(state.x - base);
      max = largest;
      sum = sum * keep + WarpSum(state.y * take);
      out = {out.x * keep, out.y * keep};
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const float weight = __shfl_sync(kAllLanes, take, i);
        if (i < count) out = {fmaf(part[i].x, weight, out.x), fmaf(part[i].y, weight, out.y)};
      }
    }
    return column >= dim || StoreTwo(item, row, column, max, sum, out);
  }

  __device__ bool StoreTwo(const decode::Item& item, int32_t row, int32_t column, float max, float sum,
                           const float2& out) const {
    const DecodeParams& params = args_.params;
    const int64_t at = (static_cast<int64_t>(item.list) * params.group + row) * params.cache.value_dim + column;
    const float sink = decode::Sink2(params, item.list % params.cache.kv_heads * params.group + row);
    const float normaliser = decode::Normaliser(max, sum, sink);
    // 0 times a NaN must not become a result, but nor must the absence of tokens.
    const bool empty = sum == 0.0F;
    const float2 x = {empty ? 0.0F : out.x * normaliser, empty ? 0.0F : out.y * normaliser};
    decode::StoreOut<T>(params, at, x.x);
    decode::StoreOut<T>(params, at + 1, x.y);
    return isfinite(x.x) && isfinite(x.y);
  }

  // Rows that came out as NaN or Inf, again with a look at every token. By the threads that compute; all others have
  // left or are about to: the barriers wait for those that have not.
  __device__ void RedoRows() {
    for (int32_t list = 0; list < args_.lists; ++list) {
      if (list % kConsumers == 0) FindRedo(list + static_cast<int32_t>(threadIdx.x));
      for (int32_t row = 0; row < args_.params.group; ++row)
        if ((tables_.redo_rows[list % kConsumers] >> row & 1) != 0)
          decode::AttendRow<T>(args_.params, list / args_.params.cache.kv_heads, list % args_.params.cache.kv_heads,
                               row, tables_.scratch);
    }
  }

  // Which rows of the next lists, one a thread, are this block's.
  __device__ void FindRedo(int32_t list) {
    const auto note = list < args_.lists ? static_cast<uint32_t>(__ldcg(args_.arrived + list)) : 0U;
    const bool mine = note >> 16 == (kRedo >> 16 | blockIdx.x);
    if (mine) args_.arrived[list] = 0;
    __syncthreads();
    tables_.redo_rows[threadIdx.x] = mine ? note & 0xFFFF : 0;
    __syncthreads();
  }

  const decode::DecodeArgs& args_;
  EndTables& tables_;
};

}  // namespace dropkv::cuda::sm90
