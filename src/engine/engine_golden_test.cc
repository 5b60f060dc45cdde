// The engine, on every instruction set, against golden DropKV scores and kept tokens.
#include <algorithm>
#include <cmath>
#include <span>

#include "dropkv/engine.h"
#include "golden/golden.h"

namespace dropkv::testing {
namespace {

constexpr double kScoreError = 1e-4;  // float32, of each score itself
constexpr double kTieBand = 1e-5;     // pooled float32 scores this close may come in either order

class EngineGolden : public GoldenTest {
 protected:
  EvictShape Shape() const {
    return {1, layer_->query_heads(), layer_->kv_heads(), layer_->tokens(), layer_->head_dim(), layer_->head_dim()};
  }

  KeepList Run(Engine& engine, const Policy& policy, double budget, std::vector<float>* raw) {
    const Result<Plan> plan = engine.MakePlan(Shape(), policy, Budget::Fraction(budget));
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    std::vector<std::byte> workspace(plan->workspace_bytes);
    const LayerInput input{layer_->View(), layer_->Rows(policy.window), layer_->Attention(), nullptr, nullptr, 0};
    EvictOutput output;
    if (raw != nullptr) {
      raw->resize(static_cast<size_t>(layer_->kv_heads()) * layer_->tokens());
      output.raw_scores = raw->data();
    }
    const Result<KeepList> keep = engine.Run(*plan, {&input, 1}, workspace, output, nullptr);
    EXPECT_TRUE(keep.ok()) << keep.status().message();
    return keep.ok() ? *keep : KeepList{};
  }
};

// Tokens that only one of the two masks keeps must have scores in one tie band. All arrays have one entry per token of
// the heads that share a budget.
void ExpectSameKept(std::span<const uint8_t> got, std::span<const uint8_t> want, std::span<const double> pooled,
                    const std::string& what) {
  double least = INFINITY;
  double greatest = -INFINITY;
  int32_t surplus = 0;
  for (size_t j = 0; j < got.size(); ++j) {
    surplus += got[j] - want[j];
    if (got[j] == want[j]) continue;
    least = std::min(least, pooled[j]);
    greatest = std::max(greatest, pooled[j]);
  }
  EXPECT_EQ(surplus, 0) << what;
  if (greatest > least) EXPECT_LE(greatest - least, kTieBand * greatest) << what;
}

TEST_P(EngineGolden, ScoresAndKeptTokens) {
  int lists = 0;
  for (const std::string_view kernel : Engine::KernelNames()) {
    SCOPED_TRACE(kernel);
    Engine engine = std::move(*Engine::Create({2, std::string(kernel)}));
    for (const std::string& name : layer_->Names("dropkv.exact.w")) {
      Policy policy;
      policy.window = static_cast<int32_t>(NumberAfter(name, ".w"));
      if (name.ends_with(".raw")) {
        const std::vector<double> expected = layer_->Doubles(name);
        std::vector<float> raw;
        Run(engine, policy, 1.0, &raw);
        for (size_t j = 0; j < expected.size(); ++j)
          ASSERT_NEAR(raw[j], expected[j], kScoreError * expected[j]) << name << " " << j;
        continue;
      }
      const size_t pool = name.find(".mean11.");
      const double budget = NumberAfter(name, "@budget");
      if (pool == std::string::npos || budget < 0) continue;
      policy.sink = std::max(0, static_cast<int32_t>(NumberAfter(name, ".sink")));
      policy.heads = name.find(".adamask@") != std::string::npos ? HeadRule::kAda : HeadRule::kUniform;
      const KeepList keep = Run(engine, policy, budget, nullptr);
      const std::vector<uint8_t> got = MaskOf(keep, layer_->tokens());
      const std::vector<uint8_t> want = layer_->KeptMask(name);
      const std::vector<double> pooled = layer_->Doubles(name.substr(0, pool) + ".mean11");
      const size_t sharing = policy.heads == HeadRule::kAda ? got.size() : layer_->tokens();
      for (size_t first = 0; first < got.size(); first += sharing)
        ExpectSameKept(std::span(got).subspan(first, sharing), std::span(want).subspan(first, sharing),
                       std::span(pooled).subspan(first, sharing), name);
      ++lists;
    }
  }
  EXPECT_GT(lists, 0);
}

INSTANTIATE_TEST_SUITE_P(Files, EngineGolden, ::testing::ValuesIn(GoldenNames()), [](const auto& test) {
  std::string name = test.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
});

}  // namespace
}  // namespace dropkv::testing
