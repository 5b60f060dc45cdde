// What the tests of the ragged cache and of its decode share: sources of every dtype, ragged lists, the reference's
// output and its bound.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/element.h"
#include "core/parallel.h"
#include "core/random.h"
#include "dropkv/ragged_cache.h"
#include "hwy/targets.h"
#include "reference/reference.h"
#include "reference/tolerance.h"

namespace dropkv::ragged_test {

// Keys and values of one layer, head-major, of any dtype.
struct Source {
  std::vector<uint8_t> k, v;
  KvView view;
};

// Writes [rows, dim] of f(i) as `dtype`.
template <typename F>
std::vector<uint8_t> Encode(DType dtype, int64_t rows, int64_t dim, F&& f) {
  std::vector<uint8_t> bytes(DTypeBytes(dtype, rows * dim));
  for (int64_t i = 0; i < rows * dim; ++i) {
    const float x = f(i);
    const uint16_t narrow = dtype == DType::kBF16 ? FloatToBFloat(x) : FloatToHalf(x);
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[i * 4], &x, 4);
    } else if (dtype != DType::kQ8_0) {
      std::memcpy(&bytes[i * 2], &narrow, 2);
    } else {  // a scale per block, quants from the value: any bytes are a valid block
      uint8_t* block = &bytes[i / 32 * 34];
      const uint16_t scale = FloatToHalf(1.0F / 64.0F * static_cast<float>(1 + i / 32 % 5));
      if (i % 32 == 0) std::memcpy(block, &scale, 2);
      block[2 + i % 32] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(x * 40.0F, -127.0F, 127.0F)));
    }
  }
  return bytes;
}

inline float Normal(uint64_t seed, int64_t i) {
  float sum = -6.0F;
  for (int r = 0; r < 12; ++r) sum += RandomUniform(seed, i * 12 + r);
  return sum;
}

enum class Content { kNormal, kLargeLogits, kDominant, kEqual };

struct TestParam {
  DType dtype = DType::kF32;
  int32_t d = 64;
  int32_t dv = 64;
  int32_t group = 3;
  std::vector<int32_t> lengths;  // one KV head each
  Content content = Content::kNormal;
  float soft_cap = 0.0F;
  bool sinks = false;
  bool nonfinite = false;
};

inline std::ostream& operator<<(std::ostream& os, const TestParam& p) {
  os << DTypeName(p.dtype) << " d " << p.d << " dv " << p.dv << " g " << p.group << " lengths";
  for (const int32_t length : p.lengths) os << ' ' << length;
  return os << " content " << static_cast<int>(p.content) << " soft_cap " << p.soft_cap << " sinks " << p.sinks
            << " nonfinite " << p.nonfinite;
}

struct Case {
  Source source;
  KeepList keep;
  std::vector<float> q;
  std::vector<float> sinks;
  AttentionSpec spec;
  std::vector<double> expected;   // [Hq, dv]
  std::vector<double> tolerance;  // [Hq]
};

inline Source MakeSource(const TestParam& p, int32_t tokens, uint64_t seed) {
  const auto heads = static_cast<int32_t>(p.lengths.size());
  const int64_t rows = int64_t{heads} * tokens;
  Source source;
  source.k = Encode(p.dtype, rows, p.d, [&](int64_t i) {
    const int64_t token = i / p.d % tokens;
    if (p.nonfinite && token % 37 == 5 && i % p.d == token % p.d) return token % 2 == 0 ? HUGE_VALF : NAN;
    if (p.content == Content::kDominant && token == tokens / 2) return 2.0F * Normal(seed, i % p.d);
    if (p.content == Content::kEqual) return Normal(seed, i % p.d);
    return Normal(seed + 1, i);
  });
  source.v = Encode(p.dtype, rows, p.dv, [&](int64_t i) {
    const int64_t token = i / p.dv % tokens;
    if (p.nonfinite && token % 41 == 7 && i % p.dv == token % p.dv) return token % 2 == 0 ? -HUGE_VALF : NAN;
    return Normal(seed + 2, i);
  });
  const auto tensor = [&](const std::vector<uint8_t>& bytes, int32_t dim) {
    return KvTensor{bytes.data(), p.dtype, int64_t{tokens} * dim, dim, 1};
  };
  source.view = {heads, tokens, p.d, p.dv, tensor(source.k, p.d), tensor(source.v, p.dv), nullptr};
  return source;
}

// Every head keeps its length of the tokens, spread evenly.
inline KeepList SpreadLists(const std::vector<int32_t>& lengths, int32_t tokens) {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  for (const int32_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) positions.push_back(static_cast<int32_t>(i * tokens / length));
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {1, static_cast<int32_t>(lengths.size()), std::move(offsets), std::move(positions)};
}

