// Every training-free eviction policy as data: what is scored, how it is reduced and pooled, what is protected, how
// layers and heads share the budget. docs/policies.md is made from this table.
//
// A recipe whose scorer is one of the engine's (EngineSignal) and whose rules are the engine's too runs on its kernels;
// all others are scored here (score.h) and selected by allocate.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "baseline/rows.h"
#include "dropkv/policy.h"

namespace dropkv::baseline {

enum class Scorer : int {
  kFull,            // nothing is evicted
  kDropKv,          // the exact mode of the engine
  kDropKvCompat,    // the authors' float32 arithmetic
  kDropKvWo,        // distances after the output projection
  kAttention,       // mean over the window's rows of p (SnapKV)
  kRecency,         // position (StreamingLLM)
  kRandom,          // counter-based
  kProjection,      // AnDPro, token form: sum_i p_ij <v_j, a_i> / |a_i|
  kProjectionCode,  // AnDPro as its public code computes it: chunks, max-pooled weights, anchors
  kCaote,           // alpha / (1 - alpha) |V alpha - v_j| over a base score that sums to 1
  kAttentionSum,    // sum over all rows of p (H2O)
  kAttentionMean,   // the same over the rows that see the token (observed attention)
  kLastRow,         // last row's p, mean over all heads (TOVA)
  kKeyNorm,         // -|k|
  kKeyDiff,         // -cos(k, mean of k / |k|)
  kLag,             // LagKV
  kExpected,        // expected attention
  kCur,             // CUR, CurDKV
  kCompactor,       // leverage and local attention
  kLocalAttention,  // the local attention of Compactor alone ("noncausal")
  kCapKv,           // weighted leverage of the values
  kFinch,           // mean over the window's rows of p times the number of earlier keys
  kVatp,            // sum over rows of p, times |v|_1
  kObCache,         // second-order saliency of the output
  kDefensive,       // DefensiveKV: the worst case over rows and query heads
  kVariance,        // CAKE: mean over rows + 200 variance
};

enum class GroupRule : int { kMean, kMax, kSum };

// How the layers of a model share its budget.
enum class LayerRule : int {
  kSame,
  kPyramid,          // kvpress: real arithmetic, window inside
  kPyramidOriginal,  // KVCache-Factory: integers, window on top
  kCake,             // by entropy and variance of the window's attention
  kFlat,             // the best tokens of all layers together
};

enum class CurForm : int { kProduct, kKey, kValue, kMean };
enum class ObCacheForm : int { kValue, kKey, kJoint };

// What a scorer reads beside keys; for the table, for errors that name what is missing, and for the prefill's capture.
struct Needs {
  bool window_queries = false;  // of the rows that judge (Recipe::rows), after RoPE
  bool all_queries = false;     // every row, after RoPE (column sums, local attention)
  bool pre_rope_queries = false;
  bool pre_rope_keys = false;
  bool values = false;
  bool output_projection = false;  // W_O
};

struct Recipe {
  // name, window (0: none), pool, sink, heads (uniform, ada, ada-o), alpha and seed. policy.signal means something for
  // the engine's scorers only: EngineSignal(). The window's tokens are protected where protect_window says so.
  Policy policy;
  RowSources rows = {};  // which rows judge, where the scorer reads rows; the window's alone by default
  Scorer scorer = Scorer::kDropKv;
  Scorer base = Scorer::kAttention;  // of kCaote: kAttention, kAttentionSum or kLastRow
  GroupRule group = GroupRule::kMean;
  bool group_before_pool = true;  // differs for maximum pooling only
  bool protect_window = true;
  int32_t recent = 0;       // last tokens that are protected beside the window (Compactor 4)
  double recent_share = 0;  // and this share of a head's tokens, the latest ones (H2O, VATP: half); Select() does it
  LayerRule layers = LayerRule::kSame;
  bool flat_heads = false;  // the best tokens of the layer, whatever their heads; policy.heads must be uniform then
  double pyramid_beta = 20;
  double cake_tau1 = 1.6;
  double cake_tau2 = 0.6;

