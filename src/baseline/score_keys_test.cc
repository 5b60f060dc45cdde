#include <gtest/gtest.h>

#include <numeric>

#include "baseline/prompt_case.h"
#include "core/random.h"
#include "reference/row.h"

namespace dropkv::baseline {
namespace {

using cpu::CaseData;
using cpu::Layout;
using cpu::ScoreCase;

struct Named {
  const char* name;
  Recipe recipe;
  ScoreFunction function;
};

std::vector<Named> KeyScorers() {
  std::vector<Named> scorers;
  const auto add = [&](const char* name, Scorer scorer, ScoreFunction function, int32_t block) {
    scorers.push_back({name, PlainRecipe(scorer), function});
    scorers.back().recipe.block = block;
  };
  add("knorm", Scorer::kKeyNorm, &ScoreKeyNorm, 0);
  add("keydiff", Scorer::kKeyDiff, &ScoreKeyDiff, 0);
  add("block keydiff", Scorer::kKeyDiff, &ScoreKeyDiff, 16);
  add("lag", Scorer::kLag, &ScoreLag, 16);
  add("cur", Scorer::kCur, &ScoreCur, 16);
  return scorers;
}

TEST(ScoreKeysTest, RecencyIsThePosition) {
  const PromptCase prompt = PromptCase{2, 2, 3}.Fill();
  EXPECT_EQ(RunScorer(&ScoreRecency, PlainRecipe(Scorer::kRecency), prompt.MakeLayer()).score,
            (std::vector<double>{0, 1, 2, 0, 1, 2}));
}

TEST(ScoreKeysTest, RandomIsCountedBySeedLayerHeadAndToken) {
  const PromptCase prompt = PromptCase{2, 2, 5}.Fill();
  Recipe recipe = PlainRecipe(Scorer::kRandom);
  recipe.policy.seed = 7;
  Layer layer = prompt.MakeLayer();
  layer.index = 3;
  const LayerScores scores = RunScorer(&ScoreRandom, recipe, layer);
  for (int32_t u = 0; u < 2; ++u)
    for (int32_t j = 0; j < 5; ++j) EXPECT_EQ(scores.score[u * 5 + j], double{RandomScore(7, 3, u, j)});
  recipe.policy.seed = 8;
  EXPECT_NE(RunScorer(&ScoreRandom, recipe, layer).score, scores.score);
}

TEST(ScoreKeysTest, KeyNormByHand) {
  PromptCase prompt = PromptCase{1, 1, 2}.Zeros();
  prompt.key(0, 1)[0] = 3.0F;
  prompt.key(0, 1)[7] = -4.0F;
  EXPECT_EQ(RunScorer(&ScoreKeyNorm, PlainRecipe(Scorer::kKeyNorm), prompt.MakeLayer()).score,
            (std::vector<double>{0.0, -5.0}));
}

// Directions x, x, y whatever their lengths: anchor (2, 1)/3.
TEST(ScoreKeysTest, KeyDiffByHand) {
  PromptCase prompt = PromptCase{1, 1, 4}.Zeros();
  prompt.key(0, 0)[0] = 3.0F;
  prompt.key(0, 1)[0] = 0.5F;
  prompt.key(0, 2)[1] = 9.0F;  // and a key of zeros
  const LayerScores scores = RunScorer(&ScoreKeyDiff, PlainRecipe(Scorer::kKeyDiff), prompt.MakeLayer());
  const double norm = std::sqrt(5.0);
  EXPECT_LE(LargestDifference(scores.score, {-2 / norm, -2 / norm, -1 / norm, 0.0}), 1e-12);
}

// The block form as its paper words it, by sets.
std::vector<int32_t> BlockKeyDiffKeeps(const PromptCase& prompt, int32_t head, int32_t keep, int32_t block) {
  const int32_t d = prompt.key_dim;
  const auto unit = [&](int32_t token) {
    const float* key = prompt.k.data() + (int64_t{head} * prompt.tokens + token) * d;
    std::vector<double> x(key, key + d);
    const double norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
    for (double& component : x) component /= norm;
    return x;
  };
  std::vector<int32_t> kept(keep);
  std::iota(kept.begin(), kept.end(), 0);
  for (int32_t begin = keep; begin < prompt.tokens; begin += block) {
    for (int32_t j = begin; j < std::min(prompt.tokens, begin + block); ++j) kept.push_back(j);
    std::vector<double> anchor(d, 0.0);
    for (const int32_t j : kept)
      for (int32_t x = 0; x < d; ++x) anchor[x] += unit(j)[x];
    std::vector<std::pair<double, int32_t>> order;
    for (const int32_t j : kept) {
      const std::vector<double> key = unit(j);
      order.emplace_back(std::inner_product(key.begin(), key.end(), anchor.begin(), 0.0), j);
    }
    std::sort(order.begin(), order.end());
    kept.clear();
    for (int32_t i = 0; i < keep; ++i) kept.push_back(order[i].second);
    std::sort(kept.begin(), kept.end());
  }
  return kept;
}

std::vector<int32_t> Best(const double* score, int32_t n, int32_t keep) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[a] > score[b]; });
  order.resize(keep);
  std::sort(order.begin(), order.end());
  return order;
}

