#include <algorithm>
#include <limits>

#include "reference/reference.h"
#include "reference/row.h"

namespace dropkv::reference {

// algorithm.md section 1.
Attention Attend(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec) {
  const Layer layer = LoadLayer(kv);
  Attention attention;
  attention.out.reserve(static_cast<size_t>(rows.query_heads) * rows.rows * kv.value_dim);
  for (int32_t h = 0; h < rows.query_heads; ++h)
    for (int32_t i = 0; i < rows.rows; ++i) {
      const Row row = SoftmaxRow(layer, rows, spec, h, i);
      attention.out.insert(attention.out.end(), row.out.begin(), row.out.end());
      attention.lse.push_back(row.skipped ? std::numeric_limits<double>::quiet_NaN() : row.lse);
      attention.skipped_rows += row.skipped ? 1 : 0;
    }
  return attention;
}

}  // namespace dropkv::reference
