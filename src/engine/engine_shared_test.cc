// Plans that share a pass: what each of them would have got alone, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "core/random.h"
#include "engine/engine_case.h"
#include "reference/reference.h"

namespace dropkv {
namespace {

constexpr int32_t kLayers = 5;  // several waves

// What a plan of a run is to return.
struct Wanted {
  bool scores = true;
  bool error = true;
  bool mass = true;
};

struct Buffers {
  std::vector<float> scores, raw, error, mass;

  explicit Buffers(const EvictShape& shape)
      : scores(static_cast<size_t>(shape.layers) * shape.kv_heads * shape.tokens, -1.0F),
        raw(scores),
        error(static_cast<size_t>(shape.layers) * shape.query_heads, -1.0F),
        mass(error) {}

  EvictOutput Output(const Wanted& wanted) {
    return {wanted.scores ? scores.data() : nullptr, wanted.scores ? raw.data() : nullptr,
            wanted.error ? error.data() : nullptr, wanted.mass ? mass.data() : nullptr};
  }
};

// NaN too.
std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// Every head rule at four budgets, of which one keeps everything.
std::vector<Plan> MakePlans(const Engine& engine, const EvictShape& shape, Policy policy) {
  std::vector<Plan> plans;
  for (const HeadRule heads : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO})
    for (const double fraction : {0.4, 0.15, 1.0, 0.7}) {
      policy.heads = heads;
      policy.alpha = heads == HeadRule::kUniform ? 0.2 : fraction;
      policy.name += "+";
      const Result<Plan> plan = engine.MakePlan(shape, policy, Budget::Fraction(fraction));
      EXPECT_TRUE(plan.ok()) << plan.status().message();
      plans.push_back(*plan);
    }
  return plans;
}

// `wanted` of plan i: wanted[i % size].
void ExpectSameAsAlone(Engine& engine, const Batch& batch, const Policy& policy, std::span<const Wanted> wanted) {
  const std::vector<Plan> plans = MakePlans(engine, batch.shape, policy);
  std::vector<Buffers> together(plans.size(), Buffers(batch.shape));
  std::vector<EvictOutput> outputs;
  size_t bytes = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    outputs.push_back(together[i].Output(wanted[i % wanted.size()]));
    bytes = std::max(bytes, plans[i].workspace_bytes);
  }
  std::vector<EvictReport> reports(plans.size());
  std::vector<std::byte> workspace(bytes, std::byte{0xFF});
  const Result<std::vector<KeepList>> lists = engine.RunAll(plans, batch.inputs, workspace, outputs, reports);
  ASSERT_TRUE(lists.ok()) << lists.status().message();
  ASSERT_EQ(lists->size(), plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "plan " << i);
    Buffers alone(batch.shape);
    EvictReport report;
    std::vector<std::byte> own(plans[i].workspace_bytes, std::byte{0xFF});
    const EvictOutput output = alone.Output(wanted[i % wanted.size()]);
    const Result<KeepList> keep = engine.Run(plans[i], batch.inputs, own, output, &report);
    ASSERT_TRUE(keep.ok()) << keep.status().message();
    ExpectSameLists((*lists)[i], *keep);
    EXPECT_EQ(Bits(together[i].scores), Bits(alone.scores));
    EXPECT_EQ(Bits(together[i].raw), Bits(alone.raw));
    EXPECT_EQ(Bits(together[i].error), Bits(alone.error));
    EXPECT_EQ(Bits(together[i].mass), Bits(alone.mass));
    EXPECT_EQ(reports[i].budget.keep, report.budget.keep);
    EXPECT_EQ(reports[i].budget.raised, report.budget.raised);
    EXPECT_EQ(reports[i].nonfinite_tokens, report.nonfinite_tokens);
    EXPECT_EQ(reports[i].dominant_tokens, report.dominant_tokens);
    EXPECT_EQ(reports[i].skipped_rows, report.skipped_rows);
    EXPECT_EQ(reports[i].kernel, report.kernel);
    EXPECT_EQ(reports[i].attend_s > 0, report.attend_s > 0);
    EXPECT_EQ(reports[i].certificate_s > 0, report.certificate_s > 0);
    EXPECT_EQ(reports[i].score_s, reports[0].score_s) << "scored more than once";
  }
}

constexpr std::array<Wanted, 1> kEverything{Wanted{}};
constexpr std::array<Wanted, 1> kNoCertificate{Wanted{true, false, false}};
// Of the plans that differ in head rule and budget some ask for this and some for that.
constexpr std::array<Wanted, 5> kMixed{
    {{true, false, false}, {true, true, true}, {false, true, false}, {false, false, false}, {true, false, true}}};

