#include "cpu/score.h"

#include <gtest/gtest.h>

#include "cpu/score_case.h"
#include "reference/reference.h"
#include "reference/tolerance.h"

namespace dropkv::cpu {
namespace {

struct RawScores {
  std::vector<float> raw;      // [Hkv, n]
  std::vector<uint8_t> flags;  // [Hkv, n]
};

RawScores RunScore(const Kernels& kernels, const ScoreCase& c, const LayerInput& input, Signal signal,
                   int32_t threads) {
  ThreadPool pool(threads);
  const WaveShape shape{1, c.kv_heads, c.group, c.rows, c.tokens, c.key_dim, c.value_dim, threads, c.generated};
  Workspace lasting_size;
  Workspace passing_size;
  const WaveScorer counted(kernels, &pool, shape, lasting_size, passing_size);
  std::vector<std::byte> lasting_memory(lasting_size.bytes_needed(), std::byte{0xFF});
  std::vector<std::byte> passing_memory(passing_size.bytes_needed(), std::byte{0xFF});
  Workspace lasting(lasting_memory);
  Workspace passing(passing_memory);
  WaveScorer scorer(kernels, &pool, shape, lasting, passing);
  EXPECT_FALSE(lasting.overflow() || passing.overflow());
  const size_t count = static_cast<size_t>(c.kv_heads) * c.candidates();
  RawScores result{std::vector<float>(count), std::vector<uint8_t>(count)};
  scorer.Attend({&input, 1}, signal == Signal::kDropKv, result.flags.data());
  scorer.Score({&input, 1}, signal, result.raw.data(), result.flags.data());
  return result;
}

Policy PolicyOf(Signal signal, const ScoreCase& c) {
  Policy policy;
  policy.signal = signal;
  policy.window = c.rows;
  return policy;
}

// float32 copies of what the reference computes, as an engine's prefill would hand them in.
struct HandedIn {
  std::vector<float> out;
  std::vector<float> lse;

