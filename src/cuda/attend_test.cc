#include <gtest/gtest.h>

#include <numbers>

#include "cuda/device_batch.h"
#include "cuda/device_tolerance.h"
#include "reference/reference.h"

namespace dropkv::cuda {
namespace {

using KernelCase = std::tuple<DeviceCase, const char*>;

// What a chain of launches left in the rows' state.
struct GotRows {
  std::vector<float> lse2;
  std::vector<float> out;
  std::vector<uint16_t> out16;
  std::vector<float> norm;
  std::vector<int32_t> top;
  std::vector<float> contribution;

  explicit GotRows(const DeviceBatch& device)
      : lse2(device.lse2.Download()),
        out(device.out.Download()),
        out16(device.out16.Download()),
        norm(device.norm.Download()),
        top(device.top.Download()),
        contribution(device.contribution.Download()) {}
};

// One list's rows beside the reference.
class RowCheck {
 public:
  RowCheck(const HostBatch& batch, int32_t list, const Precision& precision, const GotRows& got)
      : case_(batch.shape()),
        first_(list * case_.head_rows()),
        got_(got),
        layer_(reference::LoadLayer(batch.kv(list))),
        rows_(batch.rows(list)),
        want_(reference::Attend(batch.kv(list), rows_, batch.attention(list))),
        bounds_(BoundsOf(batch.kv(list), rows_, batch.attention(list), precision)) {}

  void Check() const {
    for (int32_t i = 0; i < case_.head_rows(); ++i) {
      SCOPED_TRACE("row " + std::to_string(first_ + i));
      CheckRounded(first_ + i);
      if (Judges(i)) {
        CheckValues(i);
        CheckTop(i);
      } else {
        CheckSilent(first_ + i);
      }
      if (testing::Test::HasFailure()) return;
    }
  }

  int64_t skipped_rows() const { return want_.skipped_rows; }

 private:
  bool Judges(int32_t i) const {
    if (std::isnan(want_.lse[i])) return false;
    bool seen = false;
    for (int32_t j = 0; j < rows_.visible[i % case_.rows]; ++j) seen = seen || layer_.takes_part(0, j);
    return seen;
  }

  void CheckSilent(int32_t row) const {
    EXPECT_EQ(got_.lse2[row], INFINITY);
    EXPECT_EQ(got_.top[row], -1);
    EXPECT_EQ(got_.contribution[row], 0.0F);
    for (int32_t e = 0; e < case_.value_dim; ++e) ASSERT_EQ(got_.out[row * case_.value_dim + e], 0.0F);
  }

  // out16 and norm are out's, whatever that is.
  void CheckRounded(int32_t row) const {
    double norm = 0.0;
    for (int32_t e = row * case_.value_dim; e < (row + 1) * case_.value_dim; ++e) {
      ASSERT_EQ(got_.out16[e], Round(case_.dtype, got_.out[e]));
      const double x = Widen(case_.dtype, got_.out16[e]);
      norm += x * x;
    }
    EXPECT_NEAR(got_.norm[row], norm, reference::Gamma(case_.value_dim + 2.0) * norm);
  }

  void CheckValues(int32_t i) const {
    EXPECT_NEAR(got_.lse2[first_ + i] * std::numbers::ln2, want_.lse[i], bounds_.lse[i]);
    for (int32_t e = 0; e < case_.value_dim; ++e)
      ASSERT_NEAR(got_.out[(first_ + i) * case_.value_dim + e], want_.out[i * case_.value_dim + e], bounds_.out[i])
          << "element " << e;
  }

  // Near p = 1/2 and near the flag's threshold a kernel may go either way.
  void CheckTop(int32_t i) const {
    const int32_t top = got_.top[first_ + i];
    const double rest = bounds_.top_rest[i];
    if (rest < 0.48) {
      EXPECT_EQ(top, bounds_.top[i]);
    }
    if (top >= 0 && bounds_.top[i] >= 0) {
      EXPECT_EQ(top, bounds_.top[i]);
    }
    if (std::abs(rest / 1e-6 - 1.0) > 0.05) {
      EXPECT_EQ(std::signbit(got_.contribution[first_ + i]), rest < 1e-6) << rest;
    }
  }

