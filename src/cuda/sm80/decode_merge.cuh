// From the sums of a block's warps to those of its split, from a list's splits to its output; always in the same order.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm80/decode_plan.cuh"

namespace dropkv::cuda::decode {

// Sums of exp2(l - max), alone and times four columns of the values, over some tokens of a row.
struct Fold {
  float max = -INFINITY;  // -inf: no tokens
  float sum = 0.0F;
  float4 out = {0.0F, 0.0F, 0.0F, 0.0F};
};

__device__ inline void Add(Fold& to, const float2& state, const float4& out) {
  const float largest = fmaxf(to.max, state.x);
  const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
  const float keep = Exp2(to.max - base);
  const float take = Exp2(state.x - base);
  to.max = largest;
  to.sum = to.sum * keep + state.y * take;
  to.out.x = to.out.x * keep + out.x * take;
  to.out.y = to.out.y * keep + out.y * take;
  to.out.z = to.out.z * keep + out.z * take;
  to.out.w = to.out.w * keep + out.w * take;
}

// pitch: floats from row to row of a warp's sums.
__device__ inline Fold MergeWarps(const Shared& shared, const unsigned char* memory, int32_t pitch, int32_t row,
                                  int32_t column) {
  Fold fold;
#pragma unroll
  for (int32_t warp = 0; warp < kWarps; ++warp) {
    if (shared.sums[warp] < 0) continue;
    const auto* sums = reinterpret_cast<const float*>(memory + shared.sums[warp]);
    Add(fold, shared.state[warp][row], *reinterpret_cast<const float4*>(sums + row * pitch + column));
  }
  return fold;
}

// Loads past the first level of cache: other multiprocessors wrote this.
template <int kBatch>
__device__ inline Fold MergeSplits(const DecodeArgs& args, const Item& item, int32_t row, int32_t column) {
  const int32_t group = args.params.group;
  const int64_t first = static_cast<int64_t>(item.id - item.split) * group + row;
  Fold fold;
  for (int32_t split = 0; split < item.splits; split += kBatch) {
    float2 state[kBatch];
    float4 out[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      // No branch, so that all loads are on their way together: behind the last split comes the last one again.
      const int64_t at = first + static_cast<int64_t>(min(split + i, item.splits - 1)) * group;
      state[i] = __ldcg(args.states + at);
      out[i] = __ldcg(reinterpret_cast<const float4*>(args.sums + at * args.params.cache.value_dim + column));
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i)
      if (split + i < item.splits) Add(fold, state[i], out[i]);
  }
  return fold;
}

__device__ inline void StorePartial(const DecodeArgs& args, const Item& item, int32_t row, int32_t column,
                                    const Fold& fold) {
  const int64_t at = static_cast<int64_t>(item.id) * args.params.group + row;
  *reinterpret_cast<float4*>(args.sums + at * args.params.cache.value_dim + column) = fold.out;
  if (column == 0) args.states[at] = {fold.max, fold.sum};
}

// Four columns of a row's output; false where one is not finite.
template <typename T>
__device__ inline bool StoreResult(const DecodeArgs& args, const Item& item, int32_t row, int32_t column,
                                   const Fold& fold) {
  const DecodeParams& params = args.params;
  const int64_t query_head = static_cast<int64_t>(item.list) * params.group + row;
  const float sink = Sink2(params, item.list % params.cache.kv_heads * params.group + row);
  const float normaliser = Normaliser(fold.max, fold.sum, sink);
  // 0 times a NaN must not become a result, but nor must the absence of tokens.
  const bool empty = fold.sum == 0.0F;
  const float x[4] = {empty ? 0.0F : fold.out.x * normaliser, empty ? 0.0F : fold.out.y * normaliser,
                      empty ? 0.0F : fold.out.z * normaliser, empty ? 0.0F : fold.out.w * normaliser};
  bool finite = true;
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    finite = finite && isfinite(x[i]);
    StoreOut<T>(params, query_head * params.cache.value_dim + column + i, x[i]);
  }
  return finite;
}

// Rows that came out as NaN or Inf, again with a look at every token. By all threads; barriers inside.
template <typename T>
__device__ void RedoBadRows(const DecodeArgs& args, const Item& item, Shared& shared) {
  const int32_t kv_heads = args.params.cache.kv_heads;
  for (uint32_t rows = shared.bad_rows; rows != 0; rows &= rows - 1)
    AttendRow<T>(args.params, item.list / kv_heads, item.list % kv_heads, __ffs(static_cast<int32_t>(rows)) - 1,
                 shared.scratch);
  __syncthreads();
  if (threadIdx.x == 0) shared.bad_rows = 0;
}

// Whether this block is the last of the item's list to finish; then the partial sums of all are there. By all threads.
__device__ inline bool ArriveLast(const DecodeArgs& args, const Item& item, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // what the barrier has shown to this thread, it shows to the device
    const bool last = atomicAdd(args.arrived + item.list, 1) == item.splits - 1;
    if (last) args.arrived[item.list] = 0;
    shared.last = static_cast<int32_t>(last);
    __threadfence();
  }
  __syncthreads();
  return shared.last != 0;
}

// After a barrier behind the warps' sums. What they left may be overwritten when it returns.
template <typename T, int kBatch>
__device__ inline void FinishItem(const DecodeArgs& args, const Item& item, const unsigned char* memory, int32_t pitch,
                                  Shared& shared) {
  const int32_t vectors = args.params.cache.value_dim / 4;
  const int32_t parts = args.params.group * vectors;
  const bool whole = item.splits == 1;
  bool finite = true;
  const auto store = [&](int32_t row, int32_t column, const Fold& fold) {
    if (StoreResult<T>(args, item, row, column, fold)) return;
    finite = false;
    atomicOr(&shared.bad_rows, 1U << row);
  };
  for (auto part = static_cast<int32_t>(threadIdx.x); part < parts; part += kThreads) {
    const int32_t row = part / vectors;
    const int32_t column = part % vectors * 4;
    const Fold fold = MergeWarps(shared, memory, pitch, row, column);
    if (whole) {
      store(row, column, fold);
    } else {
      StorePartial(args, item, row, column, fold);
    }
  }
  if (!whole) {
    if (!ArriveLast(args, item, shared)) return;
    for (auto part = static_cast<int32_t>(threadIdx.x); part < parts; part += kThreads) {
      const int32_t row = part / vectors;
      const int32_t column = part % vectors * 4;
      store(row, column, MergeSplits<kBatch>(args, item, row, column));
    }
  }
  if (__syncthreads_or(static_cast<int>(!finite)) != 0) RedoBadRows<T>(args, item, shared);
}

}  // namespace dropkv::cuda::decode
