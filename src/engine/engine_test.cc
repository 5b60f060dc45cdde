#include "dropkv/engine.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/engine_case.h"
#include "reference/reference.h"
#include "reference/tolerance.h"

namespace dropkv {
namespace {

TEST(EngineTest, KeepsTheTokensOfExactArithmeticOnEveryKernel) {
  ScoreCase c;
  c.tokens = 200;
  const Batch batch(c, 1);
  const Policy policy = Preset("dropkv");
  const LayerInput& in = batch.inputs[0];
  const reference::Scores scores = reference::Score(in.kv, in.rows, in.attention, policy, 0);
  const reference::Tolerances bounds = reference::LayerTolerances(in.kv, in.rows, in.attention, policy);
  for (const std::string_view name : Engine::KernelNames()) {
    SCOPED_TRACE(name);
    Engine engine = MakeEngine(2, std::string(name));
    EXPECT_EQ(engine.kernel(), name);
    const Outcome got = RunBatch(engine, batch, policy, Budget::Fraction(0.25));
    EXPECT_EQ(got.report.kernel, name);
    EXPECT_EQ(got.report.budget.keep, 50);
    for (int32_t head = 0; head < c.kv_heads; ++head) {
      const size_t first = static_cast<size_t>(head) * c.tokens;
      const auto pooled = reference::Pool(scores.raw.data() + first, c.tokens, policy.pool, policy.window);
      auto bound = reference::Pool(bounds.raw.data() + first, c.tokens, policy.pool, policy.window);
      for (int32_t j = 0; j < c.tokens; ++j) bound[j] += reference::Gamma(12) * pooled[j];
      ASSERT_EQ(got.keep.head(0, head).size(), 50U);
      ExpectDecided(got.keep.head(0, head), pooled, bound, c.tokens - policy.window, 50 - policy.window);
    }
  }
}

// Selection, pooling and flags against the reference's, from the run's own raw scores; all presets.
TEST(EngineTest, SelectsFromItsScoresAsTheReferenceDoes) {
  Engine engine = MakeEngine(2);
  for (const Content content : {Content::kNormal, Content::kNonFinite})
    for (const Policy& preset : Presets()) {
      SCOPED_TRACE(preset.name);
      ScoreCase c;
      c.tokens = 300;
      c.rows = preset.window;
      c.content = content;
      const Batch batch(c, 3);
      const Outcome got = RunBatch(engine, batch, preset, Budget::Tokens(90));
      if (preset.signal == Signal::kFull) {
        EXPECT_EQ(got.keep.min_length(), 300);
        continue;
      }
      for (int32_t layer = 0; layer < 3; ++layer) {
        const LayerInput& in = batch.inputs[layer];
        const reference::Scores want = reference::Score(in.kv, in.rows, in.attention, preset, layer);
        const size_t first = static_cast<size_t>(layer) * c.kv_heads * c.tokens;
        const std::vector<double> raw(got.raw.begin() + first, got.raw.begin() + first + want.raw.size());
        const std::vector<double> pooled(got.scores.begin() + first, got.scores.begin() + first + want.raw.size());
        const KeepList keep = reference::Select(preset, got.report.budget, c.kv_heads, c.tokens, raw.data(),
                                                pooled.data(), want.flags.data());
        for (int32_t head = 0; head < c.kv_heads; ++head)
          EXPECT_TRUE(std::ranges::equal(keep.head(0, head), got.keep.head(layer, head))) << layer << " " << head;
      }
      const bool judged = preset.needs_queries();
      EXPECT_EQ(got.report.nonfinite_tokens > 0, judged && content == Content::kNonFinite);
      EXPECT_EQ(got.report.skipped_rows > 0, content == Content::kNonFinite);
    }
}

TEST(EngineTest, CertificateMatchesReference) {
  Engine engine = MakeEngine(2);
  for (const std::string_view name : {"adadropkv", "snapkv", "streaming", "random"})
    for (const bool sinks : {false, true})
      for (const Content content : {Content::kNormal, Content::kDominant, Content::kNonFinite}) {
        const Policy policy = Preset(name);
        ScoreCase c;
        c.tokens = 257;
        c.rows = policy.window;
        c.content = content;
        c.sinks = sinks;
        SCOPED_TRACE(testing::Message() << name << " " << c);
        const Batch batch(c, 2);
        const Outcome got = RunBatch(engine, batch, policy, Budget::Tokens(100));
        for (int32_t layer = 0; layer < 2; ++layer) {
          const LayerInput& in = batch.inputs[layer];
          const reference::Certificate want = reference::Certify(in.kv, in.rows, in.attention, got.keep, layer);
          for (int32_t h = 0; h < c.query_heads(); ++h) {
            EXPECT_NEAR(got.error[layer * c.query_heads() + h], want.output_error[h], 2e-5) << layer << " " << h;
            EXPECT_NEAR(got.mass[layer * c.query_heads() + h], want.evicted_mass[h], 2e-5) << layer << " " << h;
          }
        }
      }
}

// Lists that no run would make: random ones of any length, over any number of rows.
TEST(EngineTest, CertifiesAnyKeepList) {
  for (const std::string_view kernel : Engine::KernelNames())
    for (const int32_t rows : {1, 13, 128})
      for (const Content content : {Content::kNormal, Content::kDominant, Content::kNonFinite}) {
        ScoreCase c;
        c.rows = rows;
        c.content = content;
        c.sinks = rows == 13;
        SCOPED_TRACE(testing::Message() << kernel << " " << c);
        const Batch batch(c, 3);
        cpu::RandomStream random(7);
        std::vector<int64_t> offsets{0};
        std::vector<int32_t> positions;
        for (int32_t list = 0; list < 3 * c.kv_heads; ++list) {
          for (int32_t j = 0; j < c.tokens; ++j)
            if (list == 1 || (list != 2 && random.Uniform() < 0.3F)) positions.push_back(j);
          offsets.push_back(static_cast<int64_t>(positions.size()));
        }
        const KeepList keep(3, c.kv_heads, offsets, positions);
        Engine engine = MakeEngine(2, std::string(kernel));
        const size_t count = static_cast<size_t>(3) * c.query_heads();
        std::vector<float> error(count, NAN);
        std::vector<float> mass(count, NAN);
        std::vector<float> error_alone(count);
        ASSERT_TRUE(engine.Certify(batch.shape, batch.inputs, keep, error.data(), mass.data()).ok());
        ASSERT_TRUE(engine.Certify(batch.shape, batch.inputs, keep, error_alone.data(), nullptr).ok());
        EXPECT_EQ(error, error_alone);
        for (int32_t layer = 0; layer < 3; ++layer) {
          const LayerInput& in = batch.inputs[layer];
          const reference::Certificate want = reference::Certify(in.kv, in.rows, in.attention, keep, layer);
          for (int32_t h = 0; h < c.query_heads(); ++h) {
            EXPECT_NEAR(error[layer * c.query_heads() + h], want.output_error[h], 2e-5) << layer << " " << h;
            EXPECT_NEAR(mass[layer * c.query_heads() + h], want.evicted_mass[h], 2e-5) << layer << " " << h;
          }
        }
      }
}

TEST(EngineTest, HandedInOutputsGiveTheSameTokensAndCertificate) {
  Engine engine = MakeEngine(2);
  ScoreCase c;
  c.content = Content::kDominant;
  c.tokens = 400;
  Batch batch(c, 1);
  const Policy policy = Preset("adadropkv");
  const Outcome computed = RunBatch(engine, batch, policy, Budget::Fraction(0.2));
  LayerInput& in = batch.inputs[0];
  const reference::Attention attention = reference::Attend(in.kv, in.rows, in.attention);
  const std::vector<float> out(attention.out.begin(), attention.out.end());
  const std::vector<float> lse(attention.lse.begin(), attention.lse.end());
  in.out = out.data();
  in.lse = lse.data();
  const Outcome given = RunBatch(engine, batch, policy, Budget::Fraction(0.2));
  ExpectSameLists(computed.keep, given.keep);
  EXPECT_GT(given.report.dominant_tokens, 0);
  EXPECT_EQ(given.report.dominant_tokens, computed.report.dominant_tokens);
  for (size_t i = 0; i < given.error.size(); ++i) {
    EXPECT_NEAR(given.error[i], computed.error[i], 1e-5);
    EXPECT_NEAR(given.mass[i], computed.mass[i], 1e-5);
  }
}

TEST(EngineTest, SameBitsForAnyThreadsAndBatch) {
  ScoreCase c;
  c.tokens = 4200;
  c.kv_heads = 1;
  c.group = 2;
  const Batch batch(c, 5);
  const Policy policy = Preset("adadropkv");
  Engine one = MakeEngine(1);
  const Outcome first = RunBatch(one, batch, policy, Budget::Fraction(0.1));
  for (const int32_t threads : {2, 3}) {
    Engine engine = MakeEngine(threads);
    for (int repeat = 0; repeat < 5; ++repeat) {
      const Outcome again = RunBatch(engine, batch, policy, Budget::Fraction(0.1));
      ExpectSameLists(first.keep, again.keep);
      EXPECT_EQ(first.raw, again.raw);
      EXPECT_EQ(first.error, again.error);
      EXPECT_EQ(first.mass, again.mass);
    }
  }
  const Batch alone(c, 1);
  const Outcome single = RunBatch(one, alone, policy, Budget::Fraction(0.1));
  EXPECT_TRUE(std::equal(single.raw.begin(), single.raw.end(), first.raw.begin()));
}

TEST(EngineTest, ShortPromptKeepsEverything) {
  Engine engine = MakeEngine(1);
  for (const int32_t tokens : {1, 5, 8}) {
    ScoreCase c;
    c.tokens = tokens;
    c.rows = tokens;
    const Batch batch(c, 2);
    const Outcome got = RunBatch(engine, batch, Preset("adadropkv"), Budget::Fraction(0.05));
    ExpectSameLists(got.keep, KeepList::All(2, c.kv_heads, tokens));
    EXPECT_EQ(got.error, std::vector<float>(got.error.size(), 0.0F));
  }
}

TEST(EngineTest, KeepingAllTokensChangesNothing) {
  Engine engine = MakeEngine(1);
  const ScoreCase c;
  const Batch batch(c, 1);
  const Outcome got = RunBatch(engine, batch, Preset("dropkv"), Budget::Fraction(1.0));
  ExpectSameLists(got.keep, KeepList::All(1, c.kv_heads, c.tokens));
  EXPECT_EQ(got.error, std::vector<float>(got.error.size(), 0.0F));
  EXPECT_GT(*std::ranges::max_element(got.scores), 0.0F);
}

class EngineErrorTest : public testing::Test {
 protected:
  EngineErrorTest() : batch_(case_, 1), engine_(MakeEngine(1)) {
    plan_ = *engine_.MakePlan(batch_.shape, Preset("dropkv"), Budget::Tokens(50));
    workspace_.resize(plan_.workspace_bytes);
  }

