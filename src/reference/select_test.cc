// Pooling and the choice of tokens (algorithm.md section 4).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "reference/reference.h"

namespace dropkv::reference {
namespace {

using Positions = std::vector<int32_t>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<double> Pooled(const std::vector<double>& raw, const Pooling& pool, int32_t window = 1) {
  return Pool(raw.data(), static_cast<int32_t>(raw.size()), pool, window);
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t j = 0; j < actual.size(); ++j) EXPECT_NEAR(actual[j], expected[j], 1e-15) << j;
}

TEST(Pool, MeanDividesByTheWholeWidth) {
  ExpectNear(Pooled({1, 0, 0, 0}, {PoolKind::kMean, 2, 2, false}), {0.2, 0.2, 0.2, 0});
  ExpectNear(Pooled({3, 6, 9}, {PoolKind::kMean, 1, 1, false}), {3, 6, 5});
  ExpectNear(Pooled({4}, {PoolKind::kMean, 5, 31, false}), {4.0 / 37});
}

TEST(Pool, Max) { ExpectNear(Pooled({0, 5, 0, 0}, {PoolKind::kMax, 1, 1, false}), {5, 5, 5, 0}); }

TEST(Pool, NoneIsTheRawScore) { ExpectNear(Pooled({3, 1, 2}, {PoolKind::kMean, 0, 0, false}), {3, 1, 2}); }

TEST(Pool, AHitKeepsBeforeAndAfter) {
  std::vector<double> raw(12, 0.0);
  raw[5] = 8.0;
  ExpectNear(Pooled(raw, {PoolKind::kMean, 1, 2, false}), {0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0});
  ExpectNear(Pooled(raw, {PoolKind::kMax, 0, 3, false}), {0, 0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0});
}

TEST(Pool, WiderThanThePrompt) {
  ExpectNear(Pooled({1, 2, 3}, {PoolKind::kMax, 100, 100, false}), {3, 3, 3});
  ExpectNear(Pooled({1, 2, 3}, {PoolKind::kMean, 100, 100, false}), {6.0 / 201, 6.0 / 201, 6.0 / 201});
}

TEST(Pool, TheWindowLeaksUnlessPastOnly) {
  const std::vector<double> raw = {0, 0, 0, 6, 9};
  ExpectNear(Pooled(raw, {PoolKind::kMean, 1, 1, false}, 2), {0, 0, 2, 5, 5});
  ExpectNear(Pooled(raw, {PoolKind::kMean, 1, 1, true}, 2), {0, 0, 0, 0, 0});
  ExpectNear(Pooled(raw, {PoolKind::kMax, 1, 1, true}, 1), {0, 0, 6, 6, 0});
  ExpectNear(Pooled(raw, {PoolKind::kMean, 1, 1, true}, 7), {0, 0, 0, 0, 0});
}

TEST(Pool, NonFiniteScoresCountZero) {
  const double inf = std::numeric_limits<double>::infinity();
  ExpectNear(Pooled({3, kNan, 3, inf, -inf}, {PoolKind::kMean, 1, 1, false}), {1, 2, 1, 1, 0});
  ExpectNear(Pooled({3, kNan, 3, inf, -inf}, {PoolKind::kMax, 0, 0, false}), {3, 0, 3, 0, 0});
}

// One layer of raw = pooled scores, with flags.
struct Layer1 {
  int32_t kv_heads = 1;
  int32_t n = 0;
  std::vector<double> raw;
  std::vector<double> pooled;
  std::vector<uint8_t> flags;

  explicit Layer1(std::vector<std::vector<double>> heads) {
    kv_heads = static_cast<int32_t>(heads.size());
    n = static_cast<int32_t>(heads[0].size());
    for (const auto& head : heads) pooled.insert(pooled.end(), head.begin(), head.end());
    raw = pooled;
    flags.assign(pooled.size(), 0);
  }

