// Vector functions against the C library in float64, on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/exp_test.cc"  // NOLINT: read by foreach_target.h
#include "hwy/foreach_target.h"               // IWYU pragma: keep
// After foreach_target.h, which includes this file once per instruction set.
#include "cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {

struct Functions {
  void (*exp2)(const float* x, size_t count, float* y);  // count: a multiple of 16
  void (*tanh)(const float* x, size_t count, float* y);
  void (*reciprocal)(const float* x, size_t count, float* y);
};

template <class F>
void ForEachVector(const float* x, size_t count, float* y, F&& f) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) hn::StoreU(f(d, hn::LoadU(d, x + i)), d, y + i);
}

void Exp2Array(const float* x, size_t count, float* y) {
  ForEachVector(x, count, y, [](auto d, auto v) HWY_ATTR { return Exp2(d, v); });
}
void TanhArray(const float* x, size_t count, float* y) {
  ForEachVector(x, count, y, [](auto d, auto v) HWY_ATTR { return Tanh(d, v); });
}
void ReciprocalArray(const float* x, size_t count, float* y) {
  ForEachVector(x, count, y, [](auto d, auto v) HWY_ATTR { return Reciprocal(d, v); });
}

void GetFunctions(void* functions) { *static_cast<Functions*>(functions) = {&Exp2Array, &TanhArray, &ReciprocalArray}; }

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dropkv::cpu {
namespace {

HWY_EXPORT(GetFunctions);

using Function = void (*)(const float* x, size_t count, float* y);

struct Target {
  std::string name;
  Function exp2, tanh, reciprocal;
};

std::vector<Target> Targets() {
  std::vector<Target> targets;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    hwy::ChosenTarget chosen;
    chosen.Update(left & -left);
    Function functions[3];
    HWY_DISPATCH_TABLE(GetFunctions)[chosen.GetIndex()](functions);
    targets.push_back({hwy::TargetName(left & -left), functions[0], functions[1], functions[2]});
  }
  return targets;
}

// `count` numbers from first to last, in equal steps.
std::vector<float> Range(float first, float last, size_t count) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = first + (last - first) * static_cast<float>(i) / static_cast<float>(count - 1);
  return x;
}

// Largest error in units in the last place, 2^-23 of the power of two below the result.
double LargestUlps(Function function, const std::vector<float>& x, double (*exact)(double)) {
  std::vector<float> y(x.size());
  function(x.data(), x.size(), y.data());
  double largest = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = exact(x[i]);
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    largest = std::max(largest, std::abs(y[i] - want) / ulp);
  }
  return largest;
}

TEST(ExpTest, Exp2IsAccurate) {
  for (const Target& target : Targets()) {
    EXPECT_LT(LargestUlps(target.exp2, Range(-125.9F, 126.0F, 1 << 16), std::exp2), 2.5) << target.name;
    EXPECT_LT(LargestUlps(target.exp2, Range(-1.0F, 1.0F, 1 << 16), std::exp2), 2.5) << target.name;
  }
}

TEST(ExpTest, Exp2IsExactAtWholeNumbersAndZeroFarBelow) {
  std::vector<float> x;
  for (int i = -126; i <= 126; ++i) x.push_back(static_cast<float>(i));
  const size_t whole = x.size();
  for (const float far : {-126.1F, -127.0F, -150.0F, -1e4F, -1e10F, -3e38F, -INFINITY}) x.push_back(far);
  const size_t far_end = x.size();
  x.resize((x.size() + 15) / 16 * 16, 0.0F);
  for (const Target& target : Targets()) {
    std::vector<float> y(x.size());
    target.exp2(x.data(), x.size(), y.data());
    for (size_t i = 0; i < whole; ++i) EXPECT_EQ(y[i], std::exp2(x[i])) << target.name << " " << x[i];
    for (size_t i = whole; i < far_end; ++i) EXPECT_EQ(y[i], 0.0F) << target.name << " " << x[i];
  }
}

TEST(ExpTest, TanhIsAccurateAtAnyMagnitude) {
  for (const Target& target : Targets()) {
    EXPECT_LT(LargestUlps(target.tanh, Range(-12.0F, 12.0F, 1 << 16), std::tanh), 4.0) << target.name;
    EXPECT_LT(LargestUlps(target.tanh, Range(1e-8F, 1e-3F, 1 << 14), std::tanh), 4.0) << target.name;
    EXPECT_LT(LargestUlps(target.tanh, Range(100.0F, 1e30F, 1 << 10), std::tanh), 1.0) << target.name;
  }
}

TEST(ExpTest, ReciprocalIsAccurate) {
  for (const Target& target : Targets())
    EXPECT_LT(LargestUlps(target.reciprocal, Range(0.25F, 1.0F, 1 << 16), [](double x) { return 1.0 / x; }), 3.0)
        << target.name;
}

}  // namespace
}  // namespace dropkv::cpu
#endif  // HWY_ONCE
