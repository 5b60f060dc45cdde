#include <algorithm>
#include <cmath>
#include <numeric>

#include "baseline/projection_norm.h"
#include "baseline/window_case.h"
#include "reference/reference.h"

namespace dropkv::baseline {
namespace {

class ProjectionScores : public ::testing::TestWithParam<cpu::ScoreCase> {};

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

TEST_P(ProjectionScores, Projection) {
  WindowCase window(GetParam());
  const LayerScores scores = ScoreOf(WindowRecipe(Scorer::kProjection, window.window()), window.MakeLayer());
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (int32_t i = 0; i < window.shape.rows; ++i) {
      if (window.row(h, i).skipped) continue;
      const std::vector<double>& a = window.out(h, i);
      sum += window.p(h, i, j) * Dot(window.value(h / window.shape.group, j), a) / std::sqrt(Dot(a, a));
    }
    return sum;
  }));
}

// AnDPro's code step by step: pooled weights, chunks, anchors without the kept chunks.
TEST_P(ProjectionScores, ProjectionCode) {
  WindowCase window(GetParam());
  const cpu::ScoreCase& c = window.shape;
  constexpr int32_t kChunk = 4;
  const int32_t n = window.tokens();
  const int32_t chunks = (n + kChunk - 1) / kChunk;
  const auto kept = [&](int32_t chunk) { return chunk == 0 || chunk >= chunks - window.window() / kChunk; };
  Recipe recipe = WindowRecipe(Scorer::kProjectionCode, window.window());
  recipe.policy.pool = {PoolKind::kMax, 3, 2, false};
  recipe.chunk = kChunk;
  recipe.flat_heads = true;
  std::vector<std::vector<double>> of_heads;  // [Hq] of [chunks]
  for (int32_t h = 0; h < c.query_heads(); ++h) {
    of_heads.emplace_back(chunks, 0.0);
    for (int32_t i = 0; i < c.rows; ++i) {
      const std::vector<double> weights = reference::Pool(window.row(h, i).weight.data(), n, recipe.policy.pool, 0);
      std::vector<std::vector<double>> sums(chunks, std::vector<double>(c.value_dim, 0.0));
      std::vector<double> anchor(c.value_dim, 0.0);
      for (int32_t j = 0; j < n; ++j) {
        const std::vector<double> value = window.value(h / c.group, j);
        for (int32_t x = 0; x < c.value_dim; ++x) {
          sums[j / kChunk][x] += weights[j] * value[x];
          anchor[x] += kept(j / kChunk) ? 0.0 : weights[j] * value[x];
        }
      }
      for (int32_t chunk = 0; chunk < chunks; ++chunk) of_heads[h][chunk] += Dot(sums[chunk], anchor);
    }
  }
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) { return of_heads[h][j / kChunk]; }));
  for (int32_t j = 0; j < n; ++j) EXPECT_EQ(scores.is_protected[j], kept(j / kChunk) ? 1 : 0) << j;
}

// Chunks with a sink or a recent token are kept whole, and take no part in the anchor either.
TEST(ScoreProjectionCode, KeepsTheChunksOfSinksAndRecentTokens) {
  WindowCase window(cpu::ScoreCase{});
  const int32_t n = window.shape.tokens;
  ASSERT_EQ(n, 151);  // 38 chunks, the last of 3 tokens
  Recipe recipe = WindowRecipe(Scorer::kProjectionCode, 4);
  recipe.chunk = 4;
  recipe.flat_heads = true;
  recipe.policy.sink = 6;
  recipe.recent = 8;
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  for (int32_t j = 0; j < n; ++j) EXPECT_EQ(scores.is_protected[j], j < 8 || j >= 140 ? 1 : 0) << j;
  recipe.policy.sink = 4;
  recipe.recent = 0;
  EXPECT_NE(ScoreOf(recipe, window.MakeLayer()).score, scores.score);
}

