// Vector exp2, tanh and reciprocal, compiled once per instruction set. Only what the softmax needs, hence no handling
// of NaN; both polynomials are minimax fits made for this file (relative error on their interval in the comment).

#if defined(DROPKV_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_EXP_INL_H_
#undef DROPKV_CPU_EXP_INL_H_
#else
#define DROPKV_CPU_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 2^x for -126 <= x < 127.5, about 2 ulp; anything beyond.
//
// x = n + f with n the nearest integer: adding 1.5 * 2^23 leaves n in the low mantissa bits, from where a shift takes
// it to the exponent. 2^f = 1 + f * q(f) on [-1/2, 1/2], 9.2e-8; exactly 1 at f = 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2Unchecked(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const V magic = hn::Set(d, 12582912.0F);
  const V shifted = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(shifted, magic));
  V y = hn::Set(d, 1.3264726892812453e-3F);
  y = hn::MulAdd(y, f, hn::Set(d, 9.67151266052764e-3F));
  y = hn::MulAdd(y, f, hn::Set(d, 5.550733744264838e-2F));
  y = hn::MulAdd(y, f, hn::Set(d, 2.4022242084920017e-1F));
  y = hn::MulAdd(y, f, hn::Set(d, 6.931469775984577e-1F));
  y = hn::MulAdd(y, f, hn::Set(d, 1.0F));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(du, y), exponent));
}

// The same for x <= 128; 0 below 2^smallest, -inf included. Results are never subnormal for smallest >= -126:
// arithmetic on subnormals costs a hundred cycles on some cores.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x, float smallest = -126.0F) {
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, smallest)), Exp2Unchecked(d, x));
}

// tanh(x), relative error about 2 ulp at any magnitude: logits far below the cap must keep their digits.
// |x| < 0.65: x + x^3 q(x^2), 1.6e-8; else 1 - 2 / (1 + e^2|x|), which no longer cancels.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  const V one = hn::Set(d, 1.0F);
  // Above 2^40 the quotient has long been 0.
  const V twice = hn::Min(hn::Mul(magnitude, hn::Set(d, 2.885390081777927F)), hn::Set(d, 40.0F));
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0F), hn::Add(one, Exp2(d, twice))));
  const V z = hn::Mul(x, x);
  V q = hn::Set(d, -5.138662028270852e-3F);
  q = hn::MulAdd(q, z, hn::Set(d, 2.0091969943638974e-2F));
  q = hn::MulAdd(q, z, hn::Set(d, -5.3558861295114765e-2F));
  q = hn::MulAdd(q, z, hn::Set(d, 1.3329110738843633e-1F));
  q = hn::MulAdd(q, z, hn::Set(d, -3.3333189900204135e-1F));
  const V small = hn::MulAdd(hn::Mul(q, z), x, x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.65F)), small, hn::CopySign(large, x));
}

// 1 / x to about 2 ulp for normal x: the hardware's estimate and one Newton step, a sixth of a division's cost.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Reciprocal(D d, V x) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  return hn::Div(hn::Set(d, 1.0F), x);
#else
  const V estimate = hn::ApproximateReciprocal(x);
  return hn::Mul(estimate, hn::NegMulAdd(x, estimate, hn::Set(d, 2.0F)));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_EXP_INL_H_
