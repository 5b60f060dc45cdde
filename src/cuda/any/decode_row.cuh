// One query head of one list by one block, in float32: tokens with a NaN or Inf are looked for and left out. The kernel
// for every shape, and what the tensor-core kernel falls back to where its result is not finite.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/any/vector.cuh"
#include "dropkv/cache_view.h"

namespace dropkv::cuda::decode {

inline constexpr int32_t kThreads = 128;
inline constexpr int32_t kTeam = 8;  // lanes that share a token
inline constexpr int32_t kTeams = kThreads / kTeam;
inline constexpr int32_t kTeamVectors = kMaxHeadDim / (kTeam * kVector);  // of a lane
inline constexpr int32_t kRowTile = 64;                                   // tokens between two barriers
inline constexpr int32_t kColumns = kMaxHeadDim / kThreads;               // of a thread

struct RowScratch {
  float logit[kRowTile];
};

__device__ inline float Sink2(const DecodeParams& params, int32_t query_head) {
  return params.sinks != nullptr ? params.sinks[query_head] * kLog2E : -INFINITY;
}

// What sum_j exp2(l_j - max) v_j is multiplied by to become the output, from sum_j exp2(l_j - max) and the sink.
__device__ inline float Normaliser(float max, float sum, float sink) {
  if (sum == 0.0F) return 0.0F;
  const float largest = fmaxf(max, sink);
  const float share = exp2f(max - largest);
  return share / (sum * share + exp2f(sink - largest));
}

template <typename T>
__device__ void StoreOut(const DecodeParams& params, int64_t at, float value) {
  if (params.out32 != nullptr) params.out32[at] = value;
  if (params.out != nullptr) static_cast<T*>(params.out)[at] = FromFloat<T>(value);
}

// In units of log2(e). Clamped: a product beyond float32 is still the largest of all.
__device__ inline float CarefulLogit2(const DecodeParams& params, float product) {
  RowParams rows;
  rows.scale = params.scale;
  rows.soft_cap = params.soft_cap;
  return fminf(fmaxf(Logit2(rows, product), -FLT_MAX), FLT_MAX);
}

// A lane's share of a token: its part of <q, k>, and whether its elements of key and value are finite.
template <typename T>
__device__ bool TokenPart(const DecodeParams& params, const float (&query)[kTeamVectors][kVector], const T* key,
                          const T* value, int32_t member, float* product) {
  bool finite = true;
  *product = 0.0F;
#pragma unroll
  for (int32_t i = 0; i < kTeamVectors; ++i) {
    const int32_t first = (i * kTeam + member) * kVector;
    float x[kVector];
    if (first < params.cache.key_dim) {
      Load8(key, first, params.cache.key_dim, x);
      finite = finite && AllFinite(x);
#pragma unroll
      for (int32_t e = 0; e < kVector; ++e) *product += query[i][e] * x[e];
    }
    if (first < params.cache.value_dim) {
      Load8(value, first, params.cache.value_dim, x);
      finite = finite && AllFinite(x);
    }
  }
  return finite;
}

// By all kThreads threads of a block; barriers inside.
template <typename T>
__device__ __noinline__ void AttendRow(const DecodeParams& params, int32_t sequence, int32_t head, int32_t row,
                                       RowScratch& scratch) {
  const CacheParams& cache = params.cache;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t member = thread % kTeam;
  const int64_t query_head = (static_cast<int64_t>(sequence) * cache.kv_heads + head) * params.group + row;
  const T* keys = static_cast<const T*>(cache.k.data);
  const T* values = static_cast<const T*>(cache.v.data);
  float query[kTeamVectors][kVector];
  bool finite = true;
#pragma unroll
  for (int32_t i = 0; i < kTeamVectors; ++i) {
    Load8(static_cast<const T*>(params.q) + query_head * cache.key_dim, (i * kTeam + member) * kVector, cache.key_dim,
          query[i]);
    finite = finite && AllFinite(query[i]);
  }
  const bool judges = __syncthreads_and(static_cast<int>(finite)) != 0;
  const int32_t tokens = judges ? Length(cache, sequence, head) : 0;

  float max = -INFINITY;
  float sum = 0.0F;
  float out[kColumns] = {};
  for (int32_t first = 0; first < tokens; first += kRowTile) {
    for (int32_t i = thread / kTeam; i < kRowTile; i += kTeams) {
      float product = 0.0F;
      bool takes_part = first + i < tokens;
      if (takes_part)
        takes_part = TokenPart(params, query, keys + TokenOffset(cache, cache.k, sequence, head, first + i),
                               values + TokenOffset(cache, cache.v, sequence, head, first + i), member, &product);
      product = LaneSum<kTeam>(product);
      const float absent = LaneSum<kTeam>(takes_part ? 0.0F : 1.0F);
      if (member == 0) scratch.logit[i] = absent == 0.0F ? CarefulLogit2(params, product) : -INFINITY;
    }
    __syncthreads();
    float largest = max;
    for (const float logit : scratch.logit) largest = fmaxf(largest, logit);
    if (largest > -INFINITY) {
      const float rescale = exp2f(max - largest);
      sum *= rescale;
#pragma unroll
      for (float& x : out) x *= rescale;
      max = largest;
      for (int32_t i = 0; i < kRowTile; ++i) {
        const float weight = exp2f(scratch.logit[i] - max);
        if (weight == 0.0F) continue;
        sum += weight;
        const T* value = values + TokenOffset(cache, cache.v, sequence, head, first + i);
#pragma unroll
        for (int32_t j = 0; j < kColumns; ++j) {
          const int32_t column = j * kThreads + thread;
          if (column < cache.value_dim) out[j] += weight * ToFloat(value[column]);
        }
      }
    }
    __syncthreads();
  }
  const float normaliser = Normaliser(max, sum, Sink2(params, head * params.group + row));
#pragma unroll
  for (int32_t j = 0; j < kColumns; ++j) {
    const int32_t column = j * kThreads + thread;
    if (column < cache.value_dim) StoreOut<T>(params, query_head * cache.value_dim + column, out[j] * normaliser);
  }
}

}  // namespace dropkv::cuda::decode
