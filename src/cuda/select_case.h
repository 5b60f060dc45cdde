// Cases of the selection tests: raw scores, and what the host selects from them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "core/random.h"
#include "cpu/select.h"
#include "reference/reference.h"

namespace dropkv::cuda {

struct SelectCase {
  int32_t kv_heads = 3;
  std::vector<int32_t> lengths{5000};  // candidates
  int32_t window = 8;
  int32_t sink = 0;
  Pooling pool{PoolKind::kMean, 5, 5, false};
  HeadRule heads = HeadRule::kUniform;
  double alpha = 0.2;
  double fraction = 0.1;  // 0: tokens
  int64_t tokens = 0;
  int levels = 1 << 20;     // distinct scores; few levels make many ties
  double flag_rate = 0.01;  // share of tokens that are not finite or dominant
  int32_t spare = 3;        // max_tokens beyond the longest sequence
  bool without_lengths = false;
  std::vector<int32_t> generated{};  // tokens behind them, by sequence; none
  bool one_generated = false;        // the same in all sequences

  int32_t sequences() const { return static_cast<int32_t>(lengths.size()); }
  int32_t generated_of(size_t sequence) const { return generated.empty() ? 0 : generated[sequence]; }
  int32_t max_tokens() const {
    int32_t most = 0;
    for (size_t b = 0; b < lengths.size(); ++b) most = std::max(most, lengths[b] + generated_of(b));
    return most + spare;
  }
  int32_t keep(int32_t n) const {
    const int64_t wanted = fraction > 0.0 ? static_cast<int64_t>(std::floor(fraction * n + 1e-6)) : tokens;
    return static_cast<int32_t>(std::min<int64_t>(n, std::max<int64_t>(wanted, window + sink)));
  }
};

inline std::ostream& operator<<(std::ostream& os, const SelectCase& c) {
  os << "Hkv " << c.kv_heads << " n";
  for (const int32_t n : c.lengths) os << " " << n;
  return os << " w " << c.window << " sink " << c.sink << " pooling " << PoolingText(c.pool) << " "
            << HeadRuleName(c.heads) << " alpha " << c.alpha << " fraction " << c.fraction << " tokens " << c.tokens
            << " levels " << c.levels << " flags " << c.flag_rate << " generated " << c.generated.size()
            << (c.one_generated ? ", the same" : "");
}

// [B, Hkv, max_tokens]; beyond a sequence's last candidate everything is NaN.
inline std::vector<float> MakeRaw(const SelectCase& c, uint64_t seed) {
  const int64_t stride = c.max_tokens();
  std::vector<float> raw(c.lengths.size() * c.kv_heads * stride, std::numeric_limits<float>::quiet_NaN());
  for (size_t list = 0; list < c.lengths.size() * c.kv_heads; ++list)
    for (int32_t j = 0; j < c.lengths[list / c.kv_heads]; ++j) {
      const size_t at = list * stride + j;
      const auto level = static_cast<float>(RandomBits(seed, at) % c.levels) / static_cast<float>(c.levels);
      const float spread = std::exp2(-12.0F * RandomUniform(seed + 1, at));  // scores span orders of magnitude
      const auto head_scale = static_cast<float>(list % c.kv_heads + 1);  // heads differ: shared budgets become ragged
      raw[at] = level * (c.levels > 1000 ? spread : 1.0F) * head_scale;
      if (RandomUniform(seed + 2, at) >= c.flag_rate) continue;
      switch (RandomBits(seed + 3, at) % 4) {
        case 0:
          raw[at] = std::numeric_limits<float>::quiet_NaN();
          break;
        case 1:
          raw[at] = -std::numeric_limits<float>::infinity();
          break;
        default:
          raw[at] = -raw[at];
      }
    }
  return raw;
}

// In float, each sum from the lowest position up: the bits that a kernel must have.
inline std::vector<float> PoolInOrder(const std::vector<float>& scores, const Pooling& pool, int32_t window) {
  const auto n = static_cast<int32_t>(scores.size());
  const int32_t count = pool.past_only ? std::max(0, n - window) : n;
  std::vector<float> pooled(n, 0.0F);
  for (int32_t j = 0; j < count; ++j) {
    float result = 0.0F;
    for (int32_t i = std::max(0, j - pool.after); i <= std::min(count - 1, j + pool.before); ++i) {
      const float score = std::isfinite(scores[i]) ? scores[i] : 0.0F;
      result = pool.kind == PoolKind::kMean ? result + score : std::max(result, score);
    }
    pooled[j] = pool.kind == PoolKind::kMean ? result / static_cast<float>(pool.before + pool.after + 1) : result;
  }
  return pooled;
}

struct Selection {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  std::vector<float> pooled;  // of tokens only, list by list
  uint64_t nonfinite = 0;
  uint64_t dominant = 0;
};

inline Selection SelectOnHost(const SelectCase& c, const std::vector<float>& raw) {
  Selection result;
  Policy policy;
  policy.window = c.window;
  policy.sink = c.sink;
  policy.heads = c.heads;
  policy.alpha = c.alpha;
  for (int32_t b = 0; b < c.sequences(); ++b) {
    const int32_t n = c.lengths[b];
    std::vector<float> sizes, pooled;
    std::vector<uint8_t> flags;
    for (int32_t head = 0; head < c.kv_heads; ++head) {
      const float* from = raw.data() + (int64_t{b} * c.kv_heads + head) * c.max_tokens();
      std::vector<float> scores(from, from + n);
      for (float& score : scores) {
        const bool finite = std::isfinite(score);
        flags.push_back(finite ? std::signbit(score) ? reference::kDominant : 0 : reference::kNonFinite);
        result.nonfinite += finite ? 0 : 1;
        result.dominant += finite && std::signbit(score) ? 1 : 0;
        score = std::abs(score);
      }
      const std::vector<float> of_head = PoolInOrder(scores, c.pool, c.window);
      sizes.insert(sizes.end(), scores.begin(), scores.end());
      pooled.insert(pooled.end(), of_head.begin(), of_head.end());
    }
    result.pooled.insert(result.pooled.end(), pooled.begin(), pooled.end());
    const int32_t generated = c.generated_of(b);
    std::vector<int32_t> counts(c.kv_heads, generated);
    if (n == 0)
      for (int32_t i = 0; i < c.kv_heads * generated; ++i) result.positions.push_back(i % generated);
    if (n > 0) {
      const KeepCount budget{c.keep(n), false};
      std::vector<std::byte> workspace(cpu::SelectWorkspaceBytes(policy, budget, c.kv_heads, n));
      const size_t before = result.positions.size();
      result.positions.resize(before + cpu::MaxSelected(policy, budget, c.kv_heads, n, generated));
      const Status status =
          cpu::Select({c.kv_heads, n, &policy, budget, sizes.data(), pooled.data(), flags.data(), generated}, workspace,
                      counts.data(), result.positions.data() + before);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    for (const int32_t count : counts) result.offsets.push_back(result.offsets.back() + count);
    result.positions.resize(result.offsets.back());
  }
  return result;
}

}  // namespace dropkv::cuda
