#include "cpu/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "core/random.h"
#include "reference/reference.h"

namespace dropkv::cpu {
namespace {

struct Selection {
  std::vector<int32_t> counts;
  std::vector<int32_t> positions;

  std::vector<int32_t> head(int32_t index) const {
    const int32_t* begin = positions.data();
    for (int32_t h = 0; h < index; ++h) begin += counts[h];
    return {begin, begin + counts[index]};
  }
};

// Runs Select with a workspace and output of exactly the announced sizes, poisoned, and checks that nothing beyond the
// written positions changed.
Selection RunSelect(const SelectInput& input, size_t misalign) {
  const size_t bytes = SelectWorkspaceBytes(*input.policy, input.budget, input.kv_heads, input.n);
  std::vector<std::byte> workspace(bytes + misalign, std::byte{0xA5});
  const auto bound =
      static_cast<size_t>(MaxSelected(*input.policy, input.budget, input.kv_heads, input.n, input.generated));
  Selection result;
  result.counts.assign(input.kv_heads, -7);
  result.positions.assign(bound + 8, -7);
  const Status status =
      Select(input, std::span(workspace).subspan(misalign), result.counts.data(), result.positions.data());
  EXPECT_TRUE(status.ok()) << status.message();
  size_t total = 0;
  for (const int32_t count : result.counts) total += count;
  EXPECT_LE(total, bound);
  for (size_t i = total; i < bound + 8; ++i) EXPECT_EQ(result.positions[i], -7);
  result.positions.resize(total);
  return result;
}

struct TestParam {
  int32_t kv_heads;
  int32_t n;
  int32_t window;
  int32_t sink;
  double fraction;
  HeadRule rule;
  double alpha;
  int levels;        // distinct scores; few levels make many ties
  double flag_rate;  // share of tokens with a flag
};

std::ostream& operator<<(std::ostream& os, const TestParam& p) {
  return os << "Hkv " << p.kv_heads << " n " << p.n << " w " << p.window << " sink " << p.sink << " fraction "
            << p.fraction << " rule " << static_cast<int>(p.rule) << " alpha " << p.alpha << " levels " << p.levels
            << " flags " << p.flag_rate;
}

struct Scores {
  std::vector<float> raw, pooled;
  std::vector<uint8_t> flags;
};

Scores MakeScores(const TestParam& p, uint64_t seed) {
  const size_t size = static_cast<size_t>(p.kv_heads) * p.n;
  Scores s{std::vector<float>(size), std::vector<float>(size), std::vector<uint8_t>(size, 0)};
  for (size_t i = 0; i < size; ++i) {
    const auto level = [&](uint64_t stream) {
      return static_cast<float>(RandomBits(seed + stream, i) % p.levels) / static_cast<float>(p.levels);
    };
    s.raw[i] = level(1);
    const size_t head = i / p.n;
    s.pooled[i] = level(2) * static_cast<float>(head + 1);  // heads differ, so that shared budgets become ragged
    if (RandomUniform(seed + 3, i) < p.flag_rate) s.flags[i] = 1 + RandomBits(seed + 4, i) % 3;
    if ((s.flags[i] & reference::kNonFinite) != 0) s.raw[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return s;
}

// The clamp of algorithm.md section 4.3, for shapes where window + sink may exceed n.
KeepCount Keep(const TestParam& p) {
  const int32_t keep = static_cast<int32_t>(p.fraction * p.n + 1e-6);
  return {std::min(p.n, std::max(keep, p.window + p.sink)), false};
}

void CompareWithReference(const TestParam& p, uint64_t seed) {
  SCOPED_TRACE(testing::PrintToString(p) + " seed " + std::to_string(seed));
  const Scores s = MakeScores(p, seed);
  Policy policy;
  policy.window = p.window;
  policy.sink = p.sink;
  policy.heads = p.rule;
  policy.alpha = p.alpha;
  const KeepCount budget = Keep(p);
  const auto generated = static_cast<int32_t>(seed % 4);
  const Selection got =
      RunSelect({p.kv_heads, p.n, &policy, budget, s.raw.data(), s.pooled.data(), s.flags.data(), generated}, seed % 7);
  const std::vector<double> raw(s.raw.begin(), s.raw.end());
  const std::vector<double> pooled(s.pooled.begin(), s.pooled.end());
  const KeepList expected =
      reference::Select(policy, budget, p.kv_heads, p.n, raw.data(), pooled.data(), s.flags.data(), generated);
  for (int32_t head = 0; head < p.kv_heads; ++head) {
    const auto want = expected.head(0, head);
    ASSERT_EQ(got.head(head), std::vector<int32_t>(want.begin(), want.end())) << "head " << head;
  }
}

TEST(Select, EqualsReference) {
  uint64_t seed = 1;
  for (const HeadRule rule : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO})
    for (const int32_t n : {1, 2, 8, 9, 31, 32, 33, 100, 1000, 5000})
      for (const int32_t heads : {1, 2, 3, 8})
        for (const double fraction : {0.01, 0.1, 0.5, 0.97, 1.0})
          for (const int levels : {1, 3, 1000000})
            for (const double flags : {0.0, 0.02, 0.9}) {
              const int32_t sink = seed % 3 == 0 ? 4 : 0;
              CompareWithReference({heads, n, 8, sink, fraction, rule, 0.2, levels, flags}, ++seed);
            }
}

TEST(Select, EqualsReferenceForEveryAlpha) {
  uint64_t seed = 5000;
  for (const HeadRule rule : {HeadRule::kAda, HeadRule::kAdaO})
    for (const double alpha : {0.0, 0.1, 0.29, 0.5, 1.0})
      for (const int32_t n : {57, 640, 2048})
        for (const double fraction : {0.05, 0.25, 0.6})
          CompareWithReference({4, n, 16, 2, fraction, rule, alpha, 17, 0.05}, ++seed);
}

// 2 heads, 10 tokens each above the window, flat counts (15, 5): rule K keeps (15, 5), rule O moves to (14, 6).
TEST(Select, HandComputedHeadCounts) {
  constexpr int32_t kN = 41;
  std::vector<float> pooled(2 * kN, 0.0F);
  for (int32_t j = 0; j < 15; ++j) pooled[j * 2] = 9.0F;
  for (int32_t j = 0; j < 5; ++j) pooled[kN + 3 * j] = 9.0F;
  Policy policy;
  policy.window = 1;
  SelectInput input{2, kN, &policy, {11, false}, nullptr, pooled.data(), nullptr};
  policy.heads = HeadRule::kAda;
  EXPECT_EQ(RunSelect(input, 0).counts, (std::vector<int32_t>{16, 6}));
  policy.heads = HeadRule::kAdaO;
  const Selection rule_o = RunSelect(input, 0);
  EXPECT_EQ(rule_o.counts, (std::vector<int32_t>{15, 7}));
  EXPECT_EQ(rule_o.head(1), (std::vector<int32_t>{0, 1, 3, 6, 9, 12, 40}));  // the sixth: lowest index among the zeros
  policy.heads = HeadRule::kUniform;
  EXPECT_EQ(RunSelect(input, 0).head(0), (std::vector<int32_t>{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 40}));
}

TEST(Select, FlaggedTokensComeFirstInsideTheBudget) {
  constexpr int32_t kN = 10;
  const std::vector<float> raw{0, 5, 0, 7, NAN, 0, 0, NAN, 0, 0};
  const std::vector<float> pooled{99, 1, 98, 0, 0, 97, 0, 0, 0, 0};
  std::vector<uint8_t> flags(kN, 0);
  flags[1] = flags[3] = reference::kDominant;
  flags[4] = flags[7] = reference::kNonFinite;
  Policy policy;
  policy.window = 1;
  const auto kept = [&](int32_t keep) {
    return RunSelect({1, kN, &policy, {keep, false}, raw.data(), pooled.data(), flags.data()}, 0).head(0);
  };
  EXPECT_EQ(kept(1), (std::vector<int32_t>{9}));
  EXPECT_EQ(kept(2), (std::vector<int32_t>{4, 9}));
  EXPECT_EQ(kept(3), (std::vector<int32_t>{4, 7, 9}));
  EXPECT_EQ(kept(4), (std::vector<int32_t>{3, 4, 7, 9}));
  EXPECT_EQ(kept(5), (std::vector<int32_t>{1, 3, 4, 7, 9}));
  EXPECT_EQ(kept(6), (std::vector<int32_t>{0, 1, 3, 4, 7, 9}));
}

TEST(Select, SignedZerosTieAndNegativeScoresRankBelow) {
  const std::vector<float> pooled{-1.0F, -0.0F, 0.0F, -0.0F, -2.0F, 0.0F};
  Policy policy;
  policy.window = 1;
  const auto kept = [&](int32_t keep) {
    return RunSelect({1, 6, &policy, {keep, false}, nullptr, pooled.data(), nullptr}, 0).head(0);
  };
  EXPECT_EQ(kept(3), (std::vector<int32_t>{1, 2, 5}));
  EXPECT_EQ(kept(5), (std::vector<int32_t>{0, 1, 2, 3, 5}));
}

TEST(Select, FullPolicyAndShortPromptsKeepAll) {
  Policy policy;
  policy.signal = Signal::kFull;
  EXPECT_EQ(RunSelect({2, 3, &policy, {1, false}, nullptr, nullptr, nullptr}, 0).positions,
            (std::vector<int32_t>{0, 1, 2, 0, 1, 2}));
  policy.signal = Signal::kDropKv;
  policy.window = 3;
  EXPECT_EQ(RunSelect({1, 3, &policy, {1, false}, nullptr, nullptr, nullptr}, 0).head(0),
            (std::vector<int32_t>{0, 1, 2}));
}

// Whatever the heads' shares of the prompt are: they stay, and every list ends with the generated tokens.
TEST(Select, GeneratedTokensLieOutsideTheBudget) {
  uint64_t seed = 9000;
  for (const HeadRule rule : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO})
    for (const double fraction : {0.1, 0.6, 1.0}) {
      const TestParam p{3, 90, 8, 2, fraction, rule, 0.2, 1000000, 0.05};
      const Scores s = MakeScores(p, ++seed);
      Policy policy;
      policy.sink = p.sink;
      policy.heads = rule;
      SelectInput input{3, p.n, &policy, Keep(p), s.raw.data(), s.pooled.data(), s.flags.data()};
      const Selection prompt = RunSelect(input, 0);
      const int64_t most = MaxSelected(policy, input.budget, 3, p.n);
      input.generated = 5;
      const Selection all = RunSelect(input, 0);
      EXPECT_EQ(MaxSelected(policy, input.budget, 3, p.n, 5), most + 15);
      for (int32_t head = 0; head < 3; ++head) {
        std::vector<int32_t> want = prompt.head(head);
        for (int32_t j = 90; j < 95; ++j) want.push_back(j);
        EXPECT_EQ(all.head(head), want) << "head " << head;
      }
    }
}

TEST(Select, ErrorsNameTheArgument) {
  Policy policy;
  const std::vector<float> pooled(100, 1.0F);
  const std::vector<uint8_t> flags(100, 0);
  std::array<int32_t, 100> positions{};
  int32_t count = 0;
  std::vector<std::byte> workspace(4096);
  SelectInput input{1, 100, &policy, {10, false}, nullptr, pooled.data(), nullptr};
  Status status = Select(input, std::span(workspace).first(16), &count, positions.data());
  EXPECT_EQ(status.code(), Code::kWorkspaceTooSmall);
  EXPECT_NE(status.message().find("got 16"), std::string::npos) << status.message();
  input.flags = flags.data();
  status = Select(input, workspace, &count, positions.data());
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("input.raw"), std::string::npos) << status.message();
  input.flags = nullptr;
  input.kv_heads = 20000000;
  EXPECT_EQ(Select(input, workspace, &count, positions.data()).code(), Code::kUnsupported);
  input.kv_heads = 0;
  EXPECT_EQ(Select(input, workspace, &count, positions.data()).code(), Code::kInvalidArgument);
  input.kv_heads = 1;
  input.generated = -2;
  status = Select(input, workspace, &count, positions.data());
  EXPECT_NE(status.message().find("input.generated: expected 0 or more, got -2"), std::string::npos);
  input = {1, 100, nullptr, {10, false}, nullptr, pooled.data(), nullptr};
  EXPECT_EQ(Select(input, workspace, &count, positions.data()).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace dropkv::cpu
