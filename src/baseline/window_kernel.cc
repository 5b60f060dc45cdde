#include "baseline/window_kernel.h"

#include <algorithm>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "baseline/window_kernel.cc"  // NOLINT: read by foreach_target.h
#include "hwy/foreach_target.h"                         // IWYU pragma: keep
// After foreach_target.h, which includes this file once per instruction set.
#include "cpu/score-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::baseline {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = cpu::HWY_NAMESPACE;
using simd::FloatTag;
using simd::FloatVector;
using simd::kLanes;

// Calls f.operator()<NV>(first lane) for every panel.
template <class F>
HWY_INLINE void ForEachPanel(const cpu::LaneLayout& layout, F&& f) {
  for (int32_t p = 0; p < layout.panels; ++p)
    simd::WithVectors(layout.panel_lanes(p) / kLanes,
                      [&]<int NV>() HWY_ATTR { f.template operator()<NV>(layout.panel_begin(p)); });
}

template <int NV>
HWY_INLINE void StoreWeights(const simd::Tile& tile, const cpu::Denominators& denominators, int32_t lane, int32_t lanes,
                             const float* from, float* weights, float* logits) {
  const FloatTag d;
  for (int v = 0; v < NV; ++v) {
    const int32_t at = lane + v * kLanes;
    const auto base = hn::Load(d, denominators.base + at);
    const auto share = hn::Load(d, denominators.share + at);
    for (int32_t t = 0; t < tile.tokens; ++t) {
      const auto logit = hn::Load(d, from + (t * NV + v) * kLanes);
      const auto p = simd::Share(logit, base, share, -126.0F);
      hn::StoreU(p, d, weights + t * lanes + at);
      if (logits == nullptr) continue;
      const auto natural = hn::Mul(logit, hn::Set(d, static_cast<float>(cpu::kLn2)));
      hn::StoreU(hn::IfThenElseZero(hn::Gt(p, hn::Zero(d)), natural), d, logits + t * lanes + at);
    }
  }
}

void Weights(const cpu::HeadTokens& tokens, const cpu::HeadRows& rows, const cpu::Denominators& denominators,
             const uint8_t* flags, int32_t begin, int32_t count, float* weights, float* logits,
             const cpu::TileScratch& scratch) {
  const int32_t end = begin + count;
  simd::Tile tile = simd::LoadKeysAlone(tokens, begin, end, flags, scratch);
  simd::NextTile next(tokens, false, end, tokens.count, simd::Steps(rows.layout, count, tokens.k.dim));
  ForEachPanel(rows.layout, [&]<int NV>(int32_t lane) HWY_ATTR {
    simd::TileLogits<NV>(tokens, rows, lane, tile, scratch, next);
    StoreWeights<NV>(tile, denominators, lane, rows.layout.lanes, scratch.logits, weights, logits);
  });
}

// Calls f.operator()<NV>(first lane, products [count, NV vectors]) for every panel of values B.
template <class F>
HWY_INLINE void ForEachProduct(const cpu::HeadTokens& tokens, const cpu::LaneLayout& layout, const float* b,
                               int32_t begin, int32_t count, const cpu::TileScratch& scratch, F&& f) {
  simd::Tile tile;
  tile.begin = begin;
  tile.tokens = count;
  std::fill_n(scratch.bad, count, uint8_t{0});
  simd::LoadValues(tokens, nullptr, scratch, tile);
  simd::NextTile nothing(tokens, true, 0, 0, 1);
  ForEachPanel(layout, [&]<int NV>(int32_t lane) HWY_ATTR {
    simd::TileProduct<NV>(tile.values, count, tokens.v.dim, b + int64_t{lane} * tokens.v.dim, scratch.products,
                          nothing);
    f.template operator()<NV>(lane, scratch.products);
  });
}

void Products(const cpu::HeadTokens& tokens, const cpu::LaneLayout& layout, const float* b, int32_t begin,
              int32_t count, float* out, float* norms, const cpu::TileScratch& scratch) {
  ForEachProduct(tokens, layout, b, begin, count, scratch, [&]<int NV>(int32_t lane, const float* products) HWY_ATTR {
    const FloatTag d;
    for (int32_t t = 0; t < count; ++t)
      for (int v = 0; v < NV; ++v)
        hn::StoreU(hn::Load(d, products + (t * NV + v) * kLanes), d, out + t * layout.lanes + lane + v * kLanes);
  });
  if (norms != nullptr) std::copy_n(scratch.norms, count, norms);
}

void AddMagnitudes(const cpu::HeadTokens& tokens, const cpu::LaneLayout& layout, const float* b, int32_t begin,
                   int32_t count, float* out, const cpu::TileScratch& scratch) {
  ForEachProduct(tokens, layout, b, begin, count, scratch, [&]<int NV>(int32_t, const float* products) HWY_ATTR {
    const FloatTag d;
    for (int32_t t = 0; t < count; ++t) {
      auto sum = hn::Zero(d);
      for (int v = 0; v < NV; ++v) sum = hn::Add(sum, hn::Abs(hn::Load(d, products + (t * NV + v) * kLanes)));
      out[t] += hn::GetLane(hn::SumOfLanes(d, sum));
    }
  });
}

void Dots(const float* a, const float* b, int32_t b_stride, int32_t count, int32_t lanes, float* out) {
  const FloatTag d;
  for (int32_t t = 0; t < count; ++t) {
    auto sum = hn::Zero(d);
    for (int32_t i = 0; i < lanes; i += kLanes)
      sum = hn::MulAdd(hn::LoadU(d, a + t * lanes + i), hn::LoadU(d, b + t * b_stride + i), sum);
    out[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

double Entropy(const float* weights, int64_t count) {
  const FloatTag d;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto p = hn::LoadU(d, weights + i);
    sum = hn::MulAdd(p, hn::Log(d, hn::Add(p, hn::Set(d, 1e-10F))), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

const WindowKernels* TargetKernels() {
  static const WindowKernels kernels{&Weights, &Products, &AddMagnitudes, &Dots, &Entropy};
  return &kernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::baseline
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dropkv::baseline {
namespace {

HWY_EXPORT(TargetKernels);

const WindowKernels& FindBest() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  hwy::ChosenTarget chosen;
  chosen.Update(targets & -targets);  // the lowest bit is the best instruction set
  return *HWY_DISPATCH_TABLE(TargetKernels)[chosen.GetIndex()]();
}

}  // namespace

const WindowKernels& BestWindowKernels() {
  static const WindowKernels& kernels = FindBest();
  return kernels;
}

}  // namespace dropkv::baseline
#endif  // HWY_ONCE