  KeepList Select(const Policy& policy, int32_t keep) const {
    return reference::Select(policy, {keep, false}, kv_heads, n, raw.data(), pooled.data(), flags.data());
  }
};

Positions Head(const KeepList& keep, int32_t head) {
  const auto list = keep.head(0, head);
  return {list.begin(), list.end()};
}

Policy MakePolicy(int32_t window, int32_t sink, HeadRule heads = HeadRule::kUniform) {
  Policy policy;
  policy.window = window;
  policy.sink = sink;
  policy.heads = heads;
  return policy;
}

TEST(Select, BestOthersAndTheProtected) {
  const Layer1 layer({{0, 5, 1, 9, 2, 8, 0, 0}});
  EXPECT_EQ(Head(layer.Select(MakePolicy(2, 0), 4), 0), (Positions{3, 5, 6, 7}));
  EXPECT_EQ(Head(layer.Select(MakePolicy(2, 1), 4), 0), (Positions{0, 3, 6, 7}));
  EXPECT_EQ(Head(layer.Select(MakePolicy(2, 1), 3), 0), (Positions{0, 6, 7}));
}

TEST(Select, TiesGoToTheLowerIndex) {
  const Layer1 layer({{1, 1, 1, 1, 1, 1, 1, 1}});
  EXPECT_EQ(Head(layer.Select(MakePolicy(1, 0), 4), 0), (Positions{0, 1, 2, 7}));
  const Layer1 mixed({{1, 2, 1, 2, 1, 1, 1, 1}});
  EXPECT_EQ(Head(mixed.Select(MakePolicy(1, 0), 4), 0), (Positions{0, 1, 3, 7}));
}

TEST(Select, ShortPromptsAndFullKeepAll) {
  const Layer1 layer({{3, 1, 2}, {1, 2, 3}});
  const Positions all = {0, 1, 2};
  for (const HeadRule rule : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO}) {
    EXPECT_EQ(Head(layer.Select(MakePolicy(8, 0, rule), 3), 1), all);
    EXPECT_EQ(Head(layer.Select(MakePolicy(2, 4, rule), 3), 0), all);
    EXPECT_EQ(Head(layer.Select(MakePolicy(1, 0, rule), 3), 0), all);
  }
  Policy full = MakePolicy(1, 0);
  full.signal = Signal::kFull;
  EXPECT_EQ(Head(layer.Select(full, 2), 0), all);
}

TEST(Select, FlaggedTokensComeFirstInsideTheBudget) {
  Layer1 layer({{0, 9, 1, 8, 2, 7, 3, 0}});
  layer.flags[0] = kNonFinite;
  layer.raw[0] = kNan;
  layer.flags[2] = kDominant;
  layer.raw[2] = 50.0;
  layer.flags[4] = kDominant;
  layer.raw[4] = 60.0;
  layer.flags[6] = kNonFinite | kDominant;
  layer.raw[6] = kNan;
  const Policy policy = MakePolicy(1, 0);
  EXPECT_EQ(Head(layer.Select(policy, 2), 0), (Positions{0, 7}));
  EXPECT_EQ(Head(layer.Select(policy, 3), 0), (Positions{0, 6, 7}));
  EXPECT_EQ(Head(layer.Select(policy, 4), 0), (Positions{0, 4, 6, 7}));
  EXPECT_EQ(Head(layer.Select(policy, 5), 0), (Positions{0, 2, 4, 6, 7}));
  EXPECT_EQ(Head(layer.Select(policy, 6), 0), (Positions{0, 1, 2, 4, 6, 7}));
  layer.raw[2] = 60.0;  // a tie of dominant ones: the lower index
  EXPECT_EQ(Head(layer.Select(policy, 4), 0), (Positions{0, 2, 6, 7}));
}

TEST(Select, FlagsInsideTheProtectedSetCostNothing) {
  Layer1 layer({{1, 5, 4, 3, 0}});
  layer.flags[0] = layer.flags[4] = kNonFinite;
  EXPECT_EQ(Head(layer.Select(MakePolicy(1, 1), 3), 0), (Positions{0, 1, 4}));
}

