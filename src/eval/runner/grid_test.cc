#include "eval/runner/grid.h"

#include <gtest/gtest.h>

namespace dropkv::eval {
namespace {

using baseline::Recipe;

Recipe Find(const char* name) { return baseline::FindRecipe(name).value(); }

Job MakeJob(const Setting& setting, const char* budget) { return {&setting, budget, ParseBudget(budget).value()}; }

// Every head of both layers keeps the first `lengths[i]` tokens; two heads a layer.
KeepList Lists(const std::vector<int32_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> positions;
  for (const int32_t length : lengths) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {static_cast<int32_t>(lengths.size()) / 2, 2, std::move(offsets), std::move(positions)};
}

TEST(Setting, NamesWhatIsNotThePresetsOwn) {
  Recipe recipe = Find("snapkv");
  EXPECT_EQ(SettingName(recipe), "snapkv");
  recipe.policy.window = 8;
  recipe.policy.pool.before = recipe.policy.pool.after = 5;
  EXPECT_EQ(SettingName(recipe), "snapkv w=8 k=11");
  recipe.policy.pool.before = 3;
  recipe.policy.pool.after = 20;
  recipe.policy.sink = 4;
  recipe.policy.heads = HeadRule::kAda;
  recipe.policy.alpha = 0.3;
  EXPECT_EQ(SettingName(recipe), "snapkv w=8 k=3,20 sink=4 ada alpha=0.3");
  recipe.policy.pool.kind = PoolKind::kMax;
  EXPECT_EQ(PoolName(recipe), "max:3,20");
  EXPECT_EQ(SettingName(Find("snapkv.w32.k7")), "snapkv.w32.k7");
  EXPECT_EQ(SettingName(Find("ada-snapkv")), "ada-snapkv");
  EXPECT_EQ(PoolName(Find("dropkv")), "11");
  EXPECT_EQ(PoolName(Find("streaming")), "1");
  EXPECT_EQ(HeadsName(Find("layerdefensivekv")), "flat");
  EXPECT_EQ(HeadsName(Find("adadropkv")), "ada");
}

TEST(Setting, EvictsAlikeWhateverTheName) {
  Recipe recipe = Find("dropkv");
  EXPECT_FALSE(SameEviction(recipe, Find("adadropkv")));
  recipe.policy.heads = HeadRule::kAda;
  EXPECT_TRUE(SameEviction(recipe, Find("adadropkv")));
  for (const Recipe& preset : baseline::Recipes()) EXPECT_TRUE(SameEviction(preset, preset)) << preset.name();
  EXPECT_FALSE(SameEviction(Find("obcache"), Find("obcache.key")));
}

TEST(Jobs, FullOnceAndEverySettingAtEveryBudget) {
  const std::vector<Setting> settings = {{"dropkv", Find("dropkv")}, {"snapkv", Find("snapkv")}};
  const std::vector<Job> jobs = MakeJobs(settings, {"5%", "64"}).value();
  ASSERT_EQ(jobs.size(), 5U);
  EXPECT_TRUE(jobs[0].full());
  EXPECT_EQ(jobs[0].text, "100%");
  EXPECT_EQ(jobs[2].name() + jobs[2].text, "dropkv64");
  EXPECT_EQ(jobs[4].budget.tokens, 64);
  EXPECT_FALSE(MakeJobs(settings, {"0.05"}).ok());
}

TEST(Jobs, AskedTokens) {
  EXPECT_EQ(AskedTokens(Budget::Fraction(0.05), 4096), 204);
  EXPECT_EQ(AskedTokens(Budget::Fraction(0.1), 1000), 100);
  EXPECT_EQ(AskedTokens(Budget::Fraction(1), 77), 77);
  EXPECT_EQ(AskedTokens(Budget::Tokens(512), 300), 300);
  EXPECT_EQ(AskedTokens(Budget::Tokens(512), 3000), 512);
}

TEST(Jobs, PromptsThatAPolicyKeepsAltogether) {
  const Setting setting{"snapkv", Find("snapkv")};  // a window of 64
  EXPECT_TRUE(CheckRoom(MakeJob(setting, "10%"), 65).ok());
  EXPECT_TRUE(CheckRoom(MakeJob(setting, "100%"), 60).ok());
  EXPECT_TRUE(CheckRoom(MakeJob(setting, "70"), 60).ok());
  const Status status = CheckRoom(MakeJob(setting, "10%"), 60);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("6 of 60"), std::string::npos) << status.message();
  EXPECT_FALSE(CheckRoom(MakeJob(setting, "10%"), 64).ok());
}

TEST(Jobs, WhatWasKeptIsWhatTheBudgetSays) {
  const Setting uniform{"dropkv", Find("dropkv")};
  const Setting shared{"adadropkv", Find("adadropkv")};
  const Setting scored{"h2o", Find("h2o")};
  EXPECT_TRUE(CheckKept(MakeJob(uniform, "10%"), 10, 100, Lists({10, 10, 10, 10})).ok());
  EXPECT_FALSE(CheckKept(MakeJob(uniform, "10%"), 10, 100, Lists({10, 10, 10, 11})).ok());
  EXPECT_FALSE(CheckKept(MakeJob(uniform, "10%"), 10, 100, Lists({9, 11, 10, 10})).ok());
  EXPECT_TRUE(CheckKept(MakeJob(shared, "10%"), 10, 100, Lists({9, 11, 20, 0})).ok());
  EXPECT_FALSE(CheckKept(MakeJob(shared, "10%"), 10, 100, Lists({9, 12, 10, 10})).ok());
}

TEST(Jobs, AnEvictionThatKeptEverythingIsAnError) {
  for (const char* name : {"dropkv", "adadropkv", "h2o"}) {
    const Setting setting{name, Find(name)};
    const Status status = CheckKept(MakeJob(setting, "50%"), 100, 100, Lists({100, 100, 100, 100}));
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("nothing was evicted"), std::string::npos) << status.message();
    EXPECT_TRUE(CheckKept(MakeJob(setting, "100%"), 100, 100, Lists({100, 100, 100, 100})).ok());
    EXPECT_TRUE(CheckKept(MakeJob(setting, "512"), 100, 100, Lists({100, 100, 100, 100})).ok());
  }
}