TEST(EngineSharedTest, EqualsRunsOneByOne) {
  for (const std::string_view kernel : Engine::KernelNames())
    // A signal each, dropkv with dominant tokens, one with the maximum; the reference is slow.
    for (const uint64_t seed : {12, 5, 6, 7}) {
      if (kernel == "reference" && seed != 12) continue;
      cpu::RandomStream random(seed);
      ScoreCase c = RandomCase(random, 60);
      c.content = std::array{Content::kNormal, Content::kNonFinite, Content::kDominant}[random.Below(3)];
      Policy policy;
      policy.signal = std::array{Signal::kDropKv, Signal::kAttention, Signal::kRecency, Signal::kRandom}[seed % 4];
      policy.window = 1 + static_cast<int32_t>(seed % 9);
      policy.sink = static_cast<int32_t>(seed % 3);
      policy.seed = seed;
      const bool pools = policy.needs_queries();
      policy.pool = {seed % 5 == 0 ? PoolKind::kMax : PoolKind::kMean, pools ? 3 : 0, pools ? 2 : 0, seed % 2 == 0};
      SCOPED_TRACE(testing::Message() << kernel << " seed " << seed << " " << c);
      Batch batch(c, kLayers);
      batch.shape.rows = c.rows;
      Engine engine = MakeEngine(1 + static_cast<int32_t>(seed % 2), std::string(kernel));
      ExpectSameAsAlone(engine, batch, policy, kMixed);
      if (kernel == "reference") continue;
      ExpectSameAsAlone(engine, batch, policy, kEverything);
      ExpectSameAsAlone(engine, batch, policy, kNoCertificate);
      if (testing::Test::HasFailure()) return;
    }
}

// Outputs that the caller hands in: every certificate reads them, and rows of their own softmax take states' memory.
TEST(EngineSharedTest, HandedInOutputs) {
  ScoreCase c;
  c.content = Content::kDominant;
  c.tokens = 400;
  Batch batch(c, kLayers);
  std::vector<std::vector<float>> given;
  for (LayerInput& in : batch.inputs) {
    const reference::Attention attention = reference::Attend(in.kv, in.rows, in.attention);
    in.out = given.emplace_back(attention.out.begin(), attention.out.end()).data();
    in.lse = given.emplace_back(attention.lse.begin(), attention.lse.end()).data();
  }
  Engine engine = MakeEngine(2);
  ExpectSameAsAlone(engine, batch, Preset("dropkv"), kEverything);
  ExpectSameAsAlone(engine, batch, Preset("dropkv"), kMixed);
}

TEST(EngineSharedTest, PromptsThatNothingIsEvictedFrom) {
  for (const std::string_view kernel : Engine::KernelNames()) {
    Engine engine = MakeEngine(1, std::string(kernel));
    ScoreCase c;
    c.tokens = 13;
    c.generated = 6;  // 7 of the prompt, below dropkv's window
    Batch batch(c, 2);
    batch.shape.rows = c.rows;
    ExpectSameAsAlone(engine, batch, Preset("dropkv"), kMixed);
    ExpectSameAsAlone(engine, batch, Preset("full"), kMixed);
  }
}

TEST(EngineSharedTest, CertifiesSeveralListsOverOnePass) {
  for (const std::string_view kernel : Engine::KernelNames()) {
    SCOPED_TRACE(kernel);
    ScoreCase c;
    c.rows = 40;
    c.generated = 7;
    Batch batch(c, kLayers);
    batch.shape.rows = c.rows;
    Engine engine = MakeEngine(2, std::string(kernel));
    std::vector<KeepList> lists;
    for (const int32_t tokens : {30, 120, 60})
      lists.push_back(RunBatch(engine, batch, Preset("adadropkv"), Budget::Tokens(tokens), false).keep);
    std::vector<Buffers> together(lists.size(), Buffers(batch.shape));
    const std::array<Wanted, 3> wanted{{{false, true, true}, {false, false, true}, {false, true, false}}};
    std::vector<const KeepList*> pointers;
    std::vector<EvictOutput> outputs;
    for (size_t i = 0; i < lists.size(); ++i) {
      pointers.push_back(&lists[i]);
      outputs.push_back(together[i].Output(wanted[i]));
    }
    ASSERT_TRUE(engine.CertifyAll(batch.shape, batch.inputs, pointers, outputs).ok());
    for (size_t i = 0; i < lists.size(); ++i) {
      Buffers alone(batch.shape);
      const EvictOutput output = alone.Output(wanted[i]);
      ASSERT_TRUE(engine.Certify(batch.shape, batch.inputs, lists[i], output.output_error, output.evicted_mass).ok());
      EXPECT_EQ(together[i].error, alone.error);
      EXPECT_EQ(together[i].mass, alone.mass);
    }
    EXPECT_GT(*std::ranges::min_element(together[0].error), 0.0F);
    EXPECT_TRUE(engine.CertifyAll(batch.shape, batch.inputs, {}, {}).ok());
    const Status one = engine.CertifyAll(batch.shape, batch.inputs, pointers, std::span(outputs).first(1));
    EXPECT_NE(one.message().find("outputs: expected one for each of the 3 lists, got 1"), std::string::npos)
        << one.message();
    outputs[2] = {};
    const Status none = engine.CertifyAll(batch.shape, batch.inputs, pointers, outputs);
    EXPECT_NE(none.message().find("output_error, evicted_mass"), std::string::npos) << none.message();
  }
}

