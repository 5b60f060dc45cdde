#include "support/reference_model.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "ggml.h"

namespace dropkv::testing {
namespace {

double RoundToHalf(double x) { return ggml_fp16_to_fp32(ggml_fp32_to_fp16(static_cast<float>(x))); }

double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double Silu(double x) { return x / (1 + std::exp(-x)); }

// The tanh form, which gemma was trained with.
double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

void AddTo(std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// softmax(q K^T / sqrt(d)) V over entries first .. n-1; returns the entropy.
double AttendHead(std::span<const double> q, const HeadCache& cache, size_t first, std::span<double> out) {
  const double scale = 1 / std::sqrt(static_cast<double>(q.size()));
  std::vector<double> weights;
  for (size_t j = first; j < cache.keys.size(); ++j) weights.push_back(scale * Dot(q, cache.keys[j]));
  const double largest = *std::max_element(weights.begin(), weights.end());
  double sum = 0;
  for (double& w : weights) sum += w = std::exp(w - largest);
  double entropy = 0;
  for (size_t j = 0; j < weights.size(); ++j) {
    const double p = weights[j] / sum;
    if (p > 0) entropy -= p * std::log(p);
    for (size_t i = 0; i < out.size(); ++i) out[i] += p * cache.values[first + j][i];
  }
  return entropy;
}

}  // namespace

ReferenceModel::ReferenceModel(const TinyModel& model, bool f16_cache)
    : model_(model),
      f16_cache_(f16_cache),
      caches_(model.config.layers, std::vector<HeadCache>(model.config.kv_heads)),
      traces_(model.config.layers) {}

const NamedTensor& ReferenceModel::Tensor(const std::string& name) const { return model_.tensors.at(name); }

ReferenceModel::Row ReferenceModel::Multiply(const std::string& weight, const Row& x) const {
  const NamedTensor& w = Tensor(weight);
  Row out(w.shape[1]);
  const float* row = w.data.data();
  for (double& y : out) {
    for (const double value : x) y += *row++ * value;
  }
  return out;
}

ReferenceModel::Row ReferenceModel::Normalize(const std::string& weight, const Row& x) const {
  const std::vector<float>& w = Tensor(weight).data;
  Row out(x.size());
  for (size_t start = 0; start < x.size(); start += w.size()) {
    const std::span<const double> part(x.data() + start, w.size());
    const double factor = 1 / std::sqrt(Dot(part, part) / static_cast<double>(w.size()) + kTinyNormEpsilon);
    for (size_t i = 0; i < w.size(); ++i) out[start + i] = part[i] * factor * w[i];
  }
  return out;
}

void ReferenceModel::Rotate(Row& x, int32_t layer) const {
  const TinyConfig& c = model_.config;
  const int32_t half = c.head_dim / 2;
  const double base = c.Slides(layer) ? c.sliding_rope_base : c.rope_base;
  const bool neighbours = c.arch == TinyArch::kLlama;
  for (size_t head = 0; head < x.size(); head += c.head_dim) {
    for (int32_t i = 0; i < half; ++i) {
      const double angle = position_ * std::pow(base, -2.0 * i / c.head_dim);
      double& a = x[head + (neighbours ? 2 * i : i)];
      double& b = x[head + (neighbours ? 2 * i + 1 : i + half)];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = turned;
    }
  }
}

// q or k of all heads: product, bias, norm and rotation, as far as the architecture has them. v: the first two.
ReferenceModel::Row ReferenceModel::Project(const std::string& prefix, const char* part, const Row& x,
                                            int32_t layer) const {
  const std::string name = prefix + "attn_" + part;
  Row out = Multiply(name + ".weight", x);
  if (const auto bias = model_.tensors.find(name + ".bias"); bias != model_.tensors.end()) {
    for (size_t i = 0; i < out.size(); ++i) out[i] += bias->second.data[i];
  }
  if (model_.tensors.contains(name + "_norm.weight")) out = Normalize(name + "_norm.weight", out);
  if (*part != 'v') Rotate(out, layer);
  return out;
}

ReferenceModel::Row ReferenceModel::Attend(const std::string& prefix, const Row& x, int32_t layer) {
  const TinyConfig& c = model_.config;
  Row q = Project(prefix, "q", x, layer);
  Row k = Project(prefix, "k", x, layer);
  Row v = Project(prefix, "v", x, layer);
  if (f16_cache_) {
    std::transform(k.begin(), k.end(), k.begin(), RoundToHalf);
    std::transform(v.begin(), v.end(), v.begin(), RoundToHalf);
  }
  for (int32_t head = 0; head < c.kv_heads; ++head) {
    HeadCache& cache = caches_[layer][head];
    const auto offset = static_cast<ptrdiff_t>(head) * c.head_dim;
    cache.positions.push_back(position_);
    cache.keys.emplace_back(k.begin() + offset, k.begin() + offset + c.head_dim);
    cache.values.emplace_back(v.begin() + offset, v.begin() + offset + c.head_dim);
  }
  Row out(q.size());
  Row entropies;
  for (int32_t head = 0; head < c.heads; ++head) {
    const HeadCache& cache = caches_[layer][head / (c.heads / c.kv_heads)];
    size_t first = 0;
    if (c.Slides(layer)) {
      while (cache.positions[first] <= position_ - c.sliding_window) ++first;
    }
    const auto offset = static_cast<size_t>(head) * c.head_dim;
    entropies.push_back(
        AttendHead(std::span(q).subspan(offset, c.head_dim), cache, first, std::span(out).subspan(offset, c.head_dim)));
  }
  LayerTrace& trace = traces_[layer];
  trace.queries.push_back(std::move(q));
  trace.outputs.push_back(out);
  trace.entropies.push_back(std::move(entropies));
  return Multiply(prefix + "attn_output.weight", out);
}

ReferenceModel::Row ReferenceModel::FeedForward(const std::string& prefix, const Row& x) const {
  Row gate = Multiply(prefix + "ffn_gate.weight", x);
  const Row up = Multiply(prefix + "ffn_up.weight", x);
  const bool gelu = model_.config.arch == TinyArch::kGemma3;
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = (gelu ? Gelu(gate[i]) : Silu(gate[i])) * up[i];
  return Multiply(prefix + "ffn_down.weight", gate);
}

ReferenceModel::Row ReferenceModel::Step(int32_t token) {
  const TinyConfig& c = model_.config;
  const bool post_norms = c.arch == TinyArch::kGemma3;
  const float* embedding = Tensor("token_embd.weight").data.data() + static_cast<int64_t>(token) * c.embedding;
  Row x(embedding, embedding + c.embedding);
  if (c.arch == TinyArch::kGemma3) {
    for (double& value : x) value *= std::sqrt(static_cast<double>(c.embedding));
  }
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    Row attention = Attend(prefix, Normalize(prefix + "attn_norm.weight", x), layer);
    AddTo(x, post_norms ? Normalize(prefix + "post_attention_norm.weight", attention) : attention);
    Row forward = FeedForward(prefix, Normalize(prefix + "ffn_norm.weight", x));
    AddTo(x, post_norms ? Normalize(prefix + "post_ffw_norm.weight", forward) : forward);
  }
  ++position_;
  return x;
}

std::vector<double> ReferenceModel::Decode(std::span<const int32_t> tokens) {
  std::fill(traces_.begin(), traces_.end(), LayerTrace{});
  Row x;
  for (const int32_t token : tokens) x = Step(token);
  return Multiply("output.weight", Normalize("output_norm.weight", x));
}

void ReferenceModel::Keep(const KeepList& keep, std::span<const int32_t> layers) {
  for (int32_t i = 0; i < keep.layers(); ++i) {
    std::vector<HeadCache>& heads = caches_[layers.empty() ? i : layers[i]];
    for (int32_t head = 0; head < keep.kv_heads(); ++head) {
      const std::span<const int32_t> kept = keep.head(i, head);
      HeadCache& from = heads[head];
      HeadCache to;
      for (size_t j = 0; j < from.positions.size(); ++j) {
        if (!std::binary_search(kept.begin(), kept.end(), from.positions[j])) continue;
        to.positions.push_back(from.positions[j]);
        to.keys.push_back(std::move(from.keys[j]));
        to.values.push_back(std::move(from.values[j]));
      }
      from = std::move(to);
    }
  }
}

}  // namespace dropkv::testing