  bool critical = false;     // CriticalKV's two stages over the score; with ada heads CriticalAdaKV
  double first_stage = 0.5;  // f
  double epsilon = 1e-4;     // critical: added to the score; kExpected: the same; kDropKvCompat: in the denominator
  int32_t chunk = 0;         // ChunkKV: tokens kept or evicted together (20); kProjectionCode: 4
  int32_t block = 0;         // kLag: lag; kKeyDiff: tokens a step (0: all at once); kCur: local window (0: global);
                             // kCompactor, kLocalAttention: chunk; kVatp: last rows that are summed (0: all);
                             // kDropKvCompat, ...: not read
  int32_t future = 512;      // kExpected, kCapKv: positions to come that are averaged over
  bool covariance = true;    // kExpected
  bool value_norm = true;    // kExpected
  bool cross = false;        // kLag: raw softmax instead of ranks
  bool exact_bias = false;   // kDefensive: attention mass on the window itself (false: as the code does)
  double gamma = 200;        // kVariance
  int32_t sketch = 48;       // kCompactor: columns of the random projection
  CurForm cur = CurForm::kProduct;
  ObCacheForm obcache = ObCacheForm::kJoint;

  // For the table.
  std::string signal;  // formula in a few words
  std::string source;  // where it comes from: implementation and paper
  int tier = 1;        // 1: the paper's, 2: others

  const std::string& name() const { return policy.name; }

  bool operator==(const Recipe&) const = default;
};

// The signal of an engine's own scorer (kFull, kDropKv, kAttention, kRecency, kRandom), else nothing.
std::optional<Signal> EngineSignal(Scorer scorer);

// Whether Engine::Run does all of it: scorer, head rule and layer rule, no second stage, no chunks.
bool RunsOnEngine(const Recipe& recipe);

Needs NeedsOf(const Recipe& recipe);

// Whether rows judge: generated ones can join them. Others read all of the prompt's queries, keys or positions.
bool JudgesByRows(const Recipe& recipe);

// Whether `rows` are possible and mean anything to the recipe; the message names the policy and what it reads.
Status CheckRowSources(const Recipe& recipe);

// Sets rows, and policy.window where the setting names it.
void SetRows(const RowsSetting& setting, Recipe* recipe);

// What cuts the cache for the draft of recipe.rows: the same by the window's rows alone, which are protected.
Recipe DraftRecipe(const Recipe& recipe);

// Whether policy.pool means anything to it: some scores are not pooled by definition.
bool PoolsScores(const Recipe& recipe);

// And a pooling of that kind: DefensiveKV's rows keep their sums through it, which a maximum does not.
bool PoolsBy(const Recipe& recipe, PoolKind kind);

// The last tokens that every head keeps by index: the window where it is protected, or `recent`.
int32_t ProtectedLast(const Recipe& recipe);

// Scores that mean the same in every head of a layer; an adaptive or flat rule over others deserves a warning.
bool ComparableAcrossHeads(const Recipe& recipe);

// All presets, tier 1 first, in the order of docs/policies.md.
std::span<const Recipe> Recipes();

// A preset, "ada-NAME", "critical-NAME", "criticalada-NAME", "chunk-NAME" of one that takes it, or a name of the
// comparison data ("snapkv.w32.k5", "lagkv.lag16.cross", "critical.snapkv.w32.k5", "ada0.2.knorm", "chunkkv.20.X",
// "dropkv.exact.w32.mean5+31", ...). Errors: kNotFound; lists the presets, or names the part that is not understood.
Result<Recipe> FindRecipe(std::string_view name);

// "full, dropkv, ..." for messages and help.
std::string RecipeNames();

// Ranges of all fields, what cannot be combined, and fields that nothing in the recipe reads but that are not at their
// default (policy.seed may be: commands set it for all); the message names the field.
Status CheckRecipe(const Recipe& recipe);

}  // namespace dropkv::baseline
