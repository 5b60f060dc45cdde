// The float64 reference against golden DropKV scores, outputs, pooled scores and keep lists.
#include <cmath>

#include "dropkv/policy.h"
#include "golden/golden.h"
#include "reference/reference.h"

namespace dropkv::testing {
namespace {

constexpr double kExactError = 1e-13;  // two float64 programs that sum in different orders
constexpr double kCompatError = 1e-3;  // float32 with cancellation

class DropKvGolden : public GoldenTest {
 protected:
  // "w8" and "w32" of the tensors that begin with `prefix` and end with `suffix`.
  std::vector<int32_t> Windows(const std::string& prefix, const std::string& suffix) const {
    std::vector<int32_t> windows;
    for (const std::string& name : layer_->Names(prefix))
      if (name.ends_with(suffix)) windows.push_back(static_cast<int32_t>(NumberAfter(name, ".w")));
    return windows;
  }

  // A logit error of e moves log p and the log-sum-exp by e each, so (p/(1-p))^2 by 4e and the residual |a - v|^2 by as
  // much again where the values are of one size.
  double Allowed() const { return kExactError + 8.0 * layer_->LogitError(); }

  reference::Scores Scores(int32_t window) {
    Policy policy;
    policy.window = window;
    return reference::Score(layer_->View(), layer_->Rows(window), layer_->Attention(), policy, 0);
  }

  std::vector<double> Pooled(const reference::Scores& scores, const Pooling& pool, int32_t window) const {
    std::vector<double> pooled;
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
      const std::vector<double> head = reference::Pool(scores.raw.data() + static_cast<size_t>(u) * layer_->tokens(),
                                                       layer_->tokens(), pool, window);
      pooled.insert(pooled.end(), head.begin(), head.end());
    }
    return pooled;
  }
};

// "mean7", "max5", "mean5+31", as the tensors are named.
Pooling PoolingOf(const std::string& text) {
  const bool max = text.starts_with("max");
  std::string widths = text.substr(max ? 3 : 4);
  std::replace(widths.begin(), widths.end(), '+', ',');
  const Result<Pooling> pool = ParsePooling((max ? "max:" : "") + widths);
  EXPECT_TRUE(pool.ok()) << text << ": " << pool.status().message();
  return pool.ok() ? *pool : Pooling{};
}

// The part of "dropkv.exact.w8.mean11.kept@budget0.1" between the third and the fourth point.
std::string PoolingPart(const std::string& name) {
  const size_t begin = name.find('.', name.find(".w") + 1) + 1;
  return name.substr(begin, name.find('.', begin) - begin);
}

TEST_P(DropKvGolden, ExactScores) {
  const std::vector<int32_t> windows = Windows("dropkv.exact.", ".raw");
  ASSERT_FALSE(windows.empty());
  for (const int32_t window : windows) {
    const std::string prefix = "dropkv.exact.w" + std::to_string(window);
    const reference::Scores scores = Scores(window);
    EXPECT_LE(RelativeError(scores.raw, layer_->Doubles(prefix + ".raw")), Allowed()) << prefix;
    EXPECT_EQ(*std::max_element(scores.flags.begin(), scores.flags.end()), 0);
    const reference::Attention attention = reference::Attend(layer_->View(), layer_->Rows(window), layer_->Attention());
    EXPECT_LE(RelativeError(attention.out, layer_->Doubles(prefix + ".out")), Allowed()) << prefix;
    EXPECT_LE(RelativeError(attention.lse, layer_->Doubles(prefix + ".lse")), Allowed()) << prefix;
  }
}

// Small scores decide at small budgets: each one for itself, not only beside the largest.
TEST_P(DropKvGolden, ExactScoresElementByElement) {
  for (const int32_t window : Windows("dropkv.exact.", ".raw")) {
    const std::vector<double> expected = layer_->Doubles("dropkv.exact.w" + std::to_string(window) + ".raw");
    const reference::Scores scores = Scores(window);
    for (size_t j = 0; j < expected.size(); ++j)
      ASSERT_NEAR(scores.raw[j], expected[j], (1e-11 + 2.0 * Allowed()) * expected[j]) << j;
  }
}

TEST_P(DropKvGolden, CompatScores) {
  const std::vector<int32_t> windows = Windows("dropkv.compat.", ".raw");
  if (windows.empty()) GTEST_SKIP() << "this file holds no compat scores";
  for (const int32_t window : windows) {
    const std::vector<float> scores = reference::CompatScore(layer_->View(), layer_->Rows(window), layer_->Attention());
    EXPECT_LE(RelativeError({scores.begin(), scores.end()},
                            layer_->Doubles("dropkv.compat.w" + std::to_string(window) + ".raw")),
              kCompatError);
  }
}

TEST_P(DropKvGolden, PooledScoresAndKeptTokens) {
  int pools = 0;
  int lists = 0;
  for (const int32_t window : Windows("dropkv.exact.", ".raw")) {
    const reference::Scores scores = Scores(window);
    for (const std::string& name : layer_->Names("dropkv.exact.w" + std::to_string(window) + ".m")) {
      Policy policy;
      policy.window = window;
      policy.pool = PoolingOf(PoolingPart(name));
      const std::vector<double> pooled = Pooled(scores, policy.pool, window);
      const double budget = NumberAfter(name, "@budget");
      if (budget < 0) {
        EXPECT_LE(RelativeError(pooled, layer_->Doubles(name)), Allowed()) << name;
        ++pools;
        continue;
      }
      policy.sink = std::max(0, static_cast<int32_t>(NumberAfter(name, ".sink")));
      policy.heads = name.find(".adamask@") != std::string::npos ? HeadRule::kAda : HeadRule::kUniform;
      const Result<KeepCount> count = ResolveBudget(Budget::Fraction(budget), policy, layer_->tokens());
      ASSERT_TRUE(count.ok()) << count.status().message();
      const KeepList keep = reference::Select(policy, *count, layer_->kv_heads(), layer_->tokens(), scores.raw.data(),
                                              pooled.data(), scores.flags.data());
      EXPECT_EQ(MaskOf(keep, layer_->tokens()), layer_->KeptMask(name)) << name;
      ++lists;
    }
  }
  EXPECT_GE(pools, 4);
  EXPECT_GE(lists, 16);
}

INSTANTIATE_TEST_SUITE_P(Files, DropKvGolden, ::testing::ValuesIn(GoldenNames()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace dropkv::testing