double Saliency(const WindowCase& window, ObCacheForm form, int32_t h, int32_t i, int32_t j) {
  const double p = window.p(h, i, j);
  if (p == 0.0) return 0.0;
  const double z = form == ObCacheForm::kValue ? 0.0 : window.logit(h, i, j);
  const std::vector<double> value = window.value(h / window.shape.group, j);
  double sum = 0.0;
  for (int32_t x = 0; x < window.shape.value_dim; ++x) {
    const double moved = z * (value[x] - window.out(h, i)[x]);
    sum += std::pow(form == ObCacheForm::kKey ? moved : value[x] + moved, 2.0);
  }
  return p * p * sum;
}

TEST_P(ProjectionScores, ObCache) {
  WindowCase window(GetParam());
  Recipe recipe = WindowRecipe(Scorer::kObCache, window.window());
  // Beside z^2 |v|^2 the differences v - a of the dominant case are small: float32 leaves fewer digits.
  const double error = window.shape.content == cpu::Content::kDominant ? 1e-4 : kWindowError;
  for (const ObCacheForm form : {ObCacheForm::kValue, ObCacheForm::kKey, ObCacheForm::kJoint}) {
    SCOPED_TRACE(static_cast<int>(form));
    recipe.obcache = form;
    const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
    ExpectScores(window, scores, window.MeanOverGroup([&](int32_t h, int32_t j) {
      double sum = 0.0;
      for (int32_t i = 0; i < window.shape.rows; ++i) sum += Saliency(window, form, h, i, j);
      return sum;
    }),
                 error);
  }
}

// All values the same: v - a is nothing but rounding, which must not turn a square negative.
TEST(ScoreObCache, IsNeverNegative) {
  constexpr int32_t kTokens = 40;
  constexpr int32_t kDim = 8;
  const std::vector<float> ones(size_t{kTokens} * kDim, 1.0F);
  const int32_t visible = kTokens;
  Recipe recipe = WindowRecipe(Scorer::kObCache, 1);
  recipe.obcache = ObCacheForm::kKey;
  for (int32_t trial = 0; trial < 20; ++trial) {
    std::vector<float> values;
    for (int32_t j = 0; j < kTokens; ++j)
      for (int32_t i = 0; i < kDim; ++i) values.push_back(0.1F * static_cast<float>(trial + 1) + static_cast<float>(i));
    Layer layer;
    layer.kv = {1, kTokens, kDim, kDim, {}, {}, nullptr};
    layer.kv.k = {ones.data(), DType::kF32, int64_t{kTokens} * kDim, kDim, 1};
    layer.kv.v = {values.data(), DType::kF32, int64_t{kTokens} * kDim, kDim, 1};
    layer.rows = {ones.data(), kDim, kDim, 1, 1, &visible};
    const LayerScores scores = ScoreOf(recipe, layer);
    EXPECT_GE(*std::min_element(scores.score.begin(), scores.score.end()), 0.0);
  }
}

