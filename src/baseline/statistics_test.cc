#include "baseline/statistics.h"

#include <gtest/gtest.h>

#include "baseline/prompt_case.h"
#include "reference/row.h"

namespace dropkv::baseline {
namespace {

using cpu::CaseData;
using cpu::Content;
using cpu::Layout;
using cpu::ScoreCase;

StatisticsPlan ColumnPlan() {
  StatisticsPlan plan;
  plan.column_sums = true;
  return plan;
}

double Largest(const std::vector<double>& values) {
  return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end());
}

// All rows of a layer in any layout; queries as the statistics take them.
struct WholePrompt {
  explicit WholePrompt(ScoreCase c) : shape(Rows(c)), data(shape) {
    const ObservationRows rows = data.rows();
    for (int32_t i = 0; i < shape.tokens; ++i)
      for (int32_t h = 0; h < shape.query_heads(); ++h) {
        const float* from = rows.q + h * rows.head_stride + i * rows.row_stride;
        q.insert(q.end(), from, from + shape.key_dim);
      }
  }

  static ScoreCase Rows(ScoreCase c) {
    c.rows = c.tokens;
    return c;
  }

  std::vector<double> ColumnSums(int32_t chunk, int32_t threads) {
    PromptStatistics statistics(ColumnPlan(), shape.query_heads(), shape.kv_heads, shape.tokens, shape.key_dim);
    ThreadPool pool(threads);
    const int64_t row = int64_t{shape.query_heads()} * shape.key_dim;
    for (int32_t first = 0; first < shape.tokens; first += chunk) {
      const int32_t count = std::min(chunk, shape.tokens - first);
      const Status status = statistics.Add(data.kv(), data.attention(), {}, q.data() + first * row, nullptr, first,
                                           count, threads == 1 ? nullptr : &pool);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    EXPECT_TRUE(statistics.complete());
    return statistics.column_sums();
  }

  // Row by row in float64.
  std::vector<double> BruteColumnSums() {
    const reference::Layer layer = reference::LoadLayer(data.kv());
    std::vector<double> sums(static_cast<size_t>(shape.kv_heads) * shape.tokens, 0.0);
    for (int32_t h = 0; h < shape.query_heads(); ++h)
      for (int32_t i = 0; i < shape.tokens; ++i) {
        const reference::Row row = reference::SoftmaxRow(layer, data.rows(), data.attention(), h, i);
        for (int32_t j = 0; j < shape.tokens; ++j)
          sums[int64_t{h / shape.group} * shape.tokens + j] += row.weight[j] / shape.group;
      }
    return sums;
  }

  ScoreCase shape;
  CaseData data;
  std::vector<float> q;
};

std::vector<ScoreCase> ColumnCases() {
  std::vector<ScoreCase> cases;
  const auto add = [&cases](auto&& change) {
    ScoreCase c{2, 4, 0, 101, 32, 64};
    change(c);
    cases.push_back(c);
  };
  add([](ScoreCase&) {});
  add([](ScoreCase& c) { c.group = 1, c.kv_heads = 3; });
  add([](ScoreCase& c) { c.group = 7, c.kv_heads = 1; });
  add([](ScoreCase& c) { c.tokens = 1; });
  add([](ScoreCase& c) { c.layout = Layout::kTokenMajor, c.dtype = DType::kF16, c.cells = true; });
  add([](ScoreCase& c) { c.layout = Layout::kTransposedV, c.dtype = DType::kF16; });
  add([](ScoreCase& c) { c.dtype = DType::kQ8_0; });
  add([](ScoreCase& c) { c.soft_cap = 8.0F, c.sinks = true; });
  add([](ScoreCase& c) { c.sinks = true, c.content = Content::kDominant; });
  add([](ScoreCase& c) { c.content = Content::kNonFinite; });
  return cases;
}

class ColumnSums : public ::testing::TestWithParam<ScoreCase> {};

TEST_P(ColumnSums, MatchFloat64InEveryChunking) {
  WholePrompt prompt(GetParam());
  const std::vector<double> want = prompt.BruteColumnSums();
  for (const int32_t chunk : {1, 17, 101})
    EXPECT_LE(LargestDifference(prompt.ColumnSums(chunk, 1), want), 1e-6 * Largest(want)) << "chunk " << chunk;
}

TEST_P(ColumnSums, SameBitsForAnyThreadCount) {
  WholePrompt prompt(GetParam());
  EXPECT_EQ(prompt.ColumnSums(40, 1), prompt.ColumnSums(40, 3));
}

INSTANTIATE_TEST_SUITE_P(All, ColumnSums, ::testing::ValuesIn(ColumnCases()));

// Chunks longer than the kernels' most rows, and sums that cover some of the rows only.
TEST(PromptStatisticsTest, RecentSumsAreThoseOfTheLastRows) {
  const PromptCase prompt = PromptCase{4, 2, 300}.Fill();
  StatisticsPlan plan = ColumnPlan();
  plan.recent_sums = true;
  plan.recent_rows = 70;
  const PromptStatistics whole = prompt.Gather(plan, 300);
  const PromptStatistics parts = prompt.Gather(plan, 64);
  const PromptStatistics alone = prompt.Gather(ColumnPlan(), 300);
  EXPECT_LE(LargestDifference(whole.recent_sums(), parts.recent_sums()), 1e-6);
  EXPECT_LE(LargestDifference(whole.column_sums(), parts.column_sums()), 1e-5);
  EXPECT_LE(LargestDifference(whole.column_sums(), alone.column_sums()), 1e-5);
  double recent = 0.0;
  double all = 0.0;
  for (int32_t j = 0; j < 300; ++j) {
    recent += whole.recent_sums()[j];
    all += whole.column_sums()[j];
  }
  EXPECT_NEAR(recent, 70.0, 1e-4);  // every row sums to 1
  EXPECT_NEAR(all, 300.0, 1e-3);
  plan.recent_rows = 400;  // more than there are
  const PromptStatistics all_recent = prompt.Gather(plan, 64);
  EXPECT_EQ(all_recent.recent_sums(), all_recent.column_sums());
}

// Equal logits: row i gives 1/(i+1) to each of the tokens 0..i.
TEST(PromptStatisticsTest, ColumnSumsByHand) {
  const PromptCase prompt = PromptCase{2, 1, 3}.Zeros();
  const std::vector<double> sums = prompt.Gather(ColumnPlan()).column_sums();
  EXPECT_LE(LargestDifference(sums, {1.0 + 0.5 + 1.0 / 3, 0.5 + 1.0 / 3, 1.0 / 3}), 1e-6);
}

// Mean and covariance as sums over stored rows.
struct BruteMoments {
  std::vector<double> mean;
  std::vector<double> covariance;

