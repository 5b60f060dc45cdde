// A stream of random numbers of its own for every purpose: what one sample draws never depends on another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "core/random.h"

namespace dropkv::eval {

// A key for `part` of what `key` stands for.
constexpr uint64_t DeriveKey(uint64_t key, uint64_t part) { return RandomBits(key, part); }

// FNV-1a.
constexpr uint64_t DeriveKey(uint64_t key, std::string_view part) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const char c : part) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return DeriveKey(key, hash);
}

class RandomStream {
 public:
  explicit RandomStream(uint64_t key) : key_(key) {}

  uint64_t Bits() { return RandomBits(key_, counter_++); }

  // Uniform in [0, bound), bound > 0.
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(((Bits() >> 32) * bound) >> 32); }

  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (size_t left = items.size(); left > 1; --left) {
      std::swap(items[left - 1], items[Below(static_cast<uint32_t>(left))]);
    }
  }

  // `count` different numbers of [0, bound), in the order in which they were drawn; count far below bound.
  std::vector<uint32_t> Distinct(uint32_t count, uint32_t bound) {
    std::vector<uint32_t> drawn;
    while (drawn.size() < count) {
      const uint32_t number = Below(bound);
      if (std::find(drawn.begin(), drawn.end(), number) == drawn.end()) drawn.push_back(number);
    }
    return drawn;
  }

 private:
  uint64_t key_;
  uint64_t counter_ = 0;
};

}  // namespace dropkv::eval