TEST(ScoreKeysTest, ASharesTokensAreThoseItWasMadeOf) {
  for (int32_t tokens = 1; tokens <= 400; ++tokens)
    for (int32_t keep = 0; keep <= tokens; ++keep) {
      ASSERT_EQ(static_cast<int32_t>(ShareOf(keep, tokens) * tokens), keep) << "of " << tokens;
      ASSERT_LE(ShareOf(keep, tokens), 1.0);
    }
}

// The references truncate: at a compression ratio of 0.9 they keep 29 of 300 tokens.
TEST(ScoreKeysTest, BlockKeyDiffTruncatesAsTheReferences) {
  const PromptCase prompt = PromptCase{2, 1, 300}.Fill();
  Recipe recipe = PlainRecipe(Scorer::kKeyDiff);
  recipe.block = 16;
  const LayerScores scores = RunScorer(&ScoreKeyDiff, recipe, prompt.MakeLayer(), 1.0 - 0.9);
  EXPECT_EQ(Best(scores.score.data(), 300, 29), BlockKeyDiffKeeps(prompt, 0, 29, 16));
}

TEST(ScoreKeysTest, BlockKeyDiffKeepsWhatItsRoundsKeep) {
  const PromptCase prompt = PromptCase{2, 2, 100}.Fill(5);
  for (const int32_t block : {1, 7, 16, 200})
    for (const int32_t keep : {2, 10, 37, 99, 100}) {  // of two candidates alone both are as far from their sum
      Recipe recipe = PlainRecipe(Scorer::kKeyDiff);
      recipe.block = block;
      const LayerScores scores = RunScorer(&ScoreKeyDiff, recipe, prompt.MakeLayer(), ShareOf(keep, 100));
      for (int32_t u = 0; u < 2; ++u)
        EXPECT_EQ(Best(scores.score.data() + u * 100, 100, keep), BlockKeyDiffKeeps(prompt, u, keep, block))
            << "block " << block << " keep " << keep;
    }
}

TEST(ScoreKeysTest, BlockKeyDiffKeepsProtectedTokens) {
  const PromptCase prompt = PromptCase{2, 2, 60}.Fill(6);
  Recipe recipe = PlainRecipe(Scorer::kKeyDiff);
  recipe.block = 8;
  recipe.policy.sink = 5;
  const LayerScores scores = RunScorer(&ScoreKeyDiff, recipe, prompt.MakeLayer(), ShareOf(6, 60));
  // Protected tokens stay candidates to the end: their score is a cosine, not one of a round gone by.
  for (int32_t j = 0; j < 5; ++j) EXPECT_GE(scores.score[j], -1.0);
  // The last round has those 6 and the last 6 tokens.
  const auto end = scores.score.begin() + 60;
  EXPECT_EQ(std::count_if(scores.score.begin(), end, [](double x) { return x >= -1.0; }), 12);
}

// Squared norms 1, 3 | 4 (keys) and 4, 12 | 1 (values), in blocks of two.
TEST(ScoreKeysTest, CurByHand) {
  PromptCase prompt = PromptCase{1, 1, 3, 8, 8}.Zeros();
  const double keys[] = {1.0, 3.0, 4.0};
  const double values[] = {4.0, 12.0, 1.0};
  for (int32_t j = 0; j < 3; ++j) {
    prompt.key(0, j)[j] = static_cast<float>(std::sqrt(keys[j]));
    prompt.value(0, j)[2] = -static_cast<float>(std::sqrt(values[j]));
  }
  const auto run = [&](CurForm form, int32_t block) {
    Recipe recipe = PlainRecipe(Scorer::kCur);
    recipe.cur = form;
    recipe.block = block;
    return RunScorer(&ScoreCur, recipe, prompt.MakeLayer()).score;
  };
  EXPECT_LE(LargestDifference(run(CurForm::kKey, 2), {0.125, 0.375, 0.5}), 1e-7);
  EXPECT_LE(LargestDifference(run(CurForm::kValue, 0), {4.0 / 17, 12.0 / 17, 1.0 / 17}), 1e-7);
  EXPECT_LE(LargestDifference(run(CurForm::kMean, 0), {5.0 / 25, 15.0 / 25, 5.0 / 25}), 1e-7);
  EXPECT_LE(LargestDifference(run(CurForm::kProduct, 2), {1.0 / 26, 9.0 / 26, 16.0 / 26}), 1e-7);
  EXPECT_LE(LargestDifference(run(CurForm::kProduct, 0), {4.0 / 44, 36.0 / 44, 4.0 / 44}), 1e-7);
}

