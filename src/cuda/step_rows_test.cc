// Rows and tokens beyond the prompt: generated tokens, weights, and rows that are not the window's.
#include <array>
#include <tuple>

#include "cuda/step_check.h"

namespace dropkv::cuda {
namespace {

constexpr const char* kNoDevice = "there is no CUDA device";

using RowsParam = std::tuple<const char*, const char*, int>;  // kernel, policy, variant

// Sequences that are nothing but generated, of few and of many candidates.
StepCase MakeRowsStep(const std::string& policy, const Budget& budget, const std::string& kernel, int variant) {
  StepCase c = MakeStep(policy, budget, kernel, variant % 2 == 0 ? DType::kBF16 : DType::kF16);
  c.batch.rows = 19;
  c.batch.generated = variant == 0 ? 12 : 45;
  c.batch.generated_each = variant % 2 == 1;
  c.batch.weights = variant > 0;
  switch (variant) {
    case 1:
      c.batch.layout = Layout::kTokenMajor, c.batch.content = Content::kDominant;
      break;
    case 2:
      c.batch.layout = Layout::kPaged, c.batch.content = Content::kNonFinite;
      break;
    case 3:
      c.batch.layout = Layout::kPaged, c.batch.any_visible = true, c.batch.sinks = true;
      break;
    case 4:
      c.batch.generated = 0, c.batch.any_visible = true;  // weights alone
      break;
    default:
      break;
  }
  return c;
}

class CudaStepRowsTest : public testing::TestWithParam<RowsParam> {};

TEST_P(CudaStepRowsTest, FollowsTheContract) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const auto& [kernel, policy, variant] = GetParam();
  if (std::string(kernel) == "sm90" && !IsHopper()) GTEST_SKIP() << "the device is not of compute capability 9.0";
  const StepCase c =
      MakeRowsStep(policy, variant % 3 == 0 ? Budget::Tokens(96) : Budget::Fraction(0.1), kernel, variant);
  SCOPED_TRACE(testing::PrintToString(c.batch) + " " + policy + " kernel " + kernel);
  const HostBatch batch(c.batch);
  StepRun run(c, batch);
  Ran ran;
  ASSERT_NO_FATAL_FAILURE(CheckStep(c, batch, run, &ran));
  EXPECT_EQ(ran.score, kernel);
}

INSTANTIATE_TEST_SUITE_P(All, CudaStepRowsTest,
                         testing::Combine(testing::Values("any", "sm80", "sm90"),
                                          testing::Values("dropkv", "adadropkv", "ada-o", "snapkv"),
                                          testing::Range(0, 5)));

DeviceCase MakeRandomBatch(cpu::RandomStream& random) {
  DeviceCase c;
  c.lengths.clear();
  for (int32_t b = random.Below(3); b >= 0; --b) c.lengths.push_back(40 + random.Below(200));
  c.group = 1 + random.Below(4);
  c.rows = 1 + random.Below(40);
  c.key_dim = 8 * (1 + random.Below(16));
  c.value_dim = 8 * (1 + random.Below(16));
  c.layout = std::array{Layout::kHeadMajor, Layout::kTokenMajor, Layout::kPaged}[random.Below(3)];
  c.dtype = random.Below(2) == 0 ? DType::kF16 : DType::kBF16;
  c.content = random.Below(4) == 0 ? Content::kNonFinite : Content::kNormal;
  c.soft_cap = random.Below(4) == 0 ? 5.0F : 0.0F;
  c.sinks = random.Below(3) == 0;
  c.any_visible = random.Below(2) == 0;
  c.generated = random.Below(3) == 0 ? 0 : 1 + random.Below(30);
  c.generated_each = random.Below(2) == 0;
  c.weights = random.Below(3) > 0;
  return c;
}

StepCase MakeRandomStep(uint64_t seed, const std::string& kernel) {
  cpu::RandomStream random(seed);
  StepCase c{MakeRandomBatch(random), {}, {}, kernel, {}};
  c.policy.signal = random.Below(3) > 0 ? Signal::kDropKv : Signal::kAttention;
  c.policy.window = 1 + random.Below(9);
  c.policy.sink = random.Below(4);
  c.policy.pool = {random.Below(2) == 0 ? PoolKind::kMean : PoolKind::kMax, random.Below(4), random.Below(40),
                   random.Below(2) == 0};
  c.policy.heads = static_cast<HeadRule>(random.Below(3));
  c.budget = random.Below(2) == 0 ? Budget::Fraction(0.25)
                                  : Budget::Tokens(c.policy.window + c.policy.sink + 6 + random.Below(30));
  c.batch.odd_values = c.policy.signal == Signal::kDropKv;
  if (random.Below(4) == 0) c.given = DType::kF32;
  return c;
}

class CudaStepRowsRandomTest : public testing::TestWithParam<const char*> {};

TEST_P(CudaStepRowsRandomTest, FollowsTheContract) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const std::string kernel = GetParam();
  if (kernel == "sm90" && !IsHopper()) GTEST_SKIP() << "the device is not of compute capability 9.0";
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const StepCase c = MakeRandomStep(seed, kernel);
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + testing::PrintToString(c.batch) + " heads " +
                 std::string(HeadRuleName(c.policy.heads)) + " signal " +
                 std::to_string(static_cast<int>(c.policy.signal)) + (c.given.has_value() ? " given" : ""));
    const HostBatch batch(c.batch);
    StepRun run(c, batch);
    ASSERT_NO_FATAL_FAILURE(CheckStep(c, batch, run, nullptr));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaStepRowsRandomTest, testing::Values("any", "sm80", "sm90"));

