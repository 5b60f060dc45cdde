// Scores as the references hold them: protected tokens by value.
#pragma once

#include <vector>

#include "baseline/score.h"

namespace dropkv::baseline {

// [Hkv, n] float32: protected tokens hold what the recipe's reference pads them with (layer-wide max + 1, per-head max
// + 1, max, 1.0; nothing where it pads nothing). ratio: the share REMOVED; read where the value depends on it
// (StreamingLLM).
std::vector<float> PaddedScores(const Recipe& recipe, const LayerScores& scores, double ratio);

}  // namespace dropkv::baseline
