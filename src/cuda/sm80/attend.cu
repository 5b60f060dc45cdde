// Launch of pass 1 with mma.sync.
#include "cuda/device_attribute.h"
#include "cuda/sm80/attend.cuh"

namespace dropkv::cuda {
namespace {

using namespace sm80;  // NOLINT: this file is a kernel of that folder

template <typename T, int group_warps, int out_tiles>
__global__ void __launch_bounds__(kAttendWarps * 32, 1) AttendKernel(const __grid_constant__ AttendLaunch launch) {
  extern __shared__ __align__(16) unsigned char shared[];
  AttendBlock<T, group_warps, out_tiles>(launch, shared).Run();
}

template <typename T, int group_warps, int out_tiles>
cudaError_t Launch(AttendLaunch launch, cudaStream_t stream) {
  constexpr int32_t kRows = AttendShape<group_warps>::kRows;
  const AttendParams& params = launch.params;
  const int32_t bytes = AttendBytes<group_warps, out_tiles>(params.cache);
  const auto kernel = AttendKernel<T, group_warps, out_tiles>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess)
    return error;
  launch.row_blocks = (params.rows.group * params.rows.rows + kRows - 1) / kRows;
  const int64_t blocks =
      int64_t{params.cache.sequences} * params.cache.kv_heads * params.partials.splits * launch.row_blocks;
  kernel<<<static_cast<unsigned>(blocks), kAttendWarps * 32, bytes, stream>>>(launch);
  return cudaGetLastError();
}

// Calls f(warps of a group, n-tiles of the output) as constants.
template <int out_tiles, typename F>
auto WithRows(int32_t rows, F&& f) {
  constexpr std::integral_constant<int, out_tiles> kTiles;
  if (rows <= 16) return f(std::integral_constant<int, 1>{}, kTiles);
  if (rows <= 32) return f(std::integral_constant<int, 2>{}, kTiles);
  if (rows <= 64) return f(std::integral_constant<int, 4>{}, kTiles);
  return f(std::integral_constant<int, 8>{}, kTiles);
}

template <typename F>
auto WithShape(const AttendParams& params, F&& f) {
  const int32_t rows = params.rows.group * params.rows.rows;
  if (params.partials.out == nullptr) return WithRows<0>(rows, f);
  return params.cache.value_dim <= 128 ? WithRows<16>(rows, f) : WithRows<32>(rows, f);
}

int32_t SharedLimit() {
  int limit = 0;
  return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limit) == cudaSuccess ? limit : 0;
}

}  // namespace

bool SupportsAttendSm80(const AttendParams& params) {
  if (!FitsMatrices(params.cache)) return false;
  return WithShape(params, [&](auto group_warps, auto out_tiles) {
    return AttendBytes<group_warps(), out_tiles()>(params.cache) <= SharedLimit();
  });
}

cudaError_t LaunchAttendSm80(const AttendParams& params, bool exclude, cudaStream_t stream) {
  const int64_t lists = int64_t{params.cache.sequences} * params.cache.kv_heads;
  if (lists == 0 || params.rows.group * params.rows.rows == 0) return cudaSuccess;
  const AttendLaunch launch{
      params, {IsAligned(params.cache.k), IsAligned(params.cache.v), IsAligned(params.rows), false}, exclude, 1};
  return WithShape(params, [&](auto group_warps, auto out_tiles) {
    return params.cache.dtype == DType::kF16 ? Launch<__half, group_warps(), out_tiles()>(launch, stream)
                                             : Launch<__nv_bfloat16, group_warps(), out_tiles()>(launch, stream);
  });
}

}  // namespace dropkv::cuda
