// What the scorers of the window share: the engine's raw scores for one layer, pooling, and what flags mean.
#pragma once

#include <cstdint>
#include <vector>

#include "baseline/score.h"
#include "core/parallel.h"

namespace dropkv::baseline {

struct RawScores {
  std::vector<float> raw;      // [Hkv, n]; NaN for tokens with a non-finite key or value
  std::vector<uint8_t> flags;  // [Hkv, n] bits of reference::TokenFlag
};

// kDropKv or kAttention on the engine's kernels, as Engine::Run computes them (mean over the group), with the rows'
// weights. The last `generated` tokens of kv get no scores.
RawScores EngineScores(const KvView& kv, int32_t generated, const ObservationRows& rows, const AttentionSpec& attention,
                       Signal signal, ThreadPool* pool);

// Reduces raw [Hq, n] over the groups and pools it into scores->score, in the order that the recipe asks for. raw may
// be [Hkv, n] as well: the means of the groups, which kSum multiplies by `group`.
void PoolAndReduce(const Recipe& recipe, const std::vector<float>& raw, int32_t group, ThreadPool* pool,
                   LayerScores* scores);

// Whether the recipe needs every query head's own scores: maximum over the group, or a maximum pooled before it.
bool NeedsEveryHead(const Recipe& recipe);

// Forces flagged tokens and counts the non-finite ones. Their score becomes what their order goes by: NaN where it is
// no number, the raw one where the token is dominant (raw [Hkv, n]; null where nothing is).
void Force(const std::vector<uint8_t>& flags, const float* raw, LayerScores* scores);

}  // namespace dropkv::baseline
