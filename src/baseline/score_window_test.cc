#include <algorithm>
#include <cmath>
#include <numeric>

#include "baseline/window_case.h"
#include "reference/reference.h"

namespace dropkv::baseline {
namespace {

class WindowScores : public ::testing::TestWithParam<cpu::ScoreCase> {};

// All keys equal: row i spreads its weight evenly over the tokens that it sees. Six tokens, two rows: p is 1/5 and 1/6.
cpu::ScoreCase EvenCase() {
  cpu::ScoreCase c;
  c.kv_heads = 2, c.group = 2, c.rows = 2, c.tokens = 6, c.key_dim = 8, c.value_dim = 8;
  c.content = cpu::Content::kEqualKeys;
  return c;
}

TEST(ScoreWindow, EvenWeightsWorkedOutByHand) {
  WindowCase window(EvenCase());
  const double mean = (1.0 / 5 + 1.0 / 6) / 2;
  const double variance = std::pow(1.0 / 5 - mean, 2) + std::pow(1.0 / 6 - mean, 2);  // two rows: divided by 1
  const struct {
    Scorer scorer;
    double first;  // of tokens 0..4
    double last;   // of token 5, which row 0 does not see
  } cases[] = {
      {Scorer::kAttention, mean, 1.0 / 12},
      {Scorer::kFinch, (4.0 / 5 + 5.0 / 6) / 2, 5.0 / 12},
      {Scorer::kVariance, mean + 200 * variance, 1.0 / 12 + 200.0 * 2 / 144},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(static_cast<int>(c.scorer));
    const LayerScores scores = ScoreOf(WindowRecipe(c.scorer, 2), window.MakeLayer());
    for (size_t at = 0; at < scores.score.size(); ++at)
      EXPECT_NEAR(scores.score[at], at % 6 < 5 ? c.first : c.last, 1e-6) << at;
    EXPECT_EQ(scores.is_protected, (std::vector<uint8_t>{0, 0, 0, 0, 1, 1}));
    EXPECT_EQ(scores.nonfinite_tokens, 0);
  }
  const LayerScores tova = ScoreOf(WindowRecipe(Scorer::kLastRow, 1), window.MakeLayer());
  for (const double score : tova.score) EXPECT_NEAR(score, 1.0 / 6, 1e-7);
  EXPECT_EQ(tova.is_protected, (std::vector<uint8_t>{0, 0, 0, 0, 0, 1}));
}

// CAKE's preference of the even layer: four past tokens, four query heads.
TEST(ScoreWindow, LayerPreferenceWorkedOutByHand) {
  WindowCase window(EvenCase());
  Recipe recipe = WindowRecipe(Scorer::kVariance, 2);
  recipe.layers = LayerRule::kCake;
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  EXPECT_NEAR(scores.entropy, 4 * 4 * (std::log(5.0) / 5 + std::log(6.0) / 6), 1e-5);
  EXPECT_NEAR(scores.variance, 4 * 4 * std::pow(1.0 / 5 - 1.0 / 6, 2) / 2, 1e-7);
  recipe.layers = LayerRule::kSame;
  EXPECT_EQ(ScoreOf(recipe, window.MakeLayer()).entropy, 0.0);
}

TEST_P(WindowScores, Attention) {
  WindowCase window(GetParam());
  const int32_t w = window.shape.rows;
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kAttention, window.window()), window.MakeLayer());
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < w; ++i) sum += window.p(h, i, j);
    return sum / w;
  }));
}

TEST_P(WindowScores, LastRowIsTheSameInEveryHead) {
  WindowCase window(GetParam());
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kLastRow, 1), window.MakeLayer());
  std::vector<double> want;
  for (int32_t u = 0; u < window.shape.kv_heads; ++u)
    for (int32_t j = 0; j < window.tokens(); ++j) {
      double sum = 0.0;
      for (int32_t h = 0; h < window.shape.query_heads(); ++h) sum += window.p(h, window.shape.rows - 1, j);
      want.push_back(sum / window.shape.query_heads());
    }
  ExpectScores(window, scores, want);
}

