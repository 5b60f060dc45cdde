// Compactor (arXiv 2507.08143), as in kvpress: statistical leverage of the keys before RoPE, by a random sketch, and
// the attention inside chunks; each standardised over all heads and tokens of the layer.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "baseline/gram.h"
#include "baseline/head_reader.h"
#include "baseline/scorers.h"
#include "baseline/statistics.h"
#include "core/random.h"

namespace dropkv::baseline {
namespace {

Status CheckStatistics(const Recipe& recipe, const Layer& layer) {
  if (layer.statistics == nullptr) return InvalidArgument("q: expected statistics of all rows of the prompt, got none");
  return layer.statistics->Serves(recipe, layer.kv);
}

// Standard normal number by Box and Muller; distinct for every (layer, head, index).
double Normal(uint64_t seed, int32_t layer, int32_t head, int32_t index) {
  const uint64_t counter = (static_cast<uint64_t>(layer) << 48) | (static_cast<uint64_t>(head) << 32);
  const double first = RandomUniform(seed, counter + 2 * static_cast<uint64_t>(index));
  const double second = RandomUniform(seed, counter + 2 * static_cast<uint64_t>(index) + 1);
  return std::sqrt(-2.0 * std::log(1.0 - first)) * std::cos(2.0 * std::numbers::pi * second);
}

// [d, sketch] of one head.
std::vector<double> Sketch(const Recipe& recipe, const Layer& layer, int32_t head) {
  const int32_t size = layer.kv.key_dim * recipe.sketch;
  if (layer.sketch != nullptr) {
    const float* from = layer.sketch + int64_t{head} * size;
    return {from, from + size};
  }
  std::vector<double> sketch(size);
  const double factor = 1.0 / std::sqrt(static_cast<double>(recipe.sketch));
  for (int32_t i = 0; i < size; ++i) sketch[i] = factor * Normal(recipe.policy.seed, layer.index, head, i);
  return sketch;
}

// One head's keys before RoPE, projected and centred: rows [end - begin, sketch], zeros for forced tokens.
std::vector<double> ProjectedKeys(const Recipe& recipe, const Layer& layer, int32_t head, const LocalSpan& span,
                                  const uint8_t* forced) {
  const KvView& kv = layer.kv;
  const int32_t begin = span.begin(kv.tokens);
  const int32_t end = span.end(kv.tokens);
  const int32_t columns = recipe.sketch;
  const std::vector<double> sketch = Sketch(recipe, layer, head);
  const HeadReader reader(kv, head);
  std::vector<float> key(kv.key_dim);
  std::vector<double> rows(static_cast<size_t>(end - begin) * columns, 0.0);
  std::vector<double> mean(columns, 0.0);
  int32_t count = 0;
  for (int32_t j = begin; j < end; ++j) {
    if (forced[j] != 0) continue;
    if (layer.k_pre != nullptr) {
      std::copy_n(layer.k_pre + (int64_t{head} * kv.tokens + j) * kv.key_dim, kv.key_dim, key.data());
    } else {
      reader.Key(j, key.data());
      layer.rope.Rotate(j, true, key.data());
    }
    double* row = rows.data() + int64_t{j - begin} * columns;
    for (int32_t i = 0; i < kv.key_dim; ++i)
      for (int32_t c = 0; c < columns; ++c) row[c] += key[i] * sketch[int64_t{i} * columns + c];
    for (int32_t c = 0; c < columns; ++c) mean[c] += row[c];
    ++count;
  }
  for (int32_t j = begin; j < end; ++j)
    for (int32_t c = 0; forced[j] == 0 && c < columns; ++c) rows[int64_t{j - begin} * columns + c] -= mean[c] / count;
  return rows;
}

// Factor of rows^T rows + jitter I, with more jitter where that is not positive definite.
bool FactorGram(const std::vector<double>& rows, int32_t columns, std::vector<double>* factor) {
  constexpr int32_t kTries = 5;
  double jitter = 1e-2;
  std::vector<double> gram(static_cast<size_t>(columns) * columns, 0.0);
  AddGram(rows.data(), static_cast<int32_t>(rows.size() / columns), columns, gram.data());
  for (int32_t attempt = 0; attempt < kTries; ++attempt, jitter *= 10.0) {
    *factor = gram;
    for (int32_t c = 0; c < columns; ++c) (*factor)[int64_t{c} * columns + c] += jitter;
    if (Cholesky(columns, factor->data())) return true;
  }
  return false;
}

// leverage [Hkv, n] of the tokens in the span; false where a head's Gram matrix has no factor.
bool Leverage(const Recipe& recipe, const Layer& layer, const LocalSpan& span, ThreadPool* pool, LayerScores* out) {
  const KvView& kv = layer.kv;
  const int32_t begin = span.begin(kv.tokens);
  const int32_t count = span.end(kv.tokens) - begin;
  const int32_t columns = recipe.sketch;
  std::vector<uint8_t> failed(kv.kv_heads, 0);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const std::vector<double> rows =
        ProjectedKeys(recipe, layer, static_cast<int32_t>(head), span, out->forced.data() + head * kv.tokens);
    std::vector<double> factor;
    if (!FactorGram(rows, columns, &factor)) {
      failed[head] = 1;
      return;
    }
    std::vector<double> lanes(static_cast<size_t>(columns) * kLanes, 0.0);
    double form[kLanes];
    for (int32_t j = 0; j < count; j += kLanes) {
      const int32_t tokens = std::min(kLanes, count - j);
      for (int32_t c = 0; c < columns; ++c)
        for (int32_t t = 0; t < kLanes; ++t)
          lanes[c * kLanes + t] = t < tokens ? rows[int64_t{j + t} * columns + c] : 0.0;
      InverseForm(factor.data(), columns, lanes.data(), form);
      std::copy_n(form, tokens, out->score.data() + head * kv.tokens + begin + j);
    }
  });
  return std::count(failed.begin(), failed.end(), 1) == 0;
}

