// Scores of one layer by any recipe; higher is kept.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "baseline/input.h"
#include "baseline/recipe.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Of the n candidates: the tokens of the prompt. Generated ones behind them are in no array.
struct LayerScores {
  int32_t kv_heads = 0;
  int32_t tokens = 0;
  // [Hkv, n] reduced over the group and pooled; protected tokens hold what the formula gives them, or 0 where it gives
  // them nothing (past-only scores). Before CriticalKV's stages and ChunkKV's means: those depend on the budget.
  std::vector<double> score;
  // [n] 1: kept by index in every head (window, sinks, recent tokens, last partition of LagKV, ...).
  std::vector<uint8_t> is_protected;
  // [Hkv, n] mean over the group of |v_j W_O^h|_1, where the recipe is critical or kDefensive; else empty.
  std::vector<double> projected_norm;
  // CAKE's preference of the layer: entropy and variance; where layers == kCake.
  double entropy = 0;
  double variance = 0;
  // kDefensive: tokens of the first stage [Hkv, n]; kept before all others. Else empty.
  std::vector<uint8_t> first_stage;
  int64_t nonfinite_tokens = 0;  // kept, counted: NaN or Inf in key, value or score
  // [Hkv, n] 1: kept for that (or for dominance, kDropKv); inside the budget. Its score is what its order goes by: NaN
  // or 0 where it is non-finite, the raw score where it is dominant.
  std::vector<uint8_t> forced;
};

// The share that whole tokens are of all, such that trunc(tokens * share), which is how the references count, is `keep`
// again: 29 / 300 times 300 falls short of 29 in double arithmetic.
double ShareOf(int32_t keep, int32_t tokens);

// keep_fraction: what the budget asks for per head, where a scorer depends on it (kRecency of StreamingLLM does not;
// kCompactor's beta, kDefensive's first stage and kKeyDiff's block form do). Errors: what the recipe needs and the
// layer lacks, by the names q, q_pre, k_pre, wo; shapes that disagree; n below what the policy needs; weights of rows
// where the formula has no place for them. pool null: one thread. Results do not depend on the number of threads.
Result<LayerScores> Score(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool);

// Whether Score reads keep_fraction.
bool ReadsBudget(const Recipe& recipe);

// Whether Score gives both recipes the same for every layer and budget, rows of the same generated tokens given: they
// differ only in what Select reads, rules of heads and layers above all, and in how many generated rows they ask for.
bool SameScores(const Recipe& a, const Recipe& b);

// The reference's own values [Hkv, n], float32: protected tokens padded as it pads them (max + 1, max, 1.0, ...), after
// CriticalKV's stages and so on. ratio: the share REMOVED, as the references count.
Result<std::vector<float>> ParityScores(const Recipe& recipe, const LayerScores& scores, double ratio);

}  // namespace dropkv::baseline
