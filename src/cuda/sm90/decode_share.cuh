// How decode attention is shared among blocks: the tiles of all lists, one list behind the other, in equal contiguous
// parts. A block works through pieces of lists; only its first and its last one may belong to lists that others share.
// What is summed together depends on the lengths in the batch, never on time.
#pragma once

#include "cuda/sm80/decode_plan.cuh"
#include "cuda/sm90/tile.cuh"

namespace dropkv::cuda::sm90 {

static_assert(decode::kShareTokens == kTileTokens);

// What one block does of one list.
struct Piece {
  int32_t list = -1;  // -1: there is none
  int32_t begin = 0;  // tokens
  int32_t end = 0;
  int32_t first_block = 0;  // the one that begins the list; the next ones go on
  int32_t pieces = 0;       // of the list

  // Where the block's sums of the piece lie: a block begins at most one list that it does not end, and ends or passes
  // through at most one that it did not begin.
  __device__ int32_t slot() const { return 2 * static_cast<int32_t>(blockIdx.x) + (begin == 0 ? 1 : 0); }
};

// Slot of part `part` of a list whose first part is block `first_block`'s.
__device__ inline int32_t PartSlot(int32_t first_block, int32_t part) {
  return 2 * (first_block + part) + (part == 0 ? 1 : 0);
}

// By one warp, all lanes alike. 32 lists at a time, one a lane: the lengths are the device's.
class ShareWalk {
 public:
  __device__ ShareWalk(const CacheParams& cache, int32_t lists) : cache_(cache), lists_(lists) {
    for (int32_t list = Lane(); list < lists; list += 32) total_ += TilesOf(decode::ListLength(cache, list));
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) total_ += __shfl_xor_sync(kAllLanes, total_, step);
    blocks_ = min(static_cast<int32_t>(gridDim.x), decode::DivideUp(total_, decode::kLeastTiles));
    small_ = total_ < INT32_MAX / blocks_;
    const auto block = static_cast<int32_t>(blockIdx.x);
    if (block >= blocks_) return;
    const int32_t begin = First(block);
    left_ = First(block + 1) - begin;
    Enter();
    while (begin >= first_ + tiles_) NextWindow();
    lane_ = __ffs(static_cast<int32_t>(__ballot_sync(kAllLanes, begin - first_ < until_))) - 1;
    tile_ = begin - first_ - (__shfl_sync(kAllLanes, until_, lane_) - TilesOf(__shfl_sync(kAllLanes, tokens_, lane_)));
  }

  __device__ Piece Next() {
    if (left_ == 0) return {};
    if (lane_ == 32) NextWindow();
    const int32_t tokens = __shfl_sync(kAllLanes, tokens_, lane_);
    const int32_t tiles = TilesOf(tokens);
    const int32_t start = first_ + __shfl_sync(kAllLanes, until_, lane_) - tiles;
    const int32_t count = min(left_, tiles - tile_);
    Piece piece;
    piece.list = window_ + lane_;
    piece.begin = tile_ * kTileTokens;
    piece.end = min(tokens, (tile_ + count) * kTileTokens);
    piece.first_block = Owner(start);
    piece.pieces = Owner(start + tiles - 1) - piece.first_block + 1;
    left_ -= count;
    tile_ = 0;
    ++lane_;
    return piece;
  }

 private:
  static __device__ int32_t Lane() { return static_cast<int32_t>(threadIdx.x % 32); }
  // An empty list has one tile, of no tokens: somebody must write its zeros. No list: none.
  static __device__ int32_t TilesOf(int32_t tokens) {
    return tokens < 0 ? 0 : max(1, decode::DivideUp(tokens, kTileTokens));
  }
  __device__ int32_t First(int32_t block) const {
    return small_ ? total_ * block / blocks_ : static_cast<int32_t>(int64_t{total_} * block / blocks_);
  }
  // The block whose part holds a tile: the last one that begins at or before it.
  __device__ int32_t Owner(int32_t tile) const {
    if (small_) return ((tile + 1) * blocks_ - 1) / total_;
    return static_cast<int32_t>(((int64_t{tile} + 1) * blocks_ - 1) / total_);
  }

  __device__ void Enter() {
    const int32_t list = window_ + Lane();
    tokens_ = list < lists_ ? decode::ListLength(cache_, list) : -1;
    until_ = WarpInclusiveSum(TilesOf(tokens_));
    tiles_ = __shfl_sync(kAllLanes, until_, 31);
  }
  __device__ void NextWindow() {
    first_ += tiles_;
    window_ += 32;
    lane_ = 0;
    Enter();
  }

  const CacheParams& cache_;
  int32_t lists_;
  int32_t total_ = 0;   // tiles of all lists
  int32_t blocks_ = 1;  // that have work
  bool small_ = true;   // products of the two fit 32 bits: a division of 64 takes a hundred instructions
  int32_t left_ = 0;    // tiles of the block
  int32_t window_ = 0;  // first list of the window
  int32_t first_ = 0;   // tile at which the window begins
  int32_t tiles_ = 0;   // of the window
  int32_t tokens_ = 0;  // of the lane's list; -1: there is none
  int32_t until_ = 0;   // tiles of the window up to the lane's list, that included
  int32_t lane_ = 0;    // of the list that comes next
  int32_t tile_ = 0;    // of that list
};

}  // namespace dropkv::cuda::sm90
