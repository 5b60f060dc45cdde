// Observation rows as a set: rows of the window, of generated tokens and any others together, rows that count
// differently, and generated tokens, which are in the softmax but are no candidates. Expected values by removal, in
// long double, from the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "reference/reference.h"
#include "reference/row.h"
#include "reference/test_case.h"

namespace dropkv::reference {
namespace {

constexpr int32_t kGenerated = 4;

// 40 prompt tokens and 4 generated ones; rows of the window's end, of all generated tokens, and some from the middle.
TestCase JoinedRows(float key_scale = 2.0F) {
  TestCase c = TestCase{.tokens = 44, .window = 9, .seed = 41}.Fill(key_scale);
  c.visible = {42, 38, 44, 17, 39, 41, 40, 43, 5};
  return c;
}

ObservationRows Weighted(const TestCase& c, const std::vector<float>& weights) {
  ObservationRows rows = c.Rows();
  rows.weights = weights.data();
  return rows;
}

std::vector<float> SomeWeights() { return {1.0F, 0.5F, 0.0F, 3.0F, 0.25F, 2.0F, 1.0F, 0.0F, 7.0F}; }

Policy PolicyOf(Signal signal) {
  Policy policy;
  policy.signal = signal;
  return policy;
}

TEST(Rows, RemovingACandidateMovesTheOutputsByItsScore) {
  for (const float key_scale : {2.0F, 12.0F})
    for (const bool sinks : {false, true}) {
      TestCase c = JoinedRows(key_scale);
      if (sinks) c.AddSinks();
      const Scores scores = Score(c.View(), c.Rows(), c.spec, Policy{}, 0, kGenerated);
      const int32_t n = c.tokens - kGenerated;
      ASSERT_EQ(scores.raw.size(), static_cast<size_t>(c.kv_heads) * n);
      ASSERT_EQ(scores.flags.size(), scores.raw.size());
      for (int32_t u = 0; u < c.kv_heads; ++u)
        for (int32_t j = 0; j < n; ++j) {
          const auto expected = static_cast<double>(BruteScore(c, u, j));
          EXPECT_NEAR(scores.raw[u * n + j], expected, BruteScoreError(expected)) << "head " << u << " token " << j;
        }
    }
}

TEST(Rows, AWeightMultipliesTheRowsTerm) {
  const TestCase c = JoinedRows();
  const std::vector<float> weights = SomeWeights();
  const Scores scores = Score(c.View(), Weighted(c, weights), c.spec, Policy{}, 0, kGenerated);
  const int32_t n = c.tokens - kGenerated;
  for (int32_t u = 0; u < c.kv_heads; ++u)
    for (int32_t j = 0; j < n; ++j) {
      long double sum = 0.0L;
      for (int32_t h = u * c.group(); h < (u + 1) * c.group(); ++h)
        for (int32_t i = 0; i < c.window; ++i) {
          if (j >= c.visible[i]) continue;
          const long double loss = BruteLoss(c, h, i, j);
          sum += weights[i] * loss * loss / c.group();
        }
      const auto expected = static_cast<double>(sum);
      EXPECT_NEAR(scores.raw[u * n + j], expected, BruteScoreError(expected)) << "head " << u << " token " << j;
    }
}

TEST(Rows, AttentionIsTheMeanByTheWeights) {
  const TestCase c = JoinedRows();
  const std::vector<float> weights = SomeWeights();
  const long double total = std::accumulate(weights.begin(), weights.end(), 0.0L);
  const Scores scores = Score(c.View(), Weighted(c, weights), c.spec, PolicyOf(Signal::kAttention), 0, kGenerated);
  const int32_t n = c.tokens - kGenerated;
  for (int32_t u = 0; u < c.kv_heads; ++u) {
    std::vector<long double> expected(c.tokens, 0.0L);
    for (int32_t h = u * c.group(); h < (u + 1) * c.group(); ++h)
      for (int32_t i = 0; i < c.window; ++i) {
        const std::vector<long double> e = BruteExponentials(c, h, i);
        const long double sum = std::accumulate(e.begin(), e.end(), 0.0L);  // generated tokens included
        for (int32_t j = 0; j < c.tokens; ++j) expected[j] += weights[i] * e[j] / sum / (c.group() * total);
      }
    for (int32_t j = 0; j < n; ++j) EXPECT_NEAR(scores.raw[u * n + j], static_cast<double>(expected[j]), 1e-15) << j;
    EXPECT_NEAR(static_cast<double>(std::accumulate(expected.begin(), expected.end(), 0.0L)), 1.0, 1e-14);
  }
}

TEST(Rows, TheirOrderChangesNothing) {
  const TestCase c = JoinedRows();
  const std::vector<float> weights = SomeWeights();
  TestCase turned = c;
  std::reverse(turned.visible.begin(), turned.visible.end());
  std::vector<float> turned_weights(weights.rbegin(), weights.rend());
  for (int32_t h = 0; h < c.query_heads; ++h)
    for (int32_t i = 0; i < c.window; ++i)
      std::copy_n(c.q.data() + (static_cast<size_t>(h) * c.window + i) * c.key_dim, c.key_dim,
                  turned.query(h, c.window - 1 - i));
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    const Scores a = Score(c.View(), Weighted(c, weights), c.spec, PolicyOf(signal), 0, kGenerated);
    const Scores b = Score(c.View(), Weighted(turned, turned_weights), c.spec, PolicyOf(signal), 0, kGenerated);
    for (size_t j = 0; j < a.raw.size(); ++j) EXPECT_NEAR(a.raw[j], b.raw[j], 1e-14 * a.raw[j]);
  }
}

TEST(Rows, WeightsOfOneChangeNoBit) {
  const TestCase c = JoinedRows();
  const std::vector<float> ones(c.window, 1.0F);
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention})
    EXPECT_EQ(Score(c.View(), Weighted(c, ones), c.spec, PolicyOf(signal), 0, kGenerated).raw,
              Score(c.View(), c.Rows(), c.spec, PolicyOf(signal), 0, kGenerated).raw);
}

