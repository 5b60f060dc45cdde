// What an eviction did (algorithm.md section 6), decode over ragged lists, and the error bounds of float32 kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "reference/test_case.h"
#include "reference/tolerance.h"

namespace dropkv::reference {
namespace {

// Layer 1 of two keeps every (u + 2)-th token of head u, and the window.
KeepList SomeTokens(const TestCase& c) {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  for (int32_t layer = 0; layer < 2; ++layer)
    for (int32_t u = 0; u < c.kv_heads; ++u) {
      for (int32_t j = 0; j < c.tokens; ++j)
        if (layer == 0 || j % (u + 2) == 0 || j >= c.tokens - c.window) positions.push_back(j);
      offsets.push_back(static_cast<int64_t>(positions.size()));
    }
  return {2, c.kv_heads, std::move(offsets), std::move(positions)};
}

std::vector<bool> Mask(const TestCase& c, const KeepList& keep, int32_t layer, int32_t kv_head) {
  std::vector<bool> mask(c.tokens, false);
  for (const int32_t j : keep.head(layer, kv_head)) mask[j] = true;
  return mask;
}

void ExpectCertificate(const TestCase& c) {
  const KeepList keep = SomeTokens(c);
  const Certificate certificate = Certify(c.View(), c.Rows(), c.spec, keep, 1);
  ASSERT_EQ(certificate.output_error.size(), static_cast<size_t>(c.query_heads));
  for (int32_t h = 0; h < c.query_heads; ++h) {
    const std::vector<bool> mask = Mask(c, keep, 1, h / c.group());
    long double squared = 0.0L;
    long double mass = 0.0L;
    for (int32_t i = 0; i < c.window; ++i) {
      const std::vector<long double> full = BruteOutput(c, h, i, std::vector<bool>(c.tokens, true));
      const long double moved = BruteDistance(full, BruteOutput(c, h, i, mask));
      const long double norm = BruteDistance(full, std::vector<long double>(c.value_dim, 0.0L));
      squared += moved * moved / (norm * norm);
      const std::vector<long double> e = BruteExponentials(c, h, i);
      long double sum = 0.0L;
      long double out = 0.0L;
      for (int32_t j = 0; j <= c.tokens; ++j) {
        sum += e[j];
        if (j < c.tokens && !mask[j]) out += e[j];
      }
      mass += out / sum;
    }
    EXPECT_NEAR(certificate.output_error[h], static_cast<double>(std::sqrt(squared / c.window)), 1e-13);
    EXPECT_NEAR(certificate.evicted_mass[h], static_cast<double>(mass / c.window), 1e-14);
    EXPECT_GT(certificate.evicted_mass[h], 1e-6);
  }
}

TEST(Certify, MatchesBruteForce) { ExpectCertificate(TestCase{.seed = 31}.Fill()); }

TEST(Certify, MatchesBruteForceWithSinks) {
  TestCase c = TestCase{.seed = 32}.Fill();
  c.AddSinks();
  ExpectCertificate(c);
}

TEST(Certify, KeepingEverythingCostsNothing) {
  TestCase c = TestCase{.seed = 33}.Fill();
  const Certificate certificate = Certify(c.View(), c.Rows(), c.spec, KeepList::All(1, c.kv_heads, c.tokens), 0);
  for (int32_t h = 0; h < c.query_heads; ++h) {
    EXPECT_EQ(certificate.output_error[h], 0.0);
    EXPECT_EQ(certificate.evicted_mass[h], 0.0);
  }
}

TEST(Certify, KeepingNothingLosesEverything) {
  TestCase c = TestCase{.seed = 34}.Fill();
  const KeepList none(1, c.kv_heads, std::vector<int64_t>(c.kv_heads + 1, 0), {});
  const Certificate certificate = Certify(c.View(), c.Rows(), c.spec, none, 0);
  for (int32_t h = 0; h < c.query_heads; ++h) {
    EXPECT_NEAR(certificate.output_error[h], 1.0, 1e-15);
    EXPECT_NEAR(certificate.evicted_mass[h], 1.0, 1e-14);
  }
}

TEST(Certify, RowsThatAreNotNumbersAreLeftOut) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .window = 2, .seed = 35}.Fill();
  TestCase first = c;
  first.window = 1;
  first.visible = {c.visible[0]};
  const KeepList keep = SomeTokens(c);
  const Certificate expected = Certify(first.View(), first.Rows(), c.spec, keep, 1);
  c.query(0, 1)[0] = std::numeric_limits<float>::quiet_NaN();
  const Certificate certificate = Certify(c.View(), c.Rows(), c.spec, keep, 1);
  EXPECT_EQ(certificate.output_error, expected.output_error);
  EXPECT_EQ(certificate.evicted_mass, expected.evicted_mass);
  c.query(0, 0)[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Certify(c.View(), c.Rows(), c.spec, keep, 1).output_error[0], 0.0);
}