// The scores of CAOTE from the base's own, by the formula without shortcuts.
TEST_P(ProjectionScores, Caote) {
  WindowCase window(GetParam());
  const cpu::ScoreCase& c = window.shape;
  const int32_t n = window.tokens();
  for (const Scorer base : {Scorer::kAttention, Scorer::kLastRow}) {
    SCOPED_TRACE(static_cast<int>(base));
    Recipe recipe = WindowRecipe(base, base == Scorer::kLastRow ? 1 : window.window());
    recipe.policy.sink = 2;
    const LayerScores alpha = ScoreOf(recipe, window.MakeLayer());
    recipe.scorer = Scorer::kCaote;
    recipe.base = base;
    std::vector<double> want;
    for (int32_t u = 0; u < c.kv_heads; ++u) {
      double total = 0.0;
      std::vector<double> mean(c.value_dim, 0.0);
      const auto share = [&](int32_t j) {
        const double score = alpha.score[static_cast<size_t>(u) * n + j];
        return alpha.is_protected[j] != 0 || std::isnan(score) ? 0.0 : score;
      };
      for (int32_t j = 0; j < n; ++j) total += share(j);
      for (int32_t j = 0; j < n; ++j)
        for (int32_t x = 0; x < c.value_dim; ++x) mean[x] += share(j) / total * window.value(u, j)[x];
      for (int32_t j = 0; j < n; ++j) {
        const std::vector<double> value = window.value(u, j);
        const double a = total > 0.0 ? share(j) / total : 0.0;
        want.push_back(a == 0.0 ? 0.0 : a / (1.0 - a) * reference::Distance(mean.data(), value.data(), c.value_dim));
      }
    }
    ExpectScores(window, ScoreOf(recipe, window.MakeLayer()), want);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ProjectionScores, ::testing::ValuesIn(WindowCases()));

// Three candidates with shares 1/2, 1/4, 1/4 are not needed: of two equal ones each is half, and the other is what
// remains. A single candidate has nothing beside it: 0.
TEST(ScoreCaote, WorkedOutByHand) {
  cpu::ScoreCase c;
  c.kv_heads = 1, c.group = 1, c.rows = 1, c.tokens = 4, c.key_dim = 8, c.value_dim = 8;
  c.content = cpu::Content::kEqualKeys;
  WindowCase window(c);
  Recipe recipe = WindowRecipe(Scorer::kCaote, 1);
  recipe.policy.sink = 1;  // tokens 1 and 2 are left
  const LayerScores two = ScoreOf(recipe, window.MakeLayer());
  const double apart = reference::Distance(window.value(0, 1).data(), window.value(0, 2).data(), 8);
  EXPECT_NEAR(two.score[1], 0.5 * apart, 1e-6);
  EXPECT_NEAR(two.score[2], 0.5 * apart, 1e-6);
  EXPECT_EQ(two.score[0], 0.0);
  EXPECT_EQ(two.score[3], 0.0);
  recipe.policy.sink = 2;
  EXPECT_EQ(ScoreOf(recipe, window.MakeLayer()).score, std::vector<double>(4, 0.0));
}

TEST_P(ProjectionScores, ProjectedNorms) {
  WindowCase window(GetParam());
  window.MakeOutputProjection(300);  // more than a block of its rows
  Recipe recipe = WindowRecipe(Scorer::kAttention, window.window());
  recipe.critical = true;
  const LayerScores scores = ScoreOf(recipe, window.MakeLayer());
  const std::vector<double> want = window.MeanOverGroup([&](int32_t h, int32_t j) {
    double sum = 0.0;
    for (const double x : window.Project(h, window.value(h / window.shape.group, j))) sum += std::abs(x);
    return sum;
  });
  ASSERT_EQ(scores.projected_norm.size(), want.size());
  for (size_t at = 0; at < want.size(); ++at) {
    const auto head = static_cast<int32_t>(at / window.tokens());
    if (!window.takes_part(head, static_cast<int32_t>(at % window.tokens()))) continue;
    EXPECT_NEAR(scores.projected_norm[at], want[at], 1e-5 * want[at]) << at;
  }
}

// DefensiveKV step by step.
struct Defensive {
  std::vector<double> score;
  std::vector<uint8_t> first_stage;
};

Defensive BruteDefensive(const WindowCase& window, const Recipe& recipe, double keep,
                         const std::vector<double>& projected_norm) {
  const cpu::ScoreCase& c = window.shape;
  const int32_t n = window.tokens();
  const int32_t past = n - window.window();
  const size_t count = static_cast<size_t>(c.kv_heads) * n;
  Defensive result{std::vector<double>(count, 0.0), std::vector<uint8_t>(count, 0)};
  double bias = 0.0;
  std::vector<std::vector<double>> mean(c.kv_heads, std::vector<double>(past, 0.0));
  for (int32_t h = 0; h < c.query_heads(); ++h)
    for (int32_t i = 0; i < c.rows; ++i) {
      const std::vector<double>& p = window.row(h, i).weight;
      // What is kept anyway, the window and all behind it; or as the code has it, as many tokens before it.
      const int32_t bias_begin = recipe.exact_bias ? past : std::max(0, past - window.window());
      for (int32_t j = bias_begin; j < (recipe.exact_bias ? c.tokens : past); ++j)
        bias += p[j] / (c.query_heads() * c.rows);
      std::vector<double> pooled = reference::Pool(p.data(), past, recipe.policy.pool, 0);
      const double before = std::accumulate(p.begin(), p.begin() + past, 0.0);
      const double after = std::accumulate(pooled.begin(), pooled.begin() + past, 0.0);
      for (int32_t j = 0; j < past; ++j) {
        mean[h / c.group][j] += p[j] / (c.group * c.rows);
        double& score = result.score[static_cast<size_t>(h / c.group) * n + j];
        if (after > 0.0) score = std::max(score, pooled[j] * before / after);
      }
    }
  for (int32_t u = 0; u < c.kv_heads; ++u) {
    double* score = result.score.data() + static_cast<size_t>(u) * n;
    const double average = std::accumulate(score, score + past, 0.0) / past;
    for (int32_t j = 0; j < past; ++j) {
      double total = 0.0;
      for (int32_t x = 0; x < c.kv_heads; ++x) total += projected_norm[static_cast<size_t>(x) * n + j];
      score[j] = std::max(score[j], average) * projected_norm[static_cast<size_t>(u) * n + j] / total;
    }
    std::vector<int32_t> order(past);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return mean[u][a] > mean[u][b]; });
    const double total = std::accumulate(mean[u].begin(), mean[u].end(), 0.0);
    const auto limit = static_cast<int32_t>(std::max(0.0, n * keep - window.window()));
    double sum = 0.0;
    int32_t reached = 0;
    for (int32_t x = 0; x < past && reached == 0; ++x) {
      sum += mean[u][order[x]] / total;
      if (sum >= 0.9 - bias) reached = x + 1;
    }
    for (int32_t x = 0; x < std::min(reached - 1, limit); ++x)
      result.first_stage[static_cast<size_t>(u) * n + order[x]] = 1;
  }
  return result;
}

