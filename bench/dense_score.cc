#include "dense_score.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace dropkv::bench {
namespace {

struct StandardExp {
  static float Exp(float x) { return std::exp(x); }
};

struct VectorExp {
  static inline __attribute__((always_inline)) float Exp(float x) {
    const float scaled = std::max(x * 1.44269504F, -126.0F);
    const float shifted = scaled + 12582912.0F;
    const float f = scaled - (shifted - 12582912.0F);
    float y = 1.3264727e-3F;
    y = y * f + 9.6715127e-3F;
    y = y * f + 5.5507337e-2F;
    y = y * f + 0.24022242F;
    y = y * f + 0.69314698F;
    y = y * f + 1.0F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(y) + (std::bit_cast<uint32_t>(shifted) << 23));
  }
};

// Softmax of one row of logits over its first `visible` tokens; returns the log-sum-exp.
template <class E>
inline __attribute__((always_inline)) float Softmax(float* x, int32_t visible, int32_t n) {
  float largest = x[0];
  for (int32_t j = 1; j < visible; ++j) largest = x[j] > largest ? x[j] : largest;
  float sum = 0.0F;
#pragma GCC ivdep
  for (int32_t j = 0; j < visible; ++j) x[j] = E::Exp(x[j] - largest);
  float partial[16] = {};
  int32_t j = 0;
  for (; j + 16 <= visible; j += 16)
    for (int32_t i = 0; i < 16; ++i) partial[i] += x[j + i];
  for (; j < visible; ++j) sum += x[j];
  for (const float part : partial) sum += part;
  const float scale = 1.0F / sum;
  for (j = 0; j < visible; ++j) x[j] *= scale;
  for (j = visible; j < n; ++j) x[j] = 0.0F;
  return largest + std::log(sum);
}

// p from a handed-in log-sum-exp.
template <class E>
inline __attribute__((always_inline)) void Probabilities(float* x, int32_t visible, int32_t n, float lse) {
  for (int32_t j = 0; j < visible; ++j) x[j] = E::Exp(x[j] - lse);
  for (int32_t j = visible; j < n; ++j) x[j] = 0.0F;
}

// raw += (p/(1-p))^2 (|v|^2 - 2 <a,v> + |a|^2) of one row.
inline __attribute__((always_inline)) void AddRow(const float* p, const float* cross, const float* norms,
                                                  float out_norm, int32_t n, float* raw) {
  for (int32_t j = 0; j < n; ++j) {
    const float odds = p[j] / (1.0F - p[j]);
    const float distance = norms[j] - 2.0F * cross[j] + out_norm;
    raw[j] += odds * odds * (distance > 0.0F ? distance : 0.0F);
  }
}

template <class E>
inline __attribute__((always_inline)) void Head(const DenseLayer& layer, int32_t head, bool handed_in, float* p,
                                                float* cross, float* norms, float* raw) {
  const int32_t r = layer.group * layer.rows;
  const int32_t n = layer.tokens;
  const int32_t d = layer.dim;
  const float* q = layer.q + int64_t{head} * r * d;
  const float* k = layer.k + int64_t{head} * n * d;
  const float* v = layer.v + int64_t{head} * n * d;
  float* out = layer.out + int64_t{head} * r * d;
  float* lse = layer.lse + int64_t{head} * r;
  const float scale = 1.0F / std::sqrt(static_cast<float>(d));
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, r, n, d, scale, q, d, k, d, 0.0F, p, n);
  for (int32_t i = 0; i < r; ++i) {
    const int32_t visible = n - layer.rows + i % layer.rows + 1;
    float* row = p + int64_t{i} * n;
    if (handed_in) {
      Probabilities<E>(row, visible, n, lse[i]);
    } else {
      lse[i] = Softmax<E>(row, visible, n);
    }
  }
  if (!handed_in) cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, r, d, n, 1.0F, p, n, v, d, 0.0F, out, d);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, r, n, d, 1.0F, out, d, v, d, 0.0F, cross, n);
  for (int32_t j = 0; j < n; ++j) {
    const float* row = v + int64_t{j} * d;
    float sum = 0.0F;
    for (int32_t c = 0; c < d; ++c) sum += row[c] * row[c];
    norms[j] = sum;
  }
  std::fill_n(raw, n, 0.0F);
  for (int32_t i = 0; i < r; ++i) {
    float norm = 0.0F;
    for (int32_t c = 0; c < d; ++c) norm += out[i * d + c] * out[i * d + c];
    AddRow(p + int64_t{i} * n, cross + int64_t{i} * n, norms, norm, n, raw);
  }
  const float share = 1.0F / static_cast<float>(layer.group);
  for (int32_t j = 0; j < n; ++j) raw[j] *= share;
}

void PlainHead(const DenseLayer& layer, int32_t head, bool handed_in, float* p, float* cross, float* norms,
               float* raw) {
  Head<StandardExp>(layer, head, handed_in, p, cross, norms, raw);
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx512f,avx512vl,fma,prefer-vector-width=512"))) void WideHead(const DenseLayer& layer,
                                                                                      int32_t head, bool handed_in,
                                                                                      float* p, float* cross,
                                                                                      float* norms, float* raw) {
  Head<VectorExp>(layer, head, handed_in, p, cross, norms, raw);
}
#endif

void VectorHead(const DenseLayer& layer, int32_t head, bool handed_in, float* p, float* cross, float* norms,
                float* raw) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
    return WideHead(layer, head, handed_in, p, cross, norms, raw);
#endif
  Head<VectorExp>(layer, head, handed_in, p, cross, norms, raw);
}

}  // namespace

DenseScratch::DenseScratch(const DenseLayer& layer, int32_t threads)
    : weights(threads), products(threads), norms(threads) {
  const size_t elements = static_cast<size_t>(layer.group) * layer.rows * layer.tokens;
  for (int32_t t = 0; t < threads; ++t) {
    weights[t].resize(elements);
    products[t].resize(elements);
    norms[t].resize(layer.tokens);
  }
}

void DenseScore(const DenseLayer& layer, bool handed_in, bool vector_exp, ThreadPool& pool, DenseScratch& scratch,
                float* raw) {
  pool.For(layer.kv_heads, [&](int64_t head, int32_t worker) {
    const auto run = vector_exp ? VectorHead : PlainHead;
    run(layer, static_cast<int32_t>(head), handed_in, scratch.weights[worker].data(), scratch.products[worker].data(),
        scratch.norms[worker].data(), raw + head * layer.tokens);
  });
}

}  // namespace dropkv::bench
