// CriticalKV's two stages over padded scores: the best K1 of a head first, then (score + epsilon) times the projected
// value norm. With adaptive heads the variant of CriticalAdaKV.
#pragma once

#include <cstdint>
#include <vector>

#include "baseline/score.h"

namespace dropkv::baseline {

struct CriticalStages {
  std::vector<uint8_t> first;   // [Hkv, n] 1: taken in the first stage (or safe, with adaptive heads)
  std::vector<float> value;     // [Hkv, n] float32: the largest float32 for the first stage, else the second's product
  std::vector<int32_t> budget;  // [Hkv] tokens of the head
};

// kept: tokens per KV head on average; first_count: K1 = trunc((1 - R) n f) as the reference counts it.
CriticalStages FindCritical(const Recipe& recipe, const LayerScores& scores, const std::vector<float>& padded,
                            int32_t kept, int32_t first_count);

}  // namespace dropkv::baseline
