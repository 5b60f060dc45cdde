#include <gtest/gtest.h>

#include <numeric>

#include "baseline/prompt_case.h"

namespace dropkv::baseline {
namespace {

using Matrix = std::vector<std::vector<double>>;

// Gauss and Jordan.
Matrix Inverse(Matrix a) {
  const size_t n = a.size();
  Matrix inverse(n, std::vector<double>(n, 0.0));
  for (size_t i = 0; i < n; ++i) inverse[i][i] = 1.0;
  for (size_t c = 0; c < n; ++c) {
    size_t pivot = c;
    for (size_t r = c; r < n; ++r)
      if (std::abs(a[r][c]) > std::abs(a[pivot][c])) pivot = r;
    std::swap(a[c], a[pivot]);
    std::swap(inverse[c], inverse[pivot]);
    const double factor = a[c][c];
    for (size_t x = 0; x < n; ++x) a[c][x] /= factor, inverse[c][x] /= factor;
    for (size_t r = 0; r < n; ++r) {
      const double share = r == c ? 0.0 : a[r][c];
      for (size_t x = 0; x < n; ++x) a[r][x] -= share * a[c][x], inverse[r][x] -= share * inverse[c][x];
    }
  }
  return inverse;
}

template <typename Row>
double Form(const Matrix& m, const Row* x) {
  double sum = 0.0;
  for (size_t i = 0; i < m.size(); ++i)
    for (size_t j = 0; j < m.size(); ++j) sum += double{x[i]} * m[i][j] * x[j];
  return sum;
}

double NormOf(const float* x, int32_t dim) {
  double sum = 0.0;
  for (int32_t i = 0; i < dim; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

Recipe WithSink(Scorer scorer, int32_t sink) {
  Recipe recipe = PlainRecipe(scorer);
  recipe.policy.sink = sink;
  return recipe;
}

// Row i of three gives 1/(i+1) to each token it sees.
TEST(ScorePromptTest, SumMeanAndValueNormByHand) {
  PromptCase prompt = PromptCase{2, 1, 3}.Zeros();
  prompt.value(0, 0)[0] = -2.0F;
  prompt.value(0, 1)[1] = 3.0F;
  prompt.value(0, 1)[2] = -1.0F;
  const double sums[] = {11.0 / 6, 5.0 / 6, 2.0 / 6};
  const auto run = [&](ScoreFunction function, const Recipe& recipe) {
    const PromptStatistics statistics = prompt.Gather(recipe);
    return RunScorer(function, recipe, prompt.MakeLayer(&statistics)).score;
  };
  EXPECT_LE(LargestDifference(run(&ScoreAttentionSum, PlainRecipe(Scorer::kAttentionSum)), {sums[0], sums[1], sums[2]}),
            1e-6);
  EXPECT_LE(LargestDifference(run(&ScoreAttentionMean, PlainRecipe(Scorer::kAttentionMean)),
                              {sums[0] / 3, sums[1] / 2, sums[2]}),
            1e-6);
  Recipe vatp = PlainRecipe(Scorer::kVatp);
  EXPECT_LE(LargestDifference(run(&ScoreVatp, vatp), {2 * sums[0], 4 * sums[1], 0.0}), 1e-6);
  vatp.block = 2;  // the last two rows
  EXPECT_LE(LargestDifference(run(&ScoreVatp, vatp), {5.0 / 6, 4 * (5.0 / 6) / 2, 0.0}), 1e-6);
  vatp.block = 400;  // more than there are: the divisor stays
  EXPECT_LE(LargestDifference(run(&ScoreVatp, vatp), {2 * sums[0] / 400, 4 * sums[1] / 400, 0.0}), 1e-8);
  Recipe pooled = PlainRecipe(Scorer::kAttentionSum);
  pooled.policy.pool = {PoolKind::kMean, 1, 1, true};
  pooled.policy.window = 1;
  EXPECT_LE(LargestDifference(run(&ScoreAttentionSum, pooled), {16.0 / 18, 16.0 / 18, 0.0}), 1e-6);
}

// q before RoPE, and q and k after it.
PromptCase RotaryPrompt(uint64_t seed) {
  PromptCase prompt = PromptCase{6, 2, 50, 16, 8}.Fill(seed);
  prompt.rope = Rope::Standard(16, 1000.0);
  for (size_t i = 0; i < prompt.q.size(); ++i) prompt.q[i] += (i % 3 == 0 ? 1.5F : 0.0F);
  prompt.q_pre = prompt.q;
  for (int32_t i = 0; i < prompt.tokens; ++i) {
    for (int32_t h = 0; h < 6; ++h) prompt.rope.Rotate(i, false, prompt.query(i, h));
    for (int32_t u = 0; u < 2; ++u) prompt.rope.Rotate(i, false, prompt.key(u, i));
  }
  return prompt;
}

// Rotation matrices of the positions n .. n + future - 1, averaged.
Matrix AverageRotation(const PromptCase& prompt, int32_t future) {
  const int32_t d = prompt.key_dim;
  Matrix r(d, std::vector<double>(d, 0.0));
  for (int32_t p = prompt.tokens; p < prompt.tokens + future; ++p)
    for (int32_t i = 0; i < d / 2; ++i) {
      const double angle = p * std::pow(1000.0, -2.0 * i / d);
      r[i][i] += std::cos(angle) / future;
      r[i + d / 2][i + d / 2] += std::cos(angle) / future;
      r[i][i + d / 2] -= std::sin(angle) / future;
      r[i + d / 2][i] += std::sin(angle) / future;
    }
  return r;
}

// Future queries of one head: R q_pre of every position from `skip` on.
Matrix FutureQueries(const PromptCase& prompt, const Matrix& r, int32_t head, int32_t skip) {
  Matrix queries;
  for (int32_t t = skip; t < prompt.tokens; ++t) {
    const float* q = prompt.q_pre.data() + (int64_t{t} * prompt.query_heads + head) * prompt.key_dim;
    std::vector<double> turned(prompt.key_dim, 0.0);
    for (int32_t i = 0; i < prompt.key_dim; ++i)
      for (int32_t j = 0; j < prompt.key_dim; ++j) turned[i] += r[i][j] * q[j];
    queries.push_back(turned);
  }
  return queries;
}

double DotWith(const std::vector<double>& a, const float* b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The quadratic form is the variance of <k, q>: no covariance matrix appears here.
TEST(ScoreExpectedTest, MatchesMeanAndVarianceOfLogits) {
  PromptCase prompt = RotaryPrompt(2);
  const int32_t n = prompt.tokens;
  const double scale = prompt.attention.scale;
  const Matrix r = AverageRotation(prompt, 20);
  std::vector<double> want(2 * n, 0.0);
  for (int32_t h = 0; h < 6; ++h) {
    const Matrix queries = FutureQueries(prompt, r, h, 3);
    std::vector<double> weight(n, 0.0);
    double sum = 0.0;
    for (int32_t j = 3; j < n; ++j) {
      double mean = 0.0;
      double square = 0.0;
      for (const auto& q : queries) {
        const double logit = scale * DotWith(q, prompt.key(h / 3, j));
        mean += logit / queries.size();
        square += logit * logit / queries.size();
      }
      weight[j] = std::exp(mean + 0.5 * (square - mean * mean));
      sum += weight[j];
    }
    for (int32_t j = 3; j < n; ++j) want[h / 3 * n + j] += weight[j] / sum / 3;
  }
  for (int32_t u = 0; u < 2; ++u)
    for (int32_t j = 3; j < n; ++j) want[u * n + j] = (want[u * n + j] + 0.02) * NormOf(prompt.value(u, j), 8);
  Recipe recipe = WithSink(Scorer::kExpected, 3);
  recipe.future = 20;
  recipe.epsilon = 0.02;
  const PromptStatistics statistics = prompt.Gather(recipe);
  ThreadPool pool(3);
  const LayerScores scores = RunScorer(&ScoreExpected, recipe, prompt.MakeLayer(&statistics), 0.5, &pool);
  EXPECT_LE(LargestDifference(scores.score, want), 1e-7);
  EXPECT_EQ(scores.score, RunScorer(&ScoreExpected, recipe, prompt.MakeLayer(&statistics)).score);
}

TEST(ScoreCapKvTest, MatchesInverseOfTheCapacity) {
  PromptCase prompt = RotaryPrompt(3);
  const int32_t n = prompt.tokens;
  const Matrix r = AverageRotation(prompt, 512);
  std::vector<double> want(2 * n, 0.0);
  for (int32_t h = 0; h < 6; ++h) {
    const Matrix queries = FutureQueries(prompt, r, h, 4);
    std::vector<double> anchor(16, 0.0);
    for (const auto& q : queries)
      for (int32_t i = 0; i < 16; ++i) anchor[i] += q[i] / queries.size();
    const double length = std::sqrt(std::inner_product(anchor.begin(), anchor.end(), anchor.begin(), 0.0));
    std::vector<double> weight(n, -INFINITY);
    for (int32_t j = 4; j < n; ++j) {
      const float* key = prompt.key(h / 3, j);
      weight[j] = 5.0 * DotWith(anchor, key) / (length * NormOf(key, 16));
    }
    const double largest = *std::max_element(weight.begin(), weight.end());
    Matrix capacity(8, std::vector<double>(8, 0.0));
    for (size_t i = 0; i < 8; ++i) capacity[i][i] = 1.0;
    for (int32_t j = 4; j < n; ++j) {
      weight[j] = std::exp(weight[j] - largest);
      const float* v = prompt.value(h / 3, j);
      for (size_t x = 0; x < 8; ++x)
        for (size_t y = 0; y < 8; ++y) capacity[x][y] += (weight[j] + 1e-6) * v[x] * v[y];
    }
    const Matrix inverse = Inverse(capacity);
    for (int32_t j = 4; j < n; ++j) want[h / 3 * n + j] += weight[j] * Form(inverse, prompt.value(h / 3, j)) / 3;
  }
  const Recipe recipe = WithSink(Scorer::kCapKv, 4);
  const PromptStatistics statistics = prompt.Gather(recipe);
  EXPECT_LE(LargestDifference(RunScorer(&ScoreCapKv, recipe, prompt.MakeLayer(&statistics)).score, want), 1e-9);
}

// Mean and unbiased deviation over all heads and the tokens of the span.
std::vector<double> Standard(std::vector<double> x, int32_t n, int32_t begin, int32_t end) {
  double sum = 0.0;
  double squares = 0.0;
  const double count = static_cast<double>(x.size()) / n * (end - begin);
  const auto inside = [&](size_t i) {
    return static_cast<int32_t>(i % n) >= begin && static_cast<int32_t>(i % n) < end;
  };
  for (size_t i = 0; i < x.size(); ++i) sum += inside(i) ? x[i] : 0.0;
  for (size_t i = 0; i < x.size(); ++i) squares += inside(i) ? std::pow(x[i] - sum / count, 2.0) : 0.0;
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = inside(i) ? (x[i] - sum / count) / std::sqrt(squares / (count - 1)) : 0.0;
  return x;
}

Recipe CompactorRecipe() {
  Recipe recipe = WithSink(Scorer::kCompactor, 8);
  recipe.recent = 4;
  recipe.block = 16;
  recipe.sketch = 5;
  recipe.policy.pool = {PoolKind::kMean, 1, 1, false};
  return recipe;
}

TEST(ScoreCompactorTest, MatchesDefinitionWithAGivenSketch) {
  PromptCase prompt = RotaryPrompt(4);
  const int32_t n = prompt.tokens;
  const Recipe recipe = CompactorRecipe();
  cpu::RandomStream random(9);
  std::vector<float> sketch(2 * 16 * 5);
  for (float& x : sketch) x = random.Normal();
  const PromptStatistics statistics = prompt.Gather(recipe);
  Layer layer = prompt.MakeLayer(&statistics);
  layer.sketch = sketch.data();

  std::vector<double> leverage(2 * n, 0.0);
  std::vector<double> local(2 * n, 0.0);
  std::vector<float> k_pre = prompt.k;
  for (int32_t u = 0; u < 2; ++u) {
    Matrix rows;
    std::vector<double> mean(5, 0.0);
    for (int32_t j = 0; j < n; ++j) {
      float* key = k_pre.data() + (u * n + j) * 16;
      prompt.rope.Rotate(j, true, key);
      if (j < 8 || j >= n - 4) continue;
      std::vector<double> row(5, 0.0);
      for (int32_t c = 0; c < 5; ++c) {
        for (int32_t i = 0; i < 16; ++i) row[c] += double{key[i]} * sketch[(u * 16 + i) * 5 + c];
        mean[c] += row[c] / (n - 12);
      }
      rows.push_back(row);
    }
    Matrix gram(5, std::vector<double>(5, 0.0));
    for (auto& row : rows) {
      for (size_t c = 0; c < 5; ++c) row[c] -= mean[c];
      for (size_t x = 0; x < 5; ++x)
        for (size_t y = 0; y < 5; ++y) gram[x][y] += row[x] * row[y];
    }
    for (size_t c = 0; c < 5; ++c) gram[c][c] += 1e-2;
    const Matrix inverse = Inverse(gram);
    for (int32_t j = 8; j < n - 4; ++j) leverage[u * n + j] = Form(inverse, rows[j - 8].data());
    const std::vector<double>& sums = statistics.local({16, 8, 4});
    const auto weighted = [&](int32_t j) {
      return j < 8 || j >= n - 4 ? 0.0 : sums[u * (n - 12) + j - 8] * NormOf(prompt.value(u, j), 8);
    };
    for (int32_t j = 8; j < n - 4; ++j) local[u * n + j] = (weighted(j - 1) + weighted(j) + weighted(j + 1)) / 3;
  }
  leverage = Standard(leverage, n, 8, n - 4);
  local = Standard(local, n, 8, n - 4);
  for (const double keep : {1.0, 0.25}) {
    std::vector<double> want(2 * n);
    for (int32_t i = 0; i < 2 * n; ++i) want[i] = (1.0 - keep) * leverage[i] + local[i];
    layer.k_pre = nullptr;
    const LayerScores undone = RunScorer(&ScoreCompactor, recipe, layer, keep);
    EXPECT_LE(LargestDifference(undone.score, want), 1e-6);
    layer.k_pre = k_pre.data();
    EXPECT_LE(LargestDifference(RunScorer(&ScoreCompactor, recipe, layer, keep).score, undone.score), 1e-12);
    for (int32_t j = 0; j < n; ++j) EXPECT_EQ(undone.is_protected[j], j < 8 || j >= n - 4 ? 1 : 0);
  }
}

TEST(ScoreCompactorTest, RandomSketchIsCountedBySeedLayerAndHead) {
  PromptCase prompt = RotaryPrompt(5);
  Recipe recipe = CompactorRecipe();
  const PromptStatistics statistics = prompt.Gather(recipe);
  Layer layer = prompt.MakeLayer(&statistics);
  const std::vector<double> first = RunScorer(&ScoreCompactor, recipe, layer).score;
  ThreadPool pool(2);
  EXPECT_EQ(RunScorer(&ScoreCompactor, recipe, layer, 0.5, &pool).score, first);
  layer.index = 1;
  EXPECT_NE(RunScorer(&ScoreCompactor, recipe, layer).score, first);
  layer.index = 0;
  recipe.policy.seed = 1;
  EXPECT_NE(RunScorer(&ScoreCompactor, recipe, layer).score, first);
}

struct Named {
  Recipe recipe;
  ScoreFunction function;
};

std::vector<Named> PromptScorers() {
  Recipe local = PlainRecipe(Scorer::kLocalAttention);
  local.block = 16;
  return {{PlainRecipe(Scorer::kAttentionSum), &ScoreAttentionSum},
          {PlainRecipe(Scorer::kAttentionMean), &ScoreAttentionMean},
          {PlainRecipe(Scorer::kVatp), &ScoreVatp},
          {WithSink(Scorer::kExpected, 4), &ScoreExpected},
          {WithSink(Scorer::kCapKv, 4), &ScoreCapKv},
          {CompactorRecipe(), &ScoreCompactor},
          {local, &ScoreLocalAttention}};
}

// Prompts of a few tokens, shorter than sinks, chunks and lags: finite scores, nothing crashes.
TEST(ScorePromptTest, ShortPrompts) {
  for (const int32_t n : {1, 2, 4, 5, 8, 9, 12, 13, 14})
    for (const Named& scorer : PromptScorers()) {
      SCOPED_TRACE(testing::Message() << "n " << n << " scorer " << static_cast<int>(scorer.recipe.scorer));
      PromptCase prompt = PromptCase{7, 1, n}.Fill();
      prompt.rope = Rope::Standard(8, 100.0);
      const PromptStatistics statistics = prompt.Gather(scorer.recipe, 3);
      const LayerScores scores = RunScorer(scorer.function, scorer.recipe, prompt.MakeLayer(&statistics));
      EXPECT_EQ(scores.nonfinite_tokens, 0);
      EXPECT_EQ(scores.score.size(), static_cast<size_t>(n));
      for (int32_t j = 0; j < n; ++j)
        if (j < scorer.recipe.policy.sink) EXPECT_EQ(scores.score[j], 0.0);
      if (scorer.recipe.scorer == Scorer::kCompactor && n <= 12)
        EXPECT_EQ(std::count(scores.is_protected.begin(), scores.is_protected.end(), 1), n);
    }
}

// A spoilt token is forced, scores 0 and takes no part: whether its key, its value or both are spoilt is all the same.
TEST(ScorePromptTest, NonFiniteTokensAreForced) {
  for (const Named& scorer : PromptScorers()) {
    SCOPED_TRACE(static_cast<int>(scorer.recipe.scorer));
    std::vector<double> key_spoilt;
    for (const bool key : {true, false}) {
      PromptCase prompt = PromptCase{4, 2, 40}.Fill();
      prompt.rope = Rope::Standard(8, 100.0);
      for (const auto& [head, token] : {std::pair{0, 17}, {1, 20}}) {
        if (key) prompt.key(head, token)[3] = INFINITY;
        if (!key) prompt.value(head, token)[0] = NAN;
      }
      const PromptStatistics statistics = prompt.Gather(scorer.recipe);
      const LayerScores scores = RunScorer(scorer.function, scorer.recipe, prompt.MakeLayer(&statistics));
      EXPECT_EQ(scores.nonfinite_tokens, 2);
      for (int32_t i = 0; i < 80; ++i) {
        EXPECT_EQ(scores.forced[i], i == 17 || i == 60 ? 1 : 0);
        EXPECT_TRUE(std::isfinite(scores.score[i]));
        if (i == 17 || i == 60) EXPECT_EQ(scores.score[i], 0.0);
      }
      EXPECT_NE(scores.score[18], scores.score[19]);
      if (key) key_spoilt = scores.score;
      EXPECT_LE(LargestDifference(scores.score, key_spoilt), 1e-12);
    }
  }
}

TEST(ScorePromptTest, BadInputIsNamed) {
  PromptCase prompt = PromptCase{4, 2, 40}.Fill();
  for (const Named& scorer : PromptScorers()) {
    LayerScores scores = EmptyScores(scorer.recipe, prompt.MakeLayer());
    EXPECT_EQ(scorer.function(scorer.recipe, prompt.MakeLayer(), 0.5, nullptr, &scores).message(),
              "q: expected statistics of all rows of the prompt, got none");
    const PromptStatistics none = prompt.Gather(StatisticsPlan());
    EXPECT_NE(scorer.function(scorer.recipe, prompt.MakeLayer(&none), 0.5, nullptr, &scores)
                  .message()
                  .find("which were not gathered"),
              std::string::npos);
  }
  Recipe compactor = CompactorRecipe();
  const PromptStatistics statistics = prompt.Gather(compactor);
  LayerScores scores = EmptyScores(compactor, prompt.MakeLayer());
  EXPECT_EQ(ScoreCompactor(compactor, prompt.MakeLayer(&statistics), 0.5, nullptr, &scores).message(),
            "k_pre: expected the keys before RoPE, or a rope that undoes it; got neither");
  compactor.sketch = 0;
  EXPECT_EQ(ScoreCompactor(compactor, prompt.MakeLayer(&statistics), 0.5, nullptr, &scores).message(),
            "sketch: expected at least 1, got 0");
}

}  // namespace
}  // namespace dropkv::baseline