// The local attention's column sums times |v|, pooled and standardised, in the span.
void LocalScores(const Recipe& recipe, const Layer& layer, const LocalSpan& span, ThreadPool* pool,
                 LayerScores* scores) {
  const KvView& kv = layer.kv;
  const int32_t begin = span.begin(kv.tokens);
  const int32_t end = span.end(kv.tokens);
  const std::vector<double>& sums = layer.statistics->local(span);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const HeadReader reader(kv, static_cast<int32_t>(head));
    std::vector<float> value(kv.value_dim);
    for (int32_t j = begin; j < end; ++j) {
      reader.Value(j, value.data());
      scores->score[head * kv.tokens + j] =
          sums[head * (end - begin) + (j - begin)] * std::sqrt(SquaredNorm(value.data(), kv.value_dim));
    }
  });
  PoolScores(recipe, begin, end, pool, scores);
  Standardise(begin, end, scores);
}

}  // namespace

// The attention part alone, over all tokens (kvpress's non-causal attention press).
Status ScoreLocalAttention(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(CheckStatistics(recipe, layer));
  ForceNonFinite(layer.kv, pool, scores);
  LocalScores(recipe, layer, {recipe.block, 0, 0}, pool, scores);
  FinishScores(scores);
  return Status::Ok();
}

// The share removed times the leverage, plus the attention. Protects the first policy.sink and the last recipe.recent
// tokens, which take no part in either.
Status ScoreCompactor(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                      LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(CheckStatistics(recipe, layer));
  const KvView& kv = layer.kv;
  if (recipe.sketch < 1) return InvalidArgument("sketch: expected at least 1, got " + std::to_string(recipe.sketch));
  if (layer.k_pre == nullptr && layer.rope.dims == 0)
    return InvalidArgument("k_pre: expected the keys before RoPE, or a rope that undoes it; got neither");
  const LocalSpan span{recipe.block, recipe.policy.sink, recipe.recent};
  const int32_t begin = span.begin(kv.tokens);
  const int32_t end = span.end(kv.tokens);
  std::fill_n(scores->is_protected.begin(), begin, uint8_t{1});
  std::fill(scores->is_protected.begin() + end, scores->is_protected.end(), uint8_t{1});
  ForceNonFinite(kv, pool, scores);
  LayerScores leverage = *scores;
  if (!Leverage(recipe, layer, span, pool, &leverage))
    return Unsupported("keys: the Gram matrix of their sketch is not positive definite in float64");
  Standardise(begin, end, &leverage);
  LocalScores(recipe, layer, span, pool, scores);
  for (size_t i = 0; i < scores->score.size(); ++i) scores->score[i] += (1.0 - keep_fraction) * leverage.score[i];
  FinishScores(scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