TEST_P(WindowScores, Finch) {
  WindowCase window(GetParam());
  const int32_t w = window.shape.rows;
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kFinch, window.window()), window.MakeLayer());
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < w; ++i) sum += window.p(h, i, j) * (window.shape.tokens - w + i);
    return sum / w;
  }));
}

TEST_P(WindowScores, VarianceAndPreference) {
  WindowCase window(GetParam());
  const int32_t w = window.shape.rows;
  const int32_t past = window.tokens() - window.window();
  double entropy = 0.0;
  double variances = 0.0;
  const std::vector<double> want = window.MeanOverGroup([&](int32_t h, int32_t j) {
    std::vector<double> weights;
    for (int32_t i = 0; i < w; ++i)
      if (!window.row(h, i).skipped) weights.push_back(window.p(h, i, j));
    const double mean = std::accumulate(weights.begin(), weights.end(), 0.0) / static_cast<double>(weights.size());
    double variance = 0.0;
    for (const double p : weights) variance += (p - mean) * (p - mean);
    if (weights.size() > 1) variance /= static_cast<double>(weights.size() - 1);
    if (j < past) {
      variances += variance;
      for (const double p : weights) entropy -= p * std::log(p + 1e-10);
    }
    return mean + 200 * variance;
  });
  Recipe recipe = WindowRecipe(Scorer::kVariance, window.window());
  recipe.layers = LayerRule::kCake;
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  ExpectScores(window, scores, want);
  EXPECT_NEAR(scores.entropy, entropy, 1e-5 * std::abs(entropy));
  EXPECT_NEAR(scores.variance, variances, 1e-5 * variances);
}

INSTANTIATE_TEST_SUITE_P(Cases, WindowScores, ::testing::ValuesIn(WindowCases()));

// Reduction and pooling in both orders, and every rule of the group.
TEST(ScoreWindow, GroupRulesAndPooling) {
  WindowCase window(cpu::ScoreCase{});
  const int32_t n = window.shape.tokens;
  const int32_t w = window.shape.rows;
  const int32_t g = window.shape.group;
  for (const GroupRule rule : {GroupRule::kMean, GroupRule::kMax, GroupRule::kSum})
    for (const PoolKind kind : {PoolKind::kMean, PoolKind::kMax})
      for (const bool before : {false, true}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(rule) << " " << static_cast<int>(kind) << before);
        Recipe recipe = WindowRecipe(Scorer::kAttention, w);
        recipe.policy.pool = {kind, 3, 2, true};
        recipe.group = rule;
        recipe.group_before_pool = before;
        const auto reduce = [&](const std::vector<std::vector<double>>& heads) {
          std::vector<double> out = heads[0];
          for (int32_t h = 1; h < g; ++h)
            for (int32_t j = 0; j < n; ++j)
              out[j] = rule == GroupRule::kMax ? std::max(out[j], heads[h][j]) : out[j] + heads[h][j];
          for (double& x : out) x /= rule == GroupRule::kMean ? g : 1;
          return out;
        };
        std::vector<double> want;
        for (int32_t u = 0; u < window.shape.kv_heads; ++u) {
          std::vector<std::vector<double>> heads(g, std::vector<double>(n, 0.0));
          for (int32_t h = 0; h < g; ++h)
            for (int32_t j = 0; j < n; ++j)
              for (int32_t i = 0; i < w; ++i) heads[h][j] += window.p(u * g + h, i, j) / w;
          std::vector<double> of_head;
          if (before) {
            of_head = reference::Pool(reduce(heads).data(), n, recipe.policy.pool, w);
          } else {
            for (std::vector<double>& head : heads) head = reference::Pool(head.data(), n, recipe.policy.pool, w);
            of_head = reduce(heads);
          }
          want.insert(want.end(), of_head.begin(), of_head.end());
        }
        ExpectScores(window, ScoreOf(recipe, window.MakeLayer()), want);
      }
}

