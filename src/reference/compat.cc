#include <algorithm>
#include <cmath>
#include <limits>

#include "core/element.h"
#include "reference/reference.h"

namespace dropkv::reference {
namespace {

constexpr float kEpsilon = 1e-6F;  // the published weight is p / (1 - p + 1e-6)

std::vector<float> LoadHead(const KvView& kv, const KvTensor& tensor, int32_t head, int32_t dim) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(kv.tokens) * dim);
  for (int32_t j = 0; j < kv.tokens; ++j)
    for (int32_t c = 0; c < dim; ++c) values.push_back(LoadElement(tensor, kv.cells, head, j, c));
  return values;
}

float Dot32(const float* a, const float* b, int32_t dim) {
  float sum = 0.0F;
  for (int32_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

// Softmax weights [visible] of one row in float32.
std::vector<float> Weights(const KvView& kv, const std::vector<float>& keys, const float* q, int32_t query_head,
                           int32_t visible, const AttentionSpec& spec) {
  std::vector<float> weights(visible);
  float largest = spec.sinks != nullptr ? spec.sinks[query_head] : -std::numeric_limits<float>::infinity();
  for (int32_t j = 0; j < visible; ++j) {
    weights[j] = spec.scale * Dot32(q, keys.data() + static_cast<size_t>(j) * kv.key_dim, kv.key_dim);
    if (spec.soft_cap > 0.0F) weights[j] = spec.soft_cap * std::tanh(weights[j] / spec.soft_cap);
    largest = std::max(largest, weights[j]);
  }
  float sum = spec.sinks != nullptr ? std::exp(spec.sinks[query_head] - largest) : 0.0F;
  for (float& weight : weights) sum += weight = std::exp(weight - largest);
  for (float& weight : weights) weight /= sum;
  return weights;
}

// Sums over one query head's rows that the expanded form needs, per token: W, W <v, a>, W |a|^2.
struct ExpandedSums {
  std::vector<float> weight;
  std::vector<float> cross;
  std::vector<float> out;
};

void AddRow(const KvView& kv, const std::vector<float>& values, const std::vector<float>& weights, ExpandedSums& sums) {
  std::vector<float> a(kv.value_dim, 0.0F);
  for (size_t j = 0; j < weights.size(); ++j)
    for (int32_t c = 0; c < kv.value_dim; ++c) a[c] += weights[j] * values[j * kv.value_dim + c];
  const float squared = Dot32(a.data(), a.data(), kv.value_dim);
  for (size_t j = 0; j < weights.size(); ++j) {
    const float ratio = weights[j] / (1.0F - weights[j] + kEpsilon);
    const float w = ratio * ratio;
    sums.weight[j] += w;
    sums.cross[j] += w * Dot32(values.data() + j * kv.value_dim, a.data(), kv.value_dim);
    sums.out[j] += w * squared;
  }
}

}  // namespace

std::vector<float> CompatScore(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec) {
  const int32_t group = rows.query_heads / kv.kv_heads;
  std::vector<float> scores(static_cast<size_t>(kv.kv_heads) * kv.tokens, 0.0F);
  for (int32_t u = 0; u < kv.kv_heads; ++u) {
    const std::vector<float> keys = LoadHead(kv, kv.k, u, kv.key_dim);
    const std::vector<float> values = LoadHead(kv, kv.v, u, kv.value_dim);
    float* score = scores.data() + static_cast<size_t>(u) * kv.tokens;
    for (int32_t h = u * group; h < (u + 1) * group; ++h) {
      const std::vector<float> zero(kv.tokens, 0.0F);
      ExpandedSums sums{zero, zero, zero};
      for (int32_t i = 0; i < rows.rows; ++i) {
        const float* q = rows.q + h * rows.head_stride + i * rows.row_stride;
        AddRow(kv, values, Weights(kv, keys, q, h, rows.visible[i], spec), sums);
      }
      for (int32_t j = 0; j < kv.tokens; ++j) {
        const float* value = values.data() + static_cast<size_t>(j) * kv.value_dim;
        score[j] += sums.weight[j] * Dot32(value, value, kv.value_dim) - 2.0F * sums.cross[j] + sums.out[j];
      }
    }
    for (int32_t j = 0; j < kv.tokens; ++j) score[j] /= static_cast<float>(group);
  }
  return scores;
}

}  // namespace dropkv::reference
