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

template <typename T>
bool OneOf(T value, std::initializer_list<T> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// What the attention of a caote recipe comes from, else the scorer itself.
Scorer Reads(const Recipe& recipe) { return recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer; }

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

Status CheckPooling(const Recipe& recipe) {
  const Pooling& pool = recipe.policy.pool;
  const bool pools = pool.before != 0 || pool.after != 0;
  if (pools && !PoolsScores(recipe))
    return Expected("policy.pool", "none for " + recipe.name() + ", whose scores are not pooled", PoolingText(pool));
  if (pools && !PoolsBy(recipe, pool.kind))
    return Expected("policy.pool", "a mean for policy " + recipe.name() + ", whose rows keep their sums through it",
                    PoolingText(pool));
  if (pool.past_only && (recipe.policy.window == 0 || recipe.scorer == Scorer::kProjectionCode))
    return Expected("policy.pool", "all tokens for " + recipe.name(), PoolingText(pool));
  return Status::Ok();
}

// The engine's own checks, but for the window: here it may be 0.
Status CheckPolicyFields(const Recipe& recipe) {
  const int32_t smallest = JudgesByRows(recipe) || EngineSignal(recipe.scorer) ? 1 : 0;
  if (recipe.policy.window < smallest || recipe.policy.window > kMaxRows)
    return Expected("policy.window",
                    std::to_string(smallest) + " to " + std::to_string(kMaxRows) + " for " + recipe.name(),
                    std::to_string(recipe.policy.window));
  Policy policy = recipe.policy;
  policy.window = 1;
  DROPKV_RETURN_IF_ERROR(CheckPolicy(policy));
  if (Reads(recipe) == Scorer::kLastRow && recipe.policy.window != 1)
    return Expected("policy.window", "1 for a score of the last row", std::to_string(recipe.policy.window));
  if (recipe.scorer == Scorer::kRecency && recipe.policy.window != 1)
    return Expected("policy.window", "1 for " + recipe.name() + ", which keeps the latest tokens anyway",
                    std::to_string(recipe.policy.window));
  return CheckPooling(recipe);
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

// For errors: what a recipe without rows that judge goes by.
const char* ReadsText(const Recipe& recipe) {
  const Needs needs = NeedsOf(recipe);
  if (recipe.scorer == Scorer::kFull) return "nothing";
  if (needs.all_queries) return "the queries of all rows of the prompt";
  if (needs.pre_rope_queries) return "the prompt's queries before RoPE";
  return OneOf(recipe.scorer, {Scorer::kRecency, Scorer::kRandom}) ? "positions" : "keys and values";
}

// Rules for the query heads of a group, where the scorer goes by them.
bool ReadsGroupRule(const Recipe& recipe) {
  const Scorer scorer = Reads(recipe);
  if (recipe.group == GroupRule::kMax) return scorer == Scorer::kAttention || scorer == Scorer::kVariance;
  return JudgesByRows(recipe) && !OneOf(scorer, {Scorer::kLastRow, Scorer::kProjectionCode, Scorer::kDefensive});
}

// A field that is not at its default though nothing reads it: whoever set it expects something of it.
Status CheckUnread(const Recipe& recipe) {
  struct Field {
    const char* name;
    bool set;
    bool read;
  };
  const Recipe plain;
  const Scorer scorer = recipe.scorer;
  const bool full = scorer == Scorer::kFull;
  const bool defensive = scorer == Scorer::kDefensive;  // its definition, not a choice
  const bool expected = scorer == Scorer::kExpected;
  const bool cake = recipe.layers == LayerRule::kCake;
  const Field fields[] = {
      {"policy.window", recipe.policy.window > 1, !full},
      {"policy.sink", recipe.policy.sink != 0, !full},
      {"policy.alpha", recipe.policy.alpha != plain.policy.alpha, recipe.policy.heads != HeadRule::kUniform},
      {"recent", recipe.recent != 0, !full},
      {"recent_share", recipe.recent_share != 0, !full && scorer != Scorer::kProjectionCode},
      {"base", recipe.base != plain.base, scorer == Scorer::kCaote},
      {"group", recipe.group != (defensive ? GroupRule::kMax : GroupRule::kMean), ReadsGroupRule(recipe)},
      {"group_before_pool", recipe.group_before_pool == defensive,
       OneOf(Reads(recipe), {Scorer::kAttention, Scorer::kVariance})},
      {"protect_window", !recipe.protect_window,
       recipe.policy.window > 0 && !full && scorer != Scorer::kProjectionCode},
      {"pyramid_beta", recipe.pyramid_beta != plain.pyramid_beta,
       OneOf(recipe.layers, {LayerRule::kPyramid, LayerRule::kPyramidOriginal})},
      {"cake_tau1", recipe.cake_tau1 != plain.cake_tau1, cake},
      {"cake_tau2", recipe.cake_tau2 != plain.cake_tau2, cake},
      {"first_stage", recipe.first_stage != plain.first_stage, recipe.critical},
      {"epsilon", recipe.epsilon != plain.epsilon && !(expected && recipe.epsilon == 0),
       recipe.critical || scorer == Scorer::kDropKvCompat || (expected && recipe.value_norm)},
      {"block", recipe.block != 0,
       OneOf(scorer, {Scorer::kLag, Scorer::kKeyDiff, Scorer::kCur, Scorer::kCompactor, Scorer::kLocalAttention,
                      Scorer::kVatp})},
      {"future", recipe.future != plain.future, OneOf(scorer, {Scorer::kExpected, Scorer::kCapKv})},
      {"covariance", !recipe.covariance, expected},
      {"value_norm", !recipe.value_norm, expected},
      {"cross", recipe.cross, scorer == Scorer::kLag},
      {"exact_bias", recipe.exact_bias, defensive},
      {"gamma", recipe.gamma != plain.gamma, scorer == Scorer::kVariance},
      {"sketch", recipe.sketch != plain.sketch, scorer == Scorer::kCompactor},
      {"cur", recipe.cur != plain.cur, scorer == Scorer::kCur},
      {"obcache", recipe.obcache != plain.obcache, scorer == Scorer::kObCache}};
  for (const Field& field : fields)
    if (field.set && !field.read)
      return Expected(field.name, "the default for " + recipe.name() + ", which does not read it", "another value");
  return Status::Ok();
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

bool JudgesByRows(const Recipe& recipe) {
  return OneOf(Reads(recipe), {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention,
                               Scorer::kProjection, Scorer::kProjectionCode, Scorer::kLastRow, Scorer::kFinch,
                               Scorer::kObCache, Scorer::kDefensive, Scorer::kVariance});
}

Status CheckRowSources(const Recipe& recipe) {
  DROPKV_RETURN_IF_ERROR(CheckSources(recipe.rows, recipe.policy.window));
  if (recipe.rows.generated() == 0 || JudgesByRows(recipe)) return Status::Ok();
  return Expected("rows",
                  "the window alone for policy " + recipe.name() + ", which reads " + ReadsText(recipe) +
                      ", not the queries of rows",
                  std::string("\"").append(RowsText(recipe.rows, recipe.policy.window)).append("\""));
}

void SetRows(const RowsSetting& setting, Recipe* recipe) {
  recipe->rows = setting.sources;
  if (setting.window > 0) recipe->policy.window = setting.window;
}

Recipe DraftRecipe(const Recipe& recipe) {
  Recipe draft = recipe;
  draft.rows = {};
  draft.protect_window = true;
  if (recipe.rows.draft_window > 0) draft.policy.window = recipe.rows.draft_window;
  return draft;
}

Needs NeedsOf(const Recipe& recipe) {
  Needs needs;
  needs.window_queries = JudgesByRows(recipe);
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

bool PoolsScores(const Recipe& recipe) {
  return (JudgesByRows(recipe) && !OneOf(Reads(recipe), {Scorer::kLastRow, Scorer::kFinch})) ||
         OneOf(recipe.scorer, {Scorer::kCompactor, Scorer::kLocalAttention});
}

bool PoolsBy(const Recipe& recipe, PoolKind kind) {
  return PoolsScores(recipe) && (kind == PoolKind::kMean || recipe.scorer != Scorer::kDefensive);
}

int32_t ProtectedLast(const Recipe& recipe) {
  return std::max(recipe.recent, recipe.protect_window ? recipe.policy.window : 0);
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
  DROPKV_RETURN_IF_ERROR(CheckRowSources(recipe));
  DROPKV_RETURN_IF_ERROR(CheckFields(recipe));
  DROPKV_RETURN_IF_ERROR(CheckCombination(recipe));
  return CheckUnread(recipe);
}

}  // namespace dropkv::baseline
