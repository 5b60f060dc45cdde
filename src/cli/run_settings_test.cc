// Which settings compared policies share, and which of them a flag changes.
#include "cli/run_settings.h"

#include <gtest/gtest.h>

#include <string>

namespace dropkv::cli {
namespace {

using baseline::Recipe;

std::vector<Recipe> Find(std::initializer_list<const char*> names) {
  std::vector<Recipe> recipes;
  for (const char* name : names) {
    Result<Recipe> recipe = baseline::FindRecipe(name);
    EXPECT_TRUE(recipe.ok()) << recipe.status().message();
    recipes.push_back(std::move(*recipe));
  }
  return recipes;
}

std::vector<Recipe> Settled(std::initializer_list<const char*> names, const PolicyFlags& flags = {}) {
  std::vector<Recipe> recipes = Find(names);
  const Status status = Settle(flags, &recipes);
  EXPECT_TRUE(status.ok()) << status.message();
  return recipes;
}

// "window, pooling, sinks, heads"
std::string Text(const Recipe& recipe) {
  const Policy& policy = recipe.policy;
  return std::to_string(policy.window) + ", " + PoolingText(policy.pool) + ", " + std::to_string(policy.sink) + ", " +
         std::string(HeadRuleName(policy.heads));
}

TEST(Settle, WindowsPoolingAndSinksOfTheFirstAreShared) {
  const std::vector<Recipe> recipes = Settled(
      {"full", "dropkv", "snapkv", "pyramidkv-original", "criticaladakv", "defensivekv", "cake", "finch", "random"});
  EXPECT_EQ(Text(recipes[2]), "8, mean 11 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[3]), "8, mean 11 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[4]), "8, mean 11 of the past, 0, ada");
  EXPECT_EQ(Text(recipes[5]), "8, mean 11 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[6]), "8, mean 11 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[7]), "8, none, 0, uniform");  // not pooled by definition
  EXPECT_EQ(Text(recipes[8]), "8, none, 0, uniform");
}

TEST(Settle, DefinitionsAreKept) {
  const std::initializer_list<const char*> names = {"tova",      "caote-tova", "streaming",   "lagkv",
                                                    "compactor", "expected",   "h2o",         "vatp",
                                                    "knorm",     "noncausal",  "andpro_code", "cur"};
  std::vector<Recipe> shared = Find({"dropkv-w32"});
  for (Recipe& recipe : Find(names)) shared.push_back(std::move(recipe));
  ASSERT_TRUE(Settle({}, &shared).ok());
  const std::vector<Recipe> own = Find(names);
  for (size_t i = 0; i < own.size(); ++i) EXPECT_EQ(Text(shared[i + 1]), Text(own[i])) << own[i].name();
  // And as the first they give nothing that is not theirs to give.
  for (const Recipe& recipe : own) {
    const Recipe snapkv = Settled({recipe.name().c_str(), "snapkv"}).back();
    EXPECT_EQ(Text(snapkv), recipe.name() == "streaming" ? "64, mean 5 of the past, 4, uniform"
                                                         : "64, mean 5 of the past, 0, uniform")
        << recipe.name();
  }
}

