// Rows and tokens beyond the prompt: generated tokens, weights, and rows that are not the window's.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "core/random.h"
#include "engine/engine_case.h"
#include "reference/reference.h"
#include "reference/tolerance.h"

namespace dropkv {
namespace {

struct RandomRun {
  ScoreCase c;
  Policy policy;
  Budget budget;
};

RandomRun MakeRun(uint64_t seed) {
  cpu::RandomStream random(seed);
  RandomRun run{RandomCase(random, 20), {}, {}};
  run.policy.signal = random.Below(2) == 0 ? Signal::kDropKv : Signal::kAttention;
  run.policy.window = 1 + random.Below(9);
  run.policy.sink = random.Below(4);
  run.policy.pool = {random.Below(2) == 0 ? PoolKind::kMean : PoolKind::kMax, random.Below(4), random.Below(4),
                     random.Below(2) == 0};
  run.policy.heads = static_cast<HeadRule>(random.Below(3));
  run.budget = Budget::Tokens(run.policy.window + run.policy.sink + random.Below(25));
  return run;
}

// Pooled scores and their bounds of one head, from the reference.
void ExpectKeepsTheBest(const RandomRun& run, const reference::Scores& want, const reference::Tolerances& bounds,
                        int32_t head, int32_t keep, std::span<const int32_t> kept) {
  const int32_t n = run.c.candidates();
  const Pooling& pool = run.policy.pool;
  if (run.policy.heads != HeadRule::kUniform || run.policy.sink > 0 || keep == n) return;
  if (std::ranges::any_of(want.flags, [](uint8_t flag) { return flag != 0; })) return;
  const size_t first = static_cast<size_t>(head) * n;
  const auto pooled = reference::Pool(want.raw.data() + first, n, pool, run.policy.window);
  auto bound = reference::Pool(bounds.raw.data() + first, n, pool, run.policy.window);
  for (int32_t j = 0; j < n; ++j) bound[j] += reference::Gamma(pool.before + pool.after + 2) * pooled[j];
  ExpectDecided(kept, pooled, bound, n - run.policy.window, keep - run.policy.window);
}

void CompareLayer(const RandomRun& run, const LayerInput& in, const Outcome& got, int32_t layer) {
  const ScoreCase& c = run.c;
  const int32_t n = c.candidates();
  const reference::Scores want =
      reference::Score(in.kv, in.rows, in.attention, run.policy, in.layer_index, c.generated);
  const reference::Tolerances bounds =
      reference::LayerTolerances(in.kv, in.rows, in.attention, run.policy, c.generated);
  const auto first = got.raw.begin() + static_cast<int64_t>(layer) * c.kv_heads * n;
  const std::vector<double> raw(first, first + static_cast<int64_t>(want.raw.size()));
  cpu::ExpectWithin(raw, want.raw, bounds.raw, 1, "raw");
  const auto first_pooled = got.scores.begin() + static_cast<int64_t>(layer) * c.kv_heads * n;
  const std::vector<double> pooled(first_pooled, first_pooled + static_cast<int64_t>(want.raw.size()));
  const KeepList keep = reference::Select(run.policy, got.report.budget, c.kv_heads, n, raw.data(), pooled.data(),
                                          want.flags.data(), c.generated);
  for (int32_t head = 0; head < c.kv_heads; ++head) {
    const auto kept = got.keep.head(layer, head);
    EXPECT_TRUE(std::ranges::equal(keep.head(0, head), kept)) << layer << " " << head;
    ASSERT_GE(kept.size(), static_cast<size_t>(c.generated));
    for (int32_t i = 0; i < c.generated; ++i) EXPECT_EQ(kept[kept.size() - c.generated + i], n + i);
    ExpectKeepsTheBest(run, want, bounds, head, got.report.budget.keep, kept);
  }
  const reference::Certificate measured = reference::Certify(in.kv, in.rows, in.attention, got.keep, layer);
  for (int32_t h = 0; h < c.query_heads(); ++h) {
    EXPECT_NEAR(got.error[layer * c.query_heads() + h], measured.output_error[h], 3e-5) << layer << " " << h;
    EXPECT_NEAR(got.mass[layer * c.query_heads() + h], measured.evicted_mass[h], 3e-5) << layer << " " << h;
  }
}

TEST(EngineRowsTest, EqualsTheReferenceOverRandomShapes) {
  const std::vector<std::string_view> kernels = Engine::KernelNames();
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    const RandomRun run = MakeRun(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed << " " << run.c << " heads "
                                    << static_cast<int>(run.policy.heads) << " signal "
                                    << static_cast<int>(run.policy.signal));
    Batch batch(run.c, 2);
    batch.shape.rows = run.c.rows;
    Engine engine = MakeEngine(2, std::string(kernels[seed % kernels.size()]));
    const Outcome got = RunBatch(engine, batch, run.policy, run.budget);
    for (int32_t layer = 0; layer < 2; ++layer) CompareLayer(run, batch.inputs[layer], got, layer);
    if (testing::Test::HasFailure()) return;
  }
}

// With its own window protected, a prompt that ends with the generated tokens is the same problem.
TEST(EngineRowsTest, GeneratedTokensEqualALongerProtectedWindow) {
  for (const std::string_view kernel : Engine::KernelNames())
    for (const Signal signal : {Signal::kDropKv, Signal::kAttention})
      for (uint64_t seed = 1; seed <= 8; ++seed) {
        ScoreCase c;
        c.tokens = 140 + static_cast<int32_t>(seed);
        c.generated = 3 * static_cast<int32_t>(seed);
        c.rows = 4 + 2 * static_cast<int32_t>(seed);
        c.weights = seed % 2 == 0;
        SCOPED_TRACE(testing::Message() << kernel << " " << c);
        Policy policy;
        policy.signal = signal;
        policy.window = 6;
        policy.pool = {};
        Batch batch(c, 1);
        batch.shape.rows = c.rows;
        Engine engine = MakeEngine(1, std::string(kernel));
        const Outcome got = RunBatch(engine, batch, policy, Budget::Tokens(40));
        policy.window += c.generated;
        Batch longer(c, 1);
        longer.shape.tokens += c.generated;
        longer.shape.generated = 0;
        longer.shape.rows = c.rows;
        const Outcome want = RunBatch(engine, longer, policy, Budget::Tokens(40 + c.generated));
        ExpectSameLists(got.keep, want.keep);
        EXPECT_EQ(got.keep.min_length(), 40 + c.generated);
        for (size_t h = 0; h < got.error.size(); ++h) EXPECT_NEAR(got.error[h], want.error[h], 1e-5);
      }
}

// The rows that a policy asks for by default, named; and weights of 1.
TEST(EngineRowsTest, NamingTheWindowOrWeightsOfOneChangesNoBit) {
  for (const std::string_view kernel : Engine::KernelNames())
    for (const std::string_view name : {"adadropkv", "snapkv", "streaming"}) {
      SCOPED_TRACE(testing::Message() << kernel << " " << name);
      const Policy policy = Preset(name);
      ScoreCase c;
      c.rows = policy.window;
      Batch batch(c, 3);
      Engine engine = MakeEngine(2, std::string(kernel));
      const Outcome plain = RunBatch(engine, batch, policy, Budget::Tokens(90));
      batch.shape.rows = policy.window;
      const std::vector<float> ones(policy.window, 1.0F);
      for (const bool weights : {false, true}) {
        for (LayerInput& in : batch.inputs) in.rows.weights = weights ? ones.data() : nullptr;
        const Outcome again = RunBatch(engine, batch, policy, Budget::Tokens(90));
        ExpectSameLists(plain.keep, again.keep);
        EXPECT_EQ(plain.error, again.error);
        EXPECT_EQ(plain.mass, again.mass);
        EXPECT_EQ(plain.raw, again.raw);
        EXPECT_EQ(plain.scores, again.scores);
      }
    }
}

TEST(EngineRowsTest, SameBitsForAnyThreads) {
  ScoreCase c;
  c.tokens = 4200;
  c.kv_heads = 1;
  c.generated = 150;
  c.weights = true;
  Batch batch(c, 3);
  batch.shape.rows = c.rows;
  Engine one = MakeEngine(1);
  const Outcome first = RunBatch(one, batch, Preset("adadropkv"), Budget::Fraction(0.1));
  for (const int32_t threads : {2, 3}) {
    Engine engine = MakeEngine(threads);
    const Outcome again = RunBatch(engine, batch, Preset("adadropkv"), Budget::Fraction(0.1));
    ExpectSameLists(first.keep, again.keep);
    EXPECT_EQ(first.raw, again.raw);
    EXPECT_EQ(first.error, again.error);
  }
}

// A certificate of its own list, and one whose rows count differently: the same bits.
TEST(EngineRowsTest, CertifyAgreesWithTheRunAndIgnoresWeights) {
  ScoreCase c;
  c.generated = 20;
  c.rows = 23;
  Batch batch(c, 2);
  batch.shape.rows = c.rows;
  Engine engine = MakeEngine(2);
  const Outcome run = RunBatch(engine, batch, Preset("dropkv"), Budget::Tokens(40));
  EXPECT_GT(*std::ranges::min_element(run.error), 0.0F);
  std::vector<float> weights(c.rows, 0.0F);
  weights[3] = 5.0F;
  for (LayerInput& in : batch.inputs) in.rows.weights = weights.data();
  std::vector<float> error(run.error.size());
  std::vector<float> mass(run.mass.size());
  for (const int32_t rows : {0, c.rows}) {
    batch.shape.rows = rows;
    ASSERT_TRUE(engine.Certify(batch.shape, batch.inputs, run.keep, error.data(), mass.data()).ok());
    EXPECT_EQ(error, run.error);
    EXPECT_EQ(mass, run.mass);
  }
}

TEST(EngineRowsTest, ShortPromptsAndFullKeepTheGeneratedTokensToo) {
  for (const std::string_view kernel : Engine::KernelNames()) {
    Engine engine = MakeEngine(1, std::string(kernel));
    ScoreCase c;
    c.tokens = 13;
    c.generated = 6;  // 7 of the prompt, below dropkv's window
    Batch batch(c, 2);
    batch.shape.rows = c.rows;
    const Outcome shorter = RunBatch(engine, batch, Preset("dropkv"), Budget::Fraction(0.05));
    ExpectSameLists(shorter.keep, KeepList::All(2, c.kv_heads, 13));
    const Outcome full = RunBatch(engine, batch, Preset("full"), Budget::Fraction(0.05));
    ExpectSameLists(full.keep, KeepList::All(2, c.kv_heads, 13));
    Policy narrow = Preset("dropkv");
    narrow.window = 2;
    const Outcome all = RunBatch(engine, batch, narrow, Budget::Fraction(1.0));
    ExpectSameLists(all.keep, KeepList::All(2, c.kv_heads, 13));
    EXPECT_EQ(all.error, std::vector<float>(all.error.size(), 0.0F));
  }
}

TEST(EngineRowsTest, NamesWhatIsWrong) {
  ScoreCase c;
  c.generated = 10;
  c.rows = 12;
  Batch batch(c, 1);
  Engine engine = MakeEngine(1);
  const auto expect_plan_error = [&](std::string_view text) {
    const Status status = engine.MakePlan(batch.shape, Preset("dropkv"), Budget::Tokens(50)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const auto expect_run_error = [&](std::string_view text) {
    const Result<Plan> plan = engine.MakePlan(batch.shape, Preset("dropkv"), Budget::Tokens(50));
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::vector<std::byte> workspace(plan->workspace_bytes);
    const Status status = engine.Run(*plan, batch.inputs, workspace, {}, nullptr).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  batch.shape.generated = -1;
  expect_plan_error("shape.generated: expected 0 to 2147483506, got -1");
  batch.shape.generated = 2147483507;
  expect_plan_error("shape.generated");
  batch.shape.generated = 10;
  batch.shape.rows = 129;
  expect_plan_error("shape.rows: expected 0 (the policy's window) to 128, got 129");
  batch.shape.rows = -1;
  expect_plan_error("shape.rows");
  batch.shape.rows = 0;
  expect_run_error("layer.rows.rows: expected 8 (the policy's window), got 12");
  batch.shape.rows = 13;
  expect_run_error("layer.rows.rows: expected 13 (the shape's rows), got 12");
  batch.shape.rows = 12;
  batch.shape.generated = 9;
  expect_run_error("layer.kv: expected the plan's shape [Hkv, n, d, dv] = [2, 150, 64, 64], got [2, 151, 64, 64]");
  batch.shape.generated = 10;
  std::vector<float> weights(c.rows, 0.0F);
  batch.inputs[0].rows.weights = weights.data();
  expect_run_error("rows.weights: expected one above 0");
  weights[2] = -1.0F;
  expect_run_error("rows.weights[2]");
  std::vector<float> error(c.query_heads());
  batch.inputs[0].rows.weights = nullptr;
  const KeepList outside(1, 2, {0, 1, 1}, {151});
  const Status status = engine.Certify(batch.shape, batch.inputs, outside, error.data(), nullptr);
  EXPECT_NE(status.message().find("below 151, got 151"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace dropkv
