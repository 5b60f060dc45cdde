// Small random layers for the tests of this folder, and a brute force in long double that shares no code with the
// reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "dropkv/cache_view.h"

namespace dropkv::reference {

// Owns one layer's q [Hq, w, d], k [Hkv, n, d], v [Hkv, n, dv] in float32, head-major; row i sees n-w+i+1 tokens.
struct TestCase {
  int32_t query_heads = 4;
  int32_t kv_heads = 2;
  int32_t tokens = 40;
  int32_t key_dim = 16;
  int32_t value_dim = 8;
  int32_t window = 5;
  uint64_t seed = 1;
  AttentionSpec spec = {};
  std::vector<float> q = {};
  std::vector<float> k = {};
  std::vector<float> v = {};
  std::vector<float> sinks = {};
  std::vector<int32_t> visible = {};

  // Fills everything with normal numbers; keys are scaled so that weights differ by some orders of magnitude.
  TestCase& Fill(float key_scale = 2.0F) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, size_t count, float scale) {
      values.resize(count);
      for (float& value : values) value = scale * normal(engine);
    };
    fill(q, static_cast<size_t>(query_heads) * window * key_dim, 1.0F);
    fill(k, static_cast<size_t>(kv_heads) * tokens * key_dim, key_scale);
    fill(v, static_cast<size_t>(kv_heads) * tokens * value_dim, 1.0F);
    visible.resize(window);
    std::iota(visible.begin(), visible.end(), tokens - window + 1);
    spec.scale = 1.0F / std::sqrt(static_cast<float>(key_dim));
    return *this;
  }

  // Every query head gets a learned sink logit.
  void AddSinks() {
    for (int32_t h = 0; h < query_heads; ++h) sinks.push_back(0.5F * static_cast<float>(h) - 0.5F);
    spec.sinks = sinks.data();
  }

  int32_t group() const { return query_heads / kv_heads; }
  float* key(int32_t head, int32_t token) { return k.data() + (static_cast<size_t>(head) * tokens + token) * key_dim; }
  float* value(int32_t head, int32_t token) {
    return v.data() + (static_cast<size_t>(head) * tokens + token) * value_dim;
  }
  float* query(int32_t head, int32_t row) { return q.data() + (static_cast<size_t>(head) * window + row) * key_dim; }
  const float* value(int32_t head, int32_t token) const { return const_cast<TestCase*>(this)->value(head, token); }

  KvView View() const {
    KvView view{kv_heads, tokens, key_dim, value_dim, {}, {}, nullptr};
    view.k = {k.data(), DType::kF32, static_cast<int64_t>(tokens) * key_dim, key_dim, 1};
    view.v = {v.data(), DType::kF32, static_cast<int64_t>(tokens) * value_dim, value_dim, 1};
    return view;
  }

  ObservationRows Rows() const {
    return {q.data(), static_cast<int64_t>(window) * key_dim, key_dim, query_heads, window, visible.data()};
  }
};

// exp(logit - largest) of every token of one row; 0 where it is hidden, and the sink's behind the tokens.
inline std::vector<long double> BruteExponentials(const TestCase& c, int32_t head, int32_t row) {
  const int32_t u = head / c.group();
  std::vector<long double> logits;
  long double largest = -1e4000L;
  for (int32_t j = 0; j <= c.tokens; ++j) {
    long double logit = -1e4000L;
    if (j == c.tokens && c.spec.sinks != nullptr) logit = c.spec.sinks[head];
    if (j < c.visible[row]) {
      logit = 0.0L;
      for (int32_t x = 0; x < c.key_dim; ++x)
        logit += static_cast<long double>(c.q[(static_cast<size_t>(head) * c.window + row) * c.key_dim + x]) *
                 c.k[(static_cast<size_t>(u) * c.tokens + j) * c.key_dim + x];
      logit *= c.spec.scale;
      if (c.spec.soft_cap > 0.0F) logit = c.spec.soft_cap * std::tanh(logit / c.spec.soft_cap);
    }
    logits.push_back(logit);
    largest = std::max(largest, logit);
  }
  for (long double& logit : logits) logit = std::exp(logit - largest);
  return logits;
}

// The row's output over the tokens whose bit in `kept` is set, renormalised; the sink stays in the denominator.
inline std::vector<long double> BruteOutput(const TestCase& c, int32_t head, int32_t row,
                                            const std::vector<bool>& kept) {
  const std::vector<long double> exponentials = BruteExponentials(c, head, row);
  long double sum = exponentials[c.tokens];
  std::vector<long double> out(c.value_dim, 0.0L);
  for (int32_t j = 0; j < c.tokens; ++j) {
    if (!kept[j]) continue;
    sum += exponentials[j];
    for (int32_t x = 0; x < c.value_dim; ++x) out[x] += exponentials[j] * c.value(head / c.group(), j)[x];
  }
  for (long double& element : out) element = sum > 0.0L ? element / sum : 0.0L;
  return out;
}

inline long double BruteDistance(const std::vector<long double>& a, const std::vector<long double>& b) {
  long double sum = 0.0L;
  for (size_t x = 0; x < a.size(); ++x) sum += (a[x] - b[x]) * (a[x] - b[x]);
  return std::sqrt(sum);
}

// What removing token j alone does to the row's output: algorithm.md section 2, Delta({j}), by removal.
inline long double BruteLoss(const TestCase& c, int32_t head, int32_t row, int32_t token) {
  std::vector<bool> kept(c.tokens, true);
  const std::vector<long double> full = BruteOutput(c, head, row, kept);
  kept[token] = false;
  return BruteDistance(full, BruteOutput(c, head, row, kept));
}

// The score of algorithm.md section 3 by removal. A row that sees one token only says nothing about it.
inline long double BruteScore(const TestCase& c, int32_t kv_head, int32_t token) {
  long double sum = 0.0L;
  for (int32_t h = kv_head * c.group(); h < (kv_head + 1) * c.group(); ++h)
    for (int32_t i = 0; i < c.window; ++i) {
      const bool alone = c.visible[i] == 1 && c.spec.sinks == nullptr;
      const long double loss = token < c.visible[i] && !alone ? BruteLoss(c, h, i, token) : 0.0L;
      sum += loss * loss;
    }
  return sum / c.group();
}

// What BruteScore itself may be off by: a loss is a difference of outputs of size 1 with 64 bits.
inline double BruteScoreError(double score) { return 1e-11 * score + 2e-18 * std::sqrt(score) + 1e-36; }

}  // namespace dropkv::reference
