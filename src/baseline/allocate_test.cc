#include "baseline/allocate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "baseline/critical.h"
#include "baseline/ranking.h"
#include "core/random.h"
#include "reference/reference.h"

namespace dropkv::baseline {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Heads = std::vector<std::vector<int32_t>>;

Recipe Named(std::string_view name) {
  const Result<Recipe> recipe = FindRecipe(name);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.ok() ? *recipe : Recipe{};
}

// A recipe without window, pooling or protection, whose heads share by `rule`.
Recipe Bare(HeadRule rule = HeadRule::kUniform, double alpha = 0.2) {
  Recipe recipe = Named("observed");
  recipe.policy.heads = rule;
  recipe.policy.alpha = alpha;
  return recipe;
}

LayerScores Scores(const std::vector<std::vector<double>>& heads, const std::vector<int32_t>& protected_tokens = {}) {
  LayerScores scores;
  scores.kv_heads = static_cast<int32_t>(heads.size());
  scores.tokens = static_cast<int32_t>(heads.front().size());
  for (const auto& head : heads) scores.score.insert(scores.score.end(), head.begin(), head.end());
  scores.is_protected.assign(scores.tokens, 0);
  for (const int32_t token : protected_tokens) scores.is_protected[token] = 1;
  scores.forced.assign(scores.score.size(), 0);
  return scores;
}

Heads ListsOf(const KeepList& keep, int32_t layer = 0) {
  Heads heads;
  for (int32_t head = 0; head < keep.kv_heads(); ++head)
    heads.emplace_back(keep.head(layer, head).begin(), keep.head(layer, head).end());
  return heads;
}

Heads Kept(const Recipe& recipe, const LayerScores& scores, double kept, bool clamp = true, double fraction = 0) {
  const Result<Selection> selection = Select(recipe, std::span(&scores, 1), kept, clamp, fraction);
  EXPECT_TRUE(selection.ok()) << selection.status().message();
  return selection.ok() ? ListsOf(selection->keep) : Heads();
}

double Random(uint64_t seed, uint64_t counter) { return RandomUniform(seed, counter); }

TEST(Ranking, TakesWhatASortTakes) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto n = static_cast<int32_t>(1 + RandomBits(seed, 0) % 300);
    std::vector<double> scores(n);
    for (int32_t j = 0; j < n; ++j) {
      scores[j] = (Random(seed, 3 * j + 1) - 0.5) * std::pow(10.0, 600 * (Random(seed, 3 * j + 2) - 0.5));
      if (j % 3 == 0) scores[j] = std::floor(4 * Random(seed, j)) - 2;  // ties, zeros of both signs
    }
    scores[n / 2] = seed % 2 == 0 ? std::numeric_limits<double>::infinity() : -0.0;
    std::vector<uint64_t> keys(n);
    for (int32_t j = 0; j < n; ++j) keys[j] = TokenKey(TokenClass::kScored, scores[j], j);
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
    std::vector<uint8_t> kept(n, 0);
    int32_t taken = 0;
    for (int step = 0; step < 3; ++step) {
      const auto count = static_cast<int32_t>(RandomBits(seed, 1000 + step) % (n / 2 + 2));
      EXPECT_EQ(TakeBest(keys, kept, count), std::min(count, n - taken));
      taken = std::min(n, taken + count);
      std::vector<uint8_t> expected(n, 0);
      for (int32_t i = 0; i < taken; ++i) expected[order[i]] = 1;
      ASSERT_EQ(kept, expected) << "seed " << seed << " step " << step;
    }
  }
}