// The layer with the query heads in another order: their queries and their columns of W_O.
class PermutedHeads {
 public:
  PermutedHeads(Layer layer, const std::vector<int32_t>& heads) : layer_(std::move(layer)) {
    const ObservationRows rows = layer_.rows;
    const int32_t dim = layer_.kv.key_dim;
    for (const int32_t head : heads)
      for (int32_t i = 0; i < rows.rows; ++i) {
        const float* from = rows.q + head * rows.head_stride + i * rows.row_stride;
        queries_.insert(queries_.end(), from, from + dim);
      }
    layer_.rows.q = queries_.data();
    layer_.rows.head_stride = int64_t{rows.rows} * dim;
    layer_.rows.row_stride = dim;
    const int32_t value_dim = layer_.kv.value_dim;
    layer_.wo.read_row = [read = layer_.wo.read_row, heads, value_dim](int32_t row, float* out) {
      std::vector<float> columns(heads.size() * value_dim);
      read(row, columns.data());
      for (size_t h = 0; h < heads.size(); ++h)
        std::copy_n(columns.data() + static_cast<size_t>(heads[h]) * value_dim, value_dim, out + h * value_dim);
    };
  }
  const Layer& layer() const { return layer_; }

 private:
  Layer layer_;
  std::vector<float> queries_;
};

double LargestDifference(const LayerScores& a, const LayerScores& b) {
  const auto [least, largest] = std::minmax_element(a.score.begin(), a.score.end());
  double difference = 0.0;
  for (size_t i = 0; i < a.score.size(); ++i) difference = std::max(difference, std::abs(a.score[i] - b.score[i]));
  return difference / std::max(std::abs(*least), std::abs(*largest));
}

// Query heads of a group are alike to every score; those of different groups meet other keys.
TEST(ScoreWindow, HeadsOfAGroupMayBeExchanged) {
  cpu::ScoreCase c;
  c.kv_heads = 2, c.group = 4;
  WindowCase window(c);
  window.MakeOutputProjection(64);
  const Layer layer = window.MakeLayer();
  const PermutedHeads inside(layer, {2, 0, 3, 1, 4, 7, 6, 5});
  const PermutedHeads across(layer, {4, 1, 2, 3, 0, 5, 6, 7});
  std::vector<Recipe> recipes;
  for (const Scorer scorer : {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention,
                              Scorer::kProjection, Scorer::kProjectionCode, Scorer::kCaote, Scorer::kFinch,
                              Scorer::kObCache, Scorer::kDefensive, Scorer::kVariance, Scorer::kLastRow}) {
    recipes.push_back(WindowRecipe(scorer, scorer == Scorer::kLastRow ? 1 : c.rows));
    recipes.back().chunk = scorer == Scorer::kProjectionCode ? 4 : 0;
    recipes.back().flat_heads = scorer == Scorer::kProjectionCode;
  }
  for (const GroupRule rule : {GroupRule::kMax, GroupRule::kSum}) {
    recipes.push_back(WindowRecipe(Scorer::kAttention, c.rows));
    recipes.back().group = rule;
  }
  for (const Recipe& recipe : recipes) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(recipe.scorer) << " " << static_cast<int>(recipe.group));
    const LayerScores scores = ScoreOf(recipe, layer);
    // Sums in another order; the Gram matrices of W_O are the same numbers.
    EXPECT_LE(LargestDifference(scores, ScoreOf(recipe, inside.layer())), 1e-5);
    EXPECT_GT(LargestDifference(scores, ScoreOf(recipe, across.layer())), 1e-3);
  }
}

// Only the last rows of those handed in are the window.
TEST(ScoreWindow, TakesTheLastRows) {
  cpu::ScoreCase c;
  c.rows = 20;
  WindowCase window(c);
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kAttention, 4), window.MakeLayer());
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 16; i < 20; ++i) sum += window.p(h, i, j);
    return sum / 4;
  }));
}

// The same bits from any number of threads, for every scorer of the window.
TEST(ScoreWindow, ThreadsChangeNothing) {
  cpu::ScoreCase c;
  c.tokens = 2600, c.key_dim = 16, c.value_dim = 16;
  WindowCase window(c);
  window.MakeOutputProjection(300);
  const Layer layer = window.MakeLayer();
  for (const Scorer scorer : {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention,
                              Scorer::kProjection, Scorer::kProjectionCode, Scorer::kCaote, Scorer::kFinch,
                              Scorer::kObCache, Scorer::kDefensive, Scorer::kVariance}) {
    SCOPED_TRACE(static_cast<int>(scorer));
    Recipe recipe = WindowRecipe(scorer, c.rows);
    recipe.chunk = scorer == Scorer::kProjectionCode ? 4 : 0;
    recipe.flat_heads = scorer == Scorer::kProjectionCode;
    recipe.layers = scorer == Scorer::kVariance ? LayerRule::kCake : LayerRule::kSame;
    const LayerScores one = ScoreOf(recipe, layer, 1);
    const LayerScores three = ScoreOf(recipe, layer, 3);
    EXPECT_EQ(one.score, three.score);
    EXPECT_EQ(one.entropy, three.entropy);
    EXPECT_EQ(one.projected_norm, three.projected_norm);
    EXPECT_EQ(one.first_stage, three.first_stage);
  }
}

