// Scorers that weigh values against the rows' outputs: AnDPro in two forms, OBCache.
#include <algorithm>
#include <cmath>
#include <vector>

#include "baseline/scorers.h"
#include "baseline/window_attention.h"
#include "baseline/window_scores.h"

namespace dropkv::baseline {
namespace {

// Where AnDPro's code cuts the prompt: chunks, of which the first and the window's whole ones are kept, and any that
// holds a sink or a recent token.
struct Chunks {
  int32_t size;
  int32_t count;
  int32_t first;       // how many of the first ones are kept
  int32_t last_begin;  // of the last ones that are

  Chunks(const Recipe& recipe, int32_t n) : size(std::max(1, recipe.chunk)), count((n + size - 1) / size) {
    first = std::max(1, (std::min(recipe.policy.sink, n) + size - 1) / size);
    last_begin = std::max(0, count - recipe.policy.window / size);
    if (recipe.recent > 0) last_begin = std::min(last_begin, std::max(0, n - recipe.recent) / size);
  }
  bool Kept(int32_t token) const { return token / size < first || token / size >= last_begin; }
};

// D_i = sum over the tokens of chunks that are not kept of pooled p v: one KV head's anchors [dv, lanes] in panels.
AlignedFloats Anchors(const WindowAttention& attention, const WindowAttention::Range& range, const Pooling& pooling,
                      const Chunks& chunks) {
  const int32_t lanes = attention.lanes();
  const int32_t dim = attention.value_dim();
  const auto size = static_cast<size_t>(lanes) * dim;
  std::vector<double> anchors(size, 0.0);
  std::vector<float> weights(static_cast<size_t>(cpu::kTile) * lanes);
  std::vector<float> value(dim);
  for (int32_t begin = 0; begin < range.end; begin += cpu::kTile) {
    const int32_t count = std::min(cpu::kTile, range.end - begin);
    attention.PooledWeights(range, pooling, range.end, begin, count, weights.data());
    std::vector<float> sums(size, 0.0F);  // of a tile; double over the tiles
    for (int32_t t = 0; t < count; ++t) {
      if (chunks.Kept(begin + t) || !attention.TakesPart(range, begin + t)) continue;
      attention.Value(range, begin + t, value.data());
      for (int32_t lane = 0; lane < attention.head_rows(); ++lane) {
        const float p = weights[static_cast<size_t>(t) * lanes + lane];
        float* sum = sums.data() + static_cast<size_t>(lane) * dim;
        for (int32_t i = 0; i < dim; ++i) sum[i] += p * value[i];
      }
    }
    for (size_t i = 0; i < size; ++i) anchors[i] += sums[i];
  }
  return attention.PackLanes(
      [&](int32_t lane, float* column) { std::copy_n(anchors.data() + static_cast<size_t>(lane) * dim, dim, column); });
}

}  // namespace

// AnDPro, token form: how far p_ij v_j reaches in the direction of the row's output, summed over the rows, mean over
// the group.
Status ScoreProjection(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                       LayerScores* scores) {
  WindowAttention attention(recipe, layer, true, pool);
  const int32_t lanes = attention.lanes();
  std::vector<AlignedFloats> directions;
  directions.reserve(scores->kv_heads);
  for (int32_t head = 0; head < scores->kv_heads; ++head)
    directions.push_back(attention.PackLanes([&](int32_t lane, float* column) {
      attention.Output(head, lane, column);
      const double norm = std::sqrt(cpu::SquaredNorm(column, attention.value_dim()));
      const double factor = norm > 0.0 ? 1.0 / (norm * attention.group()) : 0.0;
      for (int32_t i = 0; i < attention.value_dim(); ++i) column[i] = static_cast<float>(column[i] * factor);
    }));
  std::vector<float> raw(scores->score.size());
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    std::vector<float> products(weights.size());
    attention.Weights(range, begin, count, weights.data());
    attention.Products(range, directions[range.kv_head].data(), begin, count, products.data());
    attention.kernels().dots(weights.data(), products.data(), lanes, count, lanes,
                             raw.data() + static_cast<size_t>(range.kv_head) * scores->tokens + begin);
  });
  PoolAndReduce(recipe, raw, attention.group(), pool, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

// AnDPro as MIRALab-USTC/LLM-AnDPro computes it: the weights themselves are pooled, over all columns; the anchor of a
// row is the unnormalised sum over the chunks that are not kept anyway; a chunk's score is the sum over the rows of the
// product with the anchor, and may be negative. Every token gets its chunk's score. The code is for MHA; the mean over
// the group is ours. Kept are the first chunk and the window's whole chunks, counted from the padded end. Generated
// tokens are kept anyway: they are no part of the anchors, and weights are pooled over the prompt.
Status ScoreProjectionCode(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                           LayerScores* scores) {
  WindowAttention attention(recipe, layer, false, pool);
  const int32_t n = scores->tokens;
  const int32_t lanes = attention.lanes();
  const Chunks chunks(recipe, n);
  const Pooling& pooling = recipe.policy.pool;
  for (int32_t j = 0; j < n; ++j) scores->is_protected[j] = chunks.Kept(j) ? 1 : 0;
  attention.ForEachRange(0, [&](const WindowAttention::Range& range) {
    const AlignedFloats anchors = Anchors(attention, range, pooling, chunks);
    double* out = scores->score.data() + static_cast<size_t>(range.kv_head) * n;
    std::vector<float> weights(static_cast<size_t>(cpu::kTile) * lanes);
    std::vector<float> products(weights.size());
    std::vector<float> dots(cpu::kTile);
    std::vector<double> of_chunk(chunks.count, 0.0);
    for (int32_t begin = 0; begin < n; begin += cpu::kTile) {
      const int32_t count = std::min(cpu::kTile, n - begin);
      attention.PooledWeights(range, pooling, n, begin, count, weights.data());
      attention.Products(range, anchors.data(), begin, count, products.data());
      attention.kernels().dots(weights.data(), products.data(), lanes, count, lanes, dots.data());
      // Pooling gives weight to a neighbour that takes no part.
      for (int32_t t = 0; t < count; ++t)
        if (attention.TakesPart(range, begin + t)) of_chunk[(begin + t) / chunks.size] += dots[t];
    }
    for (int32_t j = 0; j < n; ++j) out[j] = of_chunk[j / chunks.size] / attention.group();
  });
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

namespace {

// One pair's saliency to second order, p^2 times the square of what the key's, the value's or both removals move the
// output by. z: the scaled logit; cross: <v, a>.
struct Saliency {
  ObCacheForm form;

  float operator()(float p, float z, float value_norm, float cross, float out_norm) const {
    const float toward = form == ObCacheForm::kKey ? z : 1.0F + z;  // |toward v - z a|^2
    const float moved = toward * toward * value_norm - 2.0F * toward * z * cross + z * z * out_norm;
    return p * p * (form == ObCacheForm::kValue ? value_norm : std::max(0.0F, moved));
  }
};

}  // namespace

// OBCache (arXiv 2510.07651): value sum_i p^2 |v|^2; key sum_i p^2 z^2 |v - a|^2; joint sum_i p^2 |v + z (v - a)|^2.
// Sum over the rows, mean over the group. Float32 and expanded: errors are relative to (z |v|)^2.
Status ScoreObCache(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                    LayerScores* scores) {
  WindowAttention attention(recipe, layer, true, pool);
  const int32_t lanes = attention.lanes();
  std::vector<AlignedFloats> outputs;
  outputs.reserve(scores->kv_heads);
  std::vector<float> norms(static_cast<size_t>(scores->kv_heads) * lanes, 0.0F);
  for (int32_t head = 0; head < scores->kv_heads; ++head)
    outputs.push_back(attention.PackLanes([&](int32_t lane, float* column) {
      attention.Output(head, lane, column);
      norms[head * lanes + lane] = static_cast<float>(cpu::SquaredNorm(column, attention.value_dim()));
    }));
  const Saliency saliency{recipe.obcache};
  const std::vector<float> shares(lanes, 1.0F / static_cast<float>(attention.group()));
  std::vector<float> raw(scores->score.size());
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    std::vector<float> logits(weights.size());
    std::vector<float> products(weights.size());
    std::vector<float> value_norms(count);
    attention.Weights(range, begin, count, weights.data(), logits.data());
    attention.Products(range, outputs[range.kv_head].data(), begin, count, products.data(), value_norms.data());
    const float* out_norms = norms.data() + static_cast<size_t>(range.kv_head) * lanes;
    for (int32_t t = 0; t < count; ++t)
      for (int32_t lane = 0; lane < lanes; ++lane) {
        const size_t at = static_cast<size_t>(t) * lanes + lane;
        weights[at] = saliency(weights[at], logits[at], value_norms[t], products[at], out_norms[lane]);
      }
    attention.kernels().dots(weights.data(), shares.data(), 0, count, lanes,
                             raw.data() + static_cast<size_t>(range.kv_head) * scores->tokens + begin);
  });
  PoolAndReduce(recipe, raw, attention.group(), pool, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
