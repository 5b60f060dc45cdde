// The one matrix product of the CPU kernels, C = A B, with B [depth, NV vectors] contiguous (a panel of rows as lanes)
// and A read one broadcast element at a time. Used three times:
//
//   logits    [token, r] = K   [token, d]  Q^T [d, r]      A by rows
//   products  [token, r] = V   [token, dv] A^T [dv, r]     A by rows
//   sums      [dv, r]   += V^T [dv, token] P   [token, r]  A by columns
//
// A block of MR x NV accumulators stays in registers while the depth is walked: MR*NV multiply-adds for NV vector loads
// and MR broadcasts. With 32 registers 6 x 4 (24 accumulators, 4 of B, 1 of A) needs 10 loads for 24 multiply-adds, so
// that the two multiply-add ports, not the two load ports, set the pace; 8 accumulators already hide their latency.
// The order of the sum is that of the depth for every block size: results do not depend on the tiling.

#if defined(DROPKV_CPU_KERNELS_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_KERNELS_PRODUCT_INL_H_
#undef DROPKV_CPU_KERNELS_PRODUCT_INL_H_
#else
#define DROPKV_CPU_KERNELS_PRODUCT_INL_H_
#endif

#include "cpu/kernels_load-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
inline constexpr int kPanelVectors = 4;  // 32 registers
#else
inline constexpr int kPanelVectors = 2;  // 16 registers
#endif

// Rows of A in a block: tile rows (divides kTile) and value dims (divides 8).
constexpr int TileBlock(int vectors) {
  return vectors == 1 ? 12 : vectors == 3 ? 8 : vectors == 2 && kPanelVectors == 4 ? 12 : 6;
}
constexpr int DimBlock(int vectors) { return vectors == 4 || kPanelVectors == 2 ? 4 : 8; }

// Depth between two steps of NextTile.
inline constexpr int32_t kStepDepth = 16;

// C [MR, NV vectors] = or += A B. A element (m, k) = a[m * row_stride + k * depth_stride].
template <int MR, int NV, bool kAdd>
HWY_INLINE void ProductBlock(const float* HWY_RESTRICT a, int64_t row_stride, int64_t depth_stride,
                             const float* HWY_RESTRICT b, int32_t depth, float* HWY_RESTRICT c, NextTile& next) {
  const FloatTag d;
  FloatVector sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) sum[m][v] = hn::Zero(d);
  }
  for (int32_t left = depth; left > 0; left -= kStepDepth) {
    next.Step();
    for (int32_t k = std::min(left, kStepDepth); k > 0; --k) {
      FloatVector row[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) row[v] = hn::Load(d, b + v * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        const auto x = hn::Set(d, a[m * row_stride]);
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) sum[m][v] = hn::MulAdd(x, row[v], sum[m][v]);
      }
      a += depth_stride;
      b += NV * kLanes;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      float* to = c + (m * NV + v) * kLanes;
      hn::Store(kAdd ? hn::Add(sum[m][v], hn::Load(d, to)) : sum[m][v], d, to);
    }
  }
}

// Steps of NextTile that a product makes.
constexpr int32_t TileSteps(int32_t tokens, int32_t dim, int vectors) {
  return (tokens + TileBlock(vectors) - 1) / TileBlock(vectors) * ((dim + kStepDepth - 1) / kStepDepth);
}
constexpr int32_t ValueSteps(int32_t tokens, int32_t dim, int vectors) {
  return dim / DimBlock(vectors) * ((tokens + kStepDepth - 1) / kStepDepth);
}

// c [tokens, NV vectors] = a [tokens, dim] b [dim, NV vectors]; whole blocks of tokens. A function of its own: inlined
// twice into one, it leaves the compiler without registers for the pointers of the inner loop.
template <int NV>
HWY_NOINLINE void TileProduct(const Rows& a, int32_t tokens, int32_t dim, const float* b, float* c, NextTile& next) {
  constexpr int kRows = TileBlock(NV);
  static_assert(kTile % kRows == 0);
  for (int32_t t = 0; t < tokens; t += kRows) {
    ProductBlock<kRows, NV, false>(a.first + t * a.stride, a.stride, 1, b, dim, c + t * NV * kLanes, next);
  }
}

// sums [dim, NV vectors] += values^T [dim, tokens] weights [tokens, NV vectors].
template <int NV>
HWY_INLINE void ValueProduct(const Rows& values, int32_t tokens, int32_t dim, const float* weights, float* sums,
                             NextTile& next) {
  constexpr int kRows = DimBlock(NV);
  static_assert(8 % kRows == 0);
  for (int32_t i = 0; i < dim; i += kRows) {
    ProductBlock<kRows, NV, true>(values.first + i, 1, values.stride, weights, tokens, sums + i * NV * kLanes, next);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_KERNELS_PRODUCT_INL_H_
