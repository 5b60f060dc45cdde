// Rows that one token owns, and inputs that are not numbers: where a careless score goes wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "reference/row.h"
#include "reference/test_case.h"

namespace dropkv::reference {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Scores DropKvScores(const TestCase& c) { return Score(c.View(), c.Rows(), c.spec, Policy{}, 0); }

// Every row's token 7 has a logit about `gap` above n-1 flat others.
TestCase DominantCase(float gap) {
  TestCase c = TestCase{.query_heads = 2, .kv_heads = 1, .tokens = 30, .window = 3, .seed = 21}.Fill(0.05F);
  for (int32_t h = 0; h < 2; ++h)
    for (int32_t i = 0; i < c.window; ++i) c.query(h, i)[0] = 1.0F;
  c.key(0, 7)[0] = gap / c.spec.scale;
  return c;
}

TEST(Dominant, ScoresEqualRemovalUpToCertainty) {
  // 1 - p from about 0.9 down to 1e-300; beyond a gap of 40 or so p is 1 in float64.
  for (const float gap : {0.0F, 3.0F, 3.4F, 5.0F, 10.0F, 15.0F, 17.0F, 19.5F, 25.0F, 37.0F, 60.0F, 300.0F, 700.0F}) {
    SCOPED_TRACE(gap);
    TestCase c = DominantCase(gap);
    const Scores scores = DropKvScores(c);
    for (int32_t j = 0; j < c.tokens; ++j) {
      const auto expected = static_cast<double>(BruteScore(c, 0, j));
      EXPECT_NEAR(scores.raw[j], expected, BruteScoreError(expected)) << j;
      EXPECT_TRUE(std::isfinite(scores.raw[j]));
      EXPECT_GE(scores.raw[j], 0.0);
    }
    if (gap > 5.0F) {
      EXPECT_EQ(std::max_element(scores.raw.begin(), scores.raw.end()) - scores.raw.begin(), 7);
    }
  }
}

TEST(Dominant, OneMinusPKeepsItsDigits) {
  for (const float gap : {15.0F, 19.5F, 37.0F, 60.0F}) {
    TestCase c = DominantCase(gap);
    const Row row = SoftmaxRow(LoadLayer(c.View()), c.Rows(), c.spec, 0, 0);
    ASSERT_EQ(row.top, 7);
    const std::vector<long double> e = BruteExponentials(c, 0, 0);
    long double others = 0.0L;
    for (int32_t j = 0; j < c.tokens; ++j) others += j == 7 ? 0.0L : e[j];
    const auto expected = static_cast<double>(others / (others + e[7]));
    EXPECT_NEAR(row.rest(7), expected, 1e-13 * expected) << gap;
  }
}

TEST(Dominant, FlagNeedsOneMinusPOfAMillionth) {
  for (const float gap : {0.0F, 5.0F, 12.0F, 16.5F, 17.0F, 17.5F, 18.0F, 20.0F, 100.0F}) {
    TestCase c = DominantCase(gap);
    const Layer layer = LoadLayer(c.View());
    bool expected = false;
    for (int32_t h = 0; h < 2; ++h)
      for (int32_t i = 0; i < c.window; ++i)
        expected = expected || SoftmaxRow(layer, c.Rows(), c.spec, h, i).rest(7) <= 1e-6;
    const Scores scores = DropKvScores(c);
    EXPECT_EQ((scores.flags[7] & kDominant) != 0, expected) << gap;
    EXPECT_EQ(expected, gap >= 17.5F) << gap;
    for (int32_t j = 0; j < c.tokens; ++j) EXPECT_EQ(j == 7 ? 0 : scores.flags[j], 0);
  }
}

TEST(Dominant, AttentionScoresAreNotFlagged) {
  TestCase c = DominantCase(100.0F);
  Policy policy;
  policy.signal = Signal::kAttention;
  EXPECT_EQ(Score(c.View(), c.Rows(), c.spec, policy, 0).flags[7], 0);
}

TEST(Dominant, ASinkThatOwnsTheRowLeavesSmallScores) {
  TestCase c = DominantCase(0.0F);
  c.sinks = {50.0F, 60.0F};
  c.spec.sinks = c.sinks.data();
  const Scores scores = DropKvScores(c);
  for (int32_t j = 0; j < c.tokens; ++j) {
    EXPECT_LT(scores.raw[j], 1e-40);
    EXPECT_GT(scores.raw[j], 0.0);
    EXPECT_EQ(scores.flags[j], 0);
  }
}

TEST(Dominant, TwoEqualGiantsAreNotDominant) {
  TestCase c = DominantCase(60.0F);
  std::copy_n(c.key(0, 7), c.key_dim, c.key(0, 8));
  const Scores scores = DropKvScores(c);
  EXPECT_EQ(scores.flags[7] | scores.flags[8], 0);
  for (const int32_t j : {7, 8}) {
    const auto expected = static_cast<double>(BruteScore(c, 0, j));
    EXPECT_NEAR(scores.raw[j], expected, 1e-12 * expected);
  }
}

TEST(OneToken, ContributesNothingAndIsDominant) {
  TestCase c = TestCase{.tokens = 1, .window = 1}.Fill();
  const Scores scores = DropKvScores(c);
  for (int32_t u = 0; u < c.kv_heads; ++u) {
    EXPECT_EQ(scores.raw[u], 0.0);
    EXPECT_EQ(scores.flags[u], kDominant);
  }
  const Attention attention = Attend(c.View(), c.Rows(), c.spec);
  for (int32_t h = 0; h < c.query_heads; ++h)
    for (int32_t x = 0; x < c.value_dim; ++x)
      EXPECT_EQ(attention.out[h * c.value_dim + x], c.value(h / c.group(), 0)[x]);
}

TEST(OneToken, WithASinkItsRemovalLeavesZero) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .tokens = 1, .window = 1}.Fill();
  c.sinks = {0.25F};
  c.spec.sinks = c.sinks.data();
  const Scores scores = DropKvScores(c);
  const auto expected = static_cast<double>(BruteScore(c, 0, 0));
  EXPECT_GT(expected, 0.0);
  EXPECT_NEAR(scores.raw[0], expected, 1e-14 * expected);
}

