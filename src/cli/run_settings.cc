#include "cli/run_settings.h"

#include <algorithm>
#include <string>

#include "cli/flags.h"

namespace dropkv::cli {
namespace {

using baseline::Recipe;
using baseline::Scorer;

bool IsFull(const Recipe& recipe) { return recipe.scorer == Scorer::kFull; }

bool ReadsLastRow(const Recipe& recipe) {
  return recipe.scorer == Scorer::kLastRow || (recipe.scorer == Scorer::kCaote && recipe.base == Scorer::kLastRow);
}

// Its window is a matter of settings, not of definition.
bool HasWindow(const Recipe& recipe) {
  return baseline::NeedsOf(recipe).window_queries && !ReadsLastRow(recipe) && recipe.scorer != Scorer::kProjectionCode;
}

bool SharesPooling(const Recipe& recipe) { return HasWindow(recipe) && baseline::PoolsScores(recipe); }

bool HasSinks(const Recipe& recipe) { return HasWindow(recipe) || recipe.scorer == Scorer::kRandom; }

bool TakesHeads(const Recipe& recipe, HeadRule rule) {
  return !recipe.flat_heads && recipe.chunk == 0 && !(recipe.critical && rule == HeadRule::kAdaO);
}

void SetPooling(const Pooling& pool, Recipe* recipe) {
  recipe->policy.pool.kind = pool.kind;
  recipe->policy.pool.before = pool.before;
  recipe->policy.pool.after = pool.after;
}

void Share(const Recipe& shared, Recipe* recipe) {
  if (HasWindow(shared) && HasWindow(*recipe)) recipe->policy.window = shared.policy.window;
  if (baseline::JudgesByRows(shared) && baseline::JudgesByRows(*recipe)) recipe->rows = shared.rows;
  const Pooling& pool = shared.policy.pool;
  if (SharesPooling(shared) && SharesPooling(*recipe) && baseline::PoolsBy(*recipe, pool.kind))
    SetPooling(pool, recipe);
  const bool has_sinks = HasSinks(shared) || shared.scorer == Scorer::kRecency;
  if (has_sinks && HasSinks(*recipe)) recipe->policy.sink = shared.policy.sink;
}

// Which flags some policy reads.
struct Taken {
  bool window = false;
  bool rows = false;
  bool sink = false;
  bool pool = false;
  bool heads = false;
  bool alpha = false;
};

// alone: the only policy that evicts; what it cannot take is then an error of CheckRecipe.
void Apply(const PolicyFlags& flags, bool alone, Recipe* recipe, Taken* taken) {
  Policy& policy = recipe->policy;
  const bool fixed = recipe->scorer == Scorer::kProjectionCode;
  const bool any_window = policy.window > 0 && !ReadsLastRow(*recipe) && !fixed && recipe->scorer != Scorer::kRecency;
  if (flags.window && (alone || any_window)) {
    policy.window = *flags.window;
    taken->window = true;
  }
  if (flags.rows && (alone || baseline::JudgesByRows(*recipe))) {
    recipe->rows = *flags.rows;
    taken->rows = true;
  }
  if (flags.sink && (alone || !fixed)) {
    policy.sink = *flags.sink;
    taken->sink = true;
  }
  if (flags.pool && (alone || (SharesPooling(*recipe) && baseline::PoolsBy(*recipe, flags.pool->kind)))) {
    SetPooling(*flags.pool, recipe);
    taken->pool = taken->pool || baseline::PoolsScores(*recipe);
  }
  if (flags.heads && (alone || TakesHeads(*recipe, *flags.heads))) {
    policy.heads = *flags.heads;
    if (policy.heads == HeadRule::kUniform) policy.alpha = Policy{}.alpha;  // which no rule is left to read
    taken->heads = taken->heads || !recipe->flat_heads;
  }
  if (flags.alpha && policy.heads != HeadRule::kUniform) {
    policy.alpha = *flags.alpha;
    taken->alpha = true;
  }
}

// A flag that no policy reads would do nothing, silently.
Status CheckTaken(const PolicyFlags& flags, const Taken& taken, const std::vector<Recipe>& policies) {
  std::string names;
  for (const Recipe& recipe : policies)
    if (!IsFull(recipe) || policies.size() == 1) names += (names.empty() ? "" : ", ") + recipe.name();
  const auto check = [&](const char* field, bool given, bool read, const char* expected) {
    if (!given || read) return Status::Ok();
    return InvalidArgument("policy." + std::string(field) + ": expected " + expected + ", got " + names);
  };
  DROPKV_RETURN_IF_ERROR(check("window", flags.window.has_value(), taken.window, "a policy with a window"));
  DROPKV_RETURN_IF_ERROR(check("rows", flags.rows.has_value(), taken.rows, "a policy that rows of queries judge for"));
  DROPKV_RETURN_IF_ERROR(check("sink", flags.sink.has_value(), taken.sink, "a policy that protects first tokens"));
  DROPKV_RETURN_IF_ERROR(check("pool", flags.pool.has_value(), taken.pool, "a policy that pools its scores so"));
  DROPKV_RETURN_IF_ERROR(
      check("heads", flags.heads.has_value(), taken.heads, "a policy whose heads can share a budget by such a rule"));
  return check("alpha", flags.alpha.has_value(), taken.alpha,
               "heads that share a budget (--heads ada or ada-o), which alpha is a setting of");
}

}  // namespace

Status ReadRows(const std::string& text, PolicyFlags* flags) {
  if (text.empty()) return Status::Ok();
  const Result<baseline::RowsSetting> setting = baseline::ParseRows(text);
  if (!setting.ok()) return FlagStatus("--rows", setting.status());
  flags->rows = setting->sources;
  if (setting->window == 0) return Status::Ok();
  if (flags->window && *flags->window != setting->window)
    return InvalidArgument("--rows: expected the window of --window, " + std::to_string(*flags->window) + ", got " +
                           text);
  flags->window = setting->window;
  return Status::Ok();
}

Status AddPolicies(const std::string& flag, const std::string& name, uint64_t seed, std::vector<Recipe>* policies) {
  std::vector<Recipe> found;
  if (name == "all" || name == "tier1") {
    for (const Recipe& recipe : baseline::Recipes())
      if (name == "all" || recipe.tier == 1) found.push_back(recipe);
  } else {
    Result<Recipe> recipe = baseline::FindRecipe(name);
    if (!recipe.ok()) return FlagStatus(flag, recipe.status());
    found.push_back(std::move(*recipe));
  }
  for (Recipe& recipe : found) {
    const auto same = [&](const Recipe& other) { return other.name() == recipe.name(); };
    if (std::any_of(policies->begin(), policies->end(), same)) continue;
    recipe.policy.seed = seed;
    policies->push_back(std::move(recipe));
  }
  return Status::Ok();
}

Status Settle(const PolicyFlags& flags, std::vector<Recipe>* policies) {
  const auto first =
      std::find_if(policies->begin(), policies->end(), [](const Recipe& recipe) { return !IsFull(recipe); });
  Taken taken;
  if (first == policies->end()) return CheckTaken(flags, taken, *policies);
  Recipe shared = *first;
  // What a policy cannot pool by leaves it its own pooling, not that of the first one.
  if (flags.pool) SetPooling(*flags.pool, &shared);
  const bool alone =
      std::count_if(policies->begin(), policies->end(), [](const Recipe& recipe) { return !IsFull(recipe); }) == 1;
  for (Recipe& recipe : *policies) {
    if (IsFull(recipe)) continue;
    if (!flags.own_settings) Share(shared, &recipe);
    Apply(flags, alone, &recipe, &taken);
    Status checked = baseline::CheckRecipe(recipe);
    if (!checked.ok() && checked.message().starts_with("policy.")) return checked;
    if (!checked.ok() && checked.message().starts_with("rows")) return {checked.code(), "policy." + checked.message()};
    if (!checked.ok()) return {checked.code(), "policy: " + recipe.name() + ": " + checked.message()};
  }
  return CheckTaken(flags, taken, *policies);
}

}  // namespace dropkv::cli
