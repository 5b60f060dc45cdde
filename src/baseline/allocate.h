// From scores to kept tokens for any recipe: budgets of layers, of heads, and the tokens themselves.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "baseline/score.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Tokens per KV head of every layer, protected ones included.
struct LayerBudgets {
  std::vector<int32_t> keep;  // [layers]
  bool raised = false;        // some layer's share lay below its protected tokens, and was raised to them
  int64_t total = 0;          // kFlat: tokens of all layers and heads together; else 0
};

// kept: tokens per KV head on average, unrounded: every rule rounds n (1 - R) as its reference does (trunc, nearest for
// the pyramids, trunc over all heads for the flat ones). A whole number, as ResolveBudget gives it, is taken as it is.
// clamp: as for Select. For kFlat `keep` is the average.
LayerBudgets ShareAmongLayers(const Recipe& recipe, std::span<const LayerScores> layers, double kept,
                              bool clamp = true);

struct Selection {
  KeepList keep;
  LayerBudgets budgets;
  std::vector<std::string> warnings;  // scores not comparable across heads under an adaptive rule, raised budgets, ...
};

// clamp: raises a layer's keep to its protected tokens (algorithm.md section 4, step 3). Without it (the references'
// count, trunc(n (1 - R))) fewer are kept than are protected: then the latest of the protected stay.
// Ties to the lower index, over a layer to the lower head; ascending output; exactly the counts of the budgets, but for
// ada-o (its own rounding) and chunks (whole ones).
// Order inside a head: protected tokens, forced ones (by score, NaN first), those of the first stage, then the score.
// kept_fraction: 1 - R, which ChunkKV's count of chunks is made from; 0: kept / n.
// Errors: kInvalidArgument; layers of different shapes, arrays of the wrong size, and what CheckRecipe refuses.
Result<Selection> Select(const Recipe& recipe, std::span<const LayerScores> layers, double kept, bool clamp,
                         double kept_fraction = 0);

}  // namespace dropkv::baseline
