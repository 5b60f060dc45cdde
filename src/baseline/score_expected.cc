// Scores from the mean and covariance of the queries, turned to the positions to come: expected attention, and CAPKV.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "baseline/gram.h"
#include "baseline/head_reader.h"
#include "baseline/scorers.h"
#include "baseline/statistics.h"

namespace dropkv::baseline {
namespace {

Status CheckMoments(const Recipe& recipe, const Layer& layer) {
  if (layer.statistics == nullptr) return InvalidArgument("q: expected statistics of all rows of the prompt, got none");
  if (recipe.future < 1)
    return InvalidArgument("future: expected at least 1 position, got " + std::to_string(recipe.future));
  return layer.statistics->Serves(recipe, layer.kv);
}

// The rotation averaged over positions first .. first + count - 1, for Rope::Turn.
std::vector<double> AverageTurns(const Rope& rope, int32_t first, int32_t count) {
  std::vector<double> sum(rope.dims, 0.0);
  std::vector<double> turns(rope.dims);
  for (int32_t i = 0; i < count; ++i) {
    rope.Turns(static_cast<double>(first) + i, false, turns.data());
    for (int32_t x = 0; x < rope.dims; ++x) sum[x] += turns[x] / count;
  }
  return sum;
}

// matrix [d, d] <- R M R^T for symmetric M.
void TurnBothSides(const Rope& rope, const double* turns, int32_t dim, double* matrix) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int32_t i = 0; i < dim; ++i) rope.Turn(turns, matrix + int64_t{i} * dim);
    for (int32_t i = 0; i < dim; ++i)
      for (int32_t j = 0; j < i; ++j) std::swap(matrix[int64_t{i} * dim + j], matrix[int64_t{j} * dim + i]);
  }
}

// Keys or values of up to kLanes tokens as lanes.
class LaneTile {
 public:
  LaneTile(const KvView& kv, int32_t head, bool keys)
      : reader_(kv, head), keys_(keys), dim_(keys ? kv.key_dim : kv.value_dim), row_(dim_), lanes_(dim_ * kLanes) {}

  double* Load(int32_t begin, int32_t end) {
    std::fill(lanes_.begin(), lanes_.end(), 0.0);
    for (int32_t t = 0; t < std::min(kLanes, end - begin); ++t) {
      if (keys_) {
        reader_.Key(begin + t, row_.data());
      } else {
        reader_.Value(begin + t, row_.data());
      }
      for (int32_t i = 0; i < dim_; ++i) lanes_[i * kLanes + t] = row_[i];
    }
    return lanes_.data();
  }

 private:
  HeadReader reader_;
  bool keys_;
  int32_t dim_;
  std::vector<float> row_;
  std::vector<double> lanes_;
};

void DotLanes(const double* vector, int32_t dim, const double* x, double* out) {
  std::fill_n(out, kLanes, 0.0);
  for (int32_t i = 0; i < dim; ++i)
    for (int32_t t = 0; t < kLanes; ++t) out[t] += vector[i] * x[i * kLanes + t];
}

// score [n] += softmax(logit) / group over the tokens from `begin` that are not forced.
void AddSoftmax(const std::vector<double>& logit, const uint8_t* forced, int32_t begin, int32_t group, double* score) {
  const auto n = static_cast<int32_t>(logit.size());
  double largest = -INFINITY;
  for (int32_t j = begin; j < n; ++j)
    if (forced[j] == 0) largest = std::max(largest, logit[j]);
  double sum = 0.0;
  for (int32_t j = begin; j < n; ++j)
    if (forced[j] == 0) sum += std::exp(logit[j] - largest);
  for (int32_t j = begin; j < n; ++j)
    if (forced[j] == 0) score[j] += std::exp(logit[j] - largest) / (sum * group);
}

// What all heads read.
struct Moments {
  int32_t begin;                   // the sinks: not scored
  int32_t group;                   // g
  std::vector<double> turns;       // the averaged rotation
  std::vector<double> mean;        // [Hq, d]
  std::vector<double> covariance;  // [Hq, d, d] or empty
};