TEST(Ranking, ClassesStandAboveEveryScore) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double largest = std::numeric_limits<double>::max();
  const std::vector<uint64_t> descending = {
      TokenKey(TokenClass::kProtected, -1, 7),         TokenKey(TokenClass::kProtected, 5, 3),
      TokenKey(TokenClass::kForced, kNan, 0),          TokenKey(TokenClass::kForced, 2, 0),
      TokenKey(TokenClass::kForced, -infinity, 0),     TokenKey(TokenClass::kFirstStage, infinity, 0),
      TokenKey(TokenClass::kFirstStage, -infinity, 0), TokenKey(TokenClass::kScored, infinity, 0),
      TokenKey(TokenClass::kScored, largest, 0),       TokenKey(TokenClass::kScored, 1e-300, 0),
      TokenKey(TokenClass::kScored, 0.0, 0),           TokenKey(TokenClass::kScored, -1e-300, 0),
      TokenKey(TokenClass::kScored, -infinity, 0)};
  for (size_t i = 1; i < descending.size(); ++i) EXPECT_GT(descending[i - 1], descending[i]) << i;
  EXPECT_GT(descending.back(), 0U);
  EXPECT_EQ(TokenKey(TokenClass::kScored, -0.0, 0), TokenKey(TokenClass::kScored, 0.0, 0));
  EXPECT_EQ(TokenKey(TokenClass::kScored, kNan, 0), TokenKey(TokenClass::kScored, infinity, 0));
}

// Every head rule of the engine, on random scores with ties and flagged tokens, against the specification in code.
TEST(Select, EqualsTheReferenceOfTheEngine) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Policy policy = *FindPreset("dropkv");
    const auto n = static_cast<int32_t>(8 + RandomBits(seed, 1) % 60);
    const auto heads = static_cast<int32_t>(1 + RandomBits(seed, 2) % 4);
    policy.window = static_cast<int32_t>(1 + RandomBits(seed, 3) % 5);
    policy.sink = static_cast<int32_t>(RandomBits(seed, 4) % 3);
    policy.heads = static_cast<HeadRule>(seed % 3);
    if (policy.heads != HeadRule::kUniform) policy.alpha = Random(seed, 5);
    const int32_t smallest = policy.window + policy.sink;
    const int32_t keep = smallest + static_cast<int32_t>(RandomBits(seed, 6) % (n - smallest + 1));
    Recipe recipe = Named("dropkv");
    recipe.policy = policy;
    std::vector<std::vector<double>> values(heads, std::vector<double>(n));
    for (int32_t u = 0; u < heads; ++u)
      for (int32_t j = 0; j < n; ++j) values[u][j] = std::floor(Random(seed, 100 + u * n + j) * 12) - 3;
    LayerScores scores = Scores(values);
    for (int32_t j = 0; j < n; ++j) scores.is_protected[j] = j < policy.sink || j >= n - policy.window ? 1 : 0;
    std::vector<uint8_t> flags(scores.score.size(), 0);
    std::vector<double> pooled = scores.score;
    for (size_t at = 0; at < flags.size(); ++at) {
      if (RandomBits(seed, 9000 + at) % 10 != 0) continue;
      const bool nonfinite = RandomBits(seed, 19000 + at) % 2 == 0;
      flags[at] = nonfinite ? reference::kNonFinite : reference::kDominant;
      scores.forced[at] = 1;
      if (nonfinite) scores.score[at] = kNan;
    }
    const KeepList expected =
        reference::Select(policy, {keep, false}, heads, n, pooled.data(), pooled.data(), flags.data());
    ASSERT_EQ(Kept(recipe, scores, keep), ListsOf(expected)) << "seed " << seed;
  }
}

TEST(Select, TiesGoToTheLowerIndexAndHead) {
  EXPECT_EQ(Kept(Bare(), Scores({{1, 2, 2, 2, 1}, {0, 0, 0, 0, 0}}), 2), (Heads{{1, 2}, {0, 1}}));
  EXPECT_EQ(Kept(Bare(HeadRule::kAda, 0), Scores({{1, 1, 1}, {1, 1, 1}}), 2), (Heads{{0, 1, 2}, {0}}));
}

TEST(Select, RoundsTheReferencesWay) {
  const LayerScores scores = Scores({std::vector<double>(1000, 0.0)});
  EXPECT_EQ(Kept(Bare(), scores, 1000 * (1 - 0.9), false).front().size(), 99U);
  EXPECT_EQ(Kept(Bare(), scores, 1e18, false).front().size(), 1000U);
  EXPECT_EQ(Kept(Bare(), scores, 0.5, false).front().size(), 0U);
  EXPECT_EQ(Kept(Bare(), scores, 0.5, true).front().size(), 1U);
}