// Row 0 belongs to token 7, row 1 to token 9: p within 1e-6 of 1.
TEST(Rows, ARowOfWeightZeroJudgesNothing) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .tokens = 30, .window = 2, .seed = 42}.Fill(0.05F);
  for (int32_t i = 0; i < 2; ++i) {
    std::fill_n(c.query(0, i), c.key_dim, 0.0F);
    c.query(0, i)[i] = 1.0F;
    c.key(0, 7 + 2 * i)[i] = 25.0F / c.spec.scale;
  }
  TestCase second = c;
  second.window = 1;
  second.q.erase(second.q.begin(), second.q.begin() + c.key_dim);
  second.visible = {c.visible[1]};
  EXPECT_EQ(Score(c.View(), c.Rows(), c.spec, Policy{}, 0).flags[7], kDominant);
  const std::vector<float> weights{0.0F, 1.0F};
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    const Scores scores = Score(c.View(), Weighted(c, weights), c.spec, PolicyOf(signal), 0);
    const Scores expected = Score(second.View(), second.Rows(), c.spec, PolicyOf(signal), 0);
    EXPECT_EQ(scores.raw, expected.raw);
    EXPECT_EQ(scores.flags, expected.flags);
    EXPECT_EQ(scores.flags[7], 0);
    EXPECT_EQ(scores.flags[9], signal == Signal::kDropKv ? kDominant : 0);
  }
}