Moments FutureMoments(const Recipe& recipe, const Layer& layer, ThreadPool* pool) {
  const int32_t d = layer.kv.key_dim;
  Moments moments{
      recipe.policy.sink, 0, AverageTurns(layer.rope, layer.kv.tokens, recipe.future), layer.statistics->mean(), {}};
  if (recipe.scorer == Scorer::kExpected && recipe.covariance) moments.covariance = layer.statistics->covariance();
  const auto query_heads = static_cast<int32_t>(moments.mean.size() / d);
  moments.group = query_heads / layer.kv.kv_heads;
  ForEach(pool, query_heads, [&](int64_t h) {
    layer.rope.Turn(moments.turns.data(), moments.mean.data() + h * d);
    if (!moments.covariance.empty())
      TurnBothSides(layer.rope, moments.turns.data(), d, moments.covariance.data() + h * d * d);
  });
  return moments;
}

void ExpectedHead(const Recipe& recipe, const Layer& layer, const Moments& moments, int64_t head, LayerScores* scores) {
  const KvView& kv = layer.kv;
  const int32_t n = kv.tokens;
  const int32_t d = kv.key_dim;
  const double scale = layer.attention.scale;
  double* score = scores->score.data() + head * n;
  const uint8_t* forced = scores->forced.data() + head * n;
  LaneTile keys(kv, static_cast<int32_t>(head), true);
  std::vector<double> logit(n);
  double linear[kLanes];
  double square[kLanes] = {};
  for (int64_t h = head * moments.group; h < (head + 1) * moments.group; ++h) {
    for (int32_t j = moments.begin; j < n; j += kLanes) {
      const double* tile = keys.Load(j, n);
      DotLanes(moments.mean.data() + h * d, d, tile, linear);
      if (!moments.covariance.empty()) QuadraticForm(moments.covariance.data() + h * d * d, d, tile, square);
      for (int32_t t = 0; t < std::min(kLanes, n - j); ++t)
        logit[j + t] = scale * linear[t] + 0.5 * scale * scale * square[t];
    }
    AddSoftmax(logit, forced, moments.begin, moments.group, score);
  }
  if (!recipe.value_norm) return;
  const HeadReader reader(kv, static_cast<int32_t>(head));
  std::vector<float> value(kv.value_dim);
  for (int32_t j = moments.begin; j < n; ++j) {
    reader.Value(j, value.data());
    score[j] = (score[j] + recipe.epsilon) * std::sqrt(SquaredNorm(value.data(), kv.value_dim));
  }
}

// CAPKV of one query head, added to its KV head's scores.
class CapacityScorer {
 public:
  CapacityScorer(const KvView& kv, int64_t head, const Moments& moments, const uint8_t* forced)
      : kv_(kv),
        moments_(moments),
        forced_(forced),
        keys_(kv, static_cast<int32_t>(head), true),
        values_(kv, static_cast<int32_t>(head), false),
        weight_(kv.tokens) {}

  bool Add(int64_t query_head, double* score) {
    FindWeights(moments_.mean.data() + query_head * kv_.key_dim);
    if (!FindCapacity()) return false;
    double form[kLanes];
    for (int32_t j = moments_.begin; j < kv_.tokens; j += kLanes) {
      InverseForm(capacity_.data(), kv_.value_dim, values_.Load(j, kv_.tokens), form);
      for (int32_t t = 0; t < std::min(kLanes, kv_.tokens - j); ++t)
        if (forced_[j + t] == 0) score[j + t] += weight_[j + t] * form[t] / moments_.group;
    }
    return true;
  }

 private:
  static constexpr double kTemperature = 5.0;
  static constexpr double kEpsilon = 1e-6;
  static constexpr double kSmallestNorm = 1e-12;

