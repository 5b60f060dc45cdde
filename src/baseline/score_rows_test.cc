// Rows of generated tokens: what every formula makes of them is checked by the scorers' own tests (WindowCases); here
// what they have in common.
#include <algorithm>
#include <cmath>
#include <functional>

#include "baseline/allocate.h"
#include "baseline/prompt_case.h"
#include "baseline/window_case.h"

namespace dropkv::baseline {
namespace {

constexpr Scorer kByRows[] = {Scorer::kDropKv,         Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention,
                              Scorer::kProjection,     Scorer::kCaote,        Scorer::kFinch,    Scorer::kObCache,
                              Scorer::kProjectionCode, Scorer::kDefensive,    Scorer::kVariance, Scorer::kLastRow};

Recipe RecipeOf(Scorer scorer, int32_t window) {
  Recipe recipe = WindowRecipe(scorer, scorer == Scorer::kLastRow ? 1 : window);
  recipe.chunk = scorer == Scorer::kProjectionCode ? 4 : 0;
  recipe.flat_heads = scorer == Scorer::kProjectionCode;
  recipe.layers = scorer == Scorer::kVariance ? LayerRule::kCake : LayerRule::kSame;
  recipe.exact_bias = scorer == Scorer::kDefensive;
  if (PoolsScores(recipe)) recipe.policy.pool = {PoolKind::kMean, 2, 3, scorer != Scorer::kProjectionCode};
  return recipe;
}

cpu::ScoreCase Generated(int32_t generated, int32_t rows) {
  cpu::ScoreCase c;
  c.generated = generated, c.rows = rows, c.tokens = 140 + generated;
  return c;
}

std::string ErrorOf(const Recipe& recipe, const Layer& layer) {
  const Result<LayerScores> scores = Score(recipe, layer, 0.5, nullptr);
  return scores.ok() ? "" : scores.status().message();
}

// All keys equal: six tokens of a prompt and two behind it; its last row and theirs see 6, 7 and 8 tokens.
TEST(ScoreRows, EvenWeightsWorkedOutByHand) {
  cpu::ScoreCase c;
  c.kv_heads = 2, c.group = 2, c.rows = 3, c.tokens = 8, c.generated = 2, c.key_dim = 8, c.value_dim = 8;
  c.content = cpu::Content::kEqualKeys;
  WindowCase window(c);
  const double mean = (1.0 / 6 + 1.0 / 7 + 1.0 / 8) / 3;
  double squares = 0.0;
  for (const double p : {1.0 / 6, 1.0 / 7, 1.0 / 8}) squares += (p - mean) * (p - mean);
  const struct {
    Scorer scorer;
    double score;
  } cases[] = {{Scorer::kAttention, mean},
               {Scorer::kLastRow, 1.0 / 8},
               {Scorer::kFinch, (5.0 / 6 + 6.0 / 7 + 7.0 / 8) / 3},
               {Scorer::kVariance, mean + 200 * squares / 2}};
  for (const auto& expected : cases) {
    SCOPED_TRACE(static_cast<int>(expected.scorer));
    const LayerScores scores = ScoreOf(WindowRecipe(expected.scorer, 1), window.MakeLayer());
    EXPECT_EQ(scores.tokens, 6);
    ASSERT_EQ(scores.score.size(), 12U);
    for (const double score : scores.score) EXPECT_NEAR(score, expected.score, 1e-6);
    EXPECT_EQ(scores.is_protected, (std::vector<uint8_t>{0, 0, 0, 0, 0, 1}));
    EXPECT_EQ(scores.forced, std::vector<uint8_t>(12, 0));
  }
  Recipe recipe = WindowRecipe(Scorer::kVariance, 1);  // five tokens of four query heads can be evicted
  recipe.layers = LayerRule::kCake;
  const LayerScores cake = ScoreOf(recipe, window.MakeLayer());
  EXPECT_NEAR(cake.entropy, 4 * 5 * (std::log(6.0) / 6 + std::log(7.0) / 7 + std::log(8.0) / 8), 1e-5);
  EXPECT_NEAR(cake.variance, 4 * 5 * squares / 2, 1e-7);
}

// To rows that see none of them, generated tokens are nothing; to others they are something.
TEST(ScoreRows, TokensThatNoRowSeesChangeNothing) {
  WindowCase window(Generated(20, 12));
  window.MakeOutputProjection(50);
  Layer layer = window.MakeLayer();
  const int32_t n = window.tokens();
  const std::vector<int32_t> visible(12, n);
  for (const Scorer scorer : kByRows) {
    SCOPED_TRACE(static_cast<int>(scorer));
    const Recipe recipe = RecipeOf(scorer, 8);
    Layer blind = layer;
    blind.rows.visible = visible.data();
    Layer alone = blind;
    alone.kv.tokens = n;
    alone.generated = 0;
    const LayerScores want = ScoreOf(recipe, alone);
    const LayerScores got = ScoreOf(recipe, blind);
    const LayerScores seen = ScoreOf(recipe, layer);
    const double largest = std::abs(*std::max_element(want.score.begin(), want.score.end(),
                                                      [](double a, double b) { return std::abs(a) < std::abs(b); }));
    EXPECT_LE(LargestDifference(got.score, want.score), 1e-6 * largest);
    EXPECT_GT(LargestDifference(seen.score, want.score), 1e-4 * largest);
    EXPECT_EQ(got.is_protected, want.is_protected);
    EXPECT_EQ(got.first_stage, want.first_stage);
    EXPECT_NEAR(got.entropy, want.entropy, 1e-6 * want.entropy);
    EXPECT_EQ(got.projected_norm, want.projected_norm);
  }
}

// row_count takes the last of the rows handed in, whatever the window is; TOVA's score is one row's.
TEST(ScoreRows, RowCountSaysWhichJudge) {
  WindowCase window(Generated(6, 20));
  Layer layer = window.MakeLayer();
  Recipe recipe = WindowRecipe(Scorer::kAttention, 8);
  for (const int32_t count : {1, 6, 14, 20}) {
    SCOPED_TRACE(count);
    layer.row_count = count;
    ExpectScores(window, ScoreOf(recipe, layer), window.MeanOverGroup([&](int32_t h, int32_t j) {
      double sum = 0.0;
      for (int32_t i = 20 - count; i < 20; ++i) sum += window.p(h, i, j);
      return sum / count;
    }));
  }
  layer.row_count = 0;
  const std::vector<double> by_window = ScoreOf(recipe, layer).score;
  layer.row_count = 8;
  EXPECT_EQ(ScoreOf(recipe, layer).score, by_window);
  const Recipe tova = WindowRecipe(Scorer::kLastRow, 1);
  const std::vector<double> last = ScoreOf(tova, layer).score;
  layer.row_count = 20;
  EXPECT_EQ(ScoreOf(tova, layer).score, last);
}

// A prompt shorter than the window: all of its rows, and those behind it.
TEST(ScoreRows, ShortPrompt) {
  cpu::ScoreCase c;
  c.tokens = 9, c.generated = 4, c.rows = 9;  // rows of all five prompt tokens and of four more
  WindowCase window(c);
  Recipe recipe = WindowRecipe(Scorer::kAttention, 32);
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  EXPECT_EQ(scores.is_protected, std::vector<uint8_t>(5, 1));
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < 9; ++i) sum += window.p(h, i, j);
    return sum / 9;
  }));
}