TEST(RaggedDecode, IsAttentionOverTheKeptTokens) {
  for (const bool sinks : {false, true}) {
    TestCase c = TestCase{.query_heads = 6, .kv_heads = 3, .window = 1, .seed = 36}.Fill();
    if (sinks) c.AddSinks();
    c.spec.soft_cap = 5.0F;
    const KeepList keep = SomeTokens(c);
    const std::vector<double> out = RaggedDecode(c.View(), keep, 1, c.spec, c.q.data(), c.query_heads);
    ASSERT_EQ(out.size(), static_cast<size_t>(c.query_heads) * c.value_dim);
    for (int32_t h = 0; h < c.query_heads; ++h) {
      const std::vector<long double> expected = BruteOutput(c, h, 0, Mask(c, keep, 1, h / c.group()));
      for (int32_t x = 0; x < c.value_dim; ++x)
        EXPECT_NEAR(out[h * c.value_dim + x], static_cast<double>(expected[x]), 1e-14);
    }
  }
}

// A plain float32 implementation, as far as the bounds allow: expanded distances, 1 - p from expm1, and a second pass
// without the token for p > 1/2.
struct PlainFloat {
  std::vector<float> out, lse, raw;

  explicit PlainFloat(const TestCase& c) : raw(static_cast<size_t>(c.kv_heads) * c.tokens, 0.0F) {
    for (int32_t h = 0; h < c.query_heads; ++h)
      for (int32_t i = 0; i < c.window; ++i) Row(c, h, i);
  }

  static float Softmax(const TestCase& c, int32_t u, const std::vector<float>& logits, int32_t excluded,
                       std::vector<float>& a) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int32_t j = 0; j < static_cast<int32_t>(logits.size()); ++j)
      if (j != excluded) largest = std::max(largest, logits[j]);
    float sum = 0.0F;
    a.assign(c.value_dim, 0.0F);
    for (int32_t j = 0; j < static_cast<int32_t>(logits.size()); ++j) {
      if (j == excluded) continue;
      const float e = std::exp(logits[j] - largest);
      sum += e;
      for (int32_t x = 0; x < c.value_dim; ++x) a[x] += e * c.value(u, j)[x];
    }
    for (float& element : a) element /= sum;
    return largest + std::log(sum);
  }

  void Row(const TestCase& c, int32_t h, int32_t i) {
    const int32_t u = h / c.group();
    std::vector<float> logits;
    for (int32_t j = 0; j < c.visible[i]; ++j) {
      float logit = 0.0F;
      for (int32_t x = 0; x < c.key_dim; ++x)
        logit += c.q[(static_cast<size_t>(h) * c.window + i) * c.key_dim + x] *
                 c.k[(static_cast<size_t>(u) * c.tokens + j) * c.key_dim + x];
      logits.push_back(logit * c.spec.scale);
    }
    std::vector<float> a;
    lse.push_back(Softmax(c, u, logits, -1, a));
    out.insert(out.end(), a.begin(), a.end());
    float a_squared = 0.0F;
    for (const float element : a) a_squared += element * element;
    for (int32_t j = 0; j < c.visible[i]; ++j) {
      const float p = std::exp(logits[j] - lse.back());
      float distance = a_squared;
      float weight = p / -std::expm1(logits[j] - lse.back());
      std::vector<float> without;
      if (p > 0.5F) {
        weight = p;
        distance = 0.0F;
        Softmax(c, u, logits, j, without);
      }
      for (int32_t x = 0; x < c.value_dim; ++x) {
        const float v = c.value(u, j)[x];
        distance += p > 0.5F ? (v - without[x]) * (v - without[x]) : v * v - 2.0F * v * a[x];
      }
      raw[static_cast<size_t>(u) * c.tokens + j] += weight * weight * std::max(distance, 0.0F) / c.group();
    }
  }
};

