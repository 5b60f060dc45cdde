// What an eviction did to the rows' outputs: docs/algorithm.md section 6.
#include "cuda/any/vector.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

constexpr int32_t kCertificateWarps = 8;

// (|a - a'| / |a|)^2 by one warp.
__device__ float SquaredError(const float* full, const float* kept, int32_t dim, int32_t lane) {
  float moved = 0.0F;
  float norm = 0.0F;
  for (int32_t i = lane; i < dim; i += 32) {
    moved = fmaf(full[i] - kept[i], full[i] - kept[i], moved);
    norm = fmaf(full[i], full[i], norm);
  }
  moved = LaneSum<32>(moved);
  norm = LaneSum<32>(norm);
  return moved == 0.0F ? 0.0F : moved / norm;
}

// Sum of the evicted p: what the denominator lost. A row that kept no token has the sink for its denominator.
__device__ float EvictedMass(float full_lse2, float kept_lse2, float sink) {
  constexpr float kLn2 = 0.6931471805599453F;
  if (full_lse2 == INFINITY) return 0.0F;
  const float left = kept_lse2 == INFINITY ? sink : kept_lse2;
  return fminf(1.0F, fmaxf(0.0F, -expm1f(kLn2 * (left - full_lse2))));
}

struct RowSums {
  float error;
  float mass;
  int32_t judged;
};

__global__ void __launch_bounds__(kCertificateWarps * 32)
    CertificateKernel(const __grid_constant__ AttendParams full, const __grid_constant__ RowState kept,
                      float* output_error, float* evicted_mass) {
  __shared__ RowSums sums[kCertificateWarps];
  ChainStart();
  const int32_t lane = threadIdx.x % 32;
  const int32_t warp = threadIdx.x / 32;
  const int32_t rows = full.rows.rows;
  const int32_t dim = full.cache.value_dim;
  const float sink = SinkLogit2(full.rows, static_cast<int32_t>(blockIdx.x) % (full.cache.kv_heads * full.rows.group));
  RowSums own = {};
  for (int32_t i = warp; i < rows; i += kCertificateWarps) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows + i;
    if (full.row_ok[row] == 0) continue;
    own.error += SquaredError(full.state.out + row * dim, kept.out + row * dim, dim, lane);
    own.mass += EvictedMass(full.state.lse2[row], kept.lse2[row], sink);
    ++own.judged;
  }
  if (lane == 0) sums[warp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  RowSums all = {};
  for (const RowSums& part : sums) {
    all.error += part.error;
    all.mass += part.mass;
    all.judged += part.judged;
  }
  const auto count = static_cast<float>(max(1, all.judged));
  output_error[blockIdx.x] = sqrtf(all.error / count);
  evicted_mass[blockIdx.x] = all.mass / count;
}

// How many tokens of every list a row sees that sees the first `VisibleTokens` of the sequence.
__global__ void __launch_bounds__(kCertificateWarps * 32)
    KeptVisibleKernel(const __grid_constant__ AttendParams full, const int64_t* offsets, const int32_t* positions,
                      int32_t* visible) {
  ChainStart();
  const auto list = static_cast<int32_t>(blockIdx.x);
  const int32_t sequence = list / full.cache.kv_heads;
  const int32_t head = list % full.cache.kv_heads;
  const int32_t tokens = Length(full.cache, sequence, head);
  for (int32_t i = threadIdx.x; i < full.rows.rows; i += kCertificateWarps * 32) {
    const int32_t seen = VisibleTokens(full.rows, sequence, head, i, tokens);
    int64_t first = offsets[list];
    int64_t end = offsets[list + 1];
    while (first < end) {
      const int64_t middle = (first + end) / 2;
      if (positions[middle] < seen) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    visible[static_cast<int64_t>(list) * full.rows.rows + i] = static_cast<int32_t>(first - offsets[list]);
  }
}

}  // namespace

cudaError_t LaunchKeptVisible(const AttendParams& full, const int64_t* offsets, const int32_t* positions,
                              int32_t* visible, cudaStream_t stream) {
  const int64_t lists = int64_t{full.cache.sequences} * full.cache.kv_heads;
  if (lists == 0) return cudaSuccess;
  return LaunchChained(KeptVisibleKernel, dim3(static_cast<unsigned>(lists)), kCertificateWarps * 32, 0, stream, full,
                       offsets, positions, visible);
}

cudaError_t LaunchCertificate(const AttendParams& full, const RowState& kept, float* output_error, float* evicted_mass,
                              cudaStream_t stream) {
  const int64_t heads = int64_t{full.cache.sequences} * full.cache.kv_heads * full.rows.group;
  if (heads == 0) return cudaSuccess;
  return LaunchChained(CertificateKernel, dim3(static_cast<unsigned>(heads)), kCertificateWarps * 32, 0, stream, full,
                       kept, output_error, evicted_mass);
}

}  // namespace dropkv::cuda
