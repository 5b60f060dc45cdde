// The scorers of keys, values and whole prompts against kvpress (float32): scores of unprotected tokens, and the kept
// sets outside the band of ties.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

#include "baseline/prompt_case.h"
#include "golden/golden.h"

namespace dropkv::baseline {
namespace {

using dropkv::testing::GoldenLayer;
using dropkv::testing::NumberAfter;

constexpr double kScoreError = 1e-5;  // of the largest score
constexpr double kTieBand = 1e-5;

struct Reference {
  Recipe recipe;
  ScoreFunction function;
};

Recipe CurRecipe(CurForm form, int32_t block) {
  Recipe recipe = PlainRecipe(Scorer::kCur);
  recipe.policy.sink = 4;
  recipe.cur = form;
  recipe.block = block;
  return recipe;
}

Recipe LagRecipe(int32_t lag, bool cross) {
  Recipe recipe = PlainRecipe(Scorer::kLag);
  recipe.policy.sink = 4;
  recipe.block = lag;
  recipe.cross = cross;
  return recipe;
}

Recipe ExpectedRecipe(Scorer scorer, bool covariance, bool value_norm, double epsilon) {
  Recipe recipe = PlainRecipe(scorer);
  recipe.policy.sink = 4;
  recipe.covariance = covariance;
  recipe.value_norm = value_norm;
  recipe.epsilon = epsilon;
  return recipe;
}

Recipe LocalRecipe(int32_t chunk) {
  Recipe recipe = PlainRecipe(Scorer::kLocalAttention);
  recipe.policy.pool = {PoolKind::kMean, 1, 1, false};
  recipe.block = chunk;
  return recipe;
}

const std::map<std::string, Reference>& References() {
  static const std::map<std::string, Reference> references = {
      {"observed", {PlainRecipe(Scorer::kAttentionMean), &ScoreAttentionMean}},
      {"knorm", {PlainRecipe(Scorer::kKeyNorm), &ScoreKeyNorm}},
      {"keydiff", {PlainRecipe(Scorer::kKeyDiff), &ScoreKeyDiff}},
      {"lagkv.lag16", {LagRecipe(16, false), &ScoreLag}},
      {"lagkv.lag16.cross", {LagRecipe(16, true), &ScoreLag}},
      {"lagkv.lag128", {LagRecipe(128, false), &ScoreLag}},
      {"cur", {CurRecipe(CurForm::kProduct, 16), &ScoreCur}},
      {"cur.key", {CurRecipe(CurForm::kKey, 16), &ScoreCur}},
      {"cur.value", {CurRecipe(CurForm::kValue, 16), &ScoreCur}},
      {"cur.kv_avg", {CurRecipe(CurForm::kMean, 16), &ScoreCur}},
      {"cur.global", {CurRecipe(CurForm::kProduct, 0), &ScoreCur}},
      {"expected", {ExpectedRecipe(Scorer::kExpected, true, true, 0.0), &ScoreExpected}},
      {"expected.nocov", {ExpectedRecipe(Scorer::kExpected, false, true, 0.0), &ScoreExpected}},
      {"expected.novnorm", {ExpectedRecipe(Scorer::kExpected, true, false, 0.0), &ScoreExpected}},
      {"expected.eps1e-2", {ExpectedRecipe(Scorer::kExpected, true, true, 1e-2), &ScoreExpected}},
      {"cap", {ExpectedRecipe(Scorer::kCapKv, true, true, 0.0), &ScoreCapKv}},
      {"noncausal.chunk64", {LocalRecipe(64), &ScoreLocalAttention}},
  };
  return references;
}

// A golden layer as a prompt; q_pre left out, so that the moments come from q by way of RoPE, for `undo`.
PromptCase ReadPrompt(const GoldenLayer& golden, bool undo) {
  const int32_t d = golden.head_dim();
  PromptCase prompt{golden.query_heads(), golden.kv_heads(), golden.tokens(), d, d};
  const auto token_major = [&](const char* name) {
    const std::vector<double> from = golden.Doubles(name);
    std::vector<float> to;
    for (int32_t i = 0; i < prompt.tokens; ++i)
      for (int32_t h = 0; h < prompt.query_heads; ++h)
        for (int32_t x = 0; x < d; ++x)
          to.push_back(static_cast<float>(from[(int64_t{h} * prompt.tokens + i) * d + x]));
    return to;
  };
  const auto floats = [&](const char* name) {
    const std::vector<double> from = golden.Doubles(name);
    return std::vector<float>(from.begin(), from.end());
  };
  prompt.q = token_major("q");
  if (!undo) prompt.q_pre = token_major("q_pre");
  prompt.k = floats("k");
  prompt.v = floats("v");
  prompt.attention = golden.Attention();
  prompt.rope = Rope::Standard(d, *golden.file().Number("rope_theta"));
  return prompt;
}

class ScoreGolden : public dropkv::testing::GoldenTest {
 protected:
  void SetUp() override {
    GoldenTest::SetUp();
    if (!IsSkipped() && layer_ != nullptr && layer_->Names("score.observed").empty())
      GTEST_SKIP() << "this file holds DropKV scores only";
  }

