// The table of presets, in two halves; recipe.h's Recipes() is both.
#pragma once

#include <vector>

#include "baseline/recipe.h"

namespace dropkv::baseline {

inline constexpr Pooling kNoPooling{PoolKind::kMean, 0, 0, false};

// Mean of `width` (odd) tokens of the past, as SnapKV and its relatives pool.
constexpr Pooling PastMean(int32_t width) { return {PoolKind::kMean, (width - 1) / 2, (width - 1) / 2, true}; }
constexpr Pooling PastMax(int32_t width) { return {PoolKind::kMax, (width - 1) / 2, (width - 1) / 2, true}; }

// What the paper that this project follows compares: DropKV, the attention policies and their allocators.
void AddTier1(std::vector<Recipe>* recipes);

// The other training-free policies.
void AddTier2(std::vector<Recipe>* recipes);

}  // namespace dropkv::baseline