TEST(Jobs, KeptOfLayers) {
  const std::vector<KeptTokens> kept = KeptOfLayers(Lists({4, 8, 6, 6}));
  ASSERT_EQ(kept.size(), 2U);
  EXPECT_EQ(kept[0].min, 4);
  EXPECT_EQ(kept[0].mean, 6);
  EXPECT_EQ(kept[0].max, 8);
  EXPECT_EQ(kept[1].min, 6);
  EXPECT_EQ(kept[1].max, 6);
}

TEST(RowKey, TellsSampleSettingBudgetAndQuestionApart) {
  Row row;
  row.suite = "ruler";
  row.task = "vt";
  row.id = "1";
  row.length = 4096;
  row.setting = "dropkv";
  row.budget = "5%";
  const std::string key = RowKey(row);
  Row other = row;
  other.answer = "something else";
  EXPECT_EQ(RowKey(other), key);
  const auto changed = [&](auto change) {
    Row copy = row;
    change(&copy);
    return RowKey(copy) != key;
  };
  EXPECT_TRUE(changed([](Row* r) { r->id = "2"; }));
  EXPECT_TRUE(changed([](Row* r) { r->length = 8192; }));
  EXPECT_TRUE(changed([](Row* r) { r->setting = "snapkv"; }));
  EXPECT_TRUE(changed([](Row* r) { r->budget = "10%"; }));
  EXPECT_TRUE(changed([](Row* r) { r->hidden = true; }));
}

}  // namespace
}  // namespace dropkv::eval
