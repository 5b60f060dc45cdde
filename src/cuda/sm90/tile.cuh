// Tiles of 64 tokens: the order in which a block walks over them, their way into shared memory, and rows of queries and
// outputs beside them.
#pragma once

#include "cuda/device/cache.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/tensor_map.h"

namespace dropkv::cuda {

inline constexpr int32_t kRowBytes = 128;                      // 64 elements: a swizzled row
inline constexpr int32_t kBoxBytes = kTileTokens * kRowBytes;  // one box of a full tile
inline constexpr int32_t kSharedLimit = 227 * 1024 - 1024;     // of a block, less the alignment of its start

// Named barriers; 0 is __syncthreads.
inline constexpr int32_t kAllGroups = 1;
inline constexpr int32_t kOneGroup = 2;  // + the group's number

// A ring of slots in shared memory, each a tile of keys or of values. The k-th tile of the block lies in slot k % slots
// and completes that slot's phase k / slots.
//
// A barrier's parity tells a phase from the next, not from the one after it. Where groups take turns at the tiles, a
// group may wait for a slot's next filling while the last one, of another group, is still on its way (copies complete
// out of order), and would take it for its own. `issued` says how many tiles have been asked for, each after its slot's
// last filling was consumed: behind that the parity is exact. Groups that all read every tile need no such number.
struct Ring {
  unsigned char* tiles;
  uint64_t* full;
  uint64_t* empty;
  int32_t slots;
  int32_t slot_bytes;
  int32_t* issued = nullptr;

  __device__ unsigned char* tile(int32_t k) const { return tiles + k % slots * slot_bytes; }
  __device__ void WaitFull(int32_t k) const {
    if (issued != nullptr)
      while (LoadAcquire(issued) <= k) {
      }
    BarrierWait(full + k % slots, k / slots & 1);
  }
  // A fresh barrier counts as emptied once.
  __device__ void WaitEmpty(int32_t k) const { BarrierWait(empty + k % slots, (k / slots & 1) ^ 1); }
  // By every warp that read the tile, when its reads are done.
  __device__ void Release(int32_t k) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(empty + k % slots);
  }
};

// By one thread: copies tile `tile` of (sequence, head), boxes of 64 dims one behind the other, into slot k.
__device__ inline void FetchTile(const Ring& ring, int32_t k, const CacheParams& cache, const CUtensorMap* map,
                                 int32_t boxes, uint64_t policy, int32_t sequence, int32_t head, int32_t tile) {
  ring.WaitEmpty(k);
  uint64_t* barrier = ring.full + k % ring.slots;
  unsigned char* to = ring.tile(k);
  BarrierExpect(barrier, boxes * kBoxBytes);
  if (ring.issued != nullptr) StoreRelease(ring.issued, k + 1);
  const int32_t first = tile * kTileTokens;
  if (cache.blocks == nullptr) {
    int64_t token = first;
    if (cache.offsets != nullptr) token += cache.offsets[static_cast<int64_t>(sequence) * cache.kv_heads + head];
    if (cache.starts != nullptr) token += cache.starts[sequence];
    const bool one_list = cache.offsets != nullptr;
    const int32_t at = one_list || cache.starts != nullptr ? 0 : sequence;
    for (int32_t box = 0; box < boxes; ++box)
      CopyBox(to + box * kBoxBytes, map, barrier, policy, box * kBoxDims, static_cast<int32_t>(token),
              one_list ? 0 : head, at);
    return;
  }
  const int32_t step = cache.block_size < kTileTokens ? cache.block_size : kTileTokens;
  const int32_t last = max(0, Length(cache, sequence, head) - 1);
  for (int32_t offset = 0; offset < kTileTokens; offset += step) {
    // Behind the sequence's end there is no page; any page will do, its tokens are masked.
    const int32_t token = min(first + offset, last / cache.block_size * cache.block_size);
    const int32_t block = cache.blocks[static_cast<int64_t>(sequence) * cache.blocks_stride + token / cache.block_size];
    for (int32_t box = 0; box < boxes; ++box)
      CopyBox(to + box * kBoxBytes + offset * kRowBytes, map, barrier, policy, box * kBoxDims, token % cache.block_size,
              head, block);
  }
}

// By one thread: rows first .. first + kRows - 1 of a list, a tile [boxes][kRows][64]; zeros behind the list's last
// row. Adds to what the barrier expects already.
template <int kBoxes, int kRows>
__device__ inline void FetchRows(unsigned char* to, const CUtensorMap* map, uint64_t* barrier, uint64_t policy,
                                 int32_t list, int32_t first) {
#pragma unroll
  for (int32_t box = 0; box < kBoxes; ++box)
    CopyBox(to + box * kRows * kRowBytes, map, barrier, policy, box * kBoxDims, first, list, 0);
}

// The tiles of all (sequence, head) with a candidate, in order, cut into contiguous ranges, one for each block: what
// one block has of one list after the other. Where there are blocks enough, none crosses from one list to the next,
// since the next one's rows would have to be fetched in between. A score does not depend on the cut.
class TileWalk {
 public:
  __device__ explicit TileWalk(const CacheParams& cache) : cache_(cache) {
    const int32_t lists = cache.sequences * cache.kv_heads;
    const bool same = cache.offsets == nullptr && cache.lengths == nullptr && cache.generated == nullptr;
    if (same && lists <= static_cast<int32_t>(gridDim.x)) {
      const int32_t parts = static_cast<int32_t>(gridDim.x) / lists;
      const int32_t part = static_cast<int32_t>(blockIdx.x) % parts;
      list_ = static_cast<int32_t>(blockIdx.x) / parts;
      if (list_ >= lists) return;
      const int64_t tiles = TilesOf(list_);
      begin_ = static_cast<int32_t>(tiles * part / parts);
      count_ = left_ = static_cast<int32_t>(tiles * (part + 1) / parts) - begin_;
      return;
    }
    int64_t total = 0;
    for (int32_t list = 0; list < lists; ++list) total += TilesOf(list);
    int64_t begin = total * blockIdx.x / gridDim.x;
    left_ = static_cast<int32_t>(total * (blockIdx.x + 1) / gridDim.x - begin);
    if (left_ == 0) return;
    while (begin >= TilesOf(list_)) begin -= TilesOf(list_++);
    begin_ = static_cast<int32_t>(begin);
    count_ = min(left_, TilesOf(list_) - begin_);
  }

  __device__ bool done() const { return left_ == 0; }
  __device__ int32_t list() const { return list_; }
  __device__ int32_t sequence() const { return list_ / cache_.kv_heads; }
  __device__ int32_t head() const { return list_ % cache_.kv_heads; }
  // Tile i of count() in this list.
  __device__ int32_t tile(int32_t i) const { return begin_ + i; }
  __device__ int32_t count() const { return count_; }

  __device__ void Next() {
    left_ -= count_;
    if (left_ == 0) return;
    begin_ = 0;
    do {
      count_ = min(left_, TilesOf(++list_));
    } while (count_ == 0);
  }

 private:
  __device__ int32_t TilesOf(int32_t list) const {
    const int32_t sequence = list / cache_.kv_heads;
    const int32_t tokens = Length(cache_, sequence, list % cache_.kv_heads);
    return (Candidates(cache_, sequence, tokens) + kTileTokens - 1) / kTileTokens;
  }

  const CacheParams& cache_;
  int32_t left_ = 0;
  int32_t list_ = 0;
  int32_t begin_ = 0;
  int32_t count_ = 0;
};

}  // namespace dropkv::cuda