TEST(OneToken, FirstRowOfAWindowThatCoversThePrompt) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .tokens = 4, .window = 4, .seed = 22}.Fill();
  const Scores scores = DropKvScores(c);
  EXPECT_EQ(scores.flags[0], kDominant);
  for (int32_t j = 0; j < 4; ++j) {
    long double expected = 0.0L;
    for (int32_t i = std::max(1, j); i < 4; ++i) expected += std::pow(BruteLoss(c, 0, i, j), 2);
    EXPECT_NEAR(scores.raw[j], static_cast<double>(expected), 1e-12 * static_cast<double>(expected));
  }
}

// A token that is not a number takes no part: everything else is as if it were not there.
void ExpectTokenIgnored(const TestCase& c, int32_t token, const TestCase& without) {
  const Scores scores = DropKvScores(c);
  const Scores expected = DropKvScores(without);
  for (int32_t u = 0; u < c.kv_heads; ++u)
    for (int32_t j = 0; j < c.tokens; ++j) {
      const double score = scores.raw[u * c.tokens + j];
      if (u == 0 && j == token) {
        EXPECT_TRUE(std::isnan(score));
        EXPECT_EQ(scores.flags[j], kNonFinite);
        continue;
      }
      const int32_t at = j > token ? j - 1 : j;
      if (u == 0) {
        EXPECT_DOUBLE_EQ(score, expected.raw[at]) << j;
      } else {
        EXPECT_TRUE(std::isfinite(score));
      }
      EXPECT_EQ(scores.flags[u * c.tokens + j], 0);
    }
}

TEST(NonFinite, KeyOrValueTakesNoPart) {
  constexpr int32_t kToken = 11;
  for (const float bad : {kNan, kInf, -kInf})
    for (const bool in_key : {true, false}) {
      SCOPED_TRACE(std::to_string(bad) + (in_key ? " key" : " value"));
      TestCase c = TestCase{.seed = 23}.Fill();
      // The same layer without the token; it lies before the window, so every row sees one token less.
      TestCase without = TestCase{.tokens = c.tokens - 1, .seed = 23}.Fill();
      without.q = c.q;
      for (int32_t u = 0; u < c.kv_heads; ++u)
        for (int32_t j = 0; j < without.tokens; ++j) {
          std::copy_n(c.key(u, j + (j >= kToken ? 1 : 0)), c.key_dim, without.key(u, j));
          std::copy_n(c.value(u, j + (j >= kToken ? 1 : 0)), c.value_dim, without.value(u, j));
        }
      (in_key ? c.key(0, kToken) : c.value(0, kToken))[3] = bad;
      ExpectTokenIgnored(c, kToken, without);
      Policy attention;
      attention.signal = Signal::kAttention;
      EXPECT_EQ(Score(c.View(), c.Rows(), c.spec, attention, 0).flags[kToken], kNonFinite);
    }
}

TEST(NonFinite, QueryRowJudgesNothing) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .window = 4, .seed = 24}.Fill();
  TestCase three = c;
  three.window = 3;
  three.visible.pop_back();
  three.q.resize(static_cast<size_t>(3) * c.key_dim);
  c.query(0, 3)[5] = kNan;
  const Scores scores = DropKvScores(c);
  EXPECT_EQ(scores.raw, DropKvScores(three).raw);
  EXPECT_EQ(*std::max_element(scores.flags.begin(), scores.flags.end()), 0);
  const Attention attention = Attend(c.View(), c.Rows(), c.spec);
  EXPECT_EQ(attention.skipped_rows, 1);
  EXPECT_TRUE(std::isnan(attention.lse[3]));
  EXPECT_FALSE(std::isnan(attention.lse[2]));
  for (int32_t x = 0; x < c.value_dim; ++x) EXPECT_EQ(attention.out[3 * c.value_dim + x], 0.0);
}

TEST(NonFinite, AllTokensBad) {
  TestCase c = TestCase{.tokens = 6, .window = 2}.Fill();
  std::fill(c.v.begin(), c.v.end(), kNan);
  const Scores scores = DropKvScores(c);
  for (size_t j = 0; j < scores.raw.size(); ++j) EXPECT_EQ(scores.flags[j], kNonFinite);
  for (const double lse : Attend(c.View(), c.Rows(), c.spec).lse)
    EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
}

TEST(NonFinite, AScoreBeyondFloat32IsFlagged) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .tokens = 12, .window = 2, .seed = 25}.Fill(0.1F);
  for (int32_t x = 0; x < c.value_dim; ++x) c.value(0, 4)[x] = 1e25F;
  const Scores scores = DropKvScores(c);
  EXPECT_EQ(scores.raw[4], std::numeric_limits<double>::infinity());
  EXPECT_EQ(scores.flags[4], kNonFinite);
}

}  // namespace
}  // namespace dropkv::reference
