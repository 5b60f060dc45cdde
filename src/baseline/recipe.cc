#include "baseline/recipe.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "baseline/presets.h"
#include "dropkv/cache_view.h"

namespace dropkv::baseline {
namespace {

constexpr int32_t kMaxBlock = 1 << 20;

bool OneOf(Scorer scorer, std::initializer_list<Scorer> scorers) {
  return std::find(scorers.begin(), scorers.end(), scorer) != scorers.end();
}

// What the attention of a caote recipe comes from, else the scorer itself.
Scorer Reads(const Recipe& recipe) { return recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer; }

bool ReadsWindow(const Recipe& recipe) {
  return OneOf(Reads(recipe), {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention,
                               Scorer::kProjection, Scorer::kProjectionCode, Scorer::kLastRow, Scorer::kFinch,
                               Scorer::kObCache, Scorer::kDefensive, Scorer::kVariance});
}

bool IsPooled(const Recipe& recipe) {
  return (ReadsWindow(recipe) && !OneOf(Reads(recipe), {Scorer::kLastRow, Scorer::kFinch})) ||
         OneOf(recipe.scorer, {Scorer::kCompactor, Scorer::kLocalAttention});
}

Status Expected(const char* field, const std::string& expected, const std::string& got) {
  return InvalidArgument(std::string(field) + ": expected " + expected + ", got " + got);
}

Status CheckRange(const char* field, double value, double lowest, double highest) {
  if (value >= lowest && value <= highest) return Status::Ok();
  const auto text = [](double number) {
    std::string digits = std::to_string(number);
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.ends_with('.')) digits.pop_back();
    return digits;
  };
  return Expected(field, text(lowest) + " to " + text(highest), text(value));
}

Status CheckEnums(const Recipe& recipe) {
  DROPKV_RETURN_IF_ERROR(CheckRange("scorer", static_cast<int>(recipe.scorer), 0, static_cast<int>(Scorer::kVariance)));
  DROPKV_RETURN_IF_ERROR(CheckRange("group", static_cast<int>(recipe.group), 0, static_cast<int>(GroupRule::kSum)));
  DROPKV_RETURN_IF_ERROR(CheckRange("layers", static_cast<int>(recipe.layers), 0, static_cast<int>(LayerRule::kFlat)));
  DROPKV_RETURN_IF_ERROR(CheckRange("cur", static_cast<int>(recipe.cur), 0, static_cast<int>(CurForm::kMean)));
  DROPKV_RETURN_IF_ERROR(
      CheckRange("obcache", static_cast<int>(recipe.obcache), 0, static_cast<int>(ObCacheForm::kJoint)));
  if (recipe.scorer == Scorer::kCaote &&
      !OneOf(recipe.base, {Scorer::kAttention, Scorer::kAttentionSum, Scorer::kLastRow}))
    return Expected("base", "attention, a sum of attention, or the last row's",
                    "scorer " + std::to_string(static_cast<int>(recipe.base)));
  return Status::Ok();
}

// The engine's own checks, but for the window: here it may be 0.
Status CheckPolicyFields(const Recipe& recipe) {
  const int32_t smallest = ReadsWindow(recipe) || EngineSignal(recipe.scorer) ? 1 : 0;
  if (recipe.policy.window < smallest || recipe.policy.window > kMaxRows)
    return Expected("policy.window",
                    std::to_string(smallest) + " to " + std::to_string(kMaxRows) + " for " + recipe.name(),
                    std::to_string(recipe.policy.window));
  Policy policy = recipe.policy;
  policy.window = 1;
  DROPKV_RETURN_IF_ERROR(CheckPolicy(policy));
  if (Reads(recipe) == Scorer::kLastRow && recipe.policy.window != 1)
    return Expected("policy.window", "1 for a score of the last row", std::to_string(recipe.policy.window));
  const bool pools = recipe.policy.pool.before != 0 || recipe.policy.pool.after != 0;
  if (pools && !IsPooled(recipe))
    return Expected("policy.pool", "none for " + recipe.name() + ", whose scores are not pooled",
                    PoolingText(recipe.policy.pool));
  if (recipe.policy.pool.past_only && recipe.policy.window == 0)
    return Expected("policy.pool", "all tokens where there is no window", PoolingText(recipe.policy.pool));
  return Status::Ok();
}

Status CheckFields(const Recipe& recipe) {
  constexpr double kMany = 1e9;
  DROPKV_RETURN_IF_ERROR(CheckRange("recent", recipe.recent, 0, kMany));
  DROPKV_RETURN_IF_ERROR(CheckRange("recent_share", recipe.recent_share, 0, 1));
  DROPKV_RETURN_IF_ERROR(CheckRange("pyramid_beta", recipe.pyramid_beta, 1, kMany));
  DROPKV_RETURN_IF_ERROR(CheckRange("cake_tau1", recipe.cake_tau1, 1e-3, 1e3));
  DROPKV_RETURN_IF_ERROR(CheckRange("cake_tau2", recipe.cake_tau2, 1e-3, 1e3));
  DROPKV_RETURN_IF_ERROR(CheckRange("first_stage", recipe.first_stage, 0, 1));
  DROPKV_RETURN_IF_ERROR(CheckRange("epsilon", recipe.epsilon, 0, 1));
  DROPKV_RETURN_IF_ERROR(
      CheckRange("chunk", recipe.chunk, recipe.scorer == Scorer::kProjectionCode ? 1 : 0, kMaxBlock));
  const bool blocks = OneOf(recipe.scorer, {Scorer::kLag, Scorer::kCompactor, Scorer::kLocalAttention});
  DROPKV_RETURN_IF_ERROR(CheckRange("block", recipe.block, blocks ? 1 : 0, kMaxBlock));
  DROPKV_RETURN_IF_ERROR(CheckRange("future", recipe.future, 1, kMaxBlock));
  DROPKV_RETURN_IF_ERROR(CheckRange("gamma", recipe.gamma, 0, kMany));
  DROPKV_RETURN_IF_ERROR(CheckRange("sketch", recipe.sketch, 1, kMaxBlock));
  return Status::Ok();
}

Status CheckCritical(const Recipe& recipe) {
  if (OneOf(recipe.scorer, {Scorer::kFull, Scorer::kRecency}))
    return Expected("critical", "a scorer that judges tokens", recipe.name());
  if (recipe.scorer == Scorer::kDropKvCompat)
    return Expected("critical", "a scorer without an epsilon of its own", recipe.name());
  if (recipe.scorer == Scorer::kExpected && recipe.value_norm)
    return Expected("critical", "value_norm off: the second stage has a norm of its own", "value_norm on");
  if (recipe.policy.heads == HeadRule::kAdaO) return Expected("critical", "uniform or ada heads", "ada-o");
  return Status::Ok();
}

// What does not go together.
Status CheckCombination(const Recipe& recipe) {
  const bool adaptive = recipe.policy.heads != HeadRule::kUniform;
  const bool chunks = recipe.chunk > 0 && recipe.scorer != Scorer::kProjectionCode;
  if (recipe.scorer == Scorer::kFull && (adaptive || recipe.flat_heads || chunks || recipe.layers != LayerRule::kSame))
    return Expected("scorer", "one that evicts beside a rule for heads, layers or chunks", "full");
  if (recipe.flat_heads && adaptive)
    return Expected("flat_heads", "uniform heads beside it", std::string(HeadRuleName(recipe.policy.heads)));
  if (recipe.flat_heads && recipe.critical) return Expected("critical", "no flat heads", "flat_heads");
  if (recipe.layers == LayerRule::kFlat && !recipe.flat_heads)
    return Expected("flat_heads", "true beside layers of one flat order", "false");
  if (recipe.layers == LayerRule::kCake && recipe.scorer != Scorer::kVariance)
    return Expected("layers", "CAKE's rule beside its own scorer only", recipe.name());
  if (recipe.layers == LayerRule::kFlat && recipe.scorer == Scorer::kProjectionCode)
    return Expected("layers", "budgets of layers for a policy of chunks", "one flat order");
  if (chunks && (adaptive || recipe.flat_heads))
    return Expected("chunk", "0: chunks are the same tokens in all heads", std::to_string(recipe.chunk));
  if (chunks && recipe.critical) return Expected("chunk", "0 beside critical", std::to_string(recipe.chunk));
  if (recipe.scorer == Scorer::kProjectionCode && !recipe.flat_heads)
    return Expected("flat_heads", "true: this policy shares the layer's chunks", "false");
  return recipe.critical ? CheckCritical(recipe) : Status::Ok();
}

}  // namespace

