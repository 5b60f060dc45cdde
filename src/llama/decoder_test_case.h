// What the tests of the decoders share: tiny models of every architecture, a prompt, keep lists.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "dropkv/keep_list.h"
#include "llama/model.h"
#include "support/tiny_model.h"

namespace dropkv::llama {

inline constexpr int32_t kPrompt = 150;
inline constexpr int32_t kWindow = 8;

struct Case {
  const char* name;
  testing::TinyConfig config;
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

inline std::vector<Case> Cases() {
  return {
      {"llama", {.arch = testing::TinyArch::kLlama}},
      {"llama_groups_of_three",
       {.arch = testing::TinyArch::kLlama, .heads = 6, .kv_heads = 2, .head_dim = 16, .embedding = 64}},
      {"llama_groups_of_seven",
       {.arch = testing::TinyArch::kLlama, .heads = 7, .kv_heads = 1, .head_dim = 64, .embedding = 64, .seed = 6}},
      {"llama_head_of_80", {.arch = testing::TinyArch::kLlama, .heads = 4, .kv_heads = 2, .head_dim = 80, .seed = 7}},
      {"qwen2", {.arch = testing::TinyArch::kQwen2, .seed = 2}},
      {"qwen3", {.arch = testing::TinyArch::kQwen3, .seed = 3}},
      {"gemma3", {.arch = testing::TinyArch::kGemma3, .layers = 4, .sliding_window = 24, .seed = 4}},
  };
}

inline std::vector<Token> RandomTokens(int32_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<Token> tokens(count);
  for (Token& token : tokens) token = testing::kFirstByteToken + static_cast<Token>(generator() % 300);
  return tokens;
}

// Lists that hold the window and a random choice of the past: all of `shortest` to `longest` tokens.
inline KeepList RandomKeep(int32_t layers, int32_t heads, int32_t n, int32_t shortest, int32_t longest, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> positions;
  for (int32_t list = 0; list < layers * heads; ++list) {
    std::vector<int32_t> past(n - kWindow);
    for (int32_t i = 0; i < n - kWindow; ++i) past[i] = i;
    std::shuffle(past.begin(), past.end(), generator);
    const auto span = static_cast<uint32_t>(longest - shortest + 1);
    past.resize(shortest + static_cast<int32_t>(generator() % span) - kWindow);
    std::sort(past.begin(), past.end());
    for (int32_t i = n - kWindow; i < n; ++i) past.push_back(i);
    positions.insert(positions.end(), past.begin(), past.end());
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {layers, heads, std::move(offsets), std::move(positions)};
}

}  // namespace dropkv::llama
