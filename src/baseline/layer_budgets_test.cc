#include "baseline/layer_budgets.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "baseline/allocate.h"

namespace dropkv::baseline {
namespace {

std::vector<int32_t> Shares(const Recipe& recipe, int32_t layers, int32_t n, double kept) {
  std::vector<int32_t> shares;
  for (int32_t layer = 0; layer < layers; ++layer) {
    const Result<int32_t> share = LayerShare(recipe, layer, layers, n, kept);
    EXPECT_TRUE(share.ok()) << share.status().message();
    shares.push_back(share.ok() ? *share : -1);
  }
  return shares;
}

Recipe Pyramid() { return *FindRecipe("pyramidkv"); }

Recipe PyramidOriginal() { return *FindRecipe("pyramidkv-original"); }

double Mean(const std::vector<int32_t>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

LayerScores Plain(int32_t kv_heads, int32_t tokens, int32_t protected_tokens) {
  LayerScores scores;
  scores.kv_heads = kv_heads;
  scores.tokens = tokens;
  scores.score.assign(static_cast<size_t>(kv_heads) * tokens, 0.0);
  scores.is_protected.assign(tokens, 0);
  std::fill(scores.is_protected.end() - protected_tokens, scores.is_protected.end(), uint8_t{1});
  return scores;
}

// kvpress PyramidKVPress with window 64 and 32 layers: the first, the second and the last layer's tokens.
TEST(Pyramid, TableOfKvpress) {
  struct Case {
    int32_t n;
    double kept;
    int32_t first, second, last;
  };
  const Case cases[] = {
      {4096, 0.05, 205, 205, 205},       {4096, 0.1, 410, 410, 410},       {4096, 0.3, 1229, 1229, 1229},
      {8192, 0.05, 410, 410, 410},       {8192, 0.1, 819, 819, 819},       {8192, 0.3, 4792, 4642, 123},
      {16384, 0.05, 819, 819, 819},      {16384, 0.1, 3195, 3094, 82},     {16384, 0.3, 9585, 9283, 246},
      {32768, 0.05, 3195, 3094, 82},     {32768, 0.1, 6390, 6189, 164},    {32768, 0.3, 19169, 18567, 492},
      {65536, 0.05, 6390, 6189, 164},    {65536, 0.1, 12780, 12378, 328},  {65536, 0.3, 38339, 37134, 983},
      {131072, 0.05, 12780, 12378, 328}, {131072, 0.1, 25559, 24756, 655}, {131072, 0.3, 76677, 74267, 1966},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::to_string(c.n) + " " + std::to_string(c.kept));
    const double kept = c.n * (1 - (1 - c.kept));
    const std::vector<int32_t> shares = Shares(Pyramid(), 32, c.n, kept);
    EXPECT_EQ(shares[0], c.first);
    EXPECT_EQ(shares[1], c.second);
    EXPECT_EQ(shares[31], c.last);
    EXPECT_NEAR(Mean(shares), kept, 0.5);
  }
  const std::vector<int32_t> shares = Shares(Pyramid(), 28, 131072, 131072 * (1 - 0.95));
  EXPECT_EQ(shares[0], 12780);
  EXPECT_EQ(shares[1], 12318);
  EXPECT_EQ(shares[27], 328);
}

TEST(Pyramid, HalvesGoToTheEvenNumber) {
  EXPECT_EQ(Shares(Pyramid(), 2, 1000, 100.5), (std::vector<int32_t>{100, 100}));
  EXPECT_EQ(Shares(Pyramid(), 2, 1000, 101.5), (std::vector<int32_t>{102, 102}));
}

// The last layer would hold fewer than the window: uniform. At b = 1280 it holds 64 exactly.
TEST(Pyramid, UniformBelowTheWindow) {
  EXPECT_EQ(Shares(Pyramid(), 4, 1 << 20, 1279), (std::vector<int32_t>{1279, 1279, 1279, 1279}));
  EXPECT_EQ(Shares(Pyramid(), 4, 1 << 20, 1280), (std::vector<int32_t>{2496, 1685, 875, 64}));
  EXPECT_EQ(Shares(Pyramid(), 1, 1 << 20, 5000), (std::vector<int32_t>{5000}));
}

// KVCache-Factory with window 8: 32 layers, 4096 tokens, capacities 204 and 409.
TEST(PyramidOriginal, TableOfKvCacheFactory) {
  const std::vector<int32_t> small = Shares(PyramidOriginal(), 32, 4096, 204);
  EXPECT_EQ(small.front(), 391);
  EXPECT_EQ(small.back(), 19);
  EXPECT_EQ(Mean(small), 205.0);
  const std::vector<int32_t> large = Shares(PyramidOriginal(), 32, 4096, 409);
  EXPECT_EQ(large.front(), 790);
  EXPECT_EQ(large.back(), 46);
  EXPECT_EQ(Mean(large), 418.0);
}

TEST(PyramidOriginal, SmallPromptsAndCapacities) {
  EXPECT_EQ(Shares(PyramidOriginal(), 3, 100, 120), (std::vector<int32_t>{100, 100, 100}));  // n below the capacity
  EXPECT_EQ(Shares(PyramidOriginal(), 3, 100, 60), (std::vector<int32_t>{60, 60, 60}));      // n below 2C
  EXPECT_EQ(Shares(PyramidOriginal(), 3, 100, 8), (std::vector<int32_t>{8, 8, 8}));          // the window alone
  EXPECT_EQ(Shares(PyramidOriginal(), 1, 1000, 100), (std::vector<int32_t>{100}));
  // C = 50, n = 104: high = 98 is above n - w = 96, so the layers hold 96, 50 and 4 past tokens.
  EXPECT_EQ(Shares(PyramidOriginal(), 3, 104, 58), (std::vector<int32_t>{104, 58, 12}));
}

TEST(LayerShare, ErrorsNameTheLayerAndTheRule) {
  EXPECT_EQ(LayerShare(Pyramid(), 3, 3, 100, 50).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(LayerShare(Pyramid(), -1, 3, 100, 50).status().code(), Code::kInvalidArgument);
  const Result<int32_t> cake = LayerShare(*FindRecipe("cake"), 0, 3, 100, 50);
  EXPECT_EQ(cake.status().code(), Code::kUnsupported);
  EXPECT_NE(cake.status().message().find("all 3 layers"), std::string::npos) << cake.status().message();
  EXPECT_EQ(LayerShare(*FindRecipe("layerdefensivekv"), 0, 3, 100, 50).status().code(), Code::kUnsupported);
  EXPECT_EQ(*LayerShare(*FindRecipe("snapkv"), 2, 3, 1000, 99.99999999999998), 99);
}

std::vector<int32_t> Cake(std::vector<double> preferences, std::vector<int32_t> past, int32_t window, int64_t kept) {
  const std::vector<double> ones(preferences.size(), 1.0);
  return ShareByPreference(preferences, ones, past, window, kept, 1.0, 1.0);
}

TEST(Cake, SharesThePastTokensByPreference) {
  // Pool 3 (30 - 10) = 60, by 1 : 2 : 3.
  EXPECT_EQ(Cake({1, 2, 3}, {100, 100, 100}, 10, 30), (std::vector<int32_t>{20, 30, 40}));
  // Pool 60 by 1 : 1 : 5 is 8.57, 8.57, 42.86: truncated 8 + 8 + 42, the 2 that are left to the first two layers.
  EXPECT_EQ(Cake({1, 1, 5}, {100, 100, 100}, 0, 20), (std::vector<int32_t>{9, 9, 42}));
}

TEST(Cake, WhatALayerCannotHoldGoesToTheOthers) {
  // Wanted 10, 10, 40 of 60; the third holds 25: 15 more for the two, 8 and 7.
  EXPECT_EQ(Cake({1, 1, 4}, {100, 100, 25}, 0, 20), (std::vector<int32_t>{18, 17, 25}));
  // Wanted 5, 15, 40; the excess of 28 overfills the second layer, which is cut in the end: one pass.
  EXPECT_EQ(Cake({1, 3, 8}, {100, 16, 12}, 4, 24), (std::vector<int32_t>{5 + 14 + 4, 16 + 4, 12 + 4}));
}

TEST(Cake, PowersOfEntropyAndVariance) {
  // 4^(1/2) 8^(1/3) = 4 against 1: pool 2 * 10 as 16 and 4.
  const std::vector<double> entropy = {4, 1};
  const std::vector<double> variance = {8, 1};
  const std::vector<int32_t> past = {100, 100};
  EXPECT_EQ(ShareByPreference(entropy, variance, past, 5, 15, 2.0, 3.0), (std::vector<int32_t>{21, 9}));
}

TEST(Cake, EqualSharesWhereNothingIsPreferred) {
  EXPECT_EQ(Cake({0, 0}, {100, 100}, 5, 15), (std::vector<int32_t>{15, 15}));
  EXPECT_EQ(Cake({NAN, 1}, {100, 100}, 5, 15), (std::vector<int32_t>{15, 15}));
  EXPECT_EQ(Cake({1, 2}, {100, 100}, 20, 15), (std::vector<int32_t>{20, 20}));  // the window is all there is
}

TEST(ShareAmongLayers, TruncatesInDoubleAsTheReferences) {
  const Recipe knorm = *FindRecipe("knorm");
  struct Case {
    int32_t n;
    double removed;
    int32_t kept;
  };
  const Case cases[] = {{1000, 0.9, 99},      {1000, 0.8, 199},     {4096, 0.95, 204}, {8192, 0.9, 819},
                        {131072, 0.95, 6553}, {131072, 0.7, 39321}, {16000, 0.9, 1599}};
  for (const Case& c : cases) {
    const std::vector<LayerScores> layers(1, Plain(1, c.n, 0));
    EXPECT_EQ(ShareAmongLayers(knorm, layers, c.n * (1 - c.removed)).keep, std::vector<int32_t>{c.kept})
        << c.n << " " << c.removed;
  }
}

TEST(ShareAmongLayers, RaisesToTheProtectedTokens) {
  const Recipe snapkv = *FindRecipe("snapkv");
  const std::vector<LayerScores> layers = {Plain(2, 200, 64), Plain(2, 200, 10)};
  const LayerBudgets raised = ShareAmongLayers(snapkv, layers, 20);
  EXPECT_EQ(raised.keep, (std::vector<int32_t>{64, 20}));
  EXPECT_TRUE(raised.raised);
  EXPECT_EQ(raised.total, 0);
  const LayerBudgets literal = ShareAmongLayers(snapkv, layers, 20, false);
  EXPECT_EQ(literal.keep, (std::vector<int32_t>{20, 20}));
  EXPECT_FALSE(literal.raised);
  EXPECT_FALSE(ShareAmongLayers(snapkv, layers, 64).raised);
  EXPECT_EQ(ShareAmongLayers(snapkv, layers, 500).keep, (std::vector<int32_t>{200, 200}));
  EXPECT_EQ(ShareAmongLayers(*FindRecipe("full"), layers, 5).keep, (std::vector<int32_t>{200, 200}));
}

TEST(ShareAmongLayers, FlatCountsAllHeadsAndLayers) {
  const Recipe flat = *FindRecipe("layerdefensivekv");
  const std::vector<LayerScores> layers(3, Plain(2, 101, 32));
  EXPECT_EQ(ShareAmongLayers(flat, layers, 40.4).total, 242);  // trunc(242.4); not 6 * 40
  EXPECT_FALSE(ShareAmongLayers(flat, layers, 40.4).raised);
  EXPECT_EQ(ShareAmongLayers(flat, layers, 10).total, 192);
  EXPECT_TRUE(ShareAmongLayers(flat, layers, 10).raised);
  EXPECT_EQ(ShareAmongLayers(flat, layers, 10, false).total, 60);
}

TEST(ShareAmongLayers, CakeReadsEntropyAndVariance) {
  Recipe cake = *FindRecipe("cake");
  cake.cake_tau1 = cake.cake_tau2 = 1;
  std::vector<LayerScores> layers(2, Plain(1, 200, 32));
  layers[0].entropy = 3;
  layers[0].variance = 1;
  layers[1].entropy = 1;
  layers[1].variance = 1;
  EXPECT_EQ(ShareAmongLayers(cake, layers, 52.9).keep, (std::vector<int32_t>{30 + 32, 10 + 32}));
}

TEST(ShareAmongLayers, PyramidsAreTheirLayerShares) {
  const std::vector<LayerScores> layers(4, Plain(1, 8192, 64));
  EXPECT_EQ(ShareAmongLayers(Pyramid(), layers, 1500.3).keep, Shares(Pyramid(), 4, 8192, 1500.3));
  EXPECT_EQ(ShareAmongLayers(PyramidOriginal(), layers, 1500).keep, Shares(PyramidOriginal(), 4, 8192, 1500));
}

}  // namespace
}  // namespace dropkv::baseline
