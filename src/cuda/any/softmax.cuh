// One row's softmax over its tokens by one block, in float32, with one token apart from the others: the others' sum and
// output relative to their own largest logit, so that they keep their digits however far the top stands above them.
#pragma once

#include "cuda/any/vector.cuh"
#include "dropkv/cache_view.h"

namespace dropkv::cuda {

inline constexpr int32_t kBlock = 256;
inline constexpr int32_t kWarps = kBlock / 32;
inline constexpr int32_t kTeam = 8;  // lanes that share a token
inline constexpr int32_t kTeams = kBlock / kTeam;
inline constexpr int32_t kChunks = kMaxHeadDim / (kTeam * kVector);  // vectors of a lane

struct Peak {
  float top = -INFINITY;
  int32_t token = -1;
  float second = -INFINITY;  // largest logit of the other tokens
};

struct RowShared {
  float query[kMaxHeadDim];
  float sums[kWarps][kMaxHeadDim];
  float totals[kWarps];
  Peak peaks[kTeams];
};

// Which row, and where its head's keys and values are.
template <typename T>
struct RowView {
  const AttendParams& params;
  int32_t sequence;
  int32_t head;
  int32_t row;
  int32_t tokens;   // of the sequence
  int32_t visible;  // to this row
  bool values;      // false: denominators alone, from the keys

  __device__ RowView(const AttendParams& all, int32_t list, int32_t row_of_head)
      : params(all),
        sequence(list / all.cache.kv_heads),
        head(list % all.cache.kv_heads),
        row(row_of_head),
        values(all.partials.out != nullptr) {
    tokens = Length(all.cache, sequence, head);
    visible = VisibleTokens(all.rows, sequence, head, row, tokens);
  }
  __device__ const T* key(int32_t token) const {
    return static_cast<const T*>(params.cache.k.data) +
           TokenOffset(params.cache, params.cache.k, sequence, head, token);
  }
  __device__ const T* value(int32_t token) const {
    return static_cast<const T*>(params.cache.v.data) +
           TokenOffset(params.cache, params.cache.v, sequence, head, token);
  }
  __device__ const T* query() const {
    return static_cast<const T*>(params.rows.q) + QueryOffset(params.rows, sequence, head, row);
  }
  __device__ float sink() const { return SinkLogit2(params.rows, head * params.rows.group + row / params.rows.rows); }
};

// The others' softmax state, in units of 2^base.
struct Others {
  float base;  // largest of their logits and the sink; -inf: there are none
  float sum;   // of 2^(l - base), the sink included
};

// Sum over the block, in all threads.
__device__ inline float BlockSum(float x, float (&totals)[kWarps]) {
  x = LaneSum<32>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0F;
#pragma unroll
  for (int32_t i = 0; i < kWarps; ++i) sum += totals[i];
  return sum;
}

template <typename T>
__device__ inline void LoadQuery(const RowView<T>& view, RowShared& shared) {
  const T* q = view.query();
  for (int32_t i = threadIdx.x; i < kMaxHeadDim; i += kBlock)
    shared.query[i] = i < view.params.cache.key_dim ? ToFloat(q[i]) : 0.0F;
  __syncthreads();
}

// Logit of a team's token, with its value in `value`; -inf where the token takes no part: it is not there, or its key,
// its value or their product is not finite. A key that is not finite never has a finite product.
template <typename T>
__device__ inline float TeamLogit(const RowView<T>& view, const RowShared& shared, int32_t token,
                                  float (&value)[kChunks][kVector]) {
  const int32_t lane = threadIdx.x % kTeam;
  const bool there = token < view.visible;
  float product = 0.0F;
  bool finite = true;
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c) {
    const int32_t first = (c * kTeam + lane) * kVector;
    float key[kVector] = {};
    if (there && first < view.params.cache.key_dim) Load8(view.key(token), first, view.params.cache.key_dim, key);
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) {
      product = fmaf(shared.query[first + e], key[e], product);
      value[c][e] = 0.0F;
    }
    if (there && view.values && first < view.params.cache.value_dim)
      Load8(view.value(token), first, view.params.cache.value_dim, value[c]);
    finite = finite && AllFinite(value[c]);
  }
  product = LaneSum<kTeam>(product);
  const unsigned odd = __ballot_sync(kAllLanes, !finite) >> (threadIdx.x % 32 / kTeam * kTeam) & 0xFFU;
  return there && odd == 0 && isfinite(product) ? Logit2(view.params.rows, product) : -INFINITY;
}

__device__ inline void Observe(Peak& peak, float logit, int32_t token) {
  if (logit > peak.top) {
    peak.second = peak.top;
    peak.top = logit;
    peak.token = token;
  } else {
    peak.second = fmaxf(peak.second, logit);
  }
}

