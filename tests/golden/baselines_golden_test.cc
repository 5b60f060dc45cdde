// SnapKV, streaming and adaptive head budgets against kvpress (float32). Its budget is trunc(n * (1 - ratio)), ratio
// the share REMOVED, without a clamp.
#include <algorithm>
#include <cmath>

#include "dropkv/policy.h"
#include "golden/golden.h"
#include "reference/reference.h"

namespace dropkv::testing {
namespace {

constexpr double kScoreError = 1e-5;  // float32 beside float64
constexpr double kTieBand = 1e-5;     // choices between scores this close are arbitrary

class BaselinesGolden : public GoldenTest {
 protected:
  void SetUp() override {
    GoldenTest::SetUp();
    if (!IsSkipped() && layer_ != nullptr && layer_->Names("score.snapkv.").empty())
      GTEST_SKIP() << "this file holds DropKV scores only";
  }

  // "…snapkv.w32.k5…" as a policy.
  static Policy SnapKv(const std::string& name) {
    Policy policy = *FindPreset("snapkv");
    policy.window = static_cast<int32_t>(NumberAfter(name, ".w"));
    policy.pool.before = policy.pool.after = (static_cast<int32_t>(NumberAfter(name, ".k")) - 1) / 2;
    return policy;
  }

  // kvpress's count for the ratio behind the last '@' of `name`.
  int32_t Kept(const std::string& name) const {
    return static_cast<int32_t>(layer_->tokens() * (1.0 - NumberAfter(name, "@")));
  }

  struct Scored {
    reference::Scores scores;
    std::vector<double> pooled;
  };

  Scored ScoreAndPool(const Policy& policy) {
    Scored result{reference::Score(layer_->View(), layer_->Rows(policy.window), layer_->Attention(), policy, 0), {}};
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
      const double* raw = result.scores.raw.data() + static_cast<size_t>(u) * layer_->tokens();
      const std::vector<double> head = reference::Pool(raw, layer_->tokens(), policy.pool, policy.window);
      result.pooled.insert(result.pooled.end(), head.begin(), head.end());
    }
    return result;
  }

  std::vector<uint8_t> Select(const Policy& policy, const Scored& scored, int32_t keep) const {
    return MaskOf(reference::Select(policy, {keep, false}, layer_->kv_heads(), layer_->tokens(),
                                    scored.scores.raw.data(), scored.pooled.data(), scored.scores.flags.data()),
                  layer_->tokens());
  }

  int32_t CountHead(const std::vector<uint8_t>& mask, int32_t head) const {
    const auto first = mask.begin() + static_cast<std::ptrdiff_t>(head) * layer_->tokens();
    return static_cast<int32_t>(std::count(first, first + layer_->tokens(), 1));
  }

