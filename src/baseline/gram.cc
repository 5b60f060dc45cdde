#include "baseline/gram.h"

#include <algorithm>
#include <cmath>

namespace dropkv::baseline {
namespace {

constexpr int32_t kRowsAtOnce = 4;  // one pass over the triangle takes so many rows

}  // namespace

void AddGram(const double* rows, int32_t count, int32_t dim, double* gram) {
  int32_t r = 0;
  for (; r + kRowsAtOnce <= count; r += kRowsAtOnce) {
    const double* a = rows + static_cast<int64_t>(r) * dim;
    const double* b = a + dim;
    const double* c = b + dim;
    const double* e = c + dim;
    for (int32_t i = 0; i < dim; ++i) {
      double* to = gram + static_cast<int64_t>(i) * dim;
      const double x[kRowsAtOnce] = {a[i], b[i], c[i], e[i]};
      for (int32_t j = 0; j <= i; ++j) to[j] += (x[0] * a[j] + x[1] * b[j]) + (x[2] * c[j] + x[3] * e[j]);
    }
  }
  for (; r < count; ++r) {
    const double* a = rows + static_cast<int64_t>(r) * dim;
    for (int32_t i = 0; i < dim; ++i)
      for (int32_t j = 0; j <= i; ++j) gram[static_cast<int64_t>(i) * dim + j] += a[i] * a[j];
  }
}

bool Cholesky(int32_t dim, double* matrix) {
  for (int32_t j = 0; j < dim; ++j) {
    double* row = matrix + static_cast<int64_t>(j) * dim;
    double pivot = row[j];
    for (int32_t k = 0; k < j; ++k) pivot -= row[k] * row[k];
    if (!(pivot > 0.0) || !std::isfinite(pivot)) return false;
    row[j] = std::sqrt(pivot);
    for (int32_t i = j + 1; i < dim; ++i) {
      double* below = matrix + static_cast<int64_t>(i) * dim;
      double sum = below[j];
      for (int32_t k = 0; k < j; ++k) sum -= below[k] * row[k];
      below[j] = sum / row[j];
    }
  }
  return true;
}

void InverseForm(const double* lower, int32_t dim, double* x, double* out) {
  std::fill_n(out, kLanes, 0.0);
  for (int32_t i = 0; i < dim; ++i) {
    const double* row = lower + static_cast<int64_t>(i) * dim;
    double y[kLanes];
    std::copy_n(x + static_cast<int64_t>(i) * kLanes, kLanes, y);
    for (int32_t k = 0; k < i; ++k)
      for (int32_t t = 0; t < kLanes; ++t) y[t] -= row[k] * x[k * kLanes + t];
    for (int32_t t = 0; t < kLanes; ++t) {
      y[t] /= row[i];
      x[i * kLanes + t] = y[t];
      out[t] += y[t] * y[t];
    }
  }
}

void QuadraticForm(const double* matrix, int32_t dim, const double* x, double* out) {
  std::fill_n(out, kLanes, 0.0);
  for (int32_t i = 0; i < dim; ++i) {
    const double* row = matrix + static_cast<int64_t>(i) * dim;
    double y[kLanes] = {};
    for (int32_t j = 0; j < dim; ++j)
      for (int32_t t = 0; t < kLanes; ++t) y[t] += row[j] * x[j * kLanes + t];
    for (int32_t t = 0; t < kLanes; ++t) out[t] += y[t] * x[i * kLanes + t];
  }
}

}  // namespace dropkv::baseline
