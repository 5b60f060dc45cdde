// The DropKV score with dense matrices, as one writes it over a BLAS: the competitor.
#pragma once

#include <cstdint>
#include <vector>

#include "core/parallel.h"

namespace dropkv::bench {

// One layer, head-major float32. out [Hq, w, d] and lse [Hq, w] are written, or read where they are handed in.
struct DenseLayer {
  int32_t kv_heads;
  int32_t group;
  int32_t rows;
  int32_t tokens;
  int32_t dim;
  const float* q;
  const float* k;
  const float* v;
  float* out;
  float* lse;
};

// Three matrices [g*w, n] for every thread.
struct DenseScratch {
  DenseScratch(const DenseLayer& layer, int32_t threads);

  std::vector<std::vector<float>> weights, products;
  std::vector<std::vector<float>> norms;  // [n] |v|^2
};

// raw [Hkv, n]. The KV heads run side by side, each on a single-threaded BLAS. vector_exp: a polynomial that the
// compiler vectorises, in loops compiled for AVX-512 where the machine has it, instead of std::exp and the build's own
// flags.
void DenseScore(const DenseLayer& layer, bool handed_in, bool vector_exp, ThreadPool& pool, DenseScratch& scratch,
                float* raw);

}  // namespace dropkv::bench
