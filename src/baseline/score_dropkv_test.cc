#include <algorithm>
#include <cmath>

#include "baseline/output_metric.h"
#include "baseline/window_case.h"
#include "reference/reference.h"

namespace dropkv::baseline {
namespace {

class DropKvScores : public ::testing::TestWithParam<cpu::ScoreCase> {};

double SquaredLength(const std::vector<double>& x) { return reference::Dot(x.data(), x.data(), int32_t(x.size())); }

// (p / (1-p))^2 |f(a - v_j)|^2 of one row and token, from the row without the token where that holds most of it.
template <typename F>
double PairScore(const WindowCase& window, int32_t h, int32_t i, int32_t j, F&& length) {
  const reference::Row& row = window.row(h, i);
  if (row.skipped || (j == row.top && row.alone)) return 0.0;
  const bool top = j == row.top;
  const double factor = top ? row.weight[j] : row.weight[j] / row.rest(j);
  std::vector<double> moved = window.value(h / window.shape.group, j);
  const std::vector<double>& other = top ? row.without_top : row.out;
  for (size_t x = 0; x < moved.size(); ++x) moved[x] -= other[x];
  return factor * factor * length(h, moved);
}

TEST_P(DropKvScores, DropKv) {
  WindowCase window(GetParam());
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kDropKv, window.window()), window.MakeLayer());
  const auto plain = [](int32_t, const std::vector<double>& x) { return SquaredLength(x); };
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < window.shape.rows; ++i) sum += PairScore(window, h, i, j, plain);
    return sum;
  }));
}

TEST_P(DropKvScores, DropKvBehindTheOutputProjection) {
  WindowCase window(GetParam());
  window.MakeOutputProjection(window.shape.tokens > 1000 ? 6 : 150);  // brute force takes its time
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kDropKvWo, window.window()), window.MakeLayer());
  const auto projected = [&](int32_t h, const std::vector<double>& x) { return SquaredLength(window.Project(h, x)); };
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < window.shape.rows; ++i) sum += PairScore(window, h, i, j, projected);
    return sum;
  }));
}

INSTANTIATE_TEST_SUITE_P(Cases, DropKvScores, ::testing::ValuesIn(WindowCases()));

// Tokens that are a row's output: forced, with the raw score that their order goes by, and finite.
TEST(ScoreDropKv, DominantTokensAreForced) {
  cpu::ScoreCase c;
  c.content = cpu::Content::kDominant;
  WindowCase window(c);
  window.MakeOutputProjection(64);
  Recipe recipe = WindowRecipe(Scorer::kDropKv, c.rows);
  recipe.policy.pool = {PoolKind::kMean, 5, 5, false};
  std::vector<uint8_t> want(size_t{2} * c.tokens, 0);
  for (int32_t h = 0; h < c.query_heads(); ++h)
    for (int32_t i = 0; i < c.rows; ++i) {
      const reference::Row& row = window.row(h, i);
      if (row.top >= 0 && row.top_rest <= 1e-6) want[static_cast<size_t>(h / c.group) * c.tokens + row.top] = 1;
    }
  ASSERT_GT(std::count(want.begin(), want.end(), 1), 0);
  const std::vector<double> raw = ScoreOf(WindowRecipe(Scorer::kDropKv, c.rows), window.MakeLayer()).score;
  const LayerScores pooled = ScoreOf(recipe, window.MakeLayer());
  EXPECT_EQ(pooled.forced, want);
  EXPECT_EQ(pooled.nonfinite_tokens, 0);
  for (size_t at = 0; at < want.size(); ++at) {
    EXPECT_TRUE(std::isfinite(pooled.score[at]));
    if (want[at] != 0) EXPECT_EQ(pooled.score[at], raw[at]);
  }
  recipe.scorer = Scorer::kDropKvWo;
  EXPECT_EQ(ScoreOf(recipe, window.MakeLayer()).forced, want);
}

TEST(ScoreDropKv, NonFiniteTokensAreForcedAndCounted) {
  cpu::ScoreCase c;
  c.content = cpu::Content::kNonFinite;
  WindowCase window(c);
  window.MakeOutputProjection(64);
  int64_t count = 0;
  for (int32_t u = 0; u < c.kv_heads; ++u)
    for (int32_t j = 0; j < c.tokens; ++j) count += window.takes_part(u, j) ? 0 : 1;
  ASSERT_GT(count, 0);
  for (const Scorer scorer :
       {Scorer::kDropKv, Scorer::kDropKvCompat, Scorer::kDropKvWo, Scorer::kAttention, Scorer::kProjection,
        Scorer::kCaote, Scorer::kFinch, Scorer::kObCache, Scorer::kDefensive, Scorer::kVariance}) {
    SCOPED_TRACE(static_cast<int>(scorer));
    const LayerScores scores = ScoreOf(WindowRecipe(scorer, c.rows), window.MakeLayer());
    EXPECT_EQ(scores.nonfinite_tokens, count);
    EXPECT_EQ(std::count(scores.forced.begin(), scores.forced.end(), 1), count);
    for (size_t at = 0; at < scores.score.size(); ++at) EXPECT_EQ(std::isnan(scores.score[at]), scores.forced[at] != 0);
  }
}

