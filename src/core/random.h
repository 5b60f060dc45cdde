// Counter-based random numbers: the same value for the same (seed, counter) in every language and on every machine.
#pragma once

#include <cstdint>

namespace dropkv {

// SplitMix64's output function (Steele, Lea, Flood 2014) over seed + counter * golden ratio.
constexpr uint64_t RandomBits(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// Uniform in [0, 1), 24 bits: exact in float32.
constexpr float RandomUniform(uint64_t seed, uint64_t counter) {
  return static_cast<float>(RandomBits(seed, counter) >> 40) * 0x1p-24F;
}

// The random policy's score of a token. Distinct for every (layer, head, token) below 2^16 layers, 2^16 heads, 2^31
// tokens.
constexpr float RandomScore(uint64_t seed, int32_t layer, int32_t head, int32_t token) {
  const uint64_t counter =
      (static_cast<uint64_t>(layer) << 48) | (static_cast<uint64_t>(head) << 32) | static_cast<uint32_t>(token);
  return RandomUniform(seed, counter);
}

}  // namespace dropkv