// The top token (the lowest of equal ones), or `forced` in its place where that is not -1.
template <typename T>
__device__ inline Peak FindPeak(const RowView<T>& view, int32_t forced, RowShared& shared) {
  const int32_t team = threadIdx.x / kTeam;
  Peak peak;
  float value[kChunks][kVector];
  for (int32_t base = 0; base < view.visible; base += kTeams) {
    const int32_t token = base + team;
    const float logit = TeamLogit(view, shared, token, value);
    if (logit == -INFINITY) continue;
    if (forced < 0) {
      Observe(peak, logit, token);
    } else if (token == forced) {
      peak.top = logit;
      peak.token = token;
    } else {
      peak.second = fmaxf(peak.second, logit);
    }
  }
  if (threadIdx.x % kTeam == 0) shared.peaks[team] = peak;
  __syncthreads();
  peak = shared.peaks[0];
  for (int32_t i = 1; i < kTeams; ++i) {
    const Peak& other = shared.peaks[i];
    const bool above = other.token >= 0 &&
                       (peak.token < 0 || other.top > peak.top || (other.top == peak.top && other.token < peak.token));
    // In the forced case one team alone has a top: the minimum below is then -inf.
    const float second = fmaxf(fmaxf(peak.second, other.second), fminf(peak.top, other.top));
    if (above) {
      peak.top = other.top;
      peak.token = other.token;
    }
    peak.second = second;
  }
  return peak;
}

// All tokens but the peak's. Their weighted values go to shared.sums[0].
template <typename T>
__device__ inline Others SumOthers(const RowView<T>& view, const Peak& peak, RowShared& shared) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t warp = threadIdx.x / 32;
  const float sink = view.sink();
  const float base = fmaxf(peak.second, sink);
  float sum = 0.0F;
  float out[kChunks][kVector] = {};
  for (int32_t begin = 0; begin < view.visible; begin += kTeams) {
    const int32_t token = begin + threadIdx.x / kTeam;
    float value[kChunks][kVector];
    const float logit = TeamLogit(view, shared, token, value);
    if (logit == -INFINITY || token == peak.token) continue;
    const float weight = exp2f(logit - base);
    sum += weight;
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c)
#pragma unroll
      for (int32_t e = 0; e < kVector; ++e) out[c][e] = fmaf(weight, value[c][e], out[c][e]);
  }
  // All lanes of a team have the same sum: add one lane of each of the warp's four teams.
  sum += __shfl_xor_sync(kAllLanes, sum, kTeam);
  sum += __shfl_xor_sync(kAllLanes, sum, 2 * kTeam);
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c)
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) {
      out[c][e] += __shfl_xor_sync(kAllLanes, out[c][e], kTeam);
      out[c][e] += __shfl_xor_sync(kAllLanes, out[c][e], 2 * kTeam);
      if (lane < kTeam) shared.sums[warp][(c * kTeam + lane) * kVector + e] = out[c][e];
    }
  if (lane == 0) shared.totals[warp] = sum;
  __syncthreads();
  Others others{base, sink == -INFINITY ? 0.0F : exp2f(sink - base)};
  float total = 0.0F;
  for (int32_t i = 0; i < kWarps; ++i) total += shared.totals[i];
  others.sum += total;
  float column = 0.0F;
  for (int32_t i = 0; i < kWarps; ++i) column += shared.sums[i][threadIdx.x];
  __syncthreads();
  shared.sums[0][threadIdx.x] = column;
  __syncthreads();
  return others;
}

// p and 1 - p of the peak.
struct TopShare {
  float p;
  float rest;
};

__device__ inline TopShare ShareOf(const Peak& peak, const Others& others) {
  const float odds = others.base == -INFINITY ? 0.0F : others.sum * exp2f(others.base - peak.top);
  return {1.0F / (1.0F + odds), isinf(odds) ? 1.0F : odds / (1.0F + odds)};
}

// Of the pair (row, peak): p^2 |v - a_without|^2. A row with nothing but the peak contributes 0.
template <typename T>
__device__ inline float PeakContribution(const RowView<T>& view, const Peak& peak, const Others& others,
                                         const TopShare& share, RowShared& shared) {
  float moved = 0.0F;
  if (threadIdx.x < view.params.cache.value_dim && others.base != -INFINITY) {
    const float without = shared.sums[0][threadIdx.x] / others.sum;
    const float distance = share.p * (ToFloat(view.value(peak.token)[threadIdx.x]) - without);
    moved = distance * distance;
  }
  return Contribution(BlockSum(moved, shared.totals), share.rest);
}

}  // namespace dropkv::cuda