TEST(Settle, OwnSettings) {
  PolicyFlags flags;
  flags.own_settings = true;
  const std::vector<Recipe> recipes = Settled({"dropkv", "snapkv", "cake"}, flags);
  EXPECT_EQ(Text(recipes[1]), "64, mean 5 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[2]), "32, mean 5 of the past, 0, uniform");
}

TEST(Settle, RowsAreSharedByThosePoliciesThatTheyJudgeFor) {
  PolicyFlags flags;
  ASSERT_TRUE(ReadRows("window:12+draft:6@20%", &flags).ok());
  EXPECT_EQ(flags.window, 12);
  for (const Recipe& recipe : Settled({"dropkv", "snapkv", "knorm", "tova", "laq"}, flags)) {
    const std::string rows = baseline::RowsText(recipe.rows, recipe.policy.window);
    const std::string expected = recipe.name() == "knorm"  ? "window:0"
                                 : recipe.name() == "tova" ? "window:1+draft:6@20%"
                                                           : "window:12+draft:6@20%";
    EXPECT_EQ(rows, expected) << recipe.name();
  }
  // Without the flag the first one's; with settings of their own, those.
  EXPECT_EQ(Settled({"laq++", "snapkv"}).back().rows.draft, 8);
  EXPECT_EQ(Settled({"snapkv", "laq++"}).back().rows.draft, 0);
  flags = {};
  flags.own_settings = true;
  EXPECT_EQ(Settled({"snapkv", "laq++"}, flags).back().rows.draft, 8);
  flags.window = 9;
  EXPECT_NE(ReadRows("window:8", &flags).message().find("--rows: expected the window of --window, 9"),
            std::string::npos);
}

TEST(Settle, FlagsHoldForThoseThatHaveTheSetting) {
  PolicyFlags flags;
  flags.window = 16;
  flags.pool = Pooling{PoolKind::kMax, 3, 5, false};
  flags.sink = 2;
  flags.alpha = 0.5;
  flags.heads = HeadRule::kAda;
  const std::vector<Recipe> recipes =
      Settled({"dropkv", "snapkv", "tova", "knorm", "chunkkv", "defensivekv", "andpro_code", "compactor"}, flags);
  EXPECT_EQ(Text(recipes[0]), "16, max 3,5, 2, ada");
  EXPECT_EQ(recipes[0].policy.alpha, 0.5);
  EXPECT_EQ(Text(recipes[1]), "16, max 3,5 of the past, 2, ada");
  EXPECT_EQ(Text(recipes[2]), "1, none, 2, ada");
  EXPECT_EQ(Text(recipes[3]), "0, none, 2, ada");
  EXPECT_EQ(Text(recipes[4]), "16, max 3,5 of the past, 2, uniform");  // the same chunks in all heads
  EXPECT_EQ(Text(recipes[5]), "16, mean 5 of the past, 2, uniform");   // flat over the heads; pooled by a mean only
  EXPECT_EQ(Text(recipes[6]), "32, max 7, 4, uniform");
  EXPECT_EQ(Text(recipes[7]), "0, mean 3, 2, ada");
}

TEST(Settle, EveryPresetTakesEveryFlagInAList) {
  PolicyFlags flags;
  flags.window = 24;
  flags.sink = 3;
  for (const HeadRule heads : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO}) {
    flags.heads = heads;
    flags.pool = Pooling{heads == HeadRule::kAda ? PoolKind::kMax : PoolKind::kMean, 1, 9, false};
    std::vector<Recipe> recipes(baseline::Recipes().begin(), baseline::Recipes().end());
    const Status status = Settle(flags, &recipes);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(Settle, ASinglePolicyMustTakeItsFlags) {
  const auto message = [](const char* name, const PolicyFlags& flags) {
    std::vector<Recipe> recipes = Find({"full", name});
    const Status status = Settle(flags, &recipes);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  PolicyFlags flags;
  flags.window = 8;
  EXPECT_EQ(message("tova", flags).find("policy.window: expected"), 0U);
  EXPECT_EQ(Settled({"knorm"}, flags).front().policy.window, 8);
  flags = {};
  flags.heads = HeadRule::kAda;
  EXPECT_EQ(message("chunkkv", flags).find("policy: chunkkv: chunk: expected"), 0U);
  flags.heads = HeadRule::kAdaO;
  EXPECT_EQ(message("criticalkv", flags).find("policy: criticalkv: critical: expected"), 0U);
}

std::string Refusal(std::initializer_list<const char*> names, const PolicyFlags& flags) {
  std::vector<Recipe> recipes = Find(names);
  const Status status = Settle(flags, &recipes);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  return status.message();
}

TEST(Settle, AFlagThatNoPolicyReadsIsRefused) {
  PolicyFlags window, sink, pool, heads, alpha;
  window.window = 8;
  sink.sink = 2;
  pool.pool = Pooling{PoolKind::kMean, 2, 2, false};
  heads.heads = HeadRule::kUniform;
  alpha.alpha = 0.2;
  EXPECT_EQ(Refusal({"full"}, window), "policy.window: expected a policy with a window, got full");
  EXPECT_EQ(Refusal({"full"}, sink), "policy.sink: expected a policy that protects first tokens, got full");
  EXPECT_EQ(Refusal({"full"}, pool), "policy.pool: expected a policy that pools its scores so, got full");
  EXPECT_EQ(Refusal({"full", "knorm", "tova"}, window),
            "policy.window: expected a policy with a window, got knorm, tova");
  EXPECT_EQ(Refusal({"streaming"}, window),
            "policy.window: expected 1 for streaming, which keeps the latest tokens anyway, got 8");
  EXPECT_EQ(Refusal({"streaming"}, pool),
            "policy.pool: expected none for streaming, whose scores are not pooled, got mean 5");
  EXPECT_EQ(Refusal({"random"}, pool),
            "policy.pool: expected none for random, whose scores are not pooled, got mean 5");
  EXPECT_EQ(Refusal({"knorm", "h2o"}, pool), "policy.pool: expected a policy that pools its scores so, got knorm, h2o");
  pool.pool = Pooling{PoolKind::kMean, 0, 0, false};  // none is asked for, but of a policy that has no say in it
  EXPECT_EQ(Refusal({"full", "knorm"}, pool), "policy.pool: expected a policy that pools its scores so, got knorm");
  for (const char* name : {"andpro_code", "defensivekv"})
    EXPECT_EQ(Refusal({name}, heads), std::string("policy.heads: expected a policy whose heads can share a budget by "
                                                  "such a rule, got ") +
                                          name);
  EXPECT_EQ(Refusal({"snapkv", "knorm"}, alpha),
            "policy.alpha: expected heads that share a budget (--heads ada or ada-o), "
            "which alpha is a setting of, got snapkv, knorm");
  alpha.heads = HeadRule::kAdaO;
  alpha.alpha = 0.7;
  EXPECT_EQ(Settled({"snapkv"}, alpha).front().policy.alpha, 0.7);
  alpha.heads.reset();
  const std::vector<Recipe> recipes = Settled({"snapkv", "adakv"}, alpha);
  EXPECT_EQ(recipes[0].policy.alpha, 0.2);
  EXPECT_EQ(recipes[1].policy.alpha, 0.7);
  EXPECT_EQ(Settled({"ada0.3.knorm"}, heads).front().policy.alpha, 0.2);
}

// A maximum of the first policy's is not for DefensiveKV, which keeps its own mean.
TEST(Settle, AMaximumIsSharedWithThoseThatTakeIt) {
  const std::vector<Recipe> recipes = Settled({"snapkv-official", "defensivekv", "cake"});
  EXPECT_EQ(Text(recipes[1]), "32, mean 5 of the past, 0, uniform");
  EXPECT_EQ(Text(recipes[2]), "32, max 7 of the past, 0, uniform");
}

}  // namespace
}  // namespace dropkv::cli