TEST(ScoreDefensive, StepByStep) {
  struct Varied {
    float cap;  // 0.2: nearly even weights, the threshold needs most tokens
    int32_t generated;
    cpu::Content content;
  };
  const Varied cases[] = {{0.0F, 0, cpu::Content::kNormal},
                          {0.2F, 0, cpu::Content::kNormal},
                          {0.0F, 6, cpu::Content::kNormal},
                          {0.2F, 40, cpu::Content::kNormal},      // generated tokens reach into a new tile
                          {0.0F, 40, cpu::Content::kNonFinite}};  // NaN and Inf in generated tokens too
  for (const bool exact : {false, true})
    for (const double keep : {0.03, 0.2, 0.9})
      for (const Varied& varied : cases) {
        SCOPED_TRACE(::testing::Message() << exact << " " << keep << " " << varied.cap << " " << varied.generated);
        cpu::ScoreCase c;
        c.kv_heads = 3, c.group = 2, c.tokens = 160 + varied.generated, c.soft_cap = varied.cap;
        c.generated = varied.generated, c.rows = 8 + varied.generated, c.content = varied.content;
        WindowCase window(c);
        window.MakeOutputProjection(40);
        Recipe recipe = WindowRecipe(Scorer::kDefensive, window.window());
        recipe.policy.pool = {PoolKind::kMean, 3, 1, true};
        recipe.exact_bias = exact;
        const LayerScores scores = ScoreOf(recipe, window.MakeLayer(), 2, keep);
        const Defensive want = BruteDefensive(window, recipe, keep, scores.projected_norm);
        ExpectScores(window, scores, want.score);
        EXPECT_EQ(scores.first_stage, want.first_stage);
        const int64_t first = std::count(want.first_stage.begin(), want.first_stage.end(), 1);
        EXPECT_EQ(first > 0, keep > 0.1);
      }
}

TEST(ScoreDefensive, PoolsByTheMeanOnly) {
  WindowCase window(cpu::ScoreCase{});
  window.MakeOutputProjection(16);
  Recipe recipe = WindowRecipe(Scorer::kDefensive, window.shape.rows);
  recipe.policy.pool = {PoolKind::kMax, 2, 2, true};
  ThreadPool pool(1);
  const Result<LayerScores> scores = Score(recipe, window.MakeLayer(), 0.5, &pool);
  ASSERT_FALSE(scores.ok());
  EXPECT_EQ(scores.status().message(),
            "policy.pool: expected a mean for policy tested, whose rows keep their sums through it, got max 5 of the "
            "past");
}

}  // namespace
}  // namespace dropkv::baseline