Recipe LagRecipe(int32_t sink, int32_t lag, bool cross) {
  Recipe recipe = PlainRecipe(Scorer::kLag);
  recipe.policy.sink = sink;
  recipe.block = lag;
  recipe.cross = cross;
  return recipe;
}

TEST(ScoreLagTest, ShortPromptsFallBackToRecency) {
  const PromptCase prompt = PromptCase{2, 1, 259}.Fill();
  const LayerScores scores = RunScorer(&ScoreLag, LagRecipe(4, 128, false), prompt.MakeLayer());
  EXPECT_EQ(std::count(scores.is_protected.begin(), scores.is_protected.end(), 1), 4);
  for (int32_t j = 0; j < 259; ++j) EXPECT_DOUBLE_EQ(scores.score[j], j < 4 ? 1.0 : (j - 4) / 255.0);
  const PromptCase tiny = PromptCase{2, 1, 3}.Fill();
  const LayerScores sinks = RunScorer(&ScoreLag, LagRecipe(4, 128, false), tiny.MakeLayer());
  EXPECT_EQ(sinks.score, std::vector<double>(3, 1.0));
  EXPECT_EQ(sinks.is_protected, std::vector<uint8_t>(3, 1));
}

TEST(ScoreLagTest, ProtectsSinksLastPartitionAndRest) {
  for (const int32_t n : {260, 300}) {
    const PromptCase prompt = PromptCase{2, 1, n}.Fill();
    const LayerScores scores = RunScorer(&ScoreLag, LagRecipe(4, 128, false), prompt.MakeLayer());
    EXPECT_EQ(std::count(scores.is_protected.begin(), scores.is_protected.end(), 1), n - 128);
    std::vector<double> ranks(scores.score.begin() + 4, scores.score.begin() + 132);
    std::sort(ranks.begin(), ranks.end());
    for (int32_t r = 0; r < 128; ++r) EXPECT_EQ(ranks[r], r / 128.0);
  }
}

// Channels 0 and 1 of the next partition span [0, 2] and [0, 4], the others do not vary: token 0 scales to (1, 0, 0,
// ..) and token 1 to (0, 3, 0, ...). Keys and values alike.
TEST(ScoreLagTest, ByHand) {
  PromptCase prompt = PromptCase{1, 1, 4, 8, 8}.Zeros();
  const float rows[4][2] = {{2.0F, 0.0F}, {0.0F, 12.0F}, {0.0F, 4.0F}, {2.0F, 0.0F}};
  for (int32_t j = 0; j < 4; ++j)
    for (int32_t x = 0; x < 2; ++x) prompt.key(0, j)[x] = prompt.value(0, j)[x] = rows[j][x];
  const auto deviation = [](double x) { return std::sqrt((x * x - x * x / 8) / 7); };
  const double first = std::exp(deviation(1.0));
  const double second = std::exp(deviation(3.0));
  const LayerScores cross = RunScorer(&ScoreLag, LagRecipe(0, 2, true), prompt.MakeLayer());
  EXPECT_LE(LargestDifference(cross.score, {first / (first + second), second / (first + second), 1.0, 1.0}), 1e-12);
  const LayerScores ranks = RunScorer(&ScoreLag, LagRecipe(0, 2, false), prompt.MakeLayer());
  EXPECT_EQ(ranks.score, (std::vector<double>{0.0, 0.5, 1.0, 1.0}));
  // Equal tokens: the lower index ranks higher.
  const LayerScores ties = RunScorer(&ScoreLag, LagRecipe(0, 2, false), PromptCase{1, 1, 4}.Zeros().MakeLayer());
  EXPECT_EQ(ties.score, (std::vector<double>{0.5, 0.0, 1.0, 1.0}));
}

