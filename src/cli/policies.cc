#include "cli/policies.h"

#include <cstdio>

#include "baseline/policy_table.h"
#include "baseline/recipe.h"

namespace dropkv::cli {
namespace {

constexpr const char* kHelp = R"(usage: dropkv policies [NAME ...] [--markdown]
Lists every eviction policy: what it scores, what it reads, what it protects, how heads and layers share the budget.
In brackets: multiply-adds per query head of n tokens, head size d, window w, hidden size D.

  NAME          what this name means: a preset, or one with prefixes and settings, such as ada-snapkv.w32.k5
  --markdown    the page docs/policies.md; with names, their rows alone
)";

}  // namespace

Status Policies(const std::vector<std::string>& arguments) {
  bool markdown = false;
  std::vector<baseline::Recipe> recipes;
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::fputs(kHelp, stdout);
      return Status::Ok();
    }
    if (argument == "--markdown") {
      markdown = true;
      continue;
    }
    if (argument.starts_with('-'))
      return InvalidArgument("policies: expected --markdown or the name of a policy, got '" + argument + "'");
    Result<baseline::Recipe> recipe = baseline::FindRecipe(argument);
    if (!recipe.ok()) return recipe.status();
    recipes.push_back(std::move(*recipe));
  }
  const bool all = recipes.empty();
  if (all) recipes.assign(baseline::Recipes().begin(), baseline::Recipes().end());
  const std::string text = !markdown ? baseline::PolicyTableText(recipes)
                           : all     ? baseline::PolicyDocument()
                                     : baseline::PolicyTableMarkdown(recipes);
  std::fputs(text.c_str(), stdout);
  return Status::Ok();
}

}  // namespace dropkv::cli
