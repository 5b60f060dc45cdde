// One row's partial softmax states of all splits, merged by a warp.
#pragma once

#include "cuda/any/vector.cuh"
#include "dropkv/cache_view.h"

namespace dropkv::cuda {

inline constexpr int32_t kMergeWarps = 4;
inline constexpr int32_t kMergeChunks = kMaxHeadDim / (32 * 4);  // float4 of a lane
inline constexpr int32_t kMergeBatch = 16;                       // splits whose sums are on their way together

struct SplitRow {
  const Partials& partials;
  int64_t first;  // of split 0
  int32_t splits;
  int32_t sequence;
  int32_t head;
  int32_t query_head;

  __device__ SplitRow(const AttendParams& params, int32_t list, int32_t row)
      : partials(params.partials),
        first(static_cast<int64_t>(list) * params.partials.splits * params.partials.padded_rows + row),
        sequence(list / params.cache.kv_heads),
        head(list % params.cache.kv_heads),
        query_head(head * params.rows.group + row / params.rows.rows) {
    splits = partials.splits;
  }
  __device__ int64_t at(int32_t split) const { return first + static_cast<int64_t>(split) * partials.padded_rows; }
  __device__ float max(int32_t split) const { return partials.max[at(split)]; }
  __device__ float sum(int32_t split) const { return partials.sum[at(split)]; }
};

// One float4 of a lane of each of kMergeBatch splits.
struct SplitSums {
  float4 x[kMergeBatch];

  // All loads leave before the first is needed.
  __device__ void Load(const SplitRow& row, int32_t first_split, int32_t chunk, int32_t dim, int32_t lane) {
    const int32_t column = (chunk * 32 + lane) * 4;
    const float* from = row.partials.out + row.at(first_split) * dim + column;
    const int64_t stride = static_cast<int64_t>(row.partials.padded_rows) * dim;
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i, from += stride) {
      x[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (first_split + i < row.splits && column < dim) x[i] = *reinterpret_cast<const float4*>(from);
    }
  }
  // weight: lane i has that of split i; below 0: the split has no token of the row, and its sums may be anything.
  __device__ void AddTo(float (&out)[4], float weight) const {
#pragma unroll
    for (int32_t i = 0; i < kMergeBatch; ++i) {
      const float own = __shfl_sync(kAllLanes, weight, i);
      if (own < 0.0F) continue;
      out[0] = fmaf(own, x[i].x, out[0]);
      out[1] = fmaf(own, x[i].y, out[1]);
      out[2] = fmaf(own, x[i].z, out[2]);
      out[3] = fmaf(own, x[i].w, out[3]);
    }
  }
};

struct MergedRow {
  float top;                   // largest logit of a token, -inf: none
  float base;                  // the sink counted too
  float sum;                   // of 2^(l - base), the sink included
  float out[kMergeChunks][4];  // elements (chunk * 32 + lane) * 4 .. + 3, not divided by the sum
};

// dv is a multiple of 4 (as every kernel that writes partials demands).
__device__ inline MergedRow Merge(const SplitRow& row, const AttendParams& params, int32_t lane) {
  MergedRow merged = {-INFINITY, 0.0F, 0.0F, {}};
  const int32_t dim = row.partials.out != nullptr ? params.cache.value_dim : 0;
  // What most rows need at all is asked for before anything waits.
  SplitSums sums;
  sums.Load(row, 0, 0, dim, lane);
  const bool has_split = lane < row.splits;
  const float own_max = has_split ? row.max(lane) : -INFINITY;
  const float own_sum = has_split ? row.sum(lane) : 0.0F;
  const float sink = SinkLogit2(params.rows, row.query_head);
  merged.top = own_max;
#pragma unroll 1
  for (int32_t s = lane + 32; s < row.splits; s += 32) merged.top = fmaxf(merged.top, row.max(s));
  merged.top = WarpMax(merged.top);
  merged.base = fmaxf(merged.top, sink);
  // A range with NaN for a logit has a NaN for its sum, whatever its maximum.
  const auto share = [&](float max) { return max == -INFINITY ? 0.0F : exp2f(max - merged.base); };
  merged.sum = own_sum * share(own_max);
#pragma unroll 1
  for (int32_t s = lane + 32; s < row.splits; s += 32) merged.sum += row.sum(s) * share(row.max(s));
  merged.sum = LaneSum<32>(merged.sum) + (sink == -INFINITY ? 0.0F : exp2f(sink - merged.base));
#pragma unroll
  for (int32_t c = 0; c < kMergeChunks; ++c) {
    if (c * 32 * 4 >= dim) break;
    for (int32_t first = 0; first < row.splits; first += kMergeBatch) {
      if (c > 0 || first > 0) sums.Load(row, first, c, dim, lane);
      const float max = first == 0 ? own_max : first + lane < row.splits ? row.max(first + lane) : -INFINITY;
      sums.AddTo(merged.out[c], max == -INFINITY ? -1.0F : exp2f(max - merged.base));
    }
  }
  return merged;
}

}  // namespace dropkv::cuda