TEST(Select, BelowTheProtectedTokens) {
  const LayerScores scores = Scores({{9, 8, 7, 6, 5, 4}, {1, 2, 3, 4, 5, 6}}, {0, 4, 5});
  EXPECT_EQ(Kept(Bare(), scores, 2, true), (Heads{{0, 4, 5}, {0, 4, 5}}));
  EXPECT_EQ(Kept(Bare(), scores, 2, false), (Heads{{4, 5}, {4, 5}}));
  EXPECT_EQ(Kept(Bare(HeadRule::kAda), scores, 2, false), (Heads{{4, 5}, {4, 5}}));
  EXPECT_EQ(Kept(Bare(HeadRule::kAdaO), scores, 2, false), (Heads{{4, 5}, {4, 5}}));
  const Result<Selection> raised = Select(Bare(), std::span(&scores, 1), 2, true);
  ASSERT_TRUE(raised.ok());
  EXPECT_TRUE(raised->budgets.raised);
  EXPECT_EQ(raised->budgets.keep, std::vector<int32_t>{3});
  ASSERT_EQ(raised->warnings.size(), 1U);
  EXPECT_NE(raised->warnings[0].find("raised"), std::string::npos);
}

// methods of the two references, budget 10 each beyond nothing protected: flat counts (15, 5) and (20, 0), alpha 0.2.
TEST(Select, RulesKAndO) {
  std::vector<double> high(20);
  std::vector<double> low(20);
  for (int32_t j = 0; j < 20; ++j) {
    high[j] = j < 15 ? 100 - j : 1;
    low[j] = j < 5 ? 50 - j : 2;
  }
  const auto counts = [](const Heads& heads) { return std::pair(heads[0].size(), heads[1].size()); };
  const LayerScores scores = Scores({high, low});
  EXPECT_EQ(counts(Kept(Bare(HeadRule::kAda), scores, 10)), std::pair(size_t{15}, size_t{5}));
  EXPECT_EQ(counts(Kept(Bare(HeadRule::kAdaO), scores, 10)), std::pair(size_t{14}, size_t{6}));
  const LayerScores extreme = Scores({std::vector<double>(20, 2.0), std::vector<double>(20, 1.0)});
  EXPECT_EQ(counts(Kept(Bare(HeadRule::kAda), extreme, 10)), std::pair(size_t{18}, size_t{2}));
  EXPECT_EQ(counts(Kept(Bare(HeadRule::kAdaO), extreme, 10)), std::pair(size_t{18}, size_t{2}));
}

TEST(Select, RecentShareOfTheBudget) {
  Recipe recipe = Named("h2o-official");
  const LayerScores scores = Scores({{5, 4, 9, 8, 7, 1, 0, 0}});
  EXPECT_EQ(Kept(recipe, scores, 4), (Heads{{2, 3, 6, 7}}));
  EXPECT_EQ(Kept(recipe, scores, 5), (Heads{{2, 3, 4, 6, 7}}));  // trunc(2.5) of the latest
}

TEST(Select, SinksComeBeforeRecentTokens) {
  const Recipe recipe = Named("streaming");
  const LayerScores scores = Scores({{0, 1, 2, 3, 4, 5, 6, 7}}, {0, 1, 2, 3, 7});
  EXPECT_EQ(Kept(recipe, scores, 6, false), (Heads{{0, 1, 2, 3, 6, 7}}));
  EXPECT_EQ(Kept(recipe, scores, 5, false), (Heads{{0, 1, 2, 3, 7}}));
  EXPECT_EQ(Kept(recipe, scores, 4, false), (Heads{{0, 1, 2, 3}}));
}