// Two heads of which the first has the higher scores `first` times: base 10 others per head, window 1.
Layer1 TwoHeads(int32_t first) {
  std::vector<std::vector<double>> heads(2, std::vector<double>(41, 0.0));
  for (int32_t j = 0; j < 20; ++j) {
    heads[0][j] = j < first ? 100.0 + j : 1.0;
    heads[1][j] = j < 20 - first ? 100.0 + j : 1.0;
  }
  return Layer1(heads);
}

TEST(Ada, RuleOExamples) {
  const Policy rule_o = MakePolicy(1, 0, HeadRule::kAdaO);
  const KeepList some = TwoHeads(15).Select(rule_o, 11);
  EXPECT_EQ(some.head(0, 0).size(), 15U);  // 14 + window
  EXPECT_EQ(some.head(0, 1).size(), 7U);   // 6 + window
  const KeepList extreme = TwoHeads(20).Select(rule_o, 11);
  EXPECT_EQ(extreme.head(0, 0).size(), 19U);
  EXPECT_EQ(extreme.head(0, 1).size(), 3U);
}

TEST(Ada, RuleKExamples) {
  // The published examples count a floor of 2 in 10 beyond the window, alpha * keep - window here: alpha such that it
  // is.
  Policy rule_k = MakePolicy(1, 0, HeadRule::kAda);
  rule_k.alpha = 3.0 / 11.0;
  const KeepList some = TwoHeads(15).Select(rule_k, 11);
  EXPECT_EQ(some.head(0, 0).size(), 16U);
  EXPECT_EQ(some.head(0, 1).size(), 6U);
  const KeepList extreme = TwoHeads(20).Select(rule_k, 11);
  EXPECT_EQ(extreme.head(0, 0).size(), 19U);
  EXPECT_EQ(extreme.head(0, 1).size(), 3U);
}

TEST(Ada, RuleKFloorTakesTheSlack) {
  // 0.29 * 100 is 28.999999999999996 in float64 and 29 for the rule; window 1: a floor of 28 others.
  Policy policy = MakePolicy(1, 0, HeadRule::kAda);
  policy.alpha = 0.29;
  std::vector<std::vector<double>> heads(2, std::vector<double>(300, 0.0));
  std::iota(heads[0].begin(), heads[0].end(), 1000.0);
  std::iota(heads[1].begin(), heads[1].end(), 1.0);
  const KeepList keep = Layer1(heads).Select(policy, 100);
  EXPECT_EQ(keep.head(0, 1).size(), 29U);
  EXPECT_EQ(keep.head(0, 0).size(), 171U);
}