  // The lowest score that `mask` keeps among unprotected tokens, over heads `first` .. `last`-1.
  double Threshold(const std::vector<uint8_t>& mask, const std::vector<double>& pooled, int32_t window, int32_t first,
                   int32_t last) const {
    double lowest = INFINITY;
    for (int32_t u = first; u < last; ++u)
      for (int32_t j = 0; j < layer_->tokens() - window; ++j) {
        const size_t at = static_cast<size_t>(u) * layer_->tokens() + j;
        if (mask[at] != 0) lowest = std::min(lowest, pooled[at]);
      }
    return lowest;
  }
};

TEST_P(BaselinesGolden, SnapKvScores) {
  int compared = 0;
  for (const std::string& name : layer_->Names("score.snapkv.")) {
    const Policy policy = SnapKv(name);
    const std::vector<double> expected = layer_->Doubles(name);
    const Scored scored = ScoreAndPool(policy);
    std::vector<double> ours;
    std::vector<double> theirs;
    for (int32_t u = 0; u < layer_->kv_heads(); ++u)
      for (int32_t j = 0; j < layer_->tokens() - policy.window; ++j) {
        ours.push_back(scored.pooled[static_cast<size_t>(u) * layer_->tokens() + j]);
        theirs.push_back(expected[static_cast<size_t>(u) * layer_->tokens() + j]);
      }
    EXPECT_LE(RelativeError(ours, theirs), kScoreError) << name;
    ++compared;
  }
  EXPECT_GE(compared, 3);
}

TEST_P(BaselinesGolden, SnapKvKeptTokens) {
  int compared = 0;
  for (const std::string& name : layer_->Names("kept.snapkv.")) {
    SCOPED_TRACE(name);
    const Policy policy = SnapKv(name);
    const int32_t keep = Kept(name);
    const std::vector<uint8_t> theirs = layer_->KeptMask(name);
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) ASSERT_EQ(CountHead(theirs, u), keep);
    if (keep < policy.window) continue;  // which window tokens survive is arbitrary there
    const Scored scored = ScoreAndPool(policy);
    const std::vector<uint8_t> ours = Select(policy, scored, keep);
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
      const double threshold = Threshold(ours, scored.pooled, policy.window, u, u + 1);
      for (int32_t j = 0; j < layer_->tokens(); ++j) {
        const size_t at = static_cast<size_t>(u) * layer_->tokens() + j;
        if (j < layer_->tokens() - policy.window && std::abs(scored.pooled[at] - threshold) <= kTieBand * threshold)
          continue;
        EXPECT_EQ(ours[at], theirs[at]) << "head " << u << " token " << j;
      }
    }
    ++compared;
  }
  EXPECT_GE(compared, 2);
}

TEST_P(BaselinesGolden, AdaptiveMasksOverSnapKv) {
  int compared = 0;
  for (const std::string& name : layer_->Names("mask.ada")) {
    SCOPED_TRACE(name);
    if (name.find(".snapkv.") == std::string::npos) continue;
    Policy policy = SnapKv(name);
    policy.heads = HeadRule::kAda;
    policy.alpha = NumberAfter(name, "mask.ada");
    const int32_t keep = Kept(name);
    const std::vector<uint8_t> theirs = layer_->KeptMask(name);
    EXPECT_EQ(std::count(theirs.begin(), theirs.end(), 1), static_cast<int64_t>(layer_->kv_heads()) * keep);
    for (int32_t u = 0; u < layer_->kv_heads(); ++u)
      EXPECT_GE(CountHead(theirs, u), static_cast<int32_t>(keep * policy.alpha));
    if (keep < policy.window) continue;
    const Scored scored = ScoreAndPool(policy);
    const std::vector<uint8_t> ours = Select(policy, scored, keep);
    const double threshold = Threshold(ours, scored.pooled, policy.window, 0, layer_->kv_heads());
    for (size_t at = 0; at < ours.size(); ++at) {
      const auto j = static_cast<int32_t>(at % layer_->tokens());
      if (j < layer_->tokens() - policy.window && std::abs(scored.pooled[at] - threshold) <= kTieBand * threshold)
        continue;
      EXPECT_EQ(ours[at], theirs[at]) << "head " << at / layer_->tokens() << " token " << j;
    }
    ++compared;
  }
  EXPECT_GE(compared, 2);
}

TEST_P(BaselinesGolden, Streaming) {
  const Policy policy = *FindPreset("streaming");
  const Scored scored{reference::Score(layer_->View(), {}, layer_->Attention(), policy, 0), {}};
  const Scored pooled{scored.scores, scored.scores.raw};
  int compared = 0;
  for (const std::string& name : layer_->Names("kept.streaming.sink4@")) {
    EXPECT_EQ(Select(policy, pooled, Kept(name)), layer_->KeptMask(name)) << name;
    ++compared;
  }
  EXPECT_GE(compared, 2);
  // Its scores are 1 for the kept and 0 for the others.
  const std::vector<uint8_t> half = Select(policy, pooled, Kept("@0.5"));
  EXPECT_EQ(std::vector<double>(half.begin(), half.end()), layer_->Doubles("score.streaming.sink4"));
}

INSTANTIATE_TEST_SUITE_P(Files, BaselinesGolden, ::testing::ValuesIn(GoldenNames()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace dropkv::testing