std::optional<Signal> EngineSignal(Scorer scorer) {
  switch (scorer) {
    case Scorer::kFull:
      return Signal::kFull;
    case Scorer::kDropKv:
      return Signal::kDropKv;
    case Scorer::kAttention:
      return Signal::kAttention;
    case Scorer::kRecency:
      return Signal::kRecency;
    case Scorer::kRandom:
      return Signal::kRandom;
    default:
      return std::nullopt;
  }
}

bool RunsOnEngine(const Recipe& recipe) {
  const bool mean_first = recipe.group_before_pool || recipe.policy.pool.kind == PoolKind::kMean;
  return EngineSignal(recipe.scorer).has_value() && recipe.group == GroupRule::kMean && mean_first &&
         recipe.layers == LayerRule::kSame && !recipe.flat_heads && !recipe.critical && recipe.chunk == 0 &&
         recipe.protect_window && recipe.recent == 0 && recipe.recent_share == 0 && CheckPolicy(recipe.policy).ok();
}

Needs NeedsOf(const Recipe& recipe) {
  Needs needs;
  needs.window_queries = ReadsWindow(recipe);
  needs.all_queries = OneOf(Reads(recipe), {Scorer::kAttentionSum, Scorer::kAttentionMean, Scorer::kVatp,
                                            Scorer::kCompactor, Scorer::kLocalAttention});
  needs.pre_rope_queries = OneOf(recipe.scorer, {Scorer::kExpected, Scorer::kCapKv});
  needs.pre_rope_keys = recipe.scorer == Scorer::kCompactor;
  needs.output_projection = recipe.critical || OneOf(recipe.scorer, {Scorer::kDropKvWo, Scorer::kDefensive});
  needs.values = needs.output_projection ||
                 OneOf(recipe.scorer, {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kProjection,
                                       Scorer::kProjectionCode, Scorer::kCaote, Scorer::kLag, Scorer::kCompactor,
                                       Scorer::kLocalAttention, Scorer::kCapKv, Scorer::kVatp, Scorer::kObCache}) ||
                 (recipe.scorer == Scorer::kCur && recipe.cur != CurForm::kKey) ||
                 (recipe.scorer == Scorer::kExpected && recipe.value_norm);
  return needs;
}

bool ComparableAcrossHeads(const Recipe& recipe) {
  return !OneOf(recipe.scorer,
                {Scorer::kKeyNorm, Scorer::kKeyDiff, Scorer::kLag, Scorer::kCompactor, Scorer::kLocalAttention});
}

std::span<const Recipe> Recipes() {
  static const std::vector<Recipe> recipes = [] {
    std::vector<Recipe> table;
    AddTier1(&table);
    AddTier2(&table);
    return table;
  }();
  return recipes;
}

std::string RecipeNames() {
  std::string names;
  for (const Recipe& recipe : Recipes()) names += (names.empty() ? "" : ", ") + recipe.name();
  return names;
}

Status CheckRecipe(const Recipe& recipe) {
  DROPKV_RETURN_IF_ERROR(CheckEnums(recipe));
  DROPKV_RETURN_IF_ERROR(CheckPolicyFields(recipe));
  DROPKV_RETURN_IF_ERROR(CheckFields(recipe));
  return CheckCombination(recipe);
}

}  // namespace dropkv::baseline