// Any layout and dtype scores as the same numbers do in float32, head-major.
TEST(ScoreKeysTest, LayoutsAndDtypesDoNotMatter) {
  const ScoreCase cases[] = {
      {2, 1, 1, 70, 32, 64, Layout::kTokenMajor, DType::kF16, true},
      {2, 1, 1, 70, 32, 64, Layout::kTransposedV, DType::kBF16, false},
      {2, 1, 1, 70, 32, 64, Layout::kHeadMajor, DType::kQ8_0, true},
  };
  for (const ScoreCase& c : cases) {
    CaseData data(c);
    const reference::Layer layer = reference::LoadLayer(data.kv());
    PromptCase plain{2, 2, 70, 32, 64};
    plain.Zeros();
    plain.k.assign(layer.k.begin(), layer.k.end());
    plain.v.assign(layer.v.begin(), layer.v.end());
    Layer stored;
    stored.kv = data.kv();
    ThreadPool pool(3);
    for (const Named& scorer : KeyScorers()) {
      SCOPED_TRACE(scorer.name);
      const LayerScores want = RunScorer(scorer.function, scorer.recipe, plain.MakeLayer());
      EXPECT_EQ(RunScorer(scorer.function, scorer.recipe, stored, 0.5, &pool).score, want.score);
      EXPECT_NE(want.score[0], want.score[1]);
    }
  }
}

// A spoilt token is forced and scores 0; the others score as if it were not there, where the formula allows to say so.
TEST(ScoreKeysTest, NonFiniteTokensAreForced) {
  PromptCase prompt = PromptCase{2, 2, 70, 8, 8}.Fill();
  PromptCase clean = prompt;
  const int32_t bad[] = {3, 40};
  prompt.key(0, bad[0])[1] = NAN;
  prompt.value(0, bad[1])[2] = -INFINITY;
  for (const int32_t j : bad) {  // zeros have no share in any sum
    std::fill_n(clean.key(0, j), 8, 0.0F);
    std::fill_n(clean.value(0, j), 8, 0.0F);
  }
  for (const Named& scorer : KeyScorers()) {
    SCOPED_TRACE(scorer.name);
    const LayerScores scores = RunScorer(scorer.function, scorer.recipe, prompt.MakeLayer());
    EXPECT_EQ(scores.nonfinite_tokens, 2);
    for (int32_t i = 0; i < 140; ++i) {
      EXPECT_EQ(scores.forced[i], i == bad[0] || i == bad[1] ? 1 : 0);
      EXPECT_TRUE(std::isfinite(scores.score[i]));
    }
    EXPECT_EQ(scores.score[bad[0]], 0.0);
    if (scorer.recipe.scorer == Scorer::kLag || scorer.recipe.block == 16) continue;
    EXPECT_EQ(scores.score, RunScorer(scorer.function, scorer.recipe, clean.MakeLayer()).score);
  }
}

// A range of the lag's next partition does not see a spoilt token, and a spoilt one ranks last.
TEST(ScoreLagTest, NonFiniteTokensLeaveTheRange) {
  PromptCase prompt = PromptCase{1, 1, 40, 8, 8}.Fill(3);
  PromptCase inside = prompt;
  prompt.key(0, 12)[0] = INFINITY;
  std::copy_n(inside.key(0, 13), 8, inside.key(0, 12));  // changes no minimum and no maximum
  std::copy_n(inside.value(0, 13), 8, inside.value(0, 12));
  const LayerScores spoilt = RunScorer(&ScoreLag, LagRecipe(0, 10, true), prompt.MakeLayer());
  const LayerScores equal = RunScorer(&ScoreLag, LagRecipe(0, 10, true), inside.MakeLayer());
  for (int32_t j = 0; j < 10; ++j) EXPECT_EQ(spoilt.score[j], equal.score[j]);
  double sum = 0.0;
  for (int32_t j = 10; j < 20; ++j) sum += spoilt.score[j];
  EXPECT_NEAR(sum, 1.0, 1e-12);
  EXPECT_EQ(spoilt.score[12], 0.0);
}

TEST(ScoreKeysTest, BadFieldsAreNamed) {
  const PromptCase prompt = PromptCase{1, 1, 9}.Fill();
  const Layer layer = prompt.MakeLayer();
  Recipe recipe = PlainRecipe(Scorer::kLag);
  LayerScores scores = EmptyScores(recipe, layer);
  EXPECT_EQ(ScoreLag(recipe, layer, 0.5, nullptr, &scores).message(), "block: expected the lag, at least 1, got 0");
  recipe.block = -1;
  EXPECT_EQ(ScoreCur(recipe, layer, 0.5, nullptr, &scores).message(), "block: expected at least 0, got -1");
  EXPECT_EQ(ScoreKeyDiff(recipe, layer, 0.5, nullptr, &scores).message(), "block: expected at least 0, got -1");
}

}  // namespace
}  // namespace dropkv::baseline
