// Small dense symmetric matrices in float64: sums of outer products, Cholesky's factor, and quadratic forms of several
// vectors at a time, which lie as the lanes of a matrix [dim, kLanes].
#pragma once

#include <cstdint>

namespace dropkv::baseline {

inline constexpr int32_t kLanes = 8;

// gram [dim, dim] += rows^T rows, rows [count, dim]; the lower triangle only.
void AddGram(const double* rows, int32_t count, int32_t dim, double* gram);

// The lower triangle of a symmetric positive definite matrix becomes L of L L^T; false where it is not positive
// definite (or not finite), with the matrix spoilt.
bool Cholesky(int32_t dim, double* matrix);

// out [kLanes] = |L^-1 x|^2 of every lane, that is x^T (L L^T)^-1 x. x [dim, kLanes] is overwritten.
void InverseForm(const double* lower, int32_t dim, double* x, double* out);

// out [kLanes] = x^T M x of every lane; M [dim, dim] in full.
void QuadraticForm(const double* matrix, int32_t dim, const double* x, double* out);

}  // namespace dropkv::baseline