// The expanded form in float32 agrees with the reference's to what its cancellation leaves.
TEST(ScoreDropKvCompat, AsTheReference) {
  for (const auto& tested : {std::pair{1e-6F, 0}, {0.5F, 0}, {1e-6F, 7}}) {
    const float epsilon = tested.first;
    cpu::ScoreCase c;
    c.generated = tested.second;
    WindowCase window(c);
    Recipe recipe = WindowRecipe(Scorer::kDropKvCompat, window.window());
    recipe.epsilon = epsilon;
    const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
    ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
      double sum = 0.0;
      for (int32_t i = 0; i < window.shape.rows; ++i) {
        const double ratio = window.p(h, i, j) / (1.0 - window.p(h, i, j) + epsilon);
        std::vector<double> moved = window.value(h / window.shape.group, j);
        for (size_t x = 0; x < moved.size(); ++x) moved[x] -= window.out(h, i)[x];
        sum += ratio * ratio * SquaredLength(moved);
      }
      return sum;
    }),
                 1e-4);
  }
}

// Why the exact mode exists: a token that holds nearly all of a row's weight may get a negative score.
TEST(ScoreDropKvCompat, CancelsAtDominantTokens) {
  int32_t negative = 0;
  for (const float offset : {0.0F, 1.0F}) {
    cpu::ScoreCase c;
    c.kv_heads = 1, c.group = 16, c.rows = 8, c.tokens = 700;
    c.content = offset > 0.0F ? cpu::Content::kOffset : cpu::Content::kDominant;
    WindowCase window(c);
    Recipe recipe = WindowRecipe(Scorer::kDropKvCompat, c.rows);
    recipe.epsilon = 1e-6;
    const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
    negative +=
        static_cast<int32_t>(std::count_if(scores.score.begin(), scores.score.end(), [](double x) { return x < 0; }));
    EXPECT_EQ(std::count(scores.forced.begin(), scores.forced.end(), 1), 0);
  }
  EXPECT_GT(negative, 0);
}

// W_O with fewer rows than a value has dims: the factor has no more rank, and lengths are still right.
TEST(OutputMetric, LengthsAtFullAndLowerRank) {
  cpu::ScoreCase c;
  c.value_dim = 104;
  WindowCase window(c);
  ThreadPool pool(2);
  for (const int32_t hidden : {3, 200, 512}) {
    SCOPED_TRACE(hidden);
    window.MakeOutputProjection(hidden);
    const OutputMetric metric(window.MakeLayer().wo, c.value_dim, &pool);
    ASSERT_EQ(metric.heads(), c.query_heads());
    for (int32_t h = 0; h < metric.heads(); ++h)
      for (int32_t j = 0; j < 20; ++j) {
        const std::vector<double> x = window.value(h / c.group, j);
        double length = 0.0;
        for (int32_t k = 0; k < c.value_dim; ++k) {
          double sum = 0.0;
          for (int32_t i = 0; i < c.value_dim; ++i)
            sum += double{metric.factor(h)[static_cast<size_t>(i) * c.value_dim + k]} * x[i];
          length += sum * sum;
        }
        const double want = SquaredLength(window.Project(h, x));
        ASSERT_NEAR(length, want, 1e-5 * hidden * SquaredLength(x)) << h << " " << j;
      }
  }
}

TEST(OutputMetric, MadeBeforeGivesTheSame) {
  WindowCase window(cpu::ScoreCase{});
  window.MakeOutputProjection(64);
  Layer layer = window.MakeLayer();
  const Recipe recipe = WindowRecipe(Scorer::kDropKvWo, window.shape.rows);
  const std::vector<double> want = ScoreOf(recipe, layer).score;
  ThreadPool pool(1);
  const OutputMetric metric(layer.wo, window.shape.value_dim, &pool);
  layer.output_metric = &metric;
  layer.wo = {};
  EXPECT_EQ(ScoreOf(recipe, layer).score, want);
  const OutputMetric narrow(window.MakeLayer().wo, window.shape.value_dim / 2, &pool);
  layer.output_metric = &narrow;
  const Result<LayerScores> refused = Score(recipe, layer, 0.5, &pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(), "output_metric: expected [Hq, dv] = [8, 64], got [16, 32]");
}

}  // namespace
}  // namespace dropkv::baseline
