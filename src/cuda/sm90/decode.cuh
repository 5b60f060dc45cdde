// Decode attention on Hopper: the query heads of a KV head are rows of m64n64k16 products, so that keys and values are
// read once. A token costs g (d + dv) multiply-adds for 2 (d + dv) bytes: memory bounds it, and what the products waste
// on 64 - g rows is never waited for. Blocks stay resident, and take items (splits of a list, sm80/decode_plan.cuh)
// from a counter. One warp of a block feeds the ring, from item to item without a pause; four warps compute, and the
// first of them holds all rows that count; three see to what follows an item's last tile (decode_ends.cuh). All four
// that compute wait for every tile, in order.
#pragma once

#include "cuda/device/launch.cuh"
#include "cuda/kernels.h"
#include "cuda/sm90/decode_ends.cuh"
#include "cuda/sm90/decode_items.cuh"
#include "cuda/sm90/values.cuh"

namespace dropkv::cuda::sm90 {

// Warps: four that compute, one that feeds, those of the ends.
inline constexpr int32_t kFirstEndWarp = kConsumers / 32 + 1;
inline constexpr int32_t kDecodeThreads = kConsumers + 32 + kEndThreads;
inline constexpr int32_t kItemSlots = 3;  // items between the warp that feeds and those that compute

// Blocks on a multiprocessor: where the registers allow it, one computes while the other waits.
template <int kBoxes>
inline constexpr int32_t kBlocksPerProcessor = kBoxes <= 2 ? 2 : 1;

// Of a thread, where two blocks share a multiprocessor's and 128 for all would be too few to compute with.
// The warps of the ends hold the sums of many splits.
template <int kHalves>
inline constexpr int32_t kConsumerRegisters = kHalves == 1 ? 144 : 160;
template <int kHalves>
inline constexpr int32_t kOtherRegisters = 256 - kConsumerRegisters<kHalves>;
template <int kHalves>
inline constexpr int32_t kMergeBatch = kHalves == 1 ? 28 : 20;

// Shared memory of a block, from a 1024-byte boundary: queries of every item slot, ring, tables. The products take 64
// rows of queries; those behind kRows are whatever lies there, and nothing is made of them.
template <int kBoxes, int kHalves>
struct DecodeLayout {
  static constexpr int32_t kRows = 8 * kHalves;
  static constexpr int32_t kRowBoxBytes = kRows * kRowBytes;
  static constexpr int32_t kQueryBytes = kBoxes * kRowBoxBytes;
  static constexpr int32_t kSlotBytes = kBoxes * kBoxBytes;
  static constexpr int32_t kMaxSlots = 12;
  struct Tables {
    uint64_t full[kMaxSlots];
    uint64_t empty[kMaxSlots];
    uint64_t item_full[kItemSlots];
    uint64_t item_empty[kItemSlots];
    decode::Item items[kItemSlots];
    EndTables ends;
  };
  // 228 KB of a multiprocessor; 1 KB of every block is the system's, 1 KB the way to the boundary.
  static constexpr int32_t kLimit = 228 * 1024 / kBlocksPerProcessor<kBoxes> / 1024 * 1024 - 2048;
  static constexpr int32_t kRing = kItemSlots * kQueryBytes;  // where it begins
  static constexpr int32_t kFit = (kLimit - kRing - static_cast<int32_t>(sizeof(Tables))) / kSlotBytes;
  static constexpr int32_t kSlots = kFit > kMaxSlots ? kMaxSlots : kFit;
  static constexpr int32_t kTables = kRing + kSlots * kSlotBytes;
  static constexpr int32_t kBytes = kTables + static_cast<int32_t>(sizeof(Tables)) + 1024;
  static_assert(kSlots >= 6);
};

template <typename T, int kBoxes, int kHalves>
class DecodeBlock {
  using Layout = DecodeLayout<kBoxes, kHalves>;

 public:
  __device__ DecodeBlock(const decode::DecodeArgs& args, unsigned char* shared)
      : args_(args),
        queries_(shared),
        tables_(reinterpret_cast<typename Layout::Tables*>(shared + Layout::kTables)),
        ring_{shared + Layout::kRing, tables_->full, tables_->empty, Layout::kSlots, Layout::kSlotBytes},
        ends_(args, tables_->ends) {}