TEST(ScoreRows, ThreadsChangeNothing) {
  cpu::ScoreCase c = Generated(40, 48);
  c.tokens = 2640, c.key_dim = 16, c.value_dim = 16, c.kv_heads = 1;
  WindowCase window(c);
  window.MakeOutputProjection(300);
  for (const Scorer scorer : kByRows) {
    SCOPED_TRACE(static_cast<int>(scorer));
    const LayerScores one = ScoreOf(RecipeOf(scorer, 8), window.MakeLayer(), 1);
    const LayerScores three = ScoreOf(RecipeOf(scorer, 8), window.MakeLayer(), 3);
    EXPECT_EQ(one.score, three.score);
    EXPECT_EQ(one.entropy, three.entropy);
    EXPECT_EQ(one.first_stage, three.first_stage);
  }
}

// Lists name tokens of the prompt only, and as many as the budget says; all of them where it says all.
TEST(ScoreRows, SelectionIsAmongThePrompt) {
  WindowCase window(Generated(20, 12));
  window.MakeOutputProjection(50);
  const int32_t n = window.tokens();
  for (const char* name : {"dropkv", "laq", "laq++", "adakv.w8", "criticalkv.w8", "criticalada-dropkv", "chunkkv.w8",
                           "caote.w8", "cake.w8", "defensivekv.w8", "layerdefensivekv.w8", "andpro_code.w8", "tova",
                           "finch.w8", "obcache.w8", "pyramidkv.w8"}) {
    SCOPED_TRACE(name);
    const Recipe recipe = FindRecipe(name).value();
    const LayerScores scores = ScoreOf(recipe, window.MakeLayer(), 2, 60.0 / n);
    for (const int32_t kept : {60, n}) {
      const Result<Selection> selection = Select(recipe, {&scores, 1}, kept, true);
      ASSERT_TRUE(selection.ok()) << selection.status().message();
      int64_t total = 0;
      for (int32_t head = 0; head < scores.kv_heads; ++head)
        for (const int32_t token : selection->keep.head(0, head)) {
          ASSERT_GE(token, 0);
          ASSERT_LT(token, n);
          ++total;
        }
      EXPECT_NEAR(static_cast<double>(total), scores.kv_heads * kept, recipe.chunk > 0 && kept < n ? 40 : 0);
    }
  }
}