// A generated token that owns a row leaves small scores and no flag; one that is no number takes no part.
TEST(Rows, GeneratedTokensAreNeverFlagged) {
  TestCase c = JoinedRows();
  const int32_t n = c.tokens - kGenerated;
  for (int32_t i = 0; i < c.window; ++i)
    for (int32_t h = 0; h < c.query_heads; ++h) c.query(h, i)[0] = 1.0F;
  c.key(0, n)[0] = c.key(1, n)[0] = 40.0F / c.spec.scale;
  c.visible.assign(c.window, n + 1);
  const Scores owned = Score(c.View(), c.Rows(), c.spec, Policy{}, 0, kGenerated);
  EXPECT_LT(*std::max_element(owned.raw.begin(), owned.raw.end()), 1e-12);
  EXPECT_EQ(*std::max_element(owned.flags.begin(), owned.flags.end()), 0);

  c.value(0, n)[3] = c.key(1, n)[2] = std::numeric_limits<float>::quiet_NaN();
  const Scores without = Score(c.View(), c.Rows(), c.spec, Policy{}, 0, kGenerated);
  c.visible.assign(c.window, n);
  const Scores hidden = Score(c.View(), c.Rows(), c.spec, Policy{}, 0, kGenerated);
  EXPECT_EQ(without.raw, hidden.raw);
  EXPECT_EQ(*std::max_element(without.flags.begin(), without.flags.end()), 0);
}

TEST(Rows, PositionsAndRandomNumbersAreThePromptsOwn) {
  const TestCase c = JoinedRows();
  const int32_t n = c.tokens - kGenerated;
  TestCase prompt = TestCase{.tokens = n}.Fill();
  for (const Signal signal : {Signal::kRecency, Signal::kRandom, Signal::kFull})
    EXPECT_EQ(Score(c.View(), {}, c.spec, PolicyOf(signal), 2, kGenerated).raw,
              Score(prompt.View(), {}, c.spec, PolicyOf(signal), 2).raw);
}

TEST(Rows, ListsEndWithTheGeneratedTokensOutsideTheBudget) {
  const std::vector<double> scores = {9, 1, 8, 2, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0};  // two heads of 7
  const std::vector<uint8_t> flags(scores.size(), 0);
  Policy policy;
  policy.window = 2;
  const auto select = [&](int32_t keep) {
    return Select(policy, {keep, false}, 2, 7, scores.data(), scores.data(), flags.data(), 3);
  };
  const auto head = [](const KeepList& keep, int32_t u) {
    return std::vector<int32_t>(keep.head(0, u).begin(), keep.head(0, u).end());
  };
  EXPECT_EQ(head(select(4), 0), (std::vector<int32_t>{0, 2, 5, 6, 7, 8, 9}));
  EXPECT_EQ(head(select(4), 1), (std::vector<int32_t>{2, 3, 5, 6, 7, 8, 9}));
  EXPECT_EQ(head(select(7), 1), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  // The layer's best four others: 9, 8, 3 and, of two that are equal, the lower head's 2.
  policy.heads = HeadRule::kAda;
  policy.alpha = 0.0;
  EXPECT_EQ(head(select(4), 0), (std::vector<int32_t>{0, 2, 3, 5, 6, 7, 8, 9}));
  EXPECT_EQ(head(select(4), 1), (std::vector<int32_t>{3, 5, 6, 7, 8, 9}));
  policy.window = 7;
  EXPECT_EQ(select(7).min_length(), 10);
}

TEST(Rows, CheckNamesTheWeight) {
  const TestCase c = JoinedRows();
  const KvView kv = c.View();
  std::vector<float> weights = SomeWeights();
  EXPECT_TRUE(CheckRows(Weighted(c, weights), kv).ok());
  const auto expect_error = [&](std::string_view text) {
    const Status status = CheckRows(Weighted(c, weights), kv);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  weights[8] = -0.5F;
  expect_error("rows.weights[8]: expected a finite number, 0 or more, got -0.5");
  weights[8] = std::numeric_limits<float>::infinity();
  expect_error("rows.weights[8]");
  weights[8] = std::numeric_limits<float>::quiet_NaN();
  expect_error("rows.weights[8]");
  weights.assign(c.window, 0.0F);
  expect_error("rows.weights: expected one above 0, got 9 zeros");
}

}  // namespace
}  // namespace dropkv::reference