  explicit HandedIn(const reference::Attention& attention)
      : out(attention.out.begin(), attention.out.end()), lse(attention.lse.begin(), attention.lse.end()) {}
};

class ScoreTest : public testing::TestWithParam<ScoreCase> {
 protected:
  // The flag turns at 1 - p = 1e-6: a row whose own 1 - p is within its error of that may go either way.
  static void ExpectFlags(const RawScores& got, const reference::Scores& want) {
    for (size_t i = 0; i < want.flags.size(); ++i)
      EXPECT_EQ(got.flags[i] & reference::kNonFinite, want.flags[i] & reference::kNonFinite) << "token " << i;
  }
};

TEST_P(ScoreTest, MatchesReferenceOnEveryInstructionSet) {
  const ScoreCase& c = GetParam();
  CaseData data(c);
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    SCOPED_TRACE(static_cast<int>(signal));
    const Policy policy = PolicyOf(signal, c);
    const reference::Scores want = reference::Score(data.kv(), data.rows(), data.attention(), policy, 0, c.generated);
    const reference::Tolerances bounds =
        reference::LayerTolerances(data.kv(), data.rows(), data.attention(), policy, c.generated);
    for (const Kernels& kernels : KernelTable()) {
      SCOPED_TRACE(kernels.name);
      const RawScores got = RunScore(kernels, c, data.input(), signal, 1);
      ExpectWithin(got.raw, want.raw, bounds.raw, 1, "raw");
      ExpectFlags(got, want);
    }
  }
}

TEST_P(ScoreTest, SameBitsForAnyThreadCountAndRepeat) {
  const ScoreCase& c = GetParam();
  CaseData data(c);
  const Kernels& kernels = KernelTable().front();
  const RawScores first = RunScore(kernels, c, data.input(), Signal::kDropKv, 1);
  for (const int32_t threads : {2, 3}) {
    for (int repeat = 0; repeat < (c.tokens > 1000 ? 20 : 1); ++repeat) {
      const RawScores again = RunScore(kernels, c, data.input(), Signal::kDropKv, threads);
      ASSERT_EQ(std::memcmp(first.raw.data(), again.raw.data(), first.raw.size() * sizeof(float)), 0);
      ASSERT_EQ(first.flags, again.flags);
    }
  }
}

// out and lse from outside, rounded to float32. Their rounding moves 1 - p by up to 2^-24 |lse| and a by 2^-24 |a|,
// which the bounds of a kernel's own softmax contain, but for a row with one token, whose bound is 0; rows above
// p = 0.99 are computed anew.
TEST_P(ScoreTest, HandedInOutputsMatchReference) {
  const ScoreCase& c = GetParam();
  CaseData data(c);
  const reference::Attention attention = reference::Attend(data.kv(), data.rows(), data.attention());
  const HandedIn given(attention);
  LayerInput input = data.input();
  input.out = given.out.data();
  input.lse = given.lse.data();
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    SCOPED_TRACE(static_cast<int>(signal));
    const Policy policy = PolicyOf(signal, c);
    const reference::Scores want = reference::Score(data.kv(), data.rows(), data.attention(), policy, 0, c.generated);
    reference::Tolerances bounds =
        reference::LayerTolerances(data.kv(), data.rows(), data.attention(), policy, c.generated);
    if (c.tokens == 1) bounds.raw.assign(c.kv_heads, 1e-6);
    for (const Kernels& kernels : KernelTable()) {
      SCOPED_TRACE(kernels.name);
      const RawScores got = RunScore(kernels, c, input, signal, 2);
      ExpectWithin(got.raw, want.raw, bounds.raw, 1, "raw");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScoreTest, testing::ValuesIn(AllCases()));

// One row, one key above all others by a growing gap: p runs from 1/2 to 1 - 1e-12. The score must stay
// p^2 |v - a_without|^2 to float accuracy, and the flag must come at 1 - p <= 1e-6.
TEST(DominantTest, ScoreIsSmoothUpToOne) {
  ScoreCase c{1, 1, 1, 97, 64, 64};
  for (float gap = 4.6F; gap < 32.0F; gap += 0.31F) {
    CaseData data(c);
    KvView kv = data.kv();
    std::vector<float> keys(static_cast<size_t>(c.tokens) * c.key_dim, 0.0F);
    const float* q = data.rows().q;
    float norm = 0.0F;
    for (int32_t i = 0; i < c.key_dim; ++i) norm += q[i] * q[i];
    for (int32_t i = 0; i < c.key_dim; ++i) keys[20 * c.key_dim + i] = q[i] * gap * 8.0F / norm;
    kv.k = {keys.data(), DType::kF32, 0, c.key_dim, 1};
    LayerInput input = data.input();
    input.kv = kv;
    const Policy policy = PolicyOf(Signal::kDropKv, c);
    const reference::Scores want = reference::Score(kv, data.rows(), data.attention(), policy, 0);
    const reference::Tolerances bounds = reference::LayerTolerances(kv, data.rows(), data.attention(), policy);
    for (const Kernels& kernels : KernelTable()) {
      SCOPED_TRACE(std::string(kernels.name) + " gap " + std::to_string(gap));
      const RawScores got = RunScore(kernels, c, input, Signal::kDropKv, 1);
      ExpectWithin(got.raw, want.raw, bounds.raw, 1, "raw");
      const double rest = 96.0 / (96.0 + std::exp(gap));
      if (std::abs(rest / 1e-6 - 1.0) < 0.01) continue;  // within the logit's error
      EXPECT_EQ(got.flags[20] != 0, rest < 1e-6) << rest;
    }
  }
}

// A gap of thousands: the others' weights are far below what a float holds next to the top's, yet the output without
// the top is theirs alone.
TEST(DominantTest, OutputWithoutTheTopSurvivesAnyGap) {
  const ScoreCase c{1, 1, 1, 50, 8, 8};
  CaseData data(c);
  std::vector<float> keys(static_cast<size_t>(c.tokens) * c.key_dim, 0.0F);
  const float* q = data.rows().q;
  for (int32_t i = 0; i < c.key_dim; ++i) keys[30 * c.key_dim + i] = q[i] * 1000.0F;
  LayerInput input = data.input();
  input.kv.k = {keys.data(), DType::kF32, 0, c.key_dim, 1};
  std::vector<double> mean(c.value_dim, 0.0);
  for (int32_t j = 0; j < c.tokens; ++j)
    for (int32_t i = 0; i < c.value_dim; ++i)
      if (j != 30) mean[i] += LoadElement(input.kv.v, nullptr, 0, j, i) / 49.0;
  double want = 0.0;
  for (int32_t i = 0; i < c.value_dim; ++i) {
    const double moved = LoadElement(input.kv.v, nullptr, 0, 30, i) - mean[i];
    want += moved * moved;
  }
  for (const Kernels& kernels : KernelTable()) {
    const RawScores got = RunScore(kernels, c, input, Signal::kDropKv, 1);
    EXPECT_NEAR(got.raw[30], want, 1e-5 * want) << kernels.name;
    EXPECT_EQ(got.flags[30], reference::kDominant);
  }
}

// A row that counts 0 makes no token dominant and adds nothing, computed or handed in; one that counts 3 adds 3 times.
TEST(DominantTest, RowsOfWeightZeroFlagNothing) {
  ScoreCase c{1, 1, 2, 97, 64, 64};
  c.content = Content::kDominant;  // token 0 belongs to row 0, token 5 to row 1
  CaseData data(c);
  const float* q = data.rows().q;
  std::vector<float> queries(q, q + 2 * c.key_dim);
  for (int32_t i = 0; i < c.key_dim; ++i) queries[i] *= 10.0F;  // both p within 1e-6 of 1
  for (int32_t i = 0; i < c.key_dim; ++i) queries[c.key_dim + i] *= 10.0F;
  LayerInput input = data.input();
  input.rows.q = queries.data();
  const HandedIn given(reference::Attend(input.kv, input.rows, input.attention));
  const float weights[] = {0.0F, 3.0F};
  for (const bool handed_in : {false, true})
    for (const Kernels& kernels : KernelTable()) {
      SCOPED_TRACE(std::string(kernels.name) + (handed_in ? " handed in" : ""));
      input.out = handed_in ? given.out.data() : nullptr;
      input.lse = handed_in ? given.lse.data() : nullptr;
      input.rows.weights = nullptr;
      const RawScores both = RunScore(kernels, c, input, Signal::kDropKv, 1);
      input.rows.weights = weights;
      const RawScores second = RunScore(kernels, c, input, Signal::kDropKv, 1);
      EXPECT_EQ(both.flags[0], reference::kDominant);
      EXPECT_EQ(both.flags[5], reference::kDominant);
      EXPECT_EQ(second.flags[0], 0);
      EXPECT_EQ(second.flags[5], reference::kDominant);
      EXPECT_GT(both.raw[0], 1.0F);
      EXPECT_LT(second.raw[0], 1e-6F);
      EXPECT_NEAR(second.raw[5], 3.0F * both.raw[5], 1e-4F * second.raw[5]);
    }
}

// A constant added to all values moves nothing but their rounding.
TEST(ScoreInvarianceTest, ConstantAddedToValues) {
  ScoreCase c{1, 4, 8, 151, 64, 64};
  CaseData data(c);
  LayerInput input = data.input();
  std::vector<float> values(static_cast<size_t>(c.tokens) * c.value_dim);
  std::vector<float> moved(values.size());
  for (int32_t j = 0; j < c.tokens; ++j)
    for (int32_t i = 0; i < c.value_dim; ++i) {
      // Multiples of 2^-10 below 8: adding 4096 is exact.
      const float x = LoadElement(input.kv.v, nullptr, 0, j, i);
      values[j * c.value_dim + i] = std::nearbyint(x * 1024.0F) / 1024.0F;
      moved[j * c.value_dim + i] = values[j * c.value_dim + i] + 4096.0F;
    }
  input.kv.v = {values.data(), DType::kF32, 0, c.value_dim, 1};
  LayerInput shifted = input;
  shifted.kv.v.data = moved.data();
  for (const Kernels& kernels : KernelTable()) {
    const RawScores a = RunScore(kernels, c, input, Signal::kDropKv, 1);
    const RawScores b = RunScore(kernels, c, shifted, Signal::kDropKv, 1);
    for (size_t i = 0; i < a.raw.size(); ++i)
      ASSERT_NEAR(a.raw[i], b.raw[i], 2e-4 * a.raw[i]) << kernels.name << " token " << i;
  }
}

// Logits beyond the range of floats are clamped: they decide the softmax, and nothing becomes NaN.
TEST(HugeLogitTest, ScoresStayFinite) {
  ScoreCase c;
  c.content = Content::kHuge;
  CaseData data(c);
  for (const Kernels& kernels : KernelTable()) {
    const RawScores got = RunScore(kernels, c, data.input(), Signal::kDropKv, 1);
    for (size_t i = 0; i < got.raw.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got.raw[i]) && got.raw[i] >= 0.0F) << kernels.name << " token " << i;
      ASSERT_EQ(got.flags[i] & reference::kNonFinite, 0) << kernels.name << " token " << i;
    }
  }
}

TEST(PoolTest, MatchesReference) {
  RandomStream random(5);
  for (const int32_t n : {1, 5, 40, 1024, 2051}) {
    std::vector<float> raw(n);
    for (float& x : raw) x = std::exp(8.0F * random.Normal());
    raw[n / 2] = NAN;
    raw[n / 3] = INFINITY;
    const std::vector<double> wide(raw.begin(), raw.end());
    for (const PoolKind kind : {PoolKind::kMean, PoolKind::kMax})
      for (const auto& [before, after] : {std::pair{0, 0}, {3, 3}, {5, 31}, {2000, 1}})
        for (const bool past_only : {false, true}) {
          const Pooling pool{kind, before, after, past_only};
          const std::vector<double> want = reference::Pool(wide.data(), n, pool, 8);
          std::vector<float> got(n);
          PoolScores(raw.data(), n, pool, 8, got.data());
          for (int32_t j = 0; j < n; ++j)
            ASSERT_NEAR(got[j], want[j], reference::Gamma(before + after + 2) * want[j] + 1e-37) << n << " " << j;
        }
  }
}

}  // namespace
}  // namespace dropkv::cpu
