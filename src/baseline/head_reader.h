// What the scorers of keys and values share: rows of a cache of any dtype and layout, tokens that are no numbers, loops
// over heads with or without a pool.
#pragma once

#include <cstdint>

#include "baseline/score.h"
#include "core/parallel.h"
#include "cpu/attend.h"
#include "cpu/kernels.h"

namespace dropkv::baseline {

// Keys and values of one KV head as float32.
class HeadReader {
 public:
  HeadReader(const KvView& kv, int32_t head)
      : kernels_(cpu::KernelTable().front()), tokens_(cpu::MakeHeadTokens(kv, head)) {}

  // out [d] or [dv]; false, and zeros, where the row has a NaN or Inf.
  bool Key(int32_t token, float* out) const { return kernels_.load_row(tokens_.k, tokens_.cell(token), nullptr, out); }
  bool Value(int32_t token, float* out) const {
    return kernels_.load_row(tokens_.v, tokens_.cell(token), nullptr, out);
  }

 private:
  const cpu::Kernels& kernels_;
  cpu::HeadTokens tokens_;
};

// f(item) for every item below count, on the pool's threads where there is a pool.
template <typename F>
void ForEach(ThreadPool* pool, int64_t count, F&& f) {
  if (pool != nullptr) return pool->For(count, [&](int64_t item, int32_t) { f(item); });
  for (int64_t item = 0; item < count; ++item) f(item);
}

// |x|^2.
inline double SquaredNorm(const float* x, int32_t dim) { return cpu::SquaredNorm(x, dim); }

// <a, b> of float64.
double Dot(const double* a, const double* b, int32_t dim);

// forced: 1 for tokens with NaN or Inf in key or value. First of all in a scorer: these take no part and score 0.
void ForceNonFinite(const KvView& kv, ThreadPool* pool, LayerScores* scores);

// Scores that are no finite numbers become 0 and are forced; nonfinite_tokens counts the forced. Last of all.
void FinishScores(LayerScores* scores);

// Tokens [begin, end) of every head: pooled as the recipe says, with zeros beyond both ends; forced ones count 0.
void PoolScores(const Recipe& recipe, int32_t begin, int32_t end, ThreadPool* pool, LayerScores* scores);

// Tokens [begin, end) of all heads together: (score - mean) / max(1e-6, unbiased standard deviation), over all but the
// forced ones.
void Standardise(int32_t begin, int32_t end, LayerScores* scores);

}  // namespace dropkv::baseline