TEST(Select, FlatOverTheLayer) {
  const Recipe recipe = Named("defensivekv");
  const LayerScores scores = Scores({{5, 4, 3, 2, 0}, {1, 9, 1, 1, 0}}, {4});
  EXPECT_EQ(Kept(recipe, scores, 3), (Heads{{0, 1, 2, 4}, {1, 4}}));
  EXPECT_EQ(Kept(recipe, scores, 2.5), (Heads{{0, 1, 4}, {1, 4}}));  // trunc(2.5 * 2), not 2 * 2
  EXPECT_EQ(Kept(recipe, scores, 0.5), (Heads{{4}, {4}}));
  LayerScores staged = scores;
  staged.first_stage.assign(10, 0);
  staged.first_stage[5 + 3] = 1;  // before all others, though its score is low
  EXPECT_EQ(Kept(recipe, staged, 2), (Heads{{4}, {1, 3, 4}}));
  staged.forced[2] = 1;  // forced ones come before the first stage
  EXPECT_EQ(Kept(recipe, staged, 2), (Heads{{2, 4}, {3, 4}}));
}

TEST(Select, FlatOverTheModel) {
  const Recipe recipe = Named("layerdefensivekv");
  const std::vector<LayerScores> layers = {Scores({{1, 1, 1, 0}, {2, 1, 1, 0}}, {3}),
                                           Scores({{9, 8, 7, 0}, {6, 1, 1, 0}}, {3})};
  const Result<Selection> selection = Select(recipe, layers, 2.3, true);
  ASSERT_TRUE(selection.ok());
  EXPECT_EQ(selection->budgets.total, 9);  // trunc(2.3 * 2 heads * 2 layers)
  EXPECT_EQ(selection->keep.total(), 9);
  EXPECT_EQ(ListsOf(selection->keep, 0), (Heads{{3}, {0, 3}}));
  EXPECT_EQ(ListsOf(selection->keep, 1), (Heads{{0, 1, 2, 3}, {0, 3}}));
}

TEST(Select, ChunksAreTheSameTokensInAllHeads) {
  Recipe recipe = Named("chunk-observed");
  recipe.chunk = 2;
  // Sums over heads 3, 3, 9, 1, 4, 4 and a tail of 7: means of the chunks 3, 5, 4, 7.
  const LayerScores scores = Scores({{1, 2, 9, 0, 1, 2, 3}, {2, 1, 0, 1, 3, 2, 4}});
  EXPECT_EQ(Kept(recipe, scores, 3.5), (Heads{{2, 3, 6}, {2, 3, 6}}));  // trunc(4 * 0.5) chunks
  EXPECT_EQ(Kept(recipe, scores, 3.5, false, 0.2), (Heads{{6}, {6}}));  // one chunk at least
  EXPECT_EQ(Kept(recipe, scores, 3.5, false, 0.75), (Heads{{2, 3, 4, 5, 6}, {2, 3, 4, 5, 6}}));
  const Result<Selection> selection = Select(recipe, std::span(&scores, 1), 3.5, true);
  EXPECT_EQ(selection->budgets.keep, std::vector<int32_t>{3});
  recipe.chunk = 20;  // a prompt below one chunk: the scores themselves
  EXPECT_EQ(Kept(recipe, scores, 2), (Heads{{2, 6}, {4, 6}}));
}

TEST(Select, ChunksOfProtectedTokensStay) {
  Recipe recipe = Named("chunk-observed");
  recipe.chunk = 2;
  const LayerScores scores = Scores({{9, 9, 8, 8, 7, 7, 0, 0}}, {5, 6, 7});
  EXPECT_EQ(Kept(recipe, scores, 3), (Heads{{4, 5, 6, 7}}));
  EXPECT_EQ(Kept(recipe, scores, 6), (Heads{{0, 1, 4, 5, 6, 7}}));
}