  BruteMoments(const PromptCase& prompt, const std::vector<float>& q, int32_t skip) {
    const int32_t d = prompt.key_dim;
    const int32_t rows = prompt.tokens - skip;
    const auto at = [&](int32_t h, int32_t i, int32_t x) { return double{q[(i * prompt.query_heads + h) * d + x]}; };
    for (int32_t h = 0; h < prompt.query_heads; ++h) {
      for (int32_t x = 0; x < d; ++x) {
        double sum = 0.0;
        for (int32_t i = skip; i < prompt.tokens; ++i) sum += at(h, i, x);
        mean.push_back(sum / rows);
      }
      const double* m = mean.data() + int64_t{h} * d;
      for (int32_t x = 0; x < d; ++x)
        for (int32_t y = 0; y < d; ++y) {
          double sum = 0.0;
          for (int32_t i = skip; i < prompt.tokens; ++i) sum += (at(h, i, x) - m[x]) * (at(h, i, y) - m[y]);
          covariance.push_back(sum / rows);
        }
    }
  }
};

TEST(PromptStatisticsTest, MomentsOfQueriesBeforeRope) {
  StatisticsPlan plan;
  plan.moments = plan.covariance = true;
  plan.moments_skip = 4;
  for (const bool halves : {true, false}) {
    PromptCase prompt = PromptCase{3, 1, 150, 16}.Fill();
    for (float& x : prompt.q) x += 3.0F;       // a mean well above the deviation's error
    prompt.rope = Rope::Standard(8, 10000.0);  // a part of the dims
    prompt.rope.halves = halves;
    prompt.rope.magnitude = 1.25;
    prompt.q_pre = prompt.q;
    for (int32_t i = 0; i < prompt.tokens; ++i)
      for (int32_t h = 0; h < prompt.query_heads; ++h) prompt.rope.Rotate(i, false, prompt.query(i, h));
    const BruteMoments want(prompt, prompt.q_pre, 4);
    for (const bool given : {true, false}) {
      if (!given) prompt.q_pre.clear();
      const PromptStatistics statistics = prompt.Gather(plan, given ? 70 : 3);
      EXPECT_LE(LargestDifference(statistics.mean(), want.mean), given ? 1e-12 : 1e-6);
      EXPECT_LE(LargestDifference(statistics.covariance(), want.covariance), given ? 1e-11 : 1e-5);
    }
  }
}

TEST(PromptStatisticsTest, NonFiniteQueriesAreLeftOut) {
  StatisticsPlan plan = ColumnPlan();
  plan.moments = true;
  plan.moments_skip = 0;
  plan.local.push_back({2, 0, 0});
  PromptCase prompt = PromptCase{1, 1, 4}.Zeros();
  for (int32_t i = 0; i < 4; ++i) prompt.query(i, 0)[0] = static_cast<float>(i);
  prompt.query(3, 0)[5] = NAN;
  prompt.q_pre = prompt.q;
  const PromptStatistics statistics = prompt.Gather(plan);
  EXPECT_DOUBLE_EQ(statistics.mean()[0], 1.0);
  EXPECT_LE(LargestDifference(statistics.column_sums(), {11.0 / 6, 5.0 / 6, 2.0 / 6, 0.0}), 1e-6);
  EXPECT_LE(LargestDifference(statistics.local({2, 0, 0}), {1.0, 1.0, 0.5, 0.5}), 1e-6);
}

// Local attention by its definition, padding written out as zero vectors.
std::vector<double> BruteLocal(PromptCase& prompt, const LocalSpan& span) {
  const int32_t begin = span.begin(prompt.tokens);
  const int32_t end = span.end(prompt.tokens);
  std::vector<double> sums(static_cast<size_t>(prompt.kv_heads) * (end - begin), 0.0);
  const auto logit = [&](int32_t h, int32_t i, int32_t j) {
    if (j >= end) return -1e-9;
    if (i >= end) return 0.0;
    double sum = 0.0;
    for (int32_t x = 0; x < prompt.key_dim; ++x)
      sum += double{prompt.query(i, h)[x]} * prompt.key(h / prompt.group(), j)[x];
    return sum;
  };
  for (int32_t h = 0; h < prompt.query_heads; ++h)
    for (int32_t first = begin; first < end; first += span.chunk)
      for (int32_t i = first; i < first + span.chunk; ++i) {
        double denominator = 0.0;
        for (int32_t j = first; j < first + span.chunk; ++j) denominator += std::exp(logit(h, i, j));
        for (int32_t j = first; j < std::min(end, first + span.chunk); ++j)
          sums[int64_t{h / prompt.group()} * (end - begin) + j - begin] +=
              std::exp(logit(h, i, j)) / denominator / prompt.group();
      }
  return sums;
}

TEST(PromptStatisticsTest, LocalAttentionMatchesDefinition) {
  PromptCase prompt = PromptCase{4, 2, 90}.Fill();
  prompt.attention.soft_cap = 1.0F;  // not read
  StatisticsPlan plan;
  plan.local = {{16, 0, 0}, {16, 8, 4}, {30, 0, 0}, {200, 3, 0}, {16, 60, 60}, {1, 0, 0}};
  for (const int32_t chunk : {1, 13, 90}) {
    const PromptStatistics statistics = prompt.Gather(plan, chunk);
    for (const LocalSpan& span : plan.local) {
      const std::vector<double> want = BruteLocal(prompt, span);
      EXPECT_LE(LargestDifference(statistics.local(span), want), 2e-6 * std::max(1.0, Largest(want)))
          << "chunk " << span.chunk << " skips " << span.skip_first << ", " << span.skip_last;
    }
  }
  const PromptStatistics statistics = prompt.Gather(plan);
  EXPECT_EQ(statistics.local({16, 60, 60}).size(), size_t{2 * 0});  // the skips overlap
  EXPECT_EQ(statistics.local({16, 8, 4}).size(), size_t{2 * 78});
  EXPECT_TRUE(statistics.local({17, 0, 0}).empty());  // not asked for
}

TEST(PromptStatisticsTest, LocalAttentionReadsCells) {
  ScoreCase c{2, 2, 0, 50, 32, 32, Layout::kTokenMajor, DType::kF16, true};
  WholePrompt stored(c);
  PromptCase plain{4, 2, 50, 32, 32};
  plain.Zeros();
  plain.q = stored.q;
  const reference::Layer layer = reference::LoadLayer(stored.data.kv());
  plain.k.assign(layer.k.begin(), layer.k.end());
  StatisticsPlan plan;
  plan.local = {{20, 3, 2}};
  PromptStatistics statistics(plan, 4, 2, 50, 32);
  ASSERT_TRUE(statistics.Add(stored.data.kv(), {}, {}, stored.q.data(), nullptr, 0, 50, nullptr).ok());
  const std::vector<double> want = BruteLocal(plain, plan.local[0]);
  EXPECT_LE(LargestDifference(statistics.local(plan.local[0]), want), 1e-5 * Largest(want));
}

TEST(PromptStatisticsTest, BadInputIsNamed) {
  const PromptCase prompt = PromptCase{4, 2, 20}.Fill();
  StatisticsPlan plan = ColumnPlan();
  PromptStatistics statistics(plan, 4, 2, 20, 8);
  const auto add = [&](PromptStatistics& to, const KvView& kv, const float* q, int32_t first, int32_t count) {
    return to.Add(kv, prompt.attention, {}, q, nullptr, first, count, nullptr).message();
  };
  const KvView kv = prompt.View();
  const float* q = prompt.q.data();
  EXPECT_EQ(add(statistics, kv, q, 1, 2), "first: expected 0, the next row, got 1");
  EXPECT_EQ(add(statistics, kv, q, 0, 21), "count: expected 1 to 20 rows, got 21");
  EXPECT_EQ(add(statistics, kv, q, 0, 0), "count: expected 1 to 20 rows, got 0");
  EXPECT_EQ(add(statistics, kv, nullptr, 0, 2), "q: expected a pointer, got null");
  KvView small = kv;
  small.tokens = 5;
  EXPECT_EQ(add(statistics, small, q, 0, 6), "kv.tokens: expected at least 6, got 5");
  small.kv_heads = 1;
  EXPECT_EQ(add(statistics, small, q, 0, 5), "kv: expected [Hkv, d] = [2, 8], got [1, 8]");
  PromptStatistics odd(plan, 3, 2, 20, 8);
  EXPECT_EQ(add(odd, kv, q, 0, 5), "query_heads: expected 1 to 16 times the 2 KV heads, got 3");
  plan.moments = true;
  PromptStatistics moments(plan, 4, 2, 20, 8);
  EXPECT_EQ(add(moments, kv, q, 0, 5),
            "q_pre: expected the queries before RoPE, or a rope that undoes it; got neither");
  plan.local.push_back({0, 0, 0});
  PromptStatistics local(plan, 4, 2, 20, 8);
  EXPECT_EQ(add(local, kv, q, 0, 5), "plan.local.chunk: expected at least 1, got 0");
  // Nothing of all that was added.
  EXPECT_EQ(add(statistics, kv, q, 0, 20), "");
  EXPECT_TRUE(statistics.complete());
  EXPECT_LE(LargestDifference(statistics.column_sums(), prompt.Gather(ColumnPlan(), 20).column_sums()), 0.0);
}

TEST(PromptStatisticsTest, SaysWhatARecipeMisses) {
  PromptCase prompt = PromptCase{4, 2, 20}.Fill();
  prompt.q_pre = prompt.q;
  Recipe expected = PlainRecipe(Scorer::kExpected);
  expected.policy.sink = 4;
  Recipe recent = PlainRecipe(Scorer::kVatp);
  recent.block = 400;
  Recipe local = PlainRecipe(Scorer::kLocalAttention);
  local.block = 64;
  Recipe caote = PlainRecipe(Scorer::kCaote);
  caote.base = Scorer::kAttentionSum;
  StatisticsPlan all;
  for (const Recipe& recipe : {expected, recent, local, caote}) all.Add(recipe);
  const PromptStatistics everything = prompt.Gather(all);
  const PromptStatistics nothing = prompt.Gather(StatisticsPlan());
  for (const Recipe& recipe : {expected, recent, local, caote}) {
    EXPECT_TRUE(everything.Serves(recipe, prompt.View()).ok());
    EXPECT_FALSE(nothing.Serves(recipe, prompt.View()).ok());
  }
  EXPECT_TRUE(nothing.Serves(PlainRecipe(Scorer::kKeyNorm), prompt.View()).ok());
  EXPECT_EQ(nothing.Serves(caote, prompt.View()).message(),
            "statistics: expected column sums, which were not gathered");
  Recipe other = expected;
  other.policy.sink = 2;
  EXPECT_EQ(everything.Serves(other, prompt.View()).message(),
            "statistics: expected moments of positions from 2, which were not gathered");
  other = recent;
  other.block = 10;
  EXPECT_EQ(everything.Serves(other, prompt.View()).message(),
            "statistics: expected column sums of the last 10 rows, which were not gathered");
  PromptStatistics half(all, 4, 2, 20, 8);
  EXPECT_EQ(half.Serves(local, prompt.View()).message(), "statistics: expected all 20 rows, got 0");
  prompt.tokens = 19;
  EXPECT_EQ(everything.Serves(local, prompt.View()).message(),
            "statistics: expected the cache's [Hkv, n, d] = [2, 19, 8], got [2, 20, 8]");
}

TEST(RopeTest, TurnsPairsByHand) {
  Rope rope = Rope::Standard(4, 100.0);  // frequencies 1, 0.1
  EXPECT_EQ(rope.frequencies, (std::vector<double>{1.0, 0.1}));
  float x[6] = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F};
  rope.magnitude = 2.0;
  rope.Rotate(3.0, false, x);
  EXPECT_NEAR(x[0], 2 * (std::cos(3.0) - 3 * std::sin(3.0)), 1e-6);
  EXPECT_NEAR(x[2], 2 * (std::sin(3.0) + 3 * std::cos(3.0)), 1e-6);
  EXPECT_NEAR(x[1], 2 * (2 * std::cos(0.3) - 4 * std::sin(0.3)), 1e-6);
  EXPECT_EQ(x[4], 5.0F);
  rope.Rotate(3.0, true, x);
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(x[i], i + 1, 2e-6);
  rope.halves = false;
  rope.Rotate(3.0, false, x);
  EXPECT_NEAR(x[0], 2 * (std::cos(3.0) - 2 * std::sin(3.0)), 1e-5);
  EXPECT_NEAR(x[3], 2 * (3 * std::sin(0.3) + 4 * std::cos(0.3)), 1e-5);
}

}  // namespace
}  // namespace dropkv::baseline