class EngineSharedErrorTest : public testing::Test {
 protected:
  EngineSharedErrorTest() : batch_(case_, 1), engine_(MakeEngine(1)) {}

  Plan MakePlan(const EvictShape& shape, const Policy& policy) {
    return *engine_.MakePlan(shape, policy, Budget::Tokens(50));
  }

  void ExpectError(std::span<const Plan> plans, std::string_view text, size_t outputs = 0, size_t reports = 0) {
    std::vector<std::byte> workspace(plans.empty() ? 0 : plans.front().workspace_bytes);
    const std::vector<EvictOutput> no_outputs(outputs);
    std::vector<EvictReport> no_reports(reports);
    const Status status = engine_.RunAll(plans, batch_.inputs, workspace, no_outputs, no_reports).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  }

  // The second plan's policy or shape, changed.
  template <typename F>
  void ExpectDisagreement(std::string_view text, F&& change) {
    EvictShape shape = batch_.shape;
    Policy policy = Preset("dropkv");
    change(shape, policy);
    const std::array plans{MakePlan(batch_.shape, Preset("dropkv")), MakePlan(shape, policy)};
    ExpectError(plans, "plans[1]." + std::string(text));
  }

  ScoreCase case_;
  Batch batch_;
  Engine engine_;
};

TEST_F(EngineSharedErrorTest, NamesWhatDisagrees) {
  ExpectDisagreement("shape.layers: expected plans[0]'s 1, got 2", [](EvictShape& s, Policy&) { s.layers = 2; });
  ExpectDisagreement("shape.query_heads", [](EvictShape& s, Policy&) { s.query_heads *= 2; });
  ExpectDisagreement("shape.kv_heads", [](EvictShape& s, Policy&) { s.kv_heads = 1; });
  ExpectDisagreement("shape.tokens", [](EvictShape& s, Policy&) { ++s.tokens; });
  ExpectDisagreement("shape.key_dim", [](EvictShape& s, Policy&) { s.key_dim += 8; });
  ExpectDisagreement("shape.value_dim", [](EvictShape& s, Policy&) { s.value_dim += 8; });
  ExpectDisagreement("shape.generated", [](EvictShape& s, Policy&) { s.generated = 1; });
  ExpectDisagreement("shape.rows", [](EvictShape& s, Policy&) { s.rows = 8; });
  ExpectDisagreement("policy.signal: expected plans[0]'s 1, got 2",
                     [](EvictShape&, Policy& p) { p.signal = Signal::kAttention; });
  ExpectDisagreement("policy.window: expected plans[0]'s 8, got 9", [](EvictShape&, Policy& p) { p.window = 9; });
  ExpectDisagreement("policy.pool.kind", [](EvictShape&, Policy& p) { p.pool.kind = PoolKind::kMax; });
  ExpectDisagreement("policy.pool.before", [](EvictShape&, Policy& p) { p.pool.before = 2; });
  ExpectDisagreement("policy.pool.after", [](EvictShape&, Policy& p) { p.pool.after = 2; });
  ExpectDisagreement("policy.pool.past_only", [](EvictShape&, Policy& p) { p.pool.past_only = true; });
  ExpectDisagreement("policy.sink", [](EvictShape&, Policy& p) { p.sink = 4; });
  ExpectDisagreement("policy.seed", [](EvictShape&, Policy& p) { p.seed = 1; });
}

TEST_F(EngineSharedErrorTest, NamesWhatIsWrong) {
  ExpectError({}, "plans: expected at least 1, got 0");
  const std::array plans{MakePlan(batch_.shape, Preset("dropkv")), MakePlan(batch_.shape, Preset("adadropkv"))};
  ExpectError(plans, "outputs: expected none or one for each of the 2 plans, got 1", 1);
  ExpectError(plans, "reports: expected none or one for each of the 2 plans, got 3", 2, 3);
  // Everything kept needs no memory to select in: the other plan's memory is what it takes.
  const std::array widest{*engine_.MakePlan(batch_.shape, Preset("dropkv"), Budget::Fraction(1)), plans[0]};
  ASSERT_LE(widest[0].workspace_bytes, widest[1].workspace_bytes);
  std::vector<std::byte> workspace(widest[1].workspace_bytes);
  EXPECT_TRUE(engine_.RunAll(widest, batch_.inputs, workspace, {}, {}).ok());
  workspace.pop_back();
  const Status small = engine_.RunAll(widest, batch_.inputs, workspace, {}, {}).status();
  EXPECT_EQ(small.code(), Code::kWorkspaceTooSmall) << small.message();
  batch_.inputs[0].rows.rows = 7;
  ExpectError(plans, "layer.rows.rows: expected 8");
  batch_.inputs.clear();
  ExpectError(plans, "layers: expected the plan's 1, got 0");
}

}  // namespace
}  // namespace dropkv
