#include "fma_peak.h"

#include <algorithm>
#include <chrono>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fma_peak.cc"  // NOLINT: read by foreach_target.h
#include "hwy/foreach_target.h"           // IWYU pragma: keep
// After foreach_target.h, which includes this file once per instruction set.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// FLOP of one call; `sum` keeps the compiler from dropping the work.
double MultiplyAdds(int rounds, float* sum) {
  constexpr int kChains = 12;  // more than latency times ports of any core
  const hn::ScalableTag<float> d;
  hn::Vec<decltype(d)> chain[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) chain[i] = hn::Set(d, static_cast<float>(i));
  const auto factor = hn::Set(d, *sum);
  for (int round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) chain[i] = hn::MulAdd(chain[i], factor, factor);
  auto total = hn::Zero(d);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) total = hn::Add(total, chain[i]);
  *sum = hn::GetLane(total);
  return 2.0 * kChains * rounds * static_cast<double>(hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dropkv::bench {

HWY_EXPORT(MultiplyAdds);

double FmaPeak() {
  double best = 0.0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    float sum = 0.5F;
    const auto start = std::chrono::steady_clock::now();
    const double flop = HWY_DYNAMIC_DISPATCH(MultiplyAdds)(1000000, &sum);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (sum != 0.0F) best = std::max(best, flop / seconds);
  }
  return best;
}

}  // namespace dropkv::bench
#endif  // HWY_ONCE