// AnDPro's code: chunks of 4 tokens, the first and the last w / 4 kept, the rest over both heads.
TEST(Select, ChunksOfAnDProShareTheLayer) {
  Recipe recipe = Named("andpro_code");
  recipe.policy.window = 4;
  const int32_t n = 22;  // 6 chunks, the last one of 2 tokens
  std::vector<std::vector<double>> values(2, std::vector<double>(n));
  const double of_chunk[2][6] = {{0, -1, 5, 3, 2, 0}, {0, 9, 1, 1, -4, 0}};
  for (int32_t u = 0; u < 2; ++u)
    for (int32_t j = 0; j < n; ++j) values[u][j] = of_chunk[u][j / 4];
  const LayerScores scores = Scores(values, {0, 1, 2, 3, 20, 21});
  // floor(2 * 13 / 4) = 6 chunks, 4 of them protected; two more: 9 of head 1, 5 of head 0.
  EXPECT_EQ(Kept(recipe, scores, 13.9), (Heads{{0, 1, 2, 3, 8, 9, 10, 11, 20, 21}, {0, 1, 2, 3, 4, 5, 6, 7, 20, 21}}));
  // floor(2 * 15 / 4) = 7: and 3 of head 0.
  EXPECT_EQ(Kept(recipe, scores, 15).front().size(), 14U);
  // Below what is protected.
  EXPECT_EQ(Kept(recipe, scores, 2), (Heads{{0, 1, 2, 3, 20, 21}, {0, 1, 2, 3, 20, 21}}));
}

LayerScores WithNorms(LayerScores scores, std::vector<double> norms) {
  scores.projected_norm = std::move(norms);
  return scores;
}

// K1 = trunc(4 * 0.5): the two best by score; then two of the others by (s + epsilon) N.
TEST(Critical, TwoStages) {
  const Recipe recipe = Named("critical-observed");
  const LayerScores scores = WithNorms(Scores({{9, 8, 7, 6, 5, 4}}), {1, 1, 1, 2, 1, 4});
  const std::vector<float> padded(scores.score.begin(), scores.score.end());
  const CriticalStages stages = FindCritical(recipe, scores, padded, 4, 2);
  EXPECT_EQ(stages.first, (std::vector<uint8_t>{1, 1, 0, 0, 0, 0}));
  EXPECT_EQ(stages.budget, std::vector<int32_t>{4});
  EXPECT_EQ(stages.value[1], std::numeric_limits<float>::max());
  EXPECT_EQ(stages.value[3], static_cast<float>(2 * (6 + 1e-4)));
  EXPECT_EQ(Kept(recipe, scores, 4), (Heads{{0, 1, 3, 5}}));
  // With one norm for all tokens the second stage changes nothing.
  EXPECT_EQ(Kept(recipe, WithNorms(scores, std::vector<double>(6, 3.0)), 4), (Heads{{0, 1, 2, 3}}));
  const LayerScores window = WithNorms(Scores({{9, 8, 7, 6, 0, 0}}, {4, 5}), {1, 1, 1, 9, 1, 1});
  EXPECT_EQ(Kept(recipe, window, 3), (Heads{{3, 4, 5}})) << "the window fills the first stage's one place";
}

// Golden check: (n = 4096, R = 0.95) has K1 = 102.
TEST(Critical, FirstStageIsATruncatedHalf) {
  const Recipe recipe = Named("critical-observed");
  std::vector<double> values(4096);
  std::vector<double> norms(4096);
  for (int32_t j = 0; j < 4096; ++j) {
    values[j] = 4096 - j;
    norms[j] = j < 200 ? 1e-6 : 1;  // the second stage takes none of the best
  }
  const Heads kept = Kept(recipe, WithNorms(Scores({values}), norms), 4096 * (1 - 0.95), false);
  EXPECT_EQ(kept[0].size(), 204U);
  EXPECT_EQ(std::count_if(kept[0].begin(), kept[0].end(), [](int32_t j) { return j < 200; }), 102);
}

