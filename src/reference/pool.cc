#include <algorithm>
#include <cmath>

#include "reference/reference.h"

namespace dropkv::reference {

// algorithm.md section 4.1: position j takes raw scores j-after .. j+before.
std::vector<double> Pool(const double* raw, int32_t n, const Pooling& pool, int32_t window) {
  const int32_t count = pool.past_only ? std::max(0, n - window) : n;
  std::vector<double> pooled(n, 0.0);
  for (int32_t j = 0; j < count; ++j) {
    const int32_t first = std::max(0, j - pool.after);
    const int32_t last = std::min(count - 1, j + pool.before);
    double sum = 0.0;
    double largest = 0.0;
    for (int32_t i = first; i <= last; ++i) {
      const double score = std::isfinite(raw[i]) ? raw[i] : 0.0;
      sum += score;
      largest = i == first ? score : std::max(largest, score);
    }
    pooled[j] = pool.kind == PoolKind::kMax ? largest : sum / (pool.before + pool.after + 1);
  }
  return pooled;
}

}  // namespace dropkv::reference
