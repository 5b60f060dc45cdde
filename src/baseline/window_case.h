// Brute force for the scorers of the window: all p of a small layer at once, in float64, from the reference's softmax.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "baseline/scorers.h"
#include "core/parallel.h"
#include "cpu/score_case.h"
#include "reference/row.h"

namespace dropkv::baseline {

// Scores against brute force, of the largest of them.
inline constexpr double kWindowError = 1e-5;

// Every p, logit and output of a case, and W_O where a test wants one.
class WindowCase {
 public:
  explicit WindowCase(const cpu::ScoreCase& c)
      : shape(c), data_(c), values_(reference::LoadLayer(data_.kv())), rows_(data_.rows()) {
    for (int32_t h = 0; h < c.query_heads(); ++h)
      for (int32_t i = 0; i < c.rows; ++i)
        softmax_.push_back(reference::SoftmaxRow(values_, rows_, data_.attention(), h, i));
  }

  const cpu::ScoreCase shape;

  Layer MakeLayer() {
    Layer layer;
    layer.kv = data_.kv();
    layer.rows = rows_;
    layer.generated = shape.generated;
    layer.row_count = shape.generated > 0 ? shape.rows : 0;
    layer.attention = data_.attention();
    if (wo_.empty()) return layer;
    layer.wo.columns = shape.query_heads() * shape.value_dim;
    layer.wo.hidden = static_cast<int32_t>(wo_.size()) / layer.wo.columns;
    layer.wo.read_row = [this, columns = layer.wo.columns](int32_t row, float* out) {
      std::copy_n(wo_.data() + static_cast<int64_t>(row) * columns, columns, out);
    };
    return layer;
  }

  // A random W_O [hidden, Hq * dv].
  void MakeOutputProjection(int32_t hidden) {
    cpu::RandomStream random(99);
    wo_.resize(static_cast<size_t>(hidden) * shape.query_heads() * shape.value_dim);
    for (float& x : wo_) x = random.Normal();
  }
  // x W_O^h [hidden].
  std::vector<double> Project(int32_t query_head, const std::vector<double>& x) const {
    const int32_t columns = shape.query_heads() * shape.value_dim;
    std::vector<double> out(wo_.size() / columns, 0.0);
    for (size_t r = 0; r < out.size(); ++r)
      for (int32_t i = 0; i < shape.value_dim; ++i)
        out[r] += x[i] * wo_[r * columns + static_cast<size_t>(query_head) * shape.value_dim + i];
    return out;
  }

  // The candidates, and how many of their last ones the recipe's window is. Generated tokens come behind them; the rows
  // are those of the window's end and of generated tokens, or of generated ones alone.
  int32_t tokens() const { return shape.candidates(); }
  int32_t window() const { return shape.generated > 0 ? std::max(3, shape.rows - shape.generated) : shape.rows; }

  const reference::Row& row(int32_t query_head, int32_t i) const { return softmax_[query_head * shape.rows + i]; }
  double p(int32_t query_head, int32_t i, int32_t token) const { return row(query_head, i).weight[token]; }
  double logit(int32_t query_head, int32_t i, int32_t token) const {
    return std::log(p(query_head, i, token)) + row(query_head, i).lse;
  }
  const std::vector<double>& out(int32_t query_head, int32_t i) const { return row(query_head, i).out; }
  // The token's value; zeros where it takes no part.
  std::vector<double> value(int32_t kv_head, int32_t token) const {
    const double* from = values_.value(kv_head, token);
    if (!values_.takes_part(kv_head, token)) return std::vector<double>(shape.value_dim, 0.0);
    return {from, from + shape.value_dim};
  }
  bool takes_part(int32_t kv_head, int32_t token) const { return values_.takes_part(kv_head, token); }

  // [Hkv, n] from f(query head, token): the mean over the group.
  template <typename F>
  std::vector<double> MeanOverGroup(F&& f) const {
    std::vector<double> scores;
    for (int32_t u = 0; u < shape.kv_heads; ++u)
      for (int32_t j = 0; j < tokens(); ++j) {
        double sum = 0.0;
        for (int32_t h = u * shape.group; h < (u + 1) * shape.group; ++h) sum += f(h, j);
        scores.push_back(sum / shape.group);
      }
    return scores;
  }