TEST(Tolerance, CoversAPlainFloat32Implementation) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    TestCase c = TestCase{.tokens = 200, .key_dim = 64, .value_dim = 64, .window = 8, .seed = seed};
    c.Fill(static_cast<float>(seed));  // from flat rows to p near 1
    const Tolerances bounds = LayerTolerances(c.View(), c.Rows(), c.spec, Policy{});
    const Attention attention = Attend(c.View(), c.Rows(), c.spec);
    const Scores scores = Score(c.View(), c.Rows(), c.spec, Policy{}, 0);
    const PlainFloat plain(c);
    for (size_t i = 0; i < plain.lse.size(); ++i) {
      EXPECT_NEAR(plain.lse[i], attention.lse[i], bounds.lse[i]);
      for (int32_t x = 0; x < c.value_dim; ++x)
        EXPECT_NEAR(plain.out[i * c.value_dim + x], attention.out[i * c.value_dim + x], bounds.out[i]);
    }
    for (size_t j = 0; j < plain.raw.size(); ++j) EXPECT_NEAR(plain.raw[j], scores.raw[j], bounds.raw[j]) << j;
  }
}

// A bound that lets everything pass tests nothing: it stays a small part of the value where the row is ordinary.
TEST(Tolerance, IsTight) {
  TestCase c = TestCase{.tokens = 200, .key_dim = 64, .value_dim = 64, .window = 8, .seed = 3}.Fill(1.0F);
  const Tolerances bounds = LayerTolerances(c.View(), c.Rows(), c.spec, Policy{});
  const Scores scores = Score(c.View(), c.Rows(), c.spec, Policy{}, 0);
  for (const double bound : bounds.lse) EXPECT_LT(bound, 1e-4);
  for (const double bound : bounds.out) EXPECT_LT(bound, 1e-3);
  double worst = 0.0;
  for (int32_t u = 0; u < c.kv_heads; ++u)
    for (int32_t j = 0; j < c.tokens - c.window; ++j)
      worst = std::max(worst, bounds.raw[u * c.tokens + j] / scores.raw[u * c.tokens + j]);
  EXPECT_LT(worst, 2e-3);
  EXPECT_GT(worst, 1e-6);
}

TEST(Tolerance, DominantPairsStayWellConditioned) {
  TestCase c = TestCase{.query_heads = 1, .kv_heads = 1, .tokens = 50, .window = 1, .seed = 4}.Fill(0.1F);
  c.query(0, 0)[0] = 1.0F;
  for (const float gap : {3.9F, 4.0F, 6.0F, 12.0F, 20.0F, 80.0F}) {
    c.key(0, 9)[0] = gap / c.spec.scale;
    const Scores scores = Score(c.View(), c.Rows(), c.spec, Policy{}, 0);
    const Tolerances bounds = LayerTolerances(c.View(), c.Rows(), c.spec, Policy{});
    EXPECT_LT(bounds.raw[9], 1e-2 * scores.raw[9]) << gap;
    EXPECT_NEAR(PlainFloat(c).raw[9], scores.raw[9], bounds.raw[9]) << gap;
  }
}

TEST(Tolerance, GammaIsTheSmallerOfItsTwoBounds) {
  EXPECT_NEAR(Gamma(4), 4 * 0x1p-24, 1e-12);
  EXPECT_NEAR(Gamma(10000), 600 * 0x1p-24, 1e-12);
}

}  // namespace
}  // namespace dropkv::reference
