#include "cli/run_settings.h"

#include <algorithm>

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

bool IsPooled(const Recipe& recipe) { return HasWindow(recipe) && recipe.scorer != Scorer::kFinch; }

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
  if (IsPooled(shared) && IsPooled(*recipe)) SetPooling(shared.policy.pool, recipe);
  const bool has_sinks = HasSinks(shared) || shared.scorer == Scorer::kRecency;
  if (has_sinks && HasSinks(*recipe)) recipe->policy.sink = shared.policy.sink;
}

// alone: the only policy that evicts; what it cannot take is then an error of CheckRecipe.
void Apply(const PolicyFlags& flags, bool alone, Recipe* recipe) {
  Policy& policy = recipe->policy;
  const bool fixed = recipe->scorer == Scorer::kProjectionCode;
  const bool any_window = policy.window > 0 && !ReadsLastRow(*recipe) && !fixed;
  if (flags.window && (alone || any_window)) policy.window = *flags.window;
  if (flags.sink && (alone || !fixed)) policy.sink = *flags.sink;
  if (flags.alpha) policy.alpha = *flags.alpha;
  if (flags.pool && (IsPooled(*recipe) || (alone && !baseline::RunsOnEngine(*recipe)))) SetPooling(*flags.pool, recipe);
  if (flags.heads && (alone || TakesHeads(*recipe, *flags.heads))) policy.heads = *flags.heads;
}

}  // namespace

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
  if (first == policies->end()) return Status::Ok();
  const Recipe shared = *first;
  const bool alone =
      std::count_if(policies->begin(), policies->end(), [](const Recipe& recipe) { return !IsFull(recipe); }) == 1;
  for (Recipe& recipe : *policies) {
    if (IsFull(recipe)) continue;
    if (!flags.own_settings) Share(shared, &recipe);
    Apply(flags, alone, &recipe);
    Status checked = baseline::CheckRecipe(recipe);
    if (!checked.ok() && checked.message().starts_with("policy.")) return checked;
    if (!checked.ok()) return {checked.code(), "policy: " + recipe.name() + ": " + checked.message()};
  }
  return Status::Ok();
}

}  // namespace dropkv::cli
