#include <tuple>

#include "cuda/step_check.h"

namespace dropkv::cuda {
namespace {

constexpr const char* kNoDevice = "there is no CUDA device";

// The kernels of this machine by name; "": the best one.
std::vector<std::string> Kernels() {
  return IsHopper() ? std::vector<std::string>{"any", "sm80", "sm90", ""} : std::vector<std::string>{"any", "sm80", ""};
}

using StepParam = std::tuple<const char*, DType, const char*, Layout>;  // kernel, dtype, policy, layout

class CudaStepTest : public testing::TestWithParam<StepParam> {};

TEST_P(CudaStepTest, FollowsTheContract) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const auto& [kernel, dtype, policy, layout] = GetParam();
  if (std::string(kernel) == "sm90" && !IsHopper()) GTEST_SKIP() << "the device is not of compute capability 9.0";
  const bool by_tokens = (std::string(kernel).size() / 2 + std::string(policy).size() + static_cast<int>(layout)) % 2;
  StepCase c = MakeStep(policy, by_tokens ? Budget::Tokens(96) : Budget::Fraction(0.1), kernel, dtype);
  c.batch.layout = layout;
  if (layout == Layout::kTokenMajor) c.batch.content = Content::kDominant;
  if (layout == Layout::kPaged) c.batch.content = Content::kNonFinite;
  SCOPED_TRACE(testing::PrintToString(c.batch) + " " + policy + " kernel " + kernel);
  const HostBatch batch(c.batch);
  StepRun run(c, batch);
  Ran ran;
  ASSERT_NO_FATAL_FAILURE(CheckStep(c, batch, run, &ran));
  const std::string expected = kernel[0] != '\0' ? kernel : IsHopper() ? "sm90" : "sm80";
  EXPECT_EQ(ran.attend, expected);
  EXPECT_EQ(ran.score, expected);
  EXPECT_EQ(ran.refused, "");
}

INSTANTIATE_TEST_SUITE_P(All, CudaStepTest,
                         testing::Combine(testing::Values("any", "sm80", "sm90", ""),
                                          testing::Values(DType::kF16, DType::kBF16),
                                          testing::Values("dropkv", "adadropkv", "ada-o", "snapkv"),
                                          testing::Values(Layout::kHeadMajor, Layout::kTokenMajor, Layout::kPaged)));

using Tokens = std::vector<std::pair<int32_t, int32_t>>;  // (head, token)

Tokens In(const StepResult& result, int32_t sequence, int32_t heads) {
  Tokens tokens;
  for (int32_t h = 0; h < heads; ++h)
    for (const int32_t j : result.list(sequence * heads + h)) tokens.emplace_back(h, j);
  return tokens;
}

Tokens In(const KeepList& lists) {
  Tokens tokens;
  for (int32_t h = 0; h < lists.kv_heads(); ++h)
    for (const int32_t j : lists.head(0, h)) tokens.emplace_back(h, j);
  return tokens;
}

// One of two lists may keep a token in another's place only where the scores tell them apart by less than the bounds.
// across: heads share the budget.
void ExpectSwapsInBand(const Tokens& a, const Tokens& b, const SequenceScores& scores, double bounds, bool across) {
  ASSERT_EQ(a.size(), b.size());
  Tokens only_a, only_b;
  std::ranges::set_difference(a, b, std::back_inserter(only_a));
  std::ranges::set_difference(b, a, std::back_inserter(only_b));
  EXPECT_LE(only_a.size(), a.size() / 5);
  for (const auto& [head, token] : only_a)
    for (const auto& [other_head, other] : only_b) {
      if (!across && head != other_head) continue;
      const int64_t x = int64_t{head} * scores.tokens + token;
      const int64_t y = int64_t{other_head} * scores.tokens + other;
      EXPECT_EQ(scores.flags[x] | scores.flags[y], 0) << "a flagged token is gone";
      EXPECT_LE(std::abs(scores.pooled[x] - scores.pooled[y]), bounds * (scores.tolerance[x] + scores.tolerance[y]))
          << "head " << head << " token " << token << " for head " << other_head << " token " << other;
    }
}

// Rows computed here and handed in, beside the reference's own lists and beside each other.
TEST(CudaStep, KeepsWhatTheReferenceKeeps) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const char* policy : {"dropkv", "adadropkv", "snapkv"})
    for (const DType dtype : {DType::kF16, DType::kBF16})
      for (const Content content : {Content::kNormal, Content::kDominant}) {
        StepCase c = MakeStep(policy, Budget::Fraction(0.1), "", dtype);
        c.batch.content = content;
        const HostBatch batch(c.batch);
        // Bounds of the careful kernel, and the loosest of all that run below.
        const Precision loosest = WithGivenRows(cuda::PrecisionOf(true, dtype), DType::kF32, dtype);
        std::vector<SequenceScores> careful, others;
        for (int32_t b = 0; b < c.batch.sequences(); ++b) {
          careful.push_back(ScoresOfReference(c, batch, b, {}));
          others.push_back(ScoresOfReference(c, batch, b, loosest));
        }
        std::optional<StepResult> computed;
        for (const std::string& kernel : Kernels())
          for (const std::optional<DType> given :
               {std::optional<DType>(), std::optional(DType::kF32), std::optional(dtype)}) {
            c.kernel = kernel;
            c.given = given;
            SCOPED_TRACE(std::string(policy) + " " + testing::PrintToString(c.batch) + " kernel " + kernel +
                         (given.has_value() ? " given " + std::string(DTypeName(*given)) : ""));
            StepRun run(c, batch);
            Ran ran;
            const StepResult result = run.Run(Placement::kOutOfPlace, &ran);
            EXPECT_EQ(ran.attend == "given", given.has_value());
            if (!computed.has_value()) computed = result;
            const bool across = c.policy.heads != HeadRule::kUniform;
            const auto& scores = kernel == "any" && !given.has_value() ? careful : others;
            for (int32_t b = 0; b < c.batch.sequences(); ++b) {
              const Tokens own = In(result, b, c.batch.kv_heads);
              ExpectSwapsInBand(own, In(ListsOf(c, scores[b])), scores[b], 1.0, across);
              ExpectSwapsInBand(own, In(*computed, b, c.batch.kv_heads), others[b], 2.0, across);
            }
          }
      }
}

