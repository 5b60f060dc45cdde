#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "cuda/device_batch.h"
#include "cuda/device_tolerance.h"
#include "reference/reference.h"

namespace dropkv::cuda {
namespace {

using KernelCase = std::tuple<DeviceCase, const char*>;

Policy PolicyOf(Signal signal, const DeviceCase& c) {
  Policy policy;
  policy.signal = signal;
  policy.window = c.rows;
  return policy;
}

// Tokens that must be flagged, and those that may be: a row near the threshold may go either way.
struct Flags {
  std::vector<bool> must;
  std::vector<bool> may;

  Flags(const RowBounds& bounds, int32_t tokens) : must(tokens, false), may(tokens, false) {
    for (size_t i = 0; i < bounds.top.size(); ++i) {
      if (bounds.top[i] < 0 || bounds.top[i] >= tokens || bounds.weight[i] == 0.0) continue;
      if (bounds.top_rest[i] < 0.95e-6) must[bounds.top[i]] = true;
      if (bounds.top_rest[i] < 1.05e-6) may[bounds.top[i]] = true;
    }
  }
};

// One list's raw scores beside the reference; behind its last candidate nothing was written.
void CheckList(const HostBatch& batch, int32_t list, Signal signal, const Precision& precision,
               const std::vector<float>& raw) {
  const DeviceCase& c = batch.shape();
  const int32_t n = batch.candidates(list);
  const float* got = raw.data() + int64_t{list} * c.max_tokens();
  const reference::Scores want = reference::Score(batch.kv(list), batch.rows(list), batch.attention(list),
                                                  PolicyOf(signal, c), 0, batch.generated(list));
  RowBounds bounds = BoundsOf(batch.kv(list), batch.rows(list), batch.attention(list), precision);
  bounds.loss.resize(n);
  bounds.share.resize(n);
  std::vector<float> sizes(got, got + n);
  for (float& x : sizes) x = std::abs(x);
  cpu::ExpectWithin(sizes, want.raw, signal == Signal::kDropKv ? bounds.loss : bounds.share, 1, "raw");
  const Flags flags(bounds, n);
  for (int32_t j = 0; j < n; ++j) {
    if (std::isnan(got[j])) continue;
    const bool flagged = std::signbit(got[j]);
    if (signal == Signal::kDropKv) {
      EXPECT_TRUE(flagged ? flags.may[j] : !flags.must[j]) << "token " << j << " flagged " << flagged;
    } else {
      EXPECT_FALSE(flagged) << "token " << j;
    }
  }
  for (int32_t j = n; j < c.max_tokens(); ++j)
    EXPECT_EQ(std::bit_cast<uint32_t>(got[j]), 0xFFFFFFFFU) << "behind the end, at " << j;
}

void CheckAll(const HostBatch& batch, Signal signal, const Precision& precision, const std::vector<float>& raw) {
  for (int32_t list = 0; list < batch.shape().lists(); ++list) {
    SCOPED_TRACE("list " + std::to_string(list));
    CheckList(batch, list, signal, precision, raw);
    if (testing::Test::HasFailure()) return;
  }
}

class CudaScoreTest : public testing::TestWithParam<KernelCase> {
 protected:
  const DeviceCase& shape() const { return std::get<0>(GetParam()); }
  // The attention signal does not look for values that are none.
  DeviceCase ShapeFor(Signal signal) const {
    DeviceCase c = shape();
    c.odd_values = signal == Signal::kDropKv;
    return c;
  }
  std::string kernel() const { return std::get<1>(GetParam()); }
  Precision precision() const { return PrecisionOf(kernel() != "any", shape().dtype); }
};

TEST_P(CudaScoreTest, MatchesReference) {
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    SCOPED_TRACE(static_cast<int>(signal));
    const HostBatch batch(ShapeFor(signal));
    const DeviceBatch device(batch);
    const std::string refusal = Refusal(kernel(), device.attend(), device.score(signal));
    if (!refusal.empty()) GTEST_SKIP() << refusal;
    const OwnedStream stream;
    AttendParams attend = device.attend();
    if (signal == Signal::kAttention) attend.partials.out = nullptr;
    LaunchChain(kernel(), attend, device.score(signal), stream.get());
    CheckAll(batch, signal, precision(), device.raw.Download());
  }
}

// Twenty repeats on the same memory, the last one as a graph.
TEST_P(CudaScoreTest, SameBitsEveryTime) {
  const HostBatch batch(shape());
  const DeviceBatch device(batch);
  const ScoreParams score = device.score(Signal::kDropKv);
  const std::string refusal = Refusal(kernel(), device.attend(), score);
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  const OwnedStream stream;
  LaunchChain(kernel(), device.attend(), score, stream.get());
  const std::vector<float> raw = device.raw.Download();
  const std::vector<float> out = device.out.Download();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "capture");
  LaunchChain(kernel(), device.attend(), score, stream.get());
  Check(cudaStreamEndCapture(stream.get(), &graph), "end of capture");
  Check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  for (int repeat = 1; repeat <= 20; ++repeat) {
    if (repeat == 20) {
      Check(cudaGraphLaunch(executable, stream.get()), "graph");
    } else {
      LaunchChain(kernel(), device.attend(), score, stream.get());
    }
    const std::vector<float> raw_again = device.raw.Download();
    const std::vector<float> out_again = device.out.Download();
    ASSERT_EQ(std::memcmp(raw.data(), raw_again.data(), raw.size() * sizeof(float)), 0) << repeat;
    ASSERT_EQ(std::memcmp(out.data(), out_again.data(), out.size() * sizeof(float)), 0) << repeat;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// The reference's outputs and log-sum-exps, as a prefill would hand them in.
struct GivenRows {
  std::vector<float> lse;
  std::vector<float> out;
  std::vector<uint16_t> out16;

  explicit GivenRows(const HostBatch& batch) {
    for (int32_t list = 0; list < batch.shape().lists(); ++list) {
      const reference::Attention attention = reference::Attend(batch.kv(list), batch.rows(list), batch.attention(list));
      lse.insert(lse.end(), attention.lse.begin(), attention.lse.end());
      out.insert(out.end(), attention.out.begin(), attention.out.end());
    }
    for (const float x : out) out16.push_back(Round(batch.shape().dtype, x));
  }
};

// Weights of 1 are no weights; weights a power of two larger give scores that much larger, and the same means.
TEST_P(CudaScoreTest, WeightsScaleTheScores) {
  DeviceCase c = shape();
  if (!c.weights) GTEST_SKIP() << "a case without weights";
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    c.odd_values = signal == Signal::kDropKv;
    const HostBatch batch(c);
    const DeviceBatch device(batch);
    AttendParams attend = device.attend();
    ScoreParams score = device.score(signal);
    const std::string refusal = Refusal(kernel(), attend, score);
    if (!refusal.empty()) GTEST_SKIP() << refusal;
    if (signal == Signal::kAttention) attend.partials.out = nullptr;
    const OwnedStream stream;
    const auto scores = [&](const std::vector<float>& weights) {
      const DeviceArray<float> on_device(weights);
      attend.rows.weights = score.rows.weights = weights.empty() ? nullptr : on_device.get();
      LaunchChain(kernel(), attend, score, stream.get());
      return device.raw.Download();
    };
    std::vector<float> fourfold = batch.weights();
    for (float& x : fourfold) x *= 4.0F;
    const std::vector<float> once = scores(batch.weights());
    const std::vector<float> more = scores(fourfold);
    const float factor = signal == Signal::kDropKv ? 4.0F : 1.0F;
    for (size_t i = 0; i < once.size(); ++i)
      if (!std::isnan(once[i]) && std::abs(once[i]) > 1e-20F) ASSERT_EQ(more[i], factor * once[i]) << "at " << i;
    const std::vector<float> ones = scores(std::vector<float>(fourfold.size(), 1.0F));
    c.weights = false;
    CheckAll(HostBatch(c), signal, precision(), ones);
    c.weights = true;
    if (kernel() != "any") continue;  // others have an instance for weights, whose sums may be fused in another way
    const std::vector<float> plain = scores({});
    ASSERT_EQ(std::memcmp(ones.data(), plain.data(), plain.size() * sizeof(float)), 0);
  }
}

class CudaGivenRowsTest : public CudaScoreTest {
 protected:
  void Run(const HostBatch& batch, const GivenRows& given, Signal signal, DType dtype) {
    SCOPED_TRACE(std::string(DTypeName(dtype)) + " signal " + std::to_string(static_cast<int>(signal)));
    const DeviceBatch device(batch);
    const DeviceArray<float> lse(given.lse);
    const DeviceArray<float> out(given.out);
    const DeviceArray<uint16_t> out16(given.out16);
    AttendParams attend = device.attend();
    attend.given_lse = lse.get();
    attend.given_out = dtype == DType::kF32 ? static_cast<const void*>(out.get()) : out16.get();
    attend.given_dtype = dtype;
    ScoreParams score = device.score(signal);
    score.find_tops = signal == Signal::kDropKv;
    const std::string refusal = Refusal(kernel(), attend, score);
    if (!refusal.empty()) GTEST_SKIP() << refusal;
    const OwnedStream stream;
    LaunchChain(kernel(), attend, score, stream.get());
    CheckAll(batch, signal, WithGivenRows(precision(), dtype, shape().dtype), device.raw.Download());
  }
};

TEST_P(CudaGivenRowsTest, MatchReference) {
  for (const Signal signal : {Signal::kDropKv, Signal::kAttention}) {
    const HostBatch batch(ShapeFor(signal));
    const GivenRows given(batch);
    for (const DType dtype : {DType::kF32, shape().dtype}) Run(batch, given, signal, dtype);
  }
}

// A judging row whose numbers are none: its head is attended here.
TEST_P(CudaGivenRowsTest, NotFinite) {
  const HostBatch batch(shape());
  GivenRows given(batch);
  given.lse.back() = NAN;
  given.out.front() = INFINITY;
  Run(batch, given, Signal::kDropKv, DType::kF32);
}

const auto kEveryKernel = testing::Combine(testing::ValuesIn(AllDeviceCases()), testing::Values("any", "sm80", "sm90"));
INSTANTIATE_TEST_SUITE_P(All, CudaScoreTest, kEveryKernel);
INSTANTIATE_TEST_SUITE_P(All, CudaGivenRowsTest, kEveryKernel);

}  // namespace
}  // namespace dropkv::cuda