  const DeviceCase& case_;
  int32_t first_;
  const GotRows& got_;
  reference::Layer layer_;
  ObservationRows rows_;
  reference::Attention want_;
  RowBounds bounds_;
};

class CudaAttendTest : public testing::TestWithParam<KernelCase> {};

TEST_P(CudaAttendTest, MatchesReference) {
  const auto& [c, kernel] = GetParam();
  const HostBatch batch(c);
  const DeviceBatch device(batch);
  const std::string refusal = Refusal(kernel, device.attend(), device.score(Signal::kDropKv));
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  const OwnedStream stream;
  LaunchRows(kernel, device.attend(), true, stream.get());
  const GotRows got(device);
  const Precision precision = PrecisionOf(std::string(kernel) != "any", c.dtype);
  int64_t skipped = 0;
  for (int32_t list = 0; list < c.lists(); ++list) {
    SCOPED_TRACE("list " + std::to_string(list));
    const RowCheck check(batch, list, precision, got);
    check.Check();
    skipped += check.skipped_rows();
    if (HasFailure()) return;
  }
  EXPECT_EQ(device.counters.Download()[0].skipped_rows, static_cast<unsigned long long>(skipped));
}

INSTANTIATE_TEST_SUITE_P(All, CudaAttendTest,
                         testing::Combine(testing::ValuesIn(AllDeviceCases()), testing::Values("any", "sm80", "sm90")));

// Errors of one query head's figures: those of every row's two outputs and two denominators.
struct CertificateBounds {
  double error = 0.0;
  double mass = 0.0;
};

CertificateBounds BoundsOfCertificate(const HostBatch& batch, int32_t list, int32_t head) {
  const reference::Layer layer = reference::LoadLayer(batch.kv(list));
  const ObservationRows rows = batch.rows(list);
  CertificateBounds bounds;
  for (int32_t i = 0; i < rows.rows; ++i) {
    const reference::Row row = reference::SoftmaxRow(layer, rows, batch.attention(list), head, i);
    if (row.skipped) continue;
    const reference::Magnitudes m = MagnitudesOf(layer, rows, batch.attention(list), head, i);
    const double norm = reference::Norm(row.out.data(), layer.value_dim);
    if (norm > 0.0) bounds.error = std::max(bounds.error, 2 * reference::OutNormTolerance(m) / norm);
    bounds.mass = std::max(bounds.mass, 2 * reference::LseTolerance(m) + 0x1p-20);
  }
  return bounds;
}

class CudaCertificateTest : public testing::TestWithParam<DeviceCase> {};

TEST_P(CudaCertificateTest, MatchesReference) {
  const DeviceCase& c = GetParam();
  const HostBatch batch(c);
  std::vector<std::vector<int32_t>> positions(c.lists());
  for (int32_t list = 0; list < c.lists(); ++list)
    for (int32_t j = 0; j < batch.lists()[list].tokens; ++j)
      if (j % 3 == list % 3 || j >= batch.lists()[list].tokens - c.rows) positions[list].push_back(j);
  const HostBatch kept_batch = batch.Kept(positions);
  const DeviceBatch full(batch);
  const DeviceBatch kept(kept_batch);
  const std::string refusal = Refusal("any", full.attend(), full.score(Signal::kDropKv));
  if (!refusal.empty()) GTEST_SKIP() << refusal;
  const int32_t heads = c.lists() * c.group;
  const DeviceArray<float> output_error(heads);
  const DeviceArray<float> evicted_mass(heads);
  const OwnedStream stream;
  LaunchRows("any", full.attend(), true, stream.get());
  LaunchRows("any", kept.attend(), true, stream.get());
  Check(LaunchCertificate(full.attend(), kept.attend().state, output_error.get(), evicted_mass.get(), stream.get()),
        "certificate");
  const std::vector<float> error = output_error.Download();
  const std::vector<float> mass = evicted_mass.Download();
  for (int32_t list = 0; list < c.lists(); ++list) {
    const KeepList keep(1, 1, {0, static_cast<int64_t>(positions[list].size())}, positions[list]);
    const reference::Certificate want =
        reference::Certify(batch.kv(list), batch.rows(list), batch.attention(list), keep, 0);
    for (int32_t h = 0; h < c.group; ++h) {
      SCOPED_TRACE("list " + std::to_string(list) + " head " + std::to_string(h));
      const CertificateBounds bounds = BoundsOfCertificate(batch, list, h);
      EXPECT_NEAR(error[list * c.group + h], want.output_error[h],
                  bounds.error + reference::Gamma(c.value_dim + c.rows + 8.0) * (1.0 + want.output_error[h]));
      EXPECT_NEAR(mass[list * c.group + h], want.evicted_mass[h], bounds.mass + reference::Gamma(c.rows + 4.0));
    }
  }
}

std::vector<DeviceCase> CertificateCases() {
  std::vector<DeviceCase> cases(6);
  cases[1].sinks = true;
  cases[2].content = Content::kDominant;
  cases[3].content = Content::kNonFinite;
  cases[4].lengths = {5, 0, 290};
  cases[5].dtype = DType::kF16, cases[5].rows = 32, cases[5].sinks = true;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, CudaCertificateTest, testing::ValuesIn(CertificateCases()));

}  // namespace
}  // namespace dropkv::cuda
