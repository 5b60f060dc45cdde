#include "cpu/attend.h"

#include <gtest/gtest.h>

#include "cpu/score_case.h"
#include "reference/reference.h"
#include "reference/tolerance.h"

namespace dropkv::cpu {
namespace {

struct Outputs {
  std::vector<float> out;   // [Hq, w, dv]
  std::vector<double> lse;  // [Hq, w]
};

// Attend over all tokens in ranges of `split`, merged in order.
Outputs RunAttend(const Kernels& kernels, const ScoreCase& c, CaseData& data, int32_t split) {
  std::vector<std::byte> memory(size_t{8} << 20);
  Outputs result;
  for (int32_t head = 0; head < c.kv_heads; ++head) {
    Workspace workspace(memory);
    const HeadTokens tokens = MakeHeadTokens(data.kv(), head);
    const LaneLayout layout(c.head_rows(), kernels.vector_lanes, kernels.panel_vectors);
    const PackedRows packed = PackedRows::Take(workspace, layout.lanes, c.key_dim);
    const TileScratch scratch = TileScratch::Take(workspace, c.key_dim, c.value_dim);
    const SoftmaxState all = TakeState(workspace, layout.lanes, c.value_dim);
    const SoftmaxState part = TakeState(workspace, layout.lanes, c.value_dim);
    std::vector<float> center(c.value_dim);
    std::vector<float> row(c.value_dim);
    std::vector<float> out(c.value_dim);
    std::vector<uint8_t> flags(c.tokens);
    EXPECT_FALSE(workspace.overflow());
    ChooseCenter(kernels, tokens, row.data(), center.data());
    const RowChoice choice{nullptr, c.head_rows()};
    const HeadRows rows = PackRows(kernels, data.rows(), data.attention(), c.kv_heads, head, choice, tokens, packed);
    ResetState(layout.lanes, c.value_dim, true, all);
    for (int32_t begin = 0; begin < c.tokens; begin += split) {
      ResetState(layout.lanes, c.value_dim, true, part);
      kernels.attend(tokens, rows, center.data(), begin, std::min(c.tokens, begin + split), part, flags.data(),
                     scratch);
      MergeState(kernels, tokens, layout, center.data(), part, all, row.data());
    }
    for (int32_t id = 0; id < c.head_rows(); ++id) {
      const double sink = c.sinks ? data.attention().sinks[head * c.group + id / c.rows] : -INFINITY;
      const RowResult finished =
          FinishRow(kernels, tokens, layout, center.data(), sink, all, id, out.data(), row.data());
      const bool skipped = !IsFinite(QueryOf(data.rows(), c.kv_heads, head, id), c.key_dim);
      result.lse.push_back(skipped ? NAN : finished.lse);
      for (int32_t i = 0; i < c.value_dim; ++i) result.out.push_back(skipped ? 0.0F : out[i] + center[i]);
    }
  }
  return result;
}

class AttendTest : public testing::TestWithParam<ScoreCase> {};

TEST_P(AttendTest, MatchesReferenceOnEveryInstructionSet) {
  const ScoreCase& c = GetParam();
  CaseData data(c);
  const reference::Attention want = reference::Attend(data.kv(), data.rows(), data.attention());
  const reference::Tolerances bounds =
      reference::LayerTolerances(data.kv(), data.rows(), data.attention(), *FindPreset("streaming"));
  for (const Kernels& kernels : KernelTable()) {
    SCOPED_TRACE(kernels.name);
    const Outputs got = RunAttend(kernels, c, data, 4096);
    ExpectWithin(got.lse, want.lse, bounds.lse, 1, "lse");
    ExpectWithin(got.out, want.out, bounds.out, c.value_dim, "out");
  }
}

TEST_P(AttendTest, RangesMergeToTheSameResult) {
  const ScoreCase& c = GetParam();
  if (c.tokens > 200) GTEST_SKIP() << "covered by the first test, which splits long cases";
  CaseData data(c);
  const reference::Attention want = reference::Attend(data.kv(), data.rows(), data.attention());
  const reference::Tolerances bounds =
      reference::LayerTolerances(data.kv(), data.rows(), data.attention(), *FindPreset("streaming"));
  for (const int32_t split : {1, 50}) {
    const Outputs got = RunAttend(KernelTable().front(), c, data, split);
    ExpectWithin(got.lse, want.lse, bounds.lse, 1, "lse");
    ExpectWithin(got.out, want.out, bounds.out, c.value_dim, "out");
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttendTest, testing::ValuesIn(AllCases()));

// Logits that grow with the position make every token the top in turn: each one joins the others later.
TEST(AttendTest, RisingLogits) {
  const ScoreCase c{1, 1, 1, 151, 8, 8};
  CaseData data(c);
  std::vector<float> keys(static_cast<size_t>(c.tokens) * c.key_dim);
  KvView kv = data.kv();
  const ObservationRows rows = data.rows();
  for (int32_t j = 0; j < c.tokens; ++j)
    for (int32_t i = 0; i < c.key_dim; ++i) keys[j * c.key_dim + i] = rows.q[i] * 0.01F * static_cast<float>(j);
  kv.k = {keys.data(), DType::kF32, 0, c.key_dim, 1};
  const reference::Attention want = reference::Attend(kv, rows, data.attention());
  for (const Kernels& kernels : KernelTable()) {
    SCOPED_TRACE(kernels.name);
    std::vector<std::byte> memory(size_t{1} << 20);
    Workspace workspace(memory);
    const HeadTokens tokens = MakeHeadTokens(kv, 0);
    const LaneLayout layout(1, kernels.vector_lanes, kernels.panel_vectors);
    const PackedRows packed = PackedRows::Take(workspace, layout.lanes, c.key_dim);
    const TileScratch scratch = TileScratch::Take(workspace, c.key_dim, c.value_dim);
    const SoftmaxState state = TakeState(workspace, layout.lanes, c.value_dim);
    const HeadRows packed_rows = PackRows(kernels, rows, data.attention(), 1, 0, {nullptr, 1}, tokens, packed);
    std::vector<float> center(c.value_dim, 0.0F);
    std::vector<float> out(c.value_dim);
    std::vector<float> row(c.value_dim);
    ResetState(layout.lanes, c.value_dim, true, state);
    kernels.attend(tokens, packed_rows, center.data(), 0, c.tokens, state, nullptr, scratch);
    const RowResult result =
        FinishRow(kernels, tokens, layout, center.data(), -INFINITY, state, 0, out.data(), row.data());
    EXPECT_EQ(state.token[0], c.tokens - 1);
    EXPECT_NEAR(result.lse, want.lse[0], 1e-5);
    for (int32_t i = 0; i < c.value_dim; ++i) EXPECT_NEAR(out[i], want.out[i], 1e-5);
  }
}

}  // namespace
}  // namespace dropkv::cpu
