// Allowed errors of a float32 kernel against the float64 reference: derived from sizes and magnitudes, never tuned.
//
// u = 2^-24. A float32 sum or product chain of m roundings has relative error at most m*u/(1 - m*u), and, the roundings
// being as good as independent, at most kLambda * sqrt(m) * u with probability above 1 - 2 exp(-kLambda^2 / 2) (Higham
// and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). Gamma(m) is the smaller of the two. Neither depends on the
// order of the sum, so the bounds hold for every vector width, tile size and thread count.
//
//   logit   l = s <q,k>: Gamma(d + 2) * L, L = max s |q| |k|; a soft cap has slope <= 1 and adds a few u * L.
//   lse     the logit's error, the sum of n exponentials with its rescalings (2n roundings), the logarithm, the store.
//   p       exp(l - lse): absolute errors of the exponent are relative errors of p; called rho below.
//   out     sum p v: (rho + Gamma(n)) * max |v|, per element with the largest element, as a vector with the largest
//   norm.
//   score   a pair gives c = r^2 D2, r = p/(1-p), D2 = |a - v|^2.
//     p <= 1/2: r has relative error rho/(1-p) <= 2 rho (1-p from expm1, so never from a cancelled difference);
//       D2 may come from |a|^2 - 2<a,v> + |v|^2, whose error is Gamma(dv + R + 3) (|a| + |v|)^2 over R rows, and the
//       error of a itself moves it by 2 D da + da^2.
//     p > 1/2: c = p^2 |v - a_without|^2, where a_without is a softmax output like any other; nothing is divided by
//       1-p, so the bound holds up to p = 1.
//
// Not covered: values beyond float32, intermediate results that a kernel keeps in fewer bits than float32, and row
// weights so small that a product with them is subnormal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "dropkv/cache_view.h"
#include "dropkv/policy.h"

namespace dropkv::reference {

inline constexpr double kUnitRoundoff = 0x1p-24;
inline constexpr double kLambda = 6.0;   // 2 exp(-18) = 3e-8 for one bound to fail
inline constexpr double kExpUlps = 4.0;  // relative error of a kernel's exp, expm1, log, tanh, in units of 2u
inline constexpr double kSmallestNormal = 0x1p-126;  // results below it may be flushed to 0

// Relative error of a chain of `roundings` float32 operations.
inline double Gamma(double roundings) {
  return std::min(roundings * kUnitRoundoff / (1.0 - roundings * kUnitRoundoff),
                  kLambda * std::sqrt(roundings) * kUnitRoundoff);
}

// Sizes and magnitudes of one query head (or of the worst one of a case).
struct Magnitudes {
  int32_t tokens = 0;       // n
  int32_t key_dim = 0;      // d
  int32_t value_dim = 0;    // dv
  double logit = 0.0;       // L: largest scale * |q|_2 * |k|_2, and the largest |sink|
  double value_max = 0.0;   // largest |v| element
  double value_norm = 0.0;  // largest |v_j|_2
};

// Absolute error of one logit.
inline double LogitTolerance(const Magnitudes& m) {
  return (Gamma(m.key_dim + 2.0) + 2 * kExpUlps * kUnitRoundoff) * m.logit;
}

// Absolute error of the log-sum-exp, stored as float32.
inline double LseTolerance(const Magnitudes& m) {
  const double largest = m.logit + std::log(m.tokens + 1.0);
  return LogitTolerance(m) + Gamma(2.0 * m.tokens) + 2 * kExpUlps * kUnitRoundoff * (2.0 + largest);
}

// rho: relative error of p = exp(l - lse), and of every softmax weight.
inline double WeightTolerance(const Magnitudes& m) {
  const double largest = m.logit + std::log(m.tokens + 1.0);
  return LogitTolerance(m) + LseTolerance(m) + kUnitRoundoff * (2 * kExpUlps + 2 * largest);
}

// Absolute error of one element of the attention output.
inline double OutTolerance(const Magnitudes& m) {
  return (WeightTolerance(m) + Gamma(m.tokens + 2.0)) * m.value_max + m.tokens * kSmallestNormal * m.value_max;
}

// Euclidean error of the output vector.
inline double OutNormTolerance(const Magnitudes& m) {
  return (WeightTolerance(m) + Gamma(m.tokens + 2.0)) * m.value_norm + m.tokens * kSmallestNormal * m.value_norm;
}

// Absolute error of one (row, token) pair's contribution r^2 D2 to the DropKV score, before the mean over the group.
// weight = p, rest = 1 - p, distance = |a - v|, without = |v - a_without|, out_norm = |a|, value = |v_j|, pairs = g*w.
double PairTolerance(const Magnitudes& m, double weight, double rest, double distance, double without, double out_norm,
                     double value, int32_t pairs);

// Bounds of a whole layer, from its own inputs: what a kernel test compares with.
struct Tolerances {
  std::vector<double> out;  // [Hq, w] allowed error of every element of that row's output
  std::vector<double> lse;  // [Hq, w]
  std::vector<double> raw;  // [Hkv, n] of the candidates; 0 for those that take no part and where no query is read
};

// Computed in float64 from the inputs. `policy` says which score `raw` bounds; the pooled score's bound is the pooled
// bound (pooling is linear or a maximum) plus Gamma(before + after + 2) of the pooled value. generated: as in Score.
Tolerances LayerTolerances(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec,
                           const Policy& policy, int32_t generated = 0);

}  // namespace dropkv::reference