  // By one thread, before anything of the device's memory is read.
  __device__ void Start() {
    for (int32_t i = 0; i < Layout::kSlots; ++i) {
      BarrierInit(tables_->full + i, 1);
      BarrierInit(tables_->empty + i, kConsumers / 32);
    }
    for (int32_t i = 0; i < kItemSlots; ++i) {
      BarrierInit(tables_->item_full + i, 1);
      BarrierInit(tables_->item_empty + i, kConsumers / 32);
    }
    ends_.Start();
    FenceBarrierInit();
  }

  // By a whole warp. Two items come from the block's place, the others from the counter: the answer to a question of
  // this item's time is needed when the next one has been fetched.
  __device__ void Produce(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v) const {
    const bool leads = threadIdx.x % 32 == 0;
    const auto blocks = static_cast<int32_t>(gridDim.x);
    ItemWalk walk(args_.params.cache, args_.lists);
    int32_t count = 0;
    int32_t tile = 0;
    int32_t next_id = static_cast<int32_t>(blockIdx.x) + blocks;
    decode::Item item = walk.Seek(static_cast<int32_t>(blockIdx.x));
    for (; item.id >= 0; ++count) {
      int32_t ticket = 0;
      if (leads) {
        ticket = atomicAdd(args_.tickets, 1);
        FetchItem(item, count, &tile, q, k, v);
      }
      __syncwarp();
      item = walk.Seek(next_id);
      next_id = 2 * blocks + __shfl_sync(kAllLanes, ticket, 0);
    }
    if (!leads) return;
    Publish(item, count);
    BarrierArrive(tables_->item_full + count % kItemSlots);
    __threadfence();  // behind all questions to the counter
    if (atomicAdd(args_.tickets + 1, 1) != blocks - 1) return;
    args_.tickets[0] = 0;
    args_.tickets[1] = 0;
  }

  __device__ void Consume() {
    const int32_t warp = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0);  // known to be uniform
    int32_t tile = 0;
    int32_t count = 0;
    for (;; ++count) {
      const int32_t slot = count % kItemSlots;
      BarrierWait(tables_->item_full + slot, count / kItemSlots & 1);
      const decode::Item item = tables_->items[slot];
      if (item.id < 0) break;
      Reset();
      for (int32_t token = item.begin; token < item.end; token += kTileTokens)
        Attend(queries_ + slot * Layout::kQueryBytes, tile++, item.end - token, warp);
      __syncwarp();
      if (threadIdx.x % 32 == 0) BarrierArrive(tables_->item_empty + slot);
      if (warp != 0) continue;
      StorePartial(item);
      ends_.Leave(item, count);
    }
    ends_.Finish(count);
  }

  __device__ void End() { ends_.Run(static_cast<int32_t>(threadIdx.x) / 32 - kFirstEndWarp); }

 private:
  // Waits for a free place, and writes the item there.
  __device__ void Publish(const decode::Item& item, int32_t count) const {
    const int32_t slot = count % kItemSlots;
    BarrierWait(tables_->item_empty + slot, (count / kItemSlots & 1) ^ 1);
    tables_->items[slot] = item;
  }

  // The item, its queries and all its tiles, by one thread.
  __device__ void FetchItem(const decode::Item& item, int32_t count, int32_t* tile, const CUtensorMap* q,
                            const CUtensorMap* k, const CUtensorMap* v) const {
    const uint64_t policy = EvictFirst();
    const CacheParams& cache = args_.params.cache;
    const int32_t slot = count % kItemSlots;
    const int32_t sequence = item.list / cache.kv_heads;
    const int32_t head = item.list % cache.kv_heads;
    Publish(item, count);
    BarrierExpect(tables_->item_full + slot, Layout::kQueryBytes);
    FetchRows<kBoxes, Layout::kRows>(queries_ + slot * Layout::kQueryBytes, q, tables_->item_full + slot, policy,
                                     item.list, 0);
    for (int32_t token = item.begin; token < item.end; token += kTileTokens) {
      FetchTile(ring_, (*tile)++, cache, k, kBoxes, policy, sequence, head, token / kTileTokens);
      FetchTile(ring_, (*tile)++, cache, v, kBoxes, policy, sequence, head, token / kTileTokens);
    }
  }

