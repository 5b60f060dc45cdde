// What the tests of the scorers share: a whole prompt of one layer with simple contents, its statistics, and a scorer
// called as Score() calls it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "baseline/scorers.h"
#include "baseline/statistics.h"
#include "cpu/score_case.h"

namespace dropkv::baseline {

// A recipe that protects, pools and shares nothing.
inline Recipe PlainRecipe(Scorer scorer) {
  Recipe recipe;
  recipe.scorer = scorer;
  recipe.policy.window = 0;
  recipe.policy.pool = {};
  recipe.policy.sink = 0;
  recipe.epsilon = 0.0;
  return recipe;
}

// Scores with the sizes, sinks and window that Score() sets.
inline LayerScores EmptyScores(const Recipe& recipe, const Layer& layer) {
  const int32_t n = layer.kv.tokens;
  const size_t count = static_cast<size_t>(layer.kv.kv_heads) * n;
  LayerScores scores;
  scores.kv_heads = layer.kv.kv_heads;
  scores.tokens = n;
  scores.score.assign(count, 0.0);
  scores.is_protected.assign(n, 0);
  scores.forced.assign(count, 0);
  std::fill_n(scores.is_protected.begin(), std::min(n, recipe.policy.sink), uint8_t{1});
  std::fill(scores.is_protected.end() - std::min(n, recipe.policy.window), scores.is_protected.end(), uint8_t{1});
  return scores;
}

inline LayerScores RunScorer(ScoreFunction function, const Recipe& recipe, const Layer& layer, double keep = 0.5,
                             ThreadPool* pool = nullptr) {
  LayerScores scores = EmptyScores(recipe, layer);
  const Status status = function(recipe, layer, keep, pool, &scores);
  EXPECT_TRUE(status.ok()) << status.message();
  return scores;
}

inline double LargestDifference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = a.size() == b.size() ? 0.0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;  // a NaN stays
  }
  return largest;
}

// One layer of a prompt: queries token-major [n, Hq, d], keys [Hkv, n, d] and values [Hkv, n, dv] head-major, float32.
struct PromptCase {
  int32_t query_heads = 4;
  int32_t kv_heads = 2;
  int32_t tokens = 40;
  int32_t key_dim = 8;
  int32_t value_dim = 16;
  std::vector<float> q = {};
  std::vector<float> q_pre = {};  // empty: none
  std::vector<float> k = {};
  std::vector<float> v = {};
  AttentionSpec attention = {};
  Rope rope = {};

  int32_t group() const { return query_heads / kv_heads; }
  float* query(int32_t token, int32_t head) {
    return q.data() + (static_cast<int64_t>(token) * query_heads + head) * key_dim;
  }
  float* key(int32_t head, int32_t token) { return k.data() + (int64_t{head} * tokens + token) * key_dim; }
  float* value(int32_t head, int32_t token) { return v.data() + (int64_t{head} * tokens + token) * value_dim; }

  // Normal numbers everywhere; q and k are those after RoPE.
  PromptCase& Fill(uint64_t seed = 1) {
    cpu::RandomStream random(seed);
    Zeros();
    for (std::vector<float>* values : {&q, &k, &v})
      for (float& x : *values) x = random.Normal();
    return *this;
  }
  PromptCase& Zeros() {
    q.assign(static_cast<size_t>(tokens) * query_heads * key_dim, 0.0F);
    k.assign(static_cast<size_t>(tokens) * kv_heads * key_dim, 0.0F);
    v.assign(static_cast<size_t>(tokens) * kv_heads * value_dim, 0.0F);
    attention.scale = 1.0F / std::sqrt(static_cast<float>(key_dim));
    return *this;
  }

  KvView View() const {
    KvView view{kv_heads, tokens, key_dim, value_dim, {}, {}, nullptr};
    view.k = {k.data(), DType::kF32, int64_t{tokens} * key_dim, key_dim, 1};
    view.v = {v.data(), DType::kF32, int64_t{tokens} * value_dim, value_dim, 1};
    return view;
  }

  // Statistics of all rows, in chunks of `chunk`.
  PromptStatistics Gather(const StatisticsPlan& plan, int32_t chunk = 13, ThreadPool* pool = nullptr) const {
    PromptStatistics statistics(plan, query_heads, kv_heads, tokens, key_dim);
    const int64_t row = int64_t{query_heads} * key_dim;
    for (int32_t first = 0; first < tokens; first += chunk) {
      KvView seen = View();
      seen.tokens = std::min(tokens, first + chunk);  // later tokens are not there yet
      const Status status =
          statistics.Add(seen, attention, rope, q.data() + first * row,
                         q_pre.empty() ? nullptr : q_pre.data() + first * row, first, seen.tokens - first, pool);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    return statistics;
  }
  PromptStatistics Gather(const Recipe& recipe, int32_t chunk = 13, ThreadPool* pool = nullptr) const {
    StatisticsPlan plan;
    plan.Add(recipe);
    return Gather(plan, chunk, pool);
  }

  Layer MakeLayer(const PromptStatistics* statistics = nullptr) const {
    Layer layer;
    layer.kv = View();
    layer.attention = attention;
    layer.rope = rope;
    layer.statistics = statistics;
    return layer;
  }
};

}  // namespace dropkv::baseline