// |q|_2 |k|_2 over all rows and so on: what reference/tolerance.h derives its bounds from. The bound of the output does
// not depend on the order of the sums, hence not on tiles, parts and vectors; merging parts and the sink add a handful
// of roundings, far below the n that Gamma counts.
inline double OutTolerance(const Case& c, const TestParam& p, int32_t head) {
  reference::Magnitudes m;
  m.tokens = std::max(1, p.lengths[head]);
  m.key_dim = p.d;
  m.value_dim = p.dv;
  const auto norm = [](auto&& load, int32_t dim, double* largest) {
    double sum = 0.0;
    for (int32_t i = 0; i < dim; ++i) {
      const double x = load(i);
      if (!std::isfinite(x)) return 0.0;
      sum += x * x;
      if (largest != nullptr) *largest = std::max(*largest, std::abs(x));
    }
    return std::sqrt(sum);
  };
  const KvView& kv = c.source.view;
  double key = 0.0;
  for (int32_t j = 0; j < kv.tokens; ++j) {
    key = std::max(key, norm([&](int32_t i) { return LoadElement(kv.k, nullptr, head, j, i); }, p.d, nullptr));
    norm([&](int32_t i) { return LoadElement(kv.v, nullptr, head, j, i); }, p.dv, &m.value_max);
  }
  double query = 0.0;
  for (int32_t g = 0; g < p.group; ++g)
    query = std::max(query, norm([&](int32_t i) { return c.q[(head * p.group + g) * p.d + i]; }, p.d, nullptr));
  m.logit = c.spec.scale * query * key;
  for (const float sink : c.sinks) m.logit = std::max<double>(m.logit, std::abs(sink));
  return reference::OutTolerance(m);
}

inline Case MakeCase(const TestParam& p, uint64_t seed, int32_t extra = 0) {
  const auto heads = static_cast<int32_t>(p.lengths.size());
  const int32_t tokens = std::max(1, *std::max_element(p.lengths.begin(), p.lengths.end())) + extra;
  Case c;
  c.source = MakeSource(p, tokens, seed);
  c.keep = SpreadLists(p.lengths, tokens - extra);
  c.q.resize(static_cast<size_t>(heads) * p.group * p.d);
  const float size = p.content == Content::kLargeLogits ? 20.0F : 1.0F;
  for (size_t i = 0; i < c.q.size(); ++i)
    c.q[i] = p.content == Content::kDominant ? 2.0F * Normal(seed, i % p.d) : size * Normal(seed + 3, i);
  c.spec.scale = 1.0F / std::sqrt(static_cast<float>(p.d));
  c.spec.soft_cap = p.soft_cap;
  if (p.sinks) {
    for (int32_t h = 0; h < heads * p.group; ++h) c.sinks.push_back(3.0F * Normal(seed + 4, h));
    c.spec.sinks = c.sinks.data();
  }
  return c;
}

inline void Expect(Case& c, const TestParam& p, const KeepList& keep) {
  const auto heads = static_cast<int32_t>(p.lengths.size());
  c.expected = reference::RaggedDecode(c.source.view, keep, 0, c.spec, c.q.data(), heads * p.group);
  c.tolerance.clear();
  for (int32_t head = 0; head < heads; ++head) c.tolerance.push_back(OutTolerance(c, p, head));
}

struct Subject {
  RaggedCache cache;
  RaggedDecode decode;
};

inline Subject MakeSubject(const Case& c, const TestParam& p, int32_t reserve) {
  const auto heads = static_cast<int32_t>(p.lengths.size());
  Subject s{RaggedCache::Create(p.dtype, heads, p.d, p.dv).value(),
            RaggedDecode::Create(heads, p.group, p.d, p.dv).value()};
  const Status status = s.cache.Assign(c.source.view, c.keep, 0, reserve);
  EXPECT_TRUE(status.ok()) << status.message();
  return s;
}

inline std::vector<float> RunDecode(Subject& s, const Case& c, ThreadPool* pool) {
  std::vector<float> out(c.expected.size() + 16, -77.0F);
  const Status status = s.decode.Run(s.cache, c.spec, c.q.data(), out.data(), pool);
  EXPECT_TRUE(status.ok()) << status.message();
  for (size_t i = c.expected.size(); i < out.size(); ++i) EXPECT_EQ(out[i], -77.0F) << "wrote behind the output";
  out.resize(c.expected.size());
  return out;
}

inline void ExpectClose(const std::vector<float>& out, const Case& c, const TestParam& p) {
  for (size_t i = 0; i < out.size(); ++i) {
    const double bound = c.tolerance[i / p.dv / p.group];
    ASSERT_LE(std::abs(out[i] - c.expected[i]), bound)
        << "query head " << i / p.dv << " dim " << i % p.dv << ": got " << out[i] << ", expected " << c.expected[i]
        << ", bound " << bound;
  }
}

// Calls f once per instruction set of this machine, best first, and restores the choice.
template <typename F>
void ForEachInstructionSet(F&& f) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    f();
    if (testing::Test::HasFatalFailure()) break;
  }
  hwy::SetSupportedTargetsForTest(0);
}

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0};

}  // namespace dropkv::ragged_test
