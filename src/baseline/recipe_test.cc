#include "baseline/recipe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "dropkv/policy.h"

namespace dropkv::baseline {
namespace {

Recipe Found(std::string_view name) {
  const Result<Recipe> recipe = FindRecipe(name);
  EXPECT_TRUE(recipe.ok()) << name << ": " << recipe.status().message();
  return recipe.ok() ? *recipe : Recipe{};
}

bool Contains(const Status& status, std::string_view text) { return status.message().find(text) != std::string::npos; }

Pooling PastMean(int32_t reach) { return {PoolKind::kMean, reach, reach, true}; }

TEST(Recipes, EveryOneIsValidAndNamedOnce) {
  std::set<std::string> names;
  int tier = 1;
  for (const Recipe& recipe : Recipes()) {
    EXPECT_TRUE(CheckRecipe(recipe).ok()) << recipe.name() << ": " << CheckRecipe(recipe).message();
    EXPECT_TRUE(names.insert(recipe.name()).second) << recipe.name();
    EXPECT_GE(recipe.tier, tier) << recipe.name() << " stands behind another tier";
    EXPECT_FALSE(recipe.signal.empty()) << recipe.name();
    EXPECT_FALSE(recipe.source.empty()) << recipe.name();
    tier = recipe.tier;
    EXPECT_EQ(Found(recipe.name()).name(), recipe.name());
  }
  EXPECT_EQ(tier, 2);
}

TEST(Recipes, HoldEveryPublicPolicy) {
  for (const char* name : {"full",
                           "snapkv",
                           "snapkv-official",
                           "snapkv-kvcf",
                           "laq",
                           "laq++",
                           "pyramidkv",
                           "pyramidkv-original",
                           "adakv",
                           "adakv-official",
                           "criticalkv",
                           "criticaladakv",
                           "andpro",
                           "andpro_code",
                           "caote",
                           "dropkv",
                           "dropkv-w32",
                           "adadropkv",
                           "dropkv-fwd",
                           "dropkv-compat",
                           "dropkv-wo",
                           "h2o",
                           "observed",
                           "tova",
                           "streaming",
                           "knorm",
                           "keydiff",
                           "keydiff-block",
                           "lagkv",
                           "expected",
                           "adakv-expected",
                           "cur",
                           "cur-key",
                           "cur-value",
                           "cur-mean",
                           "cur-global",
                           "compactor",
                           "noncausal",
                           "capkv",
                           "chunkkv",
                           "finch",
                           "vatp",
                           "vatp-scissorhands",
                           "obcache",
                           "obcache-value",
                           "obcache-key",
                           "defensivekv",
                           "layerdefensivekv",
                           "cake",
                           "random"})
    EXPECT_EQ(Found(name).name(), name);
}

TEST(Recipes, AgreeWithTheEnginesPresets) {
  for (const Policy& preset : Presets()) {
    SCOPED_TRACE(preset.name);
    const Recipe recipe = Found(preset.name);
    EXPECT_TRUE(RunsOnEngine(recipe));
    EXPECT_EQ(recipe.policy.signal, preset.signal);
    EXPECT_EQ(EngineSignal(recipe.scorer), preset.signal);
    EXPECT_EQ(recipe.policy.window, preset.window);
    EXPECT_EQ(recipe.policy.pool, preset.pool);
    EXPECT_EQ(recipe.policy.sink, preset.sink);
    EXPECT_EQ(recipe.policy.heads, preset.heads);
    EXPECT_EQ(recipe.policy.alpha, preset.alpha);
  }
}

TEST(Recipes, OnlyTheEnginesRunOnIt) {
  std::set<std::string> engine;
  for (const Recipe& recipe : Recipes())
    if (RunsOnEngine(recipe)) engine.insert(recipe.name());
  std::set<std::string> expected = {"dropkv-ahead", "snapkv-official", "snapkv-kvcf",
                                    "laq++",        "adakv",           "adakv-official"};
  for (const Policy& preset : Presets()) expected.insert(preset.name);
  EXPECT_EQ(engine, expected);
  Recipe last = Found("snapkv-official");
  last.group_before_pool = false;  // differs for the maximum, which the engine takes of the group's mean
  EXPECT_FALSE(RunsOnEngine(last));
  last.policy.pool = PastMean(2);
  EXPECT_TRUE(RunsOnEngine(last));
}

TEST(Recipes, SettingsOfTheReferences) {
  EXPECT_EQ(Found("snapkv").policy.window, 64);
  EXPECT_EQ(Found("snapkv").policy.pool, PastMean(2));
  EXPECT_EQ(Found("snapkv-official").policy.pool, (Pooling{PoolKind::kMax, 3, 3, true}));
  EXPECT_EQ(Found("snapkv-kvcf").policy.window, 8);
  EXPECT_EQ(Found("pyramidkv-original").layers, LayerRule::kPyramidOriginal);
  EXPECT_EQ(Found("adakv").policy.window, 64);
  EXPECT_EQ(Found("adakv-official").policy.heads, HeadRule::kAdaO);
  for (const char* name : {"laq", "laq++"}) {
    const Recipe draft = DraftRecipe(Found(name));
    EXPECT_EQ(draft.policy.window, 32);
    EXPECT_EQ(ProtectedLast(draft), 32);
    EXPECT_EQ(draft.policy.pool.kind, PoolKind::kMax);
    EXPECT_EQ(draft.policy.pool.before, 3);
    EXPECT_EQ(draft.policy.pool.after, 3);
    EXPECT_EQ(draft.scorer, Scorer::kAttention);
  }
  EXPECT_EQ(RowsText(Found("laq").rows, 32), "draft:8@same");
  EXPECT_EQ(ProtectedLast(Found("laq")), 0);
  EXPECT_FALSE(Found("laq").policy.pool.past_only);
  EXPECT_EQ(RowsText(Found("laq++").rows, Found("laq++").policy.window), "window:8+draft:8@same@w32");
  EXPECT_EQ(ProtectedLast(Found("laq++")), 8);
  EXPECT_TRUE(Found("laq++").policy.pool.past_only);
  EXPECT_EQ(Found("expected").epsilon, 0.0);
  EXPECT_EQ(Found("adakv-expected").epsilon, 0.01);
  EXPECT_EQ(Found("dropkv-compat").epsilon, 1e-6);
  EXPECT_EQ(Found("compactor").recent, 4);
  EXPECT_EQ(Found("compactor").policy.sink, 8);
  EXPECT_EQ(Found("lagkv").block, 128);
  EXPECT_EQ(Found("vatp").recent_share, 0.5);
  EXPECT_EQ(Found("layerdefensivekv").layers, LayerRule::kFlat);
  EXPECT_EQ(Found("defensivekv").group, GroupRule::kMax);
  EXPECT_TRUE(Found("andpro_code").flat_heads);
  EXPECT_FALSE(Found("tova-official").protect_window);
}

TEST(Needs, NameWhatIsRead) {
  EXPECT_FALSE(NeedsOf(Found("knorm")).values);
  EXPECT_FALSE(NeedsOf(Found("knorm")).window_queries);
  EXPECT_TRUE(NeedsOf(Found("snapkv")).window_queries);
  EXPECT_FALSE(NeedsOf(Found("snapkv")).values);
  EXPECT_TRUE(NeedsOf(Found("dropkv")).values);
  EXPECT_TRUE(NeedsOf(Found("criticalkv")).output_projection);
  EXPECT_TRUE(NeedsOf(Found("criticalkv")).values);
  EXPECT_TRUE(NeedsOf(Found("critical-knorm")).output_projection);
  EXPECT_TRUE(NeedsOf(Found("caote-h2o")).all_queries);
  EXPECT_FALSE(NeedsOf(Found("caote-h2o")).window_queries);
  EXPECT_TRUE(NeedsOf(Found("caote")).window_queries);
  EXPECT_TRUE(NeedsOf(Found("compactor")).pre_rope_keys);
  EXPECT_TRUE(NeedsOf(Found("expected")).pre_rope_queries);
  EXPECT_FALSE(NeedsOf(Found("expected.novnorm")).values);
  EXPECT_FALSE(NeedsOf(Found("cur.key")).values);
}

TEST(Names, OfTheComparisonData) {
  EXPECT_EQ(Found("snapkv.w32.k7").policy.window, 32);
  EXPECT_EQ(Found("snapkv.w32.k7").policy.pool, PastMean(3));
  EXPECT_EQ(Found("snapkv.w32.k7").name(), "snapkv.w32.k7");
  EXPECT_EQ(Found("lagkv.lag16.cross").block, 16);
  EXPECT_TRUE(Found("lagkv.lag16.cross").cross);
  EXPECT_EQ(Found("expected.eps1e-2").epsilon, 0.01);
  EXPECT_FALSE(Found("expected.nocov").covariance);
  EXPECT_FALSE(Found("expected.novnorm").value_norm);
  EXPECT_EQ(Found("cur.kv_avg").cur, CurForm::kMean);
  EXPECT_EQ(Found("cur.value").cur, CurForm::kValue);
  EXPECT_EQ(Found("obcache.value").obcache, ObCacheForm::kValue);
  EXPECT_EQ(Found("compactor.seed7").policy.seed, 7U);
  EXPECT_EQ(Found("cur.global").block, 0);
  EXPECT_EQ(Found("cap").scorer, Scorer::kCapKv);
  EXPECT_EQ(Found("noncausal.chunk64").block, 64);
  EXPECT_EQ(Found("finch.w16").policy.window, 16);
  EXPECT_EQ(Found("streaming.sink4").policy.sink, 4);
  EXPECT_EQ(Found("pyramid.w8").policy.window, 8);
  EXPECT_EQ(Found("pyramid.w8").layers, LayerRule::kPyramid);
  EXPECT_EQ(Found("dropkv.exact.w32.mean5+31").policy.pool, (Pooling{PoolKind::kMean, 5, 31, false}));
  EXPECT_EQ(Found("dropkv.exact.w8.max5").policy.pool, (Pooling{PoolKind::kMax, 2, 2, false}));
  const Recipe compat = Found("dropkv.compat.w32.raw");
  EXPECT_EQ(compat.scorer, Scorer::kDropKvCompat);
  EXPECT_EQ(compat.epsilon, 1e-6);
  EXPECT_EQ(compat.policy.window, 32);
  EXPECT_EQ(compat.policy.pool, (Pooling{PoolKind::kMean, 0, 0, false}));
}

TEST(Names, Wrapped) {
  const Recipe critical = Found("critical.snapkv.w32.k5");
  EXPECT_TRUE(critical.critical);
  EXPECT_EQ(critical.policy.heads, HeadRule::kUniform);
  EXPECT_EQ(critical.policy.window, 32);
  EXPECT_EQ(critical.epsilon, 1e-4);
  const Recipe ada = Found("ada0.3.knorm");
  EXPECT_EQ(ada.scorer, Scorer::kKeyNorm);
  EXPECT_EQ(ada.policy.heads, HeadRule::kAda);
  EXPECT_EQ(ada.policy.alpha, 0.3);
  const Recipe both = Found("criticalada0.0.snapkv.w32.k5");
  EXPECT_TRUE(both.critical);
  EXPECT_EQ(both.policy.alpha, 0.0);
  const Recipe chunks = Found("chunkkv.10.snapkv.w32.k5");
  EXPECT_EQ(chunks.chunk, 10);
  EXPECT_EQ(chunks.scorer, Scorer::kAttention);
  EXPECT_EQ(Found("chunkkv").chunk, 20);
  EXPECT_EQ(Found("chunkkv.w32").policy.window, 32);
  EXPECT_EQ(Found("chunk-knorm").chunk, 20);
  EXPECT_EQ(Found("ada-lagkv").policy.heads, HeadRule::kAda);
  EXPECT_EQ(Found("ada-o-dropkv").policy.heads, HeadRule::kAdaO);
  EXPECT_TRUE(Found("criticalada-dropkv").critical);
  EXPECT_EQ(Found("criticalada-dropkv").policy.heads, HeadRule::kAda);
  EXPECT_TRUE(Found("critical-ada-knorm").critical);
  // CriticalKV over ExpectedAttention turns the value norm off: the second stage has its own.
  EXPECT_FALSE(Found("critical-expected").value_norm);
}

TEST(Names, UnknownPartsAreNamed) {
  const auto expect = [](std::string_view name, Code code, std::string_view text) {
    const Result<Recipe> recipe = FindRecipe(name);
    ASSERT_FALSE(recipe.ok()) << name;
    EXPECT_EQ(recipe.status().code(), code) << name;
    EXPECT_TRUE(Contains(recipe.status(), text)) << name << ": " << recipe.status().message();
  };
  expect("", Code::kNotFound, "full, dropkv");
  expect("snapvk", Code::kNotFound, "snapkv-official");
  expect("ada-foo", Code::kNotFound, "\"foo\" is none of them");
  expect("ada0.2.foo.w8", Code::kNotFound, "\"foo\" is none of them");
  for (const char* part : {"q5", "w", "k4", "k0", "kx", "lag16", "cross", "eps0.5", "w-3", "mean5+", "seed1", "W8",
                           "w99999999999", "chunk4", "gamma2", "beta3", "sink4x", "future9", "w 8"})
    expect(std::string("snapkv.w32.").append(part), Code::kNotFound,
           std::string("\"").append(part).append("\" is none of them"));
  expect("snapkv.w32.5", Code::kNotFound, "\"w32.5\" is none of them");
  expect("snapkv.", Code::kNotFound, "last point");
  expect("snapkv..w8", Code::kNotFound, "\"\" is none of them");
  expect("chunkkv.20", Code::kNotFound, "\"20\" is none of them");
  expect("knorm.k5", Code::kInvalidArgument, "policy.pool");
  expect("snapkv.w0", Code::kInvalidArgument, "policy.window");
  expect("snapkv.w129", Code::kInvalidArgument, "policy.window");
  expect("tova.w2", Code::kInvalidArgument, "policy.window");
  expect("ada1.5.knorm", Code::kInvalidArgument, "policy.alpha");
  expect("ada-full", Code::kInvalidArgument, "scorer");
  expect("critical-streaming", Code::kInvalidArgument, "critical");
  expect("critical-dropkv-compat", Code::kInvalidArgument, "critical");
  expect("critical-chunkkv", Code::kInvalidArgument, "chunk");
  expect("ada-chunkkv", Code::kInvalidArgument, "chunk");
  expect("full.w8", Code::kInvalidArgument, "policy.window");
  expect("streaming.w8", Code::kInvalidArgument, "policy.window");
  expect("expected.novnorm.eps0.5", Code::kInvalidArgument, "epsilon");
  expect("ada-defensivekv", Code::kInvalidArgument, "flat_heads");
  expect("lagkv.lag0", Code::kInvalidArgument, "block");
}

TEST(CheckRecipe, NamesTheField) {
  const auto expect = [](const char* base, const char* field, const std::function<void(Recipe&)>& change) {
    Recipe recipe = Found(base);
    change(recipe);
    EXPECT_FALSE(CheckRecipe(recipe).ok()) << field;
    EXPECT_EQ(CheckRecipe(recipe).code(), Code::kInvalidArgument);
    EXPECT_TRUE(CheckRecipe(recipe).message().starts_with(std::string(field) + ": expected"))
        << CheckRecipe(recipe).message();
  };
  expect("knorm", "recent", [](Recipe& r) { r.recent = -1; });
  expect("knorm", "recent_share", [](Recipe& r) { r.recent_share = 1.5; });
  expect("knorm", "scorer", [](Recipe& r) { r.scorer = static_cast<Scorer>(99); });
  expect("knorm", "layers", [](Recipe& r) { r.layers = static_cast<LayerRule>(9); });
  expect("knorm", "group", [](Recipe& r) { r.group = static_cast<GroupRule>(-1); });
  expect("knorm", "policy.sink", [](Recipe& r) { r.policy.sink = -1; });
  expect("caote", "base", [](Recipe& r) { r.base = Scorer::kKeyNorm; });
  expect("pyramidkv", "pyramid_beta", [](Recipe& r) { r.pyramid_beta = 0.5; });
  expect("cake", "cake_tau1", [](Recipe& r) { r.cake_tau1 = 0; });
  expect("cake", "gamma", [](Recipe& r) { r.gamma = -1; });
  expect("criticalkv", "first_stage", [](Recipe& r) { r.first_stage = 1.1; });
  expect("criticalkv", "epsilon", [](Recipe& r) { r.epsilon = std::numeric_limits<double>::quiet_NaN(); });
  expect("criticalkv", "critical", [](Recipe& r) { r.policy.heads = HeadRule::kAdaO; });
  expect("compactor", "block", [](Recipe& r) { r.block = 0; });
  expect("compactor", "sketch", [](Recipe& r) { r.sketch = 0; });
  expect("expected", "future", [](Recipe& r) { r.future = 0; });
  expect("expected", "critical", [](Recipe& r) { r.critical = true; });
  expect("andpro_code", "chunk", [](Recipe& r) { r.chunk = 0; });
  expect("andpro_code", "flat_heads", [](Recipe& r) { r.flat_heads = false; });
  expect("snapkv", "layers", [](Recipe& r) { r.layers = LayerRule::kCake; });
  expect("snapkv", "flat_heads", [](Recipe& r) { r.layers = LayerRule::kFlat; });
  expect("knorm", "policy.pool", [](Recipe& r) { r.policy.pool.past_only = true; });
  expect("andpro_code", "policy.pool", [](Recipe& r) { r.policy.pool.past_only = true; });
  expect("defensivekv", "policy.pool", [](Recipe& r) { r.policy.pool.kind = PoolKind::kMax; });
  expect("streaming", "policy.pool", [](Recipe& r) { r.policy.pool = PastMean(2); });
  expect("streaming", "policy.window", [](Recipe& r) { r.policy.window = 8; });
}

// A setting that nothing reads would do nothing, silently.
TEST(CheckRecipe, RefusesWhatNothingReads) {
  const auto expect = [](const char* base, const char* field, const std::function<void(Recipe&)>& change) {
    Recipe recipe = Found(base);
    change(recipe);
    const Status status = CheckRecipe(recipe);
    EXPECT_EQ(status.message(), std::string(field) + ": expected the default for " + base +
                                    ", which does not read it, got another value");
  };
  expect("full", "policy.window", [](Recipe& r) { r.policy.window = 8; });
  expect("full", "policy.sink", [](Recipe& r) { r.policy.sink = 4; });
  expect("full", "recent", [](Recipe& r) { r.recent = 4; });
  expect("snapkv", "policy.alpha", [](Recipe& r) { r.policy.alpha = 0.5; });
  expect("andpro_code", "recent_share", [](Recipe& r) { r.recent_share = 0.5; });
  expect("andpro_code", "protect_window", [](Recipe& r) { r.protect_window = false; });
  expect("knorm", "protect_window", [](Recipe& r) { r.protect_window = false; });
  expect("snapkv", "base", [](Recipe& r) { r.base = Scorer::kLastRow; });
  for (const char* name : {"dropkv", "dropkv-compat", "dropkv-wo", "andpro", "finch", "obcache", "h2o", "tova",
                           "caote-h2o", "knorm", "compactor", "expected", "andpro_code"})
    expect(name, "group", [](Recipe& r) { r.group = GroupRule::kMax; });
  for (const char* name : {"h2o", "tova", "caote-tova", "knorm", "andpro_code", "defensivekv"})
    expect(name, "group", [](Recipe& r) { r.group = GroupRule::kSum; });
  expect("defensivekv", "group", [](Recipe& r) { r.group = GroupRule::kMean; });
  expect("defensivekv", "group_before_pool", [](Recipe& r) { r.group_before_pool = true; });
  expect("dropkv", "group_before_pool", [](Recipe& r) { r.group_before_pool = false; });
  expect("snapkv", "pyramid_beta", [](Recipe& r) { r.pyramid_beta = 10; });
  expect("pyramidkv", "cake_tau1", [](Recipe& r) { r.cake_tau1 = 1; });
  expect("pyramidkv", "cake_tau2", [](Recipe& r) { r.cake_tau2 = 1; });
  expect("snapkv", "first_stage", [](Recipe& r) { r.first_stage = 0.25; });
  expect("snapkv", "epsilon", [](Recipe& r) { r.epsilon = 0; });
  expect("expected.novnorm", "epsilon", [](Recipe& r) { r.epsilon = 0.5; });
  expect("snapkv", "block", [](Recipe& r) { r.block = 16; });
  expect("knorm", "future", [](Recipe& r) { r.future = 64; });
  expect("capkv", "covariance", [](Recipe& r) { r.covariance = false; });
  expect("capkv", "value_norm", [](Recipe& r) { r.value_norm = false; });
  expect("cur", "cross", [](Recipe& r) { r.cross = true; });
  expect("snapkv", "exact_bias", [](Recipe& r) { r.exact_bias = true; });
  expect("snapkv", "gamma", [](Recipe& r) { r.gamma = 1; });
  expect("noncausal", "sketch", [](Recipe& r) { r.sketch = 8; });
  expect("obcache", "cur", [](Recipe& r) { r.cur = CurForm::kKey; });
  expect("cur", "obcache", [](Recipe& r) { r.obcache = ObCacheForm::kKey; });
}

TEST(CheckRecipe, AllowsTheGroupRulesThatAreRead) {
  for (const char* name : {"snapkv", "adakv", "caote", "cake"})
    for (const GroupRule rule : {GroupRule::kMax, GroupRule::kSum}) {
      Recipe recipe = Found(name);
      recipe.group = rule;
      EXPECT_TRUE(CheckRecipe(recipe).ok()) << name << ": " << CheckRecipe(recipe).message();
    }
  for (const char* name : {"dropkv", "dropkv-wo", "andpro", "finch", "obcache"}) {
    Recipe recipe = Found(name);
    recipe.group = GroupRule::kSum;
    EXPECT_TRUE(CheckRecipe(recipe).ok()) << name << ": " << CheckRecipe(recipe).message();
  }
}

TEST(ComparableAcrossHeads, NotForRanksAndNormalisedScores) {
  for (const char* name : {"knorm", "keydiff", "lagkv", "compactor", "noncausal"})
    EXPECT_FALSE(ComparableAcrossHeads(Found(name))) << name;
  for (const char* name : {"dropkv", "snapkv", "expected", "cur", "defensivekv"})
    EXPECT_TRUE(ComparableAcrossHeads(Found(name))) << name;
}

}  // namespace
}  // namespace dropkv::baseline