// Two heads, 3 tokens each on average, alpha 0.4: one safe token a head; the flat order gives (4, 2); stage 1 takes
// trunc(4 / 2) and trunc(2 / 2); the norms choose the rest.
TEST(Critical, AdaptiveHeads) {
  Recipe recipe = Named("criticalada0.4.observed");
  const LayerScores scores =
      WithNorms(Scores({{9, 8, 7, 6, 5, 4}, {3, 3.5, 2, 1, 0.5, 6.5}}), {1, 1, 1, 1, 2, 3, 1, 0.1, 1, 5, 1, 1});
  const std::vector<float> padded(scores.score.begin(), scores.score.end());
  const CriticalStages stages = FindCritical(recipe, scores, padded, 3, 0);
  EXPECT_EQ(stages.budget, (std::vector<int32_t>{5, 1}));
  recipe.policy.alpha = 0.7;  // trunc(2.1) safe tokens
  EXPECT_EQ(FindCritical(recipe, scores, padded, 3, 0).budget, (std::vector<int32_t>{4, 2}));
  recipe.policy.alpha = 0.4;
  // Head 0: 9 and 8 first; then 12, 10, 7 by norm: tokens 5, 4, 2. Head 1: its safe token.
  EXPECT_EQ(Kept(recipe, scores, 3), (Heads{{0, 1, 2, 4, 5}, {5}}));
  // Two safe tokens in head 1, though stage 1 has one place; token 1 stays for all its small norm.
  recipe.policy.alpha = 0.7;
  EXPECT_EQ(Kept(recipe, scores, 3), (Heads{{0, 1, 4, 5}, {1, 5}}));
}

TEST(Select, FullKeepsEverything) {
  LayerScores scores;
  scores.kv_heads = 2;
  scores.tokens = 3;
  EXPECT_EQ(Kept(Named("full"), scores, 1), (Heads{{0, 1, 2}, {0, 1, 2}}));
}

TEST(Select, NanScoresAreKept) {
  LayerScores scores = Scores({{5, kNan, 4, 3}});
  EXPECT_EQ(Kept(Bare(), scores, 2), (Heads{{0, 1}}));
  scores.forced[3] = 1;
  EXPECT_EQ(Kept(Bare(), scores, 2), (Heads{{1, 3}}));
  scores.forced.clear();
  EXPECT_EQ(Kept(Bare(), scores, 2), (Heads{{0, 1}}));
}

TEST(Select, WarnsWhereScoresAreNotComparable) {
  const LayerScores scores = Scores({{1, 2, 3}, {1, 2, 3}});
  const auto warnings = [&](std::string_view name) {
    return Select(Named(name), std::span(&scores, 1), 2, true)->warnings.size();
  };
  EXPECT_EQ(warnings("ada-knorm"), 1U);
  EXPECT_EQ(warnings("knorm"), 0U);
  EXPECT_EQ(warnings("ada-observed"), 0U);
}

TEST(Select, BadInputIsNamed) {
  const auto expect = [](const std::string& text, const Recipe& recipe, const std::vector<LayerScores>& layers,
                         double kept, double fraction = 0) {
    const Result<Selection> selection = Select(recipe, layers, kept, true, fraction);
    ASSERT_FALSE(selection.ok()) << text;
    EXPECT_EQ(selection.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(selection.status().message().find(text), 0U) << selection.status().message();
  };
  const LayerScores good = Scores({{1, 2, 3}, {1, 2, 3}});
  expect("layers: expected", Bare(), {}, 1);
  expect("kept: expected", Bare(), {good}, kNan);
  expect("kept: expected", Bare(), {good}, -1);
  expect("kept_fraction: expected", Bare(), {good}, 1, 1.5);
  expect("layers[1].kv_heads: expected 2, got 1", Bare(), {good, Scores({{1, 2, 3}})}, 1);
  expect("layers[0].projected_norm: expected 6 elements, got 0", Named("critical-observed"), {good}, 1);
  LayerScores bad = good;
  bad.score.pop_back();
  expect("layers[0].score: expected 6 elements, got 5", Bare(), {bad}, 1);
  bad = good;
  bad.is_protected.clear();
  expect("layers[0].is_protected", Bare(), {bad}, 1);
  bad = good;
  bad.forced.resize(1);
  expect("layers[0].forced", Bare(), {bad}, 1);
  bad = good;
  bad.first_stage.resize(1);
  expect("layers[0].first_stage", Bare(), {bad}, 1);
  bad = good;
  bad.tokens = 0;
  expect("layers[0].tokens", Bare(), {bad}, 1);
  Recipe wrong = Bare();
  wrong.policy.alpha = 2;
  expect("policy.alpha", wrong, {good}, 1);
}

}  // namespace
}  // namespace dropkv::baseline