  __device__ void Reset() {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (float& x : out_[box]) x = 0.0F;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      max_[h] = -INFINITY;
      sum_[h] = 0.0F;
    }
  }

  // Tile `tile` of the block, keys and values, of which the first `tokens` exist.
  __device__ void Attend(const unsigned char* queries, int32_t tile, int32_t tokens, int32_t warp) {
    float s[32];
    ring_.WaitFull(2 * tile);
    WgmmaFence();
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint64_t a = TileDescriptor(queries + box * Layout::kRowBoxBytes);
      const uint64_t b = TileDescriptor(ring_.tile(2 * tile) + box * kBoxBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) WgmmaShared<T, 64>::Run(s, a + 2 * k, b + 2 * k, box + k);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepRegisters(s);
    ring_.Release(2 * tile);
    uint32_t p[16] = {};
    if (warp == 0) Weigh(s, p, tokens);
    ring_.WaitFull(2 * tile + 1);
    AddValues(p, ring_.tile(2 * tile + 1), tokens);
    ring_.Release(2 * tile + 1);
  }

  // Products to logits in units of log2(e). One that is not finite must stay so: the row is then redone.
  __device__ void ToLogits(float (&s)[32], int32_t tokens) const {
    if (args_.params.soft_cap > 0.0F) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i % 4 / 2 < kHalves) s[i] = fmaf(s[i], 0.0F, args_.cap2 * tanhf(s[i] * args_.logit_scale));
    } else {
#pragma unroll
      for (float& x : s) x *= args_.logit_scale;
    }
    if (tokens >= kTileTokens) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2 >= tokens) s[i] = -INFINITY;
  }

  // Products to weights relative to the running maximum; rescales what was summed before. By the warp of the rows.
  __device__ void Weigh(float (&s)[32], uint32_t (&p)[16], int32_t tokens) {
    ToLogits(s, tokens);
    float rescale[2] = {1.0F, 1.0F};
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float largest = max_[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
      rescale[h] = Exp2(max_[h] - base);
      max_[h] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float low = Exp2(s[4 * n + 2 * h] - base);
        const float high = Exp2(s[4 * n + 2 * h + 1] - base);
        sum += low + high;
        p[2 * n + h] = Pack<T>(low, high);
      }
      sum_[h] = fmaf(sum_[h], rescale[h], sum);
    }
    if (__all_sync(kAllLanes, rescale[0] == 1.0F && rescale[1] == 1.0F)) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i % 4 / 2 < kHalves) out_[box][i] *= rescale[i % 4 / 2];
  }

  __device__ void AddValues(const uint32_t (&p)[16], unsigned char* values, int32_t tokens) {
    if (tokens < kTileTokens) {
      ZeroTail<kBoxes>(values, tokens, static_cast<int32_t>(threadIdx.x), kConsumers);
      NamedSync(kAllGroups, kConsumers);
    }
    AddProduct<T, kBoxes>(out_, p, values);
  }

  // The item's sums, to the device's memory; waits for nothing.
  __device__ void StorePartial(const decode::Item& item) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    const int32_t dim = args_.params.cache.value_dim;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float sum = sum_[h];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int32_t row = lane / 4 + 8 * h;
      if (row >= args_.params.group) continue;
      const int64_t at = static_cast<int64_t>(item.id) * args_.params.group + row;
      if (lane % 4 == 0) args_.states[at] = {max_[h], sum};
      float* sums = args_.sums + at * dim;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int32_t column = box * kBoxDims + n * 8 + lane % 4 * 2;
          if (column >= dim) continue;
          *reinterpret_cast<float2*>(sums + column) = {out_[box][4 * n + 2 * h], out_[box][4 * n + 2 * h + 1]};
        }
    }
  }

  const decode::DecodeArgs& args_;
  unsigned char* queries_;
  typename Layout::Tables* tables_;
  Ring ring_;
  ItemEnds<T, kMergeBatch<kHalves>> ends_;
  float out_[kBoxes][32];
  float max_[kHalves];
  float sum_[kHalves];  // of this lane's tokens
};

}  // namespace dropkv::cuda::sm90