// Each row by itself gives the parts of the weighted sum, and of the weighted mean.
TEST(ScoreRows, WeightsAreThoseOfTheSum) {
  WindowCase window(Generated(5, 9));
  window.MakeOutputProjection(30);
  const Layer layer = window.MakeLayer();
  const std::vector<float> weights = {9.0F, 0.5F, 0.0F, 2.0F, 1.0F, 0.25F, 3.0F, 0.0F, 1.0F};
  constexpr int32_t kCount = 8;  // the first row does not judge
  const auto weighted = [&](const Recipe& recipe, bool mean) {
    std::vector<double> want(size_t{2} * window.tokens(), 0.0);
    double all = 0.0;
    for (int32_t i = 9 - kCount; i < 9; ++i) {
      Layer row = layer;
      row.rows.q += i * row.rows.row_stride;
      row.rows.visible += i;
      row.rows.rows = row.row_count = 1;
      const LayerScores part = ScoreOf(recipe, row);
      for (size_t at = 0; at < want.size(); ++at) want[at] += double{weights[i]} * part.score[at];
      all += weights[i];
    }
    for (double& x : want) x /= mean ? all : 1.0;
    return want;
  };
  Layer counted = layer;
  counted.row_count = kCount;
  counted.rows.weights = weights.data();
  Recipe recipe = WindowRecipe(Scorer::kAttention, 8);
  ExpectScores(window, ScoreOf(recipe, counted), weighted(recipe, true));
  for (const Scorer scorer : {Scorer::kDropKv, Scorer::kDropKvWo})
    ExpectScores(window, ScoreOf(WindowRecipe(scorer, 8), counted), weighted(WindowRecipe(scorer, 8), false));
  // Every query head's own mean, of which the largest counts.
  recipe.group = GroupRule::kMax;
  const LayerScores largest = ScoreOf(recipe, counted);
  std::vector<double> want;
  for (int32_t u = 0; u < 2; ++u)
    for (int32_t j = 0; j < window.tokens(); ++j) {
      double best = 0.0;
      for (int32_t h = u * window.shape.group; h < (u + 1) * window.shape.group; ++h) {
        double sum = 0.0;
        for (int32_t i = 1; i < 9; ++i) sum += double{weights[i]} * window.p(h, i, j) / 7.75;
        best = std::max(best, sum);
      }
      want.push_back(best);
    }
  ExpectScores(window, largest, want);
}