TEST(Ada, RuleKWithoutFloorIsTheLayersBest) {
  Policy policy = MakePolicy(2, 1, HeadRule::kAda);
  policy.alpha = 0.0;
  const Layer1 layer({{0, 1, 2, 3, 4, 0, 0}, {0, 9, 8, 7, 6, 0, 0}});
  const KeepList keep = layer.Select(policy, 5);
  EXPECT_EQ(Head(keep, 0), (Positions{0, 5, 6}));
  EXPECT_EQ(Head(keep, 1), (Positions{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Ada, AlphaOneIsUniform) {
  std::mt19937_64 engine(5);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::vector<double>> heads(4, std::vector<double>(50));
  for (auto& head : heads)
    for (double& score : head) score = uniform(engine);
  const Layer1 layer(heads);
  Policy ada = MakePolicy(3, 2, HeadRule::kAda);
  ada.alpha = 1.0;
  Policy ada_o = MakePolicy(3, 2, HeadRule::kAdaO);
  ada_o.alpha = 1.0;
  for (int32_t u = 0; u < 4; ++u) {
    const Positions expected = Head(layer.Select(MakePolicy(3, 2), 17), u);
    EXPECT_EQ(Head(layer.Select(ada, 17), u), expected);
    EXPECT_EQ(Head(layer.Select(ada_o, 17), u), expected);
  }
}

TEST(Ada, TiesGoToTheLowerHeadThenTheLowerIndex) {
  Policy policy = MakePolicy(1, 0, HeadRule::kAda);
  policy.alpha = 0.0;
  const Layer1 layer({{1, 1, 1, 1, 0}, {1, 1, 1, 1, 0}});
  const KeepList keep = layer.Select(policy, 4);
  EXPECT_EQ(Head(keep, 0), (Positions{0, 1, 2, 3, 4}));
  EXPECT_EQ(Head(keep, 1), (Positions{0, 1, 4}));
}

TEST(Ada, FlaggedTokensOfAnyHeadComeFirst) {
  Policy policy = MakePolicy(1, 0, HeadRule::kAda);
  policy.alpha = 0.0;
  Layer1 layer({{9, 9, 9, 9, 9, 0}, {0, 1, 2, 3, 4, 0}});
  layer.flags[6] = kNonFinite;
  layer.flags[7] = kDominant;
  layer.raw[7] = 3.0;
  const KeepList keep = layer.Select(policy, 3);
  EXPECT_EQ(Head(keep, 0), (Positions{0, 1, 5}));
  EXPECT_EQ(Head(keep, 1), (Positions{0, 1, 5}));
}

// Whatever the scores: the total of rule K, the protected tokens, the floor, ascending lists, and no token outside that
// scores higher than one inside beyond the floors.
TEST(Ada, RuleKHoldsItsInvariants) {
  std::mt19937_64 engine(6);
  for (int trial = 0; trial < 300; ++trial) {
    const int32_t n = 20 + static_cast<int32_t>(engine() % 60);
    const int32_t kv_heads = 1 + static_cast<int32_t>(engine() % 5);
    Policy policy =
        MakePolicy(1 + static_cast<int32_t>(engine() % 6), static_cast<int32_t>(engine() % 4), HeadRule::kAda);
    policy.alpha = static_cast<double>(engine() % 11) / 10.0;
    const int32_t smallest = policy.window + policy.sink;
    const int32_t keep = smallest + static_cast<int32_t>(engine() % (n - smallest));
    std::vector<std::vector<double>> heads(kv_heads, std::vector<double>(n));
    for (auto& head : heads)
      for (double& score : head) score = static_cast<double>(engine() % 16);  // many ties
    const KeepList list = Layer1(heads).Select(policy, keep);
    ASSERT_EQ(list.total(), static_cast<int64_t>(kv_heads) * keep);
    const int32_t floor_count = std::max(0, static_cast<int32_t>(std::floor(policy.alpha * keep + 1e-6)) - smallest);
    double best_out = -1.0;
    for (int32_t u = 0; u < kv_heads; ++u) {
      const Positions kept = Head(list, u);
      ASSERT_TRUE(std::is_sorted(kept.begin(), kept.end()));
      ASSERT_EQ(std::adjacent_find(kept.begin(), kept.end()), kept.end());
      ASSERT_GE(static_cast<int32_t>(kept.size()), smallest + floor_count);
      for (int32_t j = 0; j < n; ++j) {
        const bool in = std::binary_search(kept.begin(), kept.end(), j);
        ASSERT_TRUE(in || (j >= policy.sink && j < n - policy.window));
        if (!in) best_out = std::max(best_out, heads[u][j]);
      }
    }
    for (int32_t u = 0; u < kv_heads; ++u) {
      std::vector<double> inside;
      for (const int32_t j : list.head(0, u))
        if (j >= policy.sink && j < n - policy.window) inside.push_back(heads[u][j]);
      std::sort(inside.begin(), inside.end());
      for (size_t i = 0; i + floor_count < inside.size(); ++i) ASSERT_GE(inside[i], best_out);
    }
  }
}

TEST(Streaming, FourSinksAndTheMostRecent) {
  const Policy policy = *FindPreset("streaming");
  std::vector<double> position(100);
  std::iota(position.begin(), position.end(), 0.0);
  const Positions kept = Head(Layer1({position}).Select(policy, 50), 0);
  Positions expected = {0, 1, 2, 3};
  for (int32_t j = 54; j < 100; ++j) expected.push_back(j);
  EXPECT_EQ(kept, expected);
  EXPECT_EQ(Head(Layer1({position}).Select(policy, 5), 0), (Positions{0, 1, 2, 3, 99}));
}

}  // namespace
}  // namespace dropkv::reference