TEST(CudaStep, SameBitsEveryTimeAndInAGraph) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const std::string& kernel : Kernels())
    for (const Content content : {Content::kDominant, Content::kNonFinite}) {
      StepCase c = MakeStep("adadropkv", Budget::Fraction(0.1), kernel, DType::kBF16);
      c.batch.content = content;
      SCOPED_TRACE(testing::PrintToString(c.batch) + " kernel " + kernel);
      StepRun run(c, HostBatch(c.batch));
      const StepResult first = run.Run(Placement::kOutOfPlace);
      for (int repeat = 0; repeat < 20; ++repeat)
        ASSERT_TRUE(run.Run(Placement::kOutOfPlace).bytes == first.bytes) << "repeat " << repeat;
      run.Clear();
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t instance = nullptr;
      Check(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeGlobal), "begin");
      const Status status = run.Launch(Placement::kOutOfPlace);
      Check(cudaStreamEndCapture(run.stream(), &graph), "end");
      ASSERT_TRUE(status.ok()) << status.message();
      Check(cudaGraphInstantiate(&instance, graph, 0), "instantiate");
      for (int replay = 0; replay < 5; ++replay) {
        run.Clear();
        Check(cudaGraphLaunch(instance, run.stream()), "launch");
        EXPECT_TRUE(run.Download().bytes == first.bytes) << "replay " << replay;
      }
      cudaGraphExecDestroy(instance);
      cudaGraphDestroy(graph);
    }
}

TEST(CudaStep, StepsApartMakeTheSameLists) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const StepCase c = MakeStep("adadropkv", Budget::Tokens(200), "", DType::kF16);
  StepRun run(c, HostBatch(c.batch));
  const StepResult whole = run.Run(Placement::kOutOfPlace);
  run.Clear();
  Outputs outputs = run.outputs(Placement::kOutOfPlace);
  outputs.raw_scores = nullptr;  // they stay in the workspace
  ASSERT_TRUE(Score(run.plan, run.cache, run.rows, outputs, run.workspace(), run.stream()).ok());
  ASSERT_TRUE(Select(run.plan, run.cache, outputs, run.workspace(), run.stream()).ok());
  ASSERT_TRUE(Compact(run.plan, run.cache, outputs, run.workspace(), run.stream()).ok());
  const StepResult apart = run.Download();
  EXPECT_EQ(apart.offsets, whole.offsets);
  EXPECT_EQ(apart.positions, whole.positions);
  EXPECT_TRUE(apart.k == whole.k && apart.v == whole.v);
  EXPECT_TRUE(Untouched(apart.raw, 0, apart.raw.size()));
}

// A view that TMA does not take: another kernel runs, says why, and sm90 by force is an error.
TEST(CudaStep, FallsBackWhereAKernelRefuses) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  StepCase c = MakeStep("dropkv", Budget::Fraction(0.1), "", DType::kBF16);
  c.batch.misaligned = true;
  const HostBatch batch(c.batch);
  StepRun run(c, batch);
  Ran ran;
  const StepResult result = run.Run(Placement::kOutOfPlace, &ran);
  EXPECT_EQ(ran.score, ran.attend);
  EXPECT_NE(ran.score, "sm90");
  if (IsHopper()) EXPECT_EQ(ran.refused, "a cache that does not start at a multiple of 16 bytes");
  StepChecker checker(c, batch, result);
  ASSERT_NO_FATAL_FAILURE(checker.CheckLists());
  ASSERT_NO_FATAL_FAILURE(checker.CheckKeptRows());
  if (!IsHopper()) return;
  c.kernel = "sm90";
  StepRun forced(c, batch);
  forced.Clear();
  const Status status = forced.Launch(Placement::kOutOfPlace);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message().rfind("force_kernel: sm90 does not take a cache", 0), 0U) << status.message();
}

}  // namespace
}  // namespace dropkv::cuda