std::vector<std::vector<int32_t>> ListsIn(const StepCase& c, const StepResult& result) {
  std::vector<std::vector<int32_t>> lists(c.batch.lists());
  for (int32_t i = 0; i < c.batch.lists(); ++i) lists[i].assign(result.list(i).begin(), result.list(i).end());
  return lists;
}

// Without pooling and with uniform heads, a prompt whose protected window is longer by the generated tokens.
TEST(CudaStepRows, GeneratedTokensEqualALongerProtectedWindow) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    StepCase c = MakeRowsStep("dropkv", Budget::Tokens(96), "", 0);
    c.policy.signal = signal;
    c.policy.pool = {};
    c.batch.odd_values = signal == Signal::kDropKv;
    const HostBatch batch(c.batch);
    const StepResult result = StepRun(c, batch).Run(Placement::kOutOfPlace);
    StepCase longer = c;
    longer.policy.window += c.batch.generated;
    longer.budget = Budget::Tokens(96 + c.batch.generated);
    longer.batch.generated = 0;
    const StepResult want = StepRun(longer, HostBatch(longer.batch)).Run(Placement::kOutOfPlace);
    EXPECT_EQ(ListsIn(c, result), ListsIn(longer, want));
    if (signal != Signal::kDropKv) continue;  // it has no certificate
    EXPECT_EQ(result.output_error, want.output_error);
    EXPECT_EQ(result.evicted_mass, want.evicted_mass);
  }
}

// The window's rows named by their visible counts: the certificate then looks up what they see of every list.
TEST(CudaStepRows, NamingTheWindowsRowsChangesNoBit) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  StepCase c = MakeStep("adadropkv", Budget::Fraction(0.1), "", DType::kBF16);
  StepRun run(c, HostBatch(c.batch));
  const StepResult plain = run.Run(Placement::kOutOfPlace);
  std::vector<int32_t> visible;
  for (const int32_t n : c.batch.lengths)
    for (int32_t i = 0; i < c.batch.rows; ++i) visible.push_back(n - c.batch.rows + i + 1);
  const DeviceArray<int32_t> named(visible);
  run.rows.visible = named.get();
  EXPECT_TRUE(run.Run(Placement::kOutOfPlace).bytes == plain.bytes);
}

// The certificate takes rows alike, whatever their weights.
TEST(CudaStepRows, TheCertificateIgnoresWeights) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const StepCase c = MakeRowsStep("dropkv", Budget::Tokens(8), "", 0);  // the window alone is kept, whatever the scores
  StepRun run(c, HostBatch(c.batch));
  const StepResult plain = run.Run(Placement::kOutOfPlace);
  std::vector<float> weights(int64_t{c.batch.sequences()} * c.batch.rows, 0.0F);
  for (int32_t b = 0; b < c.batch.sequences(); ++b) weights[b * c.batch.rows + 3] = 5.0F;
  const DeviceArray<float> one_counts(weights);
  run.rows.weights = one_counts.get();
  const StepResult weighted = run.Run(Placement::kOutOfPlace);
  EXPECT_EQ(weighted.positions, plain.positions);
  EXPECT_EQ(weighted.output_error, plain.output_error);
  EXPECT_EQ(weighted.evicted_mass, plain.evicted_mass);
  EXPECT_GT(*std::ranges::max_element(plain.output_error), 0.1F);
  EXPECT_NE(std::memcmp(weighted.raw.data(), plain.raw.data(), plain.raw.size() * sizeof(float)), 0);
}

TEST(CudaStepRows, SameBitsEveryTime) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const char* kernel : {"any", "sm80", ""})
    for (int variant = 0; variant < 5; ++variant) {
      const StepCase c = MakeRowsStep("adadropkv", Budget::Fraction(0.1), kernel, variant);
      SCOPED_TRACE(testing::PrintToString(c.batch) + " kernel " + kernel);
      StepRun run(c, HostBatch(c.batch));
      const StepResult first = run.Run(Placement::kOutOfPlace);
      for (int repeat = 0; repeat < 10; ++repeat)
        ASSERT_TRUE(run.Run(Placement::kOutOfPlace).bytes == first.bytes) << "repeat " << repeat;
    }
}

}  // namespace
}  // namespace dropkv::cuda