  LayerScores Score(const Reference& reference, bool undo) const {
    const PromptCase prompt = ReadPrompt(*layer_, undo);
    const PromptStatistics statistics = prompt.Gather(reference.recipe, 37);
    return RunScorer(reference.function, reference.recipe, prompt.MakeLayer(&statistics));
  }
};

// Entries of unprotected tokens.
std::vector<double> Unprotected(const LayerScores& scores, const std::vector<double>& values) {
  std::vector<double> entries;
  for (size_t i = 0; i < values.size(); ++i)
    if (scores.is_protected[i % scores.tokens] == 0) entries.push_back(values[i]);
  return entries;
}

TEST_P(ScoreGolden, Scores) {
  for (const auto& [name, reference] : References()) {
    SCOPED_TRACE(name);
    const std::vector<double> expected = layer_->Doubles("score." + name);
    for (const bool undo : {false, true}) {
      const LayerScores scores = Score(reference, undo);
      const double error =
          dropkv::testing::RelativeError(Unprotected(scores, scores.score), Unprotected(scores, expected));
      EXPECT_LE(error, kScoreError);
      EXPECT_FALSE(Unprotected(scores, expected).empty());
      EXPECT_EQ(scores.nonfinite_tokens, 0);
    }
  }
}

// Protected tokens are those that the reference pads: theirs are the largest values.
TEST_P(ScoreGolden, ProtectedTokensArePadded) {
  for (const auto& [name, reference] : References()) {
    SCOPED_TRACE(name);
    const std::vector<double> expected = layer_->Doubles("score." + name);
    const LayerScores scores = Score(reference, false);
    double padding = INFINITY;
    for (size_t i = 0; i < expected.size(); ++i)
      if (scores.is_protected[i % scores.tokens] != 0) padding = std::min(padding, expected[i]);
    for (const double score : Unprotected(scores, expected)) EXPECT_LE(score, padding);
  }
}

TEST_P(ScoreGolden, KeptTokens) {
  const int32_t n = layer_->tokens();
  int compared = 0;
  for (const auto& [name, reference] : References()) {
    const LayerScores scores = Score(reference, false);
    const auto fixed = static_cast<int32_t>(std::count(scores.is_protected.begin(), scores.is_protected.end(), 1));
    for (const std::string& kept : layer_->Names("kept." + name + "@")) {
      SCOPED_TRACE(kept);
      const auto keep = static_cast<int32_t>(n * (1.0 - NumberAfter(kept, "@")));
      if (keep < fixed) continue;  // which protected tokens survive is arbitrary there
      const std::vector<uint8_t> theirs = layer_->KeptMask(kept);
      for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
        const double* score = scores.score.data() + int64_t{u} * n;
        std::vector<double> free;
        double largest = 0.0;
        for (int32_t j = 0; j < n; ++j) {
          if (scores.is_protected[j] != 0) continue;
          free.push_back(score[j]);
          largest = std::max(largest, std::abs(score[j]));
        }
        std::sort(free.rbegin(), free.rend());
        const double threshold = keep > fixed ? free[keep - fixed - 1] : INFINITY;
        for (int32_t j = 0; j < n; ++j) {
          if (scores.is_protected[j] == 0 && std::abs(score[j] - threshold) <= kTieBand * largest) continue;
          const bool ours = scores.is_protected[j] != 0 || score[j] > threshold;
          EXPECT_EQ(ours, theirs[int64_t{u} * n + j] != 0) << "head " << u << " token " << j;
        }
      }
      ++compared;
    }
  }
  EXPECT_GE(compared, 20);
}

INSTANTIATE_TEST_SUITE_P(Files, ScoreGolden, ::testing::ValuesIn(dropkv::testing::GoldenNames()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace dropkv::baseline
