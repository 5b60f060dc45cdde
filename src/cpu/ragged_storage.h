// How a RaggedCache lies in memory: shared by the cache, the decode and its kernels.
//
// Keys: blocks of 16 tokens, transposed, so that the 16 lanes of a vector are 16 tokens and a logit needs no horizontal
// sum. f32, f16, bf16: [block][d][16]. q8_0: [block][d / 32][16 f16 scales, then [32][16] int8], the 34 bytes a token
// and 32 dims of the source in another order. Values: rows [n][dv padded to a multiple of 16] (zeros behind dv); q8_0:
// [n][dv / 32] blocks as they came.
//
// A token with a NaN or Inf component takes no part in any softmax: its key is stored with a NaN in dim 0 (its logit is
// then NaN for every query, which the kernels mask) and its value as zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "dropkv/ragged_cache.h"

namespace dropkv {

inline constexpr int32_t kRaggedBlock = 16;  // tokens in a block of keys

// Memory aligned to a cache line, not initialised, so that a reserve takes no pages. Size 0: the allocation failed.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(size_t size);

  std::byte* data() { return memory_.get(); }
  const std::byte* data() const { return memory_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

struct RaggedHead {
  AlignedBytes k;
  AlignedBytes v;
  int32_t length = 0;
  int32_t capacity = 0;  // multiple of 16
};

struct RaggedCache::Impl {
  DType dtype = DType::kF32;
  int32_t key_dim = 0;        // d
  int32_t value_dim = 0;      // dv
  int64_t k_block_bytes = 0;  // of 16 tokens
  int64_t v_row_bytes = 0;
  std::vector<RaggedHead> heads;
};

// dv rounded up to what a row of values holds.
constexpr int32_t PaddedValueDim(int32_t value_dim) { return (value_dim + 15) / 16 * 16; }

}  // namespace dropkv