std::string ErrorOf(const Recipe& recipe, const Layer& layer, double keep = 0.5) {
  ThreadPool pool(1);
  const Result<LayerScores> scores = Score(recipe, layer, keep, &pool);
  return scores.ok() ? "" : scores.status().message();
}

TEST(Score, SaysWhatIsMissing) {
  WindowCase window(cpu::ScoreCase{});
  Recipe recipe = WindowRecipe(Scorer::kAttention, 8);
  recipe.policy.name = "snapkv";
  Layer layer = window.MakeLayer();
  layer.rows.q = nullptr;
  EXPECT_EQ(ErrorOf(recipe, layer),
            "policy snapkv needs q [Hq, w, d] of the last 8 rows of the prompt, which is missing");
  recipe.policy.window = 9;
  EXPECT_EQ(ErrorOf(recipe, window.MakeLayer()), "q: expected at least 9 rows, the window of policy snapkv, got 8");
  recipe.policy.window = 8;
  recipe.policy.name = "criticalkv";
  recipe.critical = true;
  EXPECT_EQ(ErrorOf(recipe, window.MakeLayer()), "policy criticalkv needs wo [hidden, Hq*dv], which is missing");
  window.MakeOutputProjection(16);
  layer = window.MakeLayer();
  layer.wo.columns -= 64;
  EXPECT_EQ(ErrorOf(recipe, layer), "wo: expected [hidden, Hq*dv] with Hq*dv = 8 * 64, got 448 columns");
  EXPECT_EQ(ErrorOf(recipe, window.MakeLayer(), 1.5), "keep_fraction: expected 0 to 1, the share kept, got 1.500000");

  Recipe h2o = WindowRecipe(Scorer::kAttentionSum, 8);
  h2o.policy.name = "h2o";
  EXPECT_EQ(ErrorOf(h2o, window.MakeLayer()),
            "policy h2o needs q [Hq, n, d] of all rows, gathered in statistics, which is missing");
  Recipe expected = WindowRecipe(Scorer::kExpected, 0);
  expected.policy.name = "expected";
  EXPECT_EQ(ErrorOf(expected, window.MakeLayer()),
            "policy expected needs q_pre [Hq, n, d] of all rows, gathered in statistics, which is missing");
  layer = window.MakeLayer();
  layer.kv.k.data = nullptr;
  EXPECT_EQ(ErrorOf(WindowRecipe(Scorer::kKeyNorm, 0), layer), "kv.k.data: expected a pointer, got null");
}

TEST(Score, FullProtectsEverything) {
  WindowCase window(EvenCase());
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kFull, 1), window.MakeLayer());
  EXPECT_EQ(scores.is_protected, std::vector<uint8_t>(6, 1));
}

TEST(Score, ProtectsByIndex) {
  WindowCase window(cpu::ScoreCase{});
  Recipe recipe = WindowRecipe(Scorer::kAttention, 8);
  recipe.policy.sink = 3;
  std::vector<uint8_t> want(151, 0);
  std::fill_n(want.begin(), 3, uint8_t{1});
  std::fill(want.end() - 8, want.end(), uint8_t{1});
  EXPECT_EQ(ScoreOf(recipe, window.MakeLayer()).is_protected, want);
  recipe.protect_window = false;
  recipe.recent = 2;
  std::fill(want.end() - 8, want.end() - 2, uint8_t{0});
  EXPECT_EQ(ScoreOf(recipe, window.MakeLayer()).is_protected, want);
}

}  // namespace
}  // namespace dropkv::baseline