  // weight = exp(5 c - max), c the cosine of the key and the mean query.
  void FindWeights(const double* anchor) {
    const int32_t d = kv_.key_dim;
    const double length = std::max(kSmallestNorm, std::sqrt(Dot(anchor, anchor, d)));
    double dot[kLanes];
    double largest = -INFINITY;
    for (int32_t j = moments_.begin; j < kv_.tokens; j += kLanes) {
      const double* tile = keys_.Load(j, kv_.tokens);
      DotLanes(anchor, d, tile, dot);
      double squares[kLanes] = {};
      for (int32_t i = 0; i < d; ++i)
        for (int32_t t = 0; t < kLanes; ++t) squares[t] += tile[i * kLanes + t] * tile[i * kLanes + t];
      for (int32_t t = 0; t < std::min(kLanes, kv_.tokens - j); ++t) {
        const double norm = std::max(kSmallestNorm, std::sqrt(squares[t]));
        weight_[j + t] = kTemperature * std::clamp(dot[t] / (norm * length), -1.0, 1.0);
        if (forced_[j + t] == 0) largest = std::max(largest, weight_[j + t]);
      }
    }
    for (int32_t j = moments_.begin; j < kv_.tokens; ++j) weight_[j] = std::exp(weight_[j] - largest);
  }

  // capacity = Cholesky's factor of I + sum_j (weight_j + epsilon) v_j v_j^T.
  bool FindCapacity() {
    const int32_t dv = kv_.value_dim;
    capacity_.assign(static_cast<size_t>(dv) * dv, 0.0);
    for (int32_t i = 0; i < dv; ++i) capacity_[int64_t{i} * dv + i] = 1.0;
    std::vector<double> rows(static_cast<size_t>(kLanes) * dv);
    for (int32_t j = moments_.begin; j < kv_.tokens; j += kLanes) {
      const int32_t count = std::min(kLanes, kv_.tokens - j);
      const double* tile = values_.Load(j, kv_.tokens);
      for (int32_t t = 0; t < count; ++t) {
        const double factor = forced_[j + t] != 0 ? 0.0 : std::sqrt(weight_[j + t] + kEpsilon);
        for (int32_t i = 0; i < dv; ++i) rows[int64_t{t} * dv + i] = factor * tile[i * kLanes + t];
      }
      AddGram(rows.data(), count, dv, capacity_.data());
    }
    return Cholesky(dv, capacity_.data());
  }

  const KvView& kv_;
  const Moments& moments_;
  const uint8_t* forced_;
  LaneTile keys_;
  LaneTile values_;
  std::vector<double> weight_;    // [n]
  std::vector<double> capacity_;  // [dv, dv]
};

}  // namespace

// Expected attention, as in kvpress: the softmax of E[exp of the logit] under Gaussian queries at the next positions,
// mean over the group, times |v|. Logits by the layer's own scale, without soft cap and sinks. The first policy.sink
// tokens take no part.
Status ScoreExpected(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  if (layer.kv.tokens <= recipe.policy.sink) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(CheckMoments(recipe, layer));
  ForceNonFinite(layer.kv, pool, scores);
  const Moments moments = FutureMoments(recipe, layer, pool);
  ForEach(pool, layer.kv.kv_heads, [&](int64_t head) { ExpectedHead(recipe, layer, moments, head, scores); });
  PoolScores(recipe, recipe.policy.sink, layer.kv.tokens, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

// CAPKV (arXiv 2604.25975), as in kvpress: weight_j v_j^T A^-1 v_j with A = I + sum (weight + 1e-6) v v^T, the weights
// by the cosine of key and mean query; mean over the group. The first policy.sink tokens take no part.
Status ScoreCapKv(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  const KvView& kv = layer.kv;
  if (kv.tokens <= recipe.policy.sink) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(CheckMoments(recipe, layer));
  ForceNonFinite(kv, pool, scores);
  const Moments moments = FutureMoments(recipe, layer, pool);
  std::vector<uint8_t> failed(kv.kv_heads, 0);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    CapacityScorer scorer(kv, head, moments, scores->forced.data() + head * kv.tokens);
    for (int64_t h = head * moments.group; h < (head + 1) * moments.group; ++h)
      if (!scorer.Add(h, scores->score.data() + head * kv.tokens)) failed[head] = 1;
  });
  if (std::count(failed.begin(), failed.end(), 1) > 0)
    return Unsupported("values: their weighted Gram matrix is not positive definite in float64");
  PoolScores(recipe, recipe.policy.sink, kv.tokens, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
