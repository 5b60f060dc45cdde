// Attention of the query heads of one KV head over a range of its tokens in a RaggedCache, for every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "dropkv/dtype.h"

namespace dropkv::ragged {

inline constexpr int32_t kTile = 256;  // tokens between two rescalings of the running sums

// Tokens begin .. end-1 of one KV head. Results are those of the range alone; ranges are merged by their maxima.
struct Part {
  DType dtype = DType::kF32;
  const std::byte* k = nullptr;  // the head's blocks and rows (ragged_storage.h)
  const std::byte* v = nullptr;
  int32_t begin = 0;         // multiple of 16
  int32_t end = 0;           // above begin
  int32_t group = 0;         // g, 1 .. 16
  int32_t key_dim = 0;       // d
  int32_t value_dim = 0;     // dv, padded to a multiple of 16
  const float* q = nullptr;  // [g, d]
  float scale = 1.0F;
  float soft_cap = 0.0F;
  const std::byte* next_k = nullptr;  // keys that this thread reads next, asked into the cache; null: unknown
  float* sum = nullptr;               // [g, value_dim] out: sum_j exp(l_j - max) v_j; 64-byte aligned
  float* largest = nullptr;           // [g] out: the largest logit; -inf where no token takes part
  float* weight = nullptr;            // [g] out: sum_j exp(l_j - max)
};

// Online softmax in float32 (Milakov and Gimelshein 2018, equations 4 to 6) over tiles of kTile tokens, with the
// best instruction set of this machine. Allocates nothing.
void Attend(const Part& part);

// The instruction set that Attend runs on, in Highway's words.
std::string_view KernelName();

}  // namespace dropkv::ragged