TEST(ScoreRows, WeightsAreRefusedWhereAFormulaHasNoPlaceForThem) {
  WindowCase window(Generated(5, 9));
  window.MakeOutputProjection(30);
  Layer layer = window.MakeLayer();
  std::vector<float> weights(9, 1.0F);
  layer.rows.weights = weights.data();
  for (const Scorer scorer : kByRows) {
    SCOPED_TRACE(static_cast<int>(scorer));
    const std::string error = ErrorOf(RecipeOf(scorer, 8), layer);
    const bool takes = scorer == Scorer::kDropKv || scorer == Scorer::kDropKvWo || scorer == Scorer::kAttention ||
                       scorer == Scorer::kCaote;  // its base is snapkv's score
    EXPECT_EQ(error, takes ? ""
                           : "rows.weights: expected none for policy tested: dropkv's, dropkv-wo's and snapkv's scores "
                             "alone weigh rows");
  }
  weights[3] = -1.0F;
  EXPECT_TRUE(ErrorOf(RecipeOf(Scorer::kDropKv, 8), layer).starts_with("rows.weights[3]: expected "));
}

// What reads no rows scores the prompt as if nothing came behind it.
TEST(ScoreRows, OthersDoNotLookAtGeneratedTokens) {
  const PromptCase prompt = PromptCase{}.Fill();
  std::vector<Recipe> recipes;
  for (const Recipe& recipe : Recipes())
    if (!JudgesByRows(recipe)) recipes.push_back(recipe);
  ASSERT_GT(recipes.size(), 15U);
  StatisticsPlan plan;
  for (const Recipe& recipe : recipes) plan.Add(recipe);
  PromptCase joined = PromptCase{4, 2, 46}.Fill(2);
  for (int32_t head = 0; head < 2; ++head) {
    std::copy_n(prompt.k.data() + size_t{40} * 8 * head, 40 * 8, joined.key(head, 0));
    std::copy_n(prompt.v.data() + size_t{40} * 16 * head, 40 * 16, joined.value(head, 0));
  }
  PromptCase before = prompt;
  before.q_pre = before.q;
  before.rope = joined.rope = Rope::Standard(8, 10000.0);
  int32_t scored = 0;
  for (const Recipe& recipe : recipes) {
    SCOPED_TRACE(recipe.name());
    const PromptStatistics statistics = before.Gather(recipe);
    Layer alone = before.MakeLayer(&statistics);
    Layer layer = joined.MakeLayer(&statistics);
    layer.generated = 6;
    const Result<LayerScores> want = Score(recipe, alone, 0.5, nullptr);
    const Result<LayerScores> got = Score(recipe, layer, 0.5, nullptr);
    ASSERT_EQ(got.ok(), want.ok()) << got.status().message();
    if (!want.ok()) continue;
    ++scored;
    EXPECT_EQ(got->tokens, 40);
    EXPECT_EQ(got->score, want->score);
    EXPECT_EQ(got->is_protected, want->is_protected);
    EXPECT_EQ(got->forced, want->forced);
  }
  EXPECT_GT(scored, 15);
}

TEST(ScoreRows, SaysWhatIsWrong) {
  WindowCase window(Generated(5, 13));
  Recipe recipe = WindowRecipe(Scorer::kAttention, 8);
  const auto error = [&](const std::function<void(Layer&)>& change) {
    Layer layer = window.MakeLayer();
    change(layer);
    return ErrorOf(recipe, layer);
  };
  EXPECT_EQ(error([](Layer&) {}), "");
  EXPECT_EQ(error([](Layer& layer) { layer.generated = -1; }),
            "generated: expected 0 to 144, less than all tokens of kv, got -1");
  EXPECT_EQ(error([](Layer& layer) { layer.generated = 145; }),
            "generated: expected 0 to 144, less than all tokens of kv, got 145");
  EXPECT_EQ(error([](Layer& layer) { layer.row_count = 14; }),
            "q: expected at least 14 rows, row_count of policy tested, got 13");
  EXPECT_EQ(error([](Layer& layer) { layer.row_count = 129; }),
            "row_count: expected 0 to 128 rows that judge, got 129");
  EXPECT_EQ(error([](Layer& layer) { layer.row_count = -1; }), "row_count: expected 0 to 128 rows that judge, got -1");
  recipe.rows.draft = 5;
  EXPECT_EQ(error([](Layer&) {}), "");
  EXPECT_EQ(error([](Layer& layer) { layer.row_count = 0; }),
            "row_count: expected how many rows judge, window and generated ones (window:8+draft:5@10% of policy "
            "tested), got 0");
}

}  // namespace
}  // namespace dropkv::baseline