  void ExpectError(Code code, std::string_view text) {
    const Result<KeepList> keep = engine_.Run(plan_, batch_.inputs, workspace_, {}, nullptr);
    ASSERT_FALSE(keep.ok());
    EXPECT_EQ(keep.status().code(), code);
    EXPECT_NE(keep.status().message().find(text), std::string::npos) << keep.status().message();
  }

  ScoreCase case_;
  Batch batch_;
  Engine engine_;
  Plan plan_;
  std::vector<std::byte> workspace_;
};

TEST_F(EngineErrorTest, NamesWhatIsWrong) {
  const LayerInput good = batch_.inputs[0];
  LayerInput& in = batch_.inputs[0];
  in.kv.tokens = 150;
  ExpectError(Code::kInvalidArgument, "layer.kv");
  in = good;
  in.kv.k.data = nullptr;
  ExpectError(Code::kInvalidArgument, "kv.k.data");
  in = good;
  in.rows.rows = 7;
  ExpectError(Code::kInvalidArgument, "layer.rows.rows: expected 8");
  in = good;
  in.rows.query_heads = 4;
  ExpectError(Code::kInvalidArgument, "query_heads");
  in = good;
  const float lse = 0.0F;
  in.lse = &lse;
  ExpectError(Code::kInvalidArgument, "layer.out");
  in = good;
  workspace_.resize(plan_.workspace_bytes - 1);
  ExpectError(Code::kWorkspaceTooSmall, "workspace");
  batch_.inputs.clear();
  ExpectError(Code::kInvalidArgument, "layers: expected");
}

TEST_F(EngineErrorTest, CertifyNamesWhatIsWrong) {
  std::vector<float> error(case_.query_heads());
  const KeepList all = KeepList::All(1, case_.kv_heads, case_.tokens);
  const auto expect_error = [&](const KeepList& keep, float* target, std::string_view text) {
    const Status status = engine_.Certify(batch_.shape, batch_.inputs, keep, target, nullptr);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  EXPECT_TRUE(engine_.Certify(batch_.shape, batch_.inputs, all, error.data(), nullptr).ok());
  expect_error(all, nullptr, "output_error, evicted_mass");
  expect_error(KeepList::All(2, case_.kv_heads, 3), error.data(), "keep: expected lists of 1 layers and 2");
  expect_error(KeepList::All(1, case_.kv_heads, case_.tokens + 1), error.data(), "got 151 after 150");
  expect_error(KeepList(1, 2, {0, 2, 2}, {4, 3}), error.data(), "got 3 after 4");
  expect_error(KeepList(1, 2, {0, 1, 1}, {-1}), error.data(), "got -1 after -1");
  batch_.inputs[0].rows.rows = 0;
  expect_error(all, error.data(), "rows.rows");
  batch_.inputs[0].kv.tokens = 150;
  expect_error(all, error.data(), "layer.kv");
  batch_.inputs.clear();
  expect_error(all, error.data(), "layers: expected");
}

// More threads take more layers at once, hence more memory than the plan of an engine with one thread holds.
TEST_F(EngineErrorTest, PlanOfAnotherEngine) {
  const Batch batch(case_, 8);
  const Plan plan = *engine_.MakePlan(batch.shape, Preset("dropkv"), Budget::Tokens(50));
  Engine wide = MakeEngine(8);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  const Result<KeepList> keep = wide.Run(plan, batch.inputs, workspace, {}, nullptr);
  ASSERT_FALSE(keep.ok());
  EXPECT_EQ(keep.status().code(), Code::kFailedPrecondition);
}

TEST_F(EngineErrorTest, PlanAndCreate) {
  EvictShape shape = batch_.shape;
  shape.key_dim = 60;
  EXPECT_EQ(engine_.MakePlan(shape, Preset("dropkv"), Budget::Tokens(50)).status().code(), Code::kInvalidArgument);
  shape = batch_.shape;
  shape.query_heads = 7;
  EXPECT_EQ(engine_.MakePlan(shape, Preset("dropkv"), Budget::Tokens(50)).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(engine_.MakePlan(batch_.shape, Preset("dropkv"), Budget::Tokens(5)).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(Engine::Create({1, "AVX9"}).status().code(), Code::kNotFound);
  EXPECT_EQ(Engine::Create({-1, ""}).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace dropkv
