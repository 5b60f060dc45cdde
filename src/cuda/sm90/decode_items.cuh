// The items of decode attention, in ascending order, by one warp: items of the lists in a window of 32, one list a
// lane. Nothing is kept for the lists before the window, so that a block need not know how many items there are.
#pragma once

#include "cuda/sm80/decode_plan.cuh"

namespace dropkv::cuda::sm90 {

class ItemWalk {
 public:
  __device__ ItemWalk(const CacheParams& cache, int32_t lists) : cache_(cache), lists_(lists) {
    tokens_ = Tokens(0);
    Enter();
  }

  // By all lanes alike; no id may be below the one before. id -1: there is no such item.
  __device__ decode::Item Seek(int32_t id) {
    while (id >= first_ + items_) {
      if (window_ + 32 >= lists_) return {};
      first_ += items_;
      window_ += 32;
      tokens_ = next_tokens_;
      Enter();
    }
    const int32_t rest = id - first_;
    const int32_t source = __ffs(static_cast<int32_t>(__ballot_sync(kAllLanes, rest < until_))) - 1;
    const int32_t length = __shfl_sync(kAllLanes, tokens_, source);
    decode::Item item;
    item.id = id;
    item.list = window_ + source;
    item.splits = decode::SplitCount(length);
    item.split = rest - (__shfl_sync(kAllLanes, until_, source) - item.splits);
    item.begin = item.split * decode::SplitTokens(length);
    item.end = min(length, item.begin + decode::SplitTokens(length));
    return item;
  }

 private:
  __device__ int32_t Tokens(int32_t window) const {
    const int32_t list = window + static_cast<int32_t>(threadIdx.x % 32);
    return list < lists_ ? decode::ListLength(cache_, list) : -1;
  }

  // Counts the window's items, and asks for the next one's lengths ahead of their use.
  __device__ void Enter() {
    next_tokens_ = Tokens(window_ + 32);
    until_ = tokens_ >= 0 ? decode::SplitCount(tokens_) : 0;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(kAllLanes, until_, step);
      if (static_cast<int32_t>(threadIdx.x % 32) >= step) until_ += left;
    }
    items_ = __shfl_sync(kAllLanes, until_, 31);
  }

  const CacheParams& cache_;
  int32_t lists_;
  int32_t window_ = 0;       // first list
  int32_t first_ = 0;        // item at which the window begins
  int32_t items_ = 0;        // of the window
  int32_t tokens_ = 0;       // of the lane's list; -1: there is none
  int32_t next_tokens_ = 0;  // the same, of the next window
  int32_t until_ = 0;        // items of the window up to the lane's list, that included
};

}  // namespace dropkv::cuda::sm90
