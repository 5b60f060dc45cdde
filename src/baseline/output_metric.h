// How long a difference of values becomes behind the output projection: |x W_O^h|^2 = |L_h^T x|^2, where L_h L_h^T is
// the Gram matrix W_O^h W_O^h^T [dv, dv] of query head h. dv numbers instead of `hidden`, and no expanded form.
#pragma once

#include <cstdint>
#include <vector>

#include "baseline/input.h"
#include "core/parallel.h"

namespace dropkv::baseline {

class OutputMetric {
 public:
  // Reads every row of wo once. value_dim divides wo.columns. Float32 products over 128 rows of W_O at a time, summed
  // in double; directions whose square is below 1e-6 of the greatest dim's count as none (a W_O of lower rank).
  OutputMetric(const OutputProjection& wo, int32_t value_dim, ThreadPool* pool);

  int32_t heads() const { return heads_; }
  int32_t value_dim() const { return dim_; }
  // L_h [dv, dv], row by row; triangular but for the order of its rows.
  const float* factor(int32_t head) const { return factors_.data() + static_cast<size_t>(head) * dim_ * dim_; }

 private:
  int32_t heads_;
  int32_t dim_;
  std::vector<float> factors_;
};

}  // namespace dropkv::baseline
