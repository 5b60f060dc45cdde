// Raw scores by plain differences: eight lanes hold one token's key and value, and meet every row in its order.
#include "cuda/any/softmax.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

struct Vectors {
  float x[kChunks][kVector];
};

// A team's row of `dim` elements, spread over its lanes; zeros behind its end.
template <typename T>
__device__ void LoadRow(const T* row, int32_t dim, Vectors& vectors) {
  const int32_t lane = threadIdx.x % kTeam;
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c) {
    const int32_t first = (c * kTeam + lane) * kVector;
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) vectors.x[c][e] = 0.0F;
    if (first < dim) Load8(row, first, dim, vectors.x[c]);
  }
}

// A team's token: what all rows see of it.
struct TokenState {
  Vectors key;
  Vectors value;
  int32_t token;
  bool finite;
  bool dominant = false;
  float sum = 0.0F;
};

template <typename T>
__device__ float TeamProduct(const T* row, int32_t dim, const Vectors& key) {
  Vectors q;
  LoadRow(row, dim, q);
  float product = 0.0F;
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c)
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) product = fmaf(q.x[c][e], key.x[c][e], product);
  return LaneSum<kTeam>(product);
}

__device__ float TeamDistance(const float* out, int32_t dim, const Vectors& value) {
  Vectors a;
  LoadRow(out, dim, a);
  float square = 0.0F;
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c)
#pragma unroll
    for (int32_t e = 0; e < kVector; ++e) {
      const float moved = a.x[c][e] - value.x[c][e];
      square = fmaf(moved, moved, square);
    }
  return LaneSum<kTeam>(square);
}

// The row's contribution to its top token is known already.
__device__ void AddTop(float contribution, float weight, TokenState& state) {
  state.sum = fmaf(weight, fabsf(contribution), state.sum);
  state.dominant = state.dominant || signbit(contribution);
}

// Every lane of the warp takes part, whatever its token. weight: the row's, above 0.
template <typename T>
__device__ void AddRow(const ScoreParams& params, int32_t list, int32_t sequence, int32_t head, int32_t row,
                       float weight, bool counts, TokenState& state) {
  const int64_t index = static_cast<int64_t>(list) * (params.rows.group * params.rows.rows) + row;
  const T* q = static_cast<const T*>(params.rows.q) + QueryOffset(params.rows, sequence, head, row);
  const float logit = Logit2(params.rows, TeamProduct(q, params.cache.key_dim, state.key));
  const float p = exp2f(logit - params.state.lse2[index]);
  if (params.signal == Signal::kAttention) {
    if (counts) state.sum = fmaf(weight, p, state.sum);
    return;
  }
  const int32_t dim = params.cache.value_dim;
  const float distance = TeamDistance(params.state.out + index * dim, dim, state.value);
  if (!counts) return;
  if (params.find_tops && p > kFoundShare) {
    if (threadIdx.x % kTeam != 0) return;
    atomicMin(reinterpret_cast<unsigned*>(params.state.top + index), static_cast<unsigned>(state.token));
    params.has_tops[list] = 1;
  } else if (!params.find_tops && params.state.top[index] == state.token) {
    AddTop(params.state.contribution[index], weight, state);
  } else {
    const float odds = p / (1.0F - p);
    state.sum = fmaf(weight * (odds * odds), distance, state.sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock) ScoreAnyKernel(const __grid_constant__ ScoreParams params) {
  ChainStart();
  const int32_t blocks = (params.cache.max_tokens + kTeams - 1) / kTeams;
  const auto list = static_cast<int32_t>(blockIdx.x / blocks);
  const int32_t sequence = list / params.cache.kv_heads;
  const int32_t head = list % params.cache.kv_heads;
  const int32_t tokens = Length(params.cache, sequence, head);
  const int32_t candidates = Candidates(params.cache, sequence, tokens);
  const int32_t first = static_cast<int32_t>(blockIdx.x % blocks) * kTeams;
  if (first >= candidates) return;
  TokenState state;
  state.token = first + static_cast<int32_t>(threadIdx.x) / kTeam;
  const bool there = state.token < candidates;
  const int32_t at = there ? state.token : candidates - 1;
  LoadRow(static_cast<const T*>(params.cache.k.data) + TokenOffset(params.cache, params.cache.k, sequence, head, at),
          params.cache.key_dim, state.key);
  // The attention signal reads keys only.
  LoadRow(static_cast<const T*>(params.cache.v.data) + TokenOffset(params.cache, params.cache.v, sequence, head, at),
          params.signal == Signal::kAttention ? 0 : params.cache.value_dim, state.value);
  bool finite = true;
#pragma unroll
  for (int32_t c = 0; c < kChunks; ++c) finite = finite && AllFinite(state.key.x[c]) && AllFinite(state.value.x[c]);
  state.finite = (__ballot_sync(kAllLanes, !finite) >> (threadIdx.x % 32 / kTeam * kTeam) & 0xFFU) == 0;

  const int32_t rows = params.rows.group * params.rows.rows;
  for (int32_t i = 0; i < rows; ++i) {
    const float weight = RowWeight(params.rows, sequence, i);
    const bool judges = weight > 0.0F && params.state.lse2[static_cast<int64_t>(list) * rows + i] < INFINITY;
    const int32_t visible = judges ? VisibleTokens(params.rows, sequence, head, i, tokens) : 0;
    if (first >= visible) continue;
    AddRow<T>(params, list, sequence, head, i, weight, state.finite && state.token < visible, state);
  }
  const float row_sum = params.signal == Signal::kAttention ? RowWeightSum(params.rows, sequence) : 1.0F;
  if (!there || threadIdx.x % kTeam != 0) return;
  const float score = state.sum / (static_cast<float>(params.rows.group) * row_sum);
  float* raw = params.raw + static_cast<int64_t>(list) * params.cache.max_tokens + state.token;
  *raw = !state.finite || !isfinite(score) ? NAN : state.dominant ? -score : score;
}

}  // namespace

cudaError_t LaunchScoreAny(const ScoreParams& params, cudaStream_t stream) {
  const int64_t lists = int64_t{params.cache.sequences} * params.cache.kv_heads;
  const int64_t blocks = lists * ((params.cache.max_tokens + kTeams - 1) / kTeams);
  if (blocks == 0) return cudaSuccess;
  return WithType(params.cache.dtype, [&](auto element) {
    return LaunchChained(ScoreAnyKernel<decltype(element)>, dim3(static_cast<unsigned>(blocks)), kBlock, 0, stream,
                         params);
  });
}

}  // namespace dropkv::cuda
