#include "baseline/parity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace dropkv::baseline {
namespace {

// Two heads of five tokens; the first and the last are protected, and one protected score is the greatest of all.
LayerScores SmallScores() {
  LayerScores scores;
  scores.kv_heads = 2;
  scores.tokens = 5;
  scores.score = {9, 1, 2, 0.5, 0, 0, 4, -1, 3, 0};
  scores.is_protected = {1, 0, 0, 0, 1};
  scores.forced.assign(10, 0);
  return scores;
}

std::vector<float> Padded(Scorer scorer, double ratio = 0.5) {
  Recipe recipe;
  recipe.scorer = scorer;
  recipe.policy.sink = 1;
  return PaddedScores(recipe, SmallScores(), ratio);
}

TEST(Parity, PadsAsTheReferenceDoes) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  using Floats = std::vector<float>;
  for (const Scorer scorer :
       {Scorer::kAttention, Scorer::kAttentionSum, Scorer::kLastRow, Scorer::kFinch, Scorer::kExpected, Scorer::kCapKv,
        Scorer::kProjection, Scorer::kCaote, Scorer::kObCache, Scorer::kVariance})
    EXPECT_EQ(Padded(scorer), (Floats{5, 1, 2, 0.5, 5, 5, 4, -1, 3, 5})) << static_cast<int>(scorer);
  for (const Scorer scorer : {Scorer::kCompactor, Scorer::kDefensive})
    EXPECT_EQ(Padded(scorer), (Floats{4, 1, 2, 0.5, 4, 4, 4, -1, 3, 4})) << static_cast<int>(scorer);
  for (const Scorer scorer : {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo})
    EXPECT_EQ(Padded(scorer), (Floats{10, 1, 2, 0.5, 10, 5, 4, -1, 3, 5})) << static_cast<int>(scorer);
  for (const Scorer scorer : {Scorer::kCur, Scorer::kLag})
    EXPECT_EQ(Padded(scorer), (Floats{1, 1, 2, 0.5, 1, 1, 4, -1, 3, 1})) << static_cast<int>(scorer);
  EXPECT_EQ(Padded(Scorer::kVatp), (Floats{kLargest, 1, 2, 0.5, kLargest, kLargest, 4, -1, 3, kLargest}));
  for (const Scorer scorer : {Scorer::kFull, Scorer::kRandom, Scorer::kProjectionCode, Scorer::kAttentionMean,
                              Scorer::kKeyNorm, Scorer::kKeyDiff, Scorer::kLocalAttention})
    EXPECT_EQ(Padded(scorer), (Floats{9, 1, 2, 0.5, 0, 0, 4, -1, 3, 0})) << static_cast<int>(scorer);
  // One sink; trunc(5 (1 - 0.5)) = 2 tokens kept: 1, 2 and 3 are pruned.
  EXPECT_EQ(Padded(Scorer::kRecency), (Floats{1, 0, 0, 0, 1, 1, 0, 0, 0, 1}));
  EXPECT_EQ(Padded(Scorer::kRecency, 0.3), (Floats{1, 0, 0, 1, 1, 1, 0, 0, 1, 1}));
}

// A token that is no number has no part in the greatest score.
TEST(Parity, SkipsNonFiniteScores) {
  Recipe recipe;
  recipe.scorer = Scorer::kAttention;
  LayerScores scores = SmallScores();
  scores.score[8] = std::numeric_limits<double>::quiet_NaN();
  const std::vector<float> padded = PaddedScores(recipe, scores, 0.5);
  EXPECT_EQ(padded[0], 5.0F);
  EXPECT_TRUE(std::isnan(padded[8]));
}

TEST(Parity, FirstStageOfDefensiveKvIsTheLayersGreatest) {
  Recipe recipe;
  recipe.scorer = Scorer::kDefensive;
  LayerScores scores = SmallScores();
  scores.first_stage = {0, 0, 1, 0, 0, 0, 0, 1, 0, 0};
  EXPECT_EQ(PaddedScores(recipe, scores, 0.5), (std::vector<float>{4, 1, 4, 0.5, 4, 4, 4, 4, 3, 4}));
}

// n = 5, R = 0.2: K1 = trunc(0.8 * 5 * 0.5) = 2 of each head, window and sink among them.
TEST(Parity, CriticalStagesAfterThePadding) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  Recipe recipe;
  recipe.scorer = Scorer::kAttention;
  recipe.critical = true;
  recipe.epsilon = 0.5;
  LayerScores scores = SmallScores();
  const Result<std::vector<float>> missing = ParityScores(recipe, scores, 0.2);
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.status().message().find("scores.projected_norm: expected 10 numbers"), std::string::npos);
  scores.projected_norm.assign(10, 2.0);
  const Result<std::vector<float>> got = ParityScores(recipe, scores, 0.2);
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(*got, (std::vector<float>{kLargest, 3, 5, 2, kLargest, kLargest, 9, -1, 7, kLargest}));
}

TEST(Parity, RefusesWrongArguments) {
  Recipe recipe;
  LayerScores scores = SmallScores();
  for (const double ratio : {1.0, -0.1, std::numeric_limits<double>::quiet_NaN()}) {
    const Result<std::vector<float>> got = ParityScores(recipe, scores, ratio);
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.status().message().substr(0, 16), "ratio: expected ");
  }
  scores.score.pop_back();
  EXPECT_FALSE(ParityScores(recipe, scores, 0.5).ok());
}

}  // namespace
}  // namespace dropkv::baseline
