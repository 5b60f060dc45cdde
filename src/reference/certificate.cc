#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "reference/row.h"

namespace dropkv::reference {
namespace {

// Tokens of KV head `head` that are kept, as a mask [n].
std::vector<uint8_t> KeptMask(const KeepList& keep, int32_t layer, int32_t head, int32_t n) {
  std::vector<uint8_t> mask(n, 0);
  for (const int32_t token : keep.head(layer, head)) mask[token] = 1;
  return mask;
}

double RelativeError(const std::vector<double>& full, const std::vector<double>& kept) {
  const auto dim = static_cast<int32_t>(full.size());
  const double moved = Distance(full.data(), kept.data(), dim);
  return moved == 0.0 ? 0.0 : moved / Norm(full.data(), dim);
}

}  // namespace

// algorithm.md section 6. The kept tokens' softmax is a' itself: the common denominator of the p cancels, and the sink
// stays in both.
Certificate Certify(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec, const KeepList& keep,
                    int32_t layer) {
  const Layer data = LoadLayer(kv);
  const int32_t group = rows.query_heads / kv.kv_heads;
  Certificate certificate;
  for (int32_t h = 0; h < rows.query_heads; ++h) {
    const int32_t u = h / group;
    const std::vector<uint8_t> kept = KeptMask(keep, layer, u, kv.tokens);
    double squared = 0.0;
    double mass = 0.0;
    int32_t judged = 0;
    for (int32_t i = 0; i < rows.rows; ++i) {
      const Row full = SoftmaxRow(data, rows, spec, h, i);
      if (full.skipped) continue;
      ++judged;
      const float* q = rows.q + h * rows.head_stride + i * rows.row_stride;
      const Row after = SoftmaxRow(data, q, h, u, rows.visible[i], spec, kept.data());
      const double error = RelativeError(full.out, after.out);
      squared += error * error;
      for (int32_t j = 0; j < kv.tokens; ++j) mass += kept[j] != 0 ? 0.0 : full.weight[j];
    }
    certificate.output_error.push_back(judged > 0 ? std::sqrt(squared / judged) : 0.0);
    certificate.evicted_mass.push_back(judged > 0 ? mass / judged : 0.0);
  }
  return certificate;
}

}  // namespace dropkv::reference