 private:
  cpu::CaseData data_;
  reference::Layer values_;
  ObservationRows rows_;
  std::vector<reference::Row> softmax_;
  std::vector<float> wo_;
};

// A recipe over all rows of the case that pools nothing and protects nothing but its window.
inline Recipe WindowRecipe(Scorer scorer, int32_t window) {
  Recipe recipe;
  recipe.policy.name = "tested";
  recipe.scorer = scorer;
  recipe.policy.window = window;
  recipe.policy.pool = {};
  if (scorer == Scorer::kDefensive) {
    recipe.group = GroupRule::kMax;
    recipe.group_before_pool = false;
  }
  return recipe;
}

inline LayerScores ScoreOf(const Recipe& recipe, const Layer& layer, int32_t threads = 2, double keep = 0.5) {
  ThreadPool pool(threads);
  const Result<LayerScores> scores = Score(recipe, layer, keep, &pool);
  EXPECT_TRUE(scores.ok()) << scores.status().message();
  return scores.ok() ? *scores : LayerScores{};
}

// Scores as brute force has them, but for forced tokens; those are the non-finite ones, or in `dominant` too.
inline void ExpectScores(const WindowCase& window, const LayerScores& got, const std::vector<double>& want,
                         double error = kWindowError) {
  ASSERT_EQ(got.score.size(), want.size());
  double largest = 0.0;
  double worst = 0.0;
  for (size_t at = 0; at < want.size(); ++at) {
    const auto head = static_cast<int32_t>(at / got.tokens);
    const auto token = static_cast<int32_t>(at % got.tokens);
    if (!window.takes_part(head, token)) {
      EXPECT_EQ(got.forced[at], 1) << "head " << head << " token " << token;
      continue;
    }
    largest = std::max(largest, std::abs(want[at]));
    const double difference = std::abs(got.score[at] - want[at]);
    if (!(difference <= worst)) worst = difference;  // a NaN stays
  }
  EXPECT_LE(worst, error * largest);
}

// Cases around an ordinary one: shapes, layouts, dtypes, dominance, numbers that are none, sinks, soft cap, generated
// tokens and their rows.
inline std::vector<cpu::ScoreCase> WindowCases() {
  std::vector<cpu::ScoreCase> cases;
  const auto add = [&cases](auto&& change) {
    cpu::ScoreCase c;
    c.key_dim = 32;
    c.value_dim = 40;
    change(c);
    cases.push_back(c);
  };
  add([](cpu::ScoreCase&) {});
  add([](cpu::ScoreCase& c) { c.kv_heads = 1, c.group = 7, c.rows = 5, c.tokens = 96; });
  add([](cpu::ScoreCase& c) { c.kv_heads = 3, c.group = 1, c.rows = 1, c.tokens = 97; });
  add([](cpu::ScoreCase& c) { c.rows = 32, c.tokens = 1200, c.value_dim = 128; });
  add([](cpu::ScoreCase& c) { c.tokens = 8; });
  add([](cpu::ScoreCase& c) { c.layout = cpu::Layout::kTransposedV, c.dtype = DType::kBF16; });
  add([](cpu::ScoreCase& c) {
    c.layout = cpu::Layout::kTokenMajor, c.dtype = DType::kQ8_0, c.cells = true, c.value_dim = 64;
  });
  add([](cpu::ScoreCase& c) { c.content = cpu::Content::kDominant, c.sinks = true; });
  add([](cpu::ScoreCase& c) { c.content = cpu::Content::kNonFinite; });
  add([](cpu::ScoreCase& c) { c.soft_cap = 5.0F; });
  add([](cpu::ScoreCase& c) { c.generated = 5, c.rows = 13, c.tokens = 153; });
  add([](cpu::ScoreCase& c) { c.generated = 9, c.rows = 9, c.sinks = true, c.cells = true; });
  add([](cpu::ScoreCase& c) {
    c.generated = 8, c.rows = 16, c.tokens = 1200, c.layout = cpu::Layout::kTransposedV, c.dtype = DType::kF16;
  });
  add([](cpu::ScoreCase& c) { c.generated = 30, c.rows = 38, c.content = cpu::Content::kDominant; });
  add([](cpu::ScoreCase& c) { c.generated = 60, c.rows = 12, c.content = cpu::Content::kNonFinite; });
  return cases;
}

}  // namespace dropkv::baseline
