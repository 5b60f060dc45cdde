#include "engine/run_reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/reference.h"

namespace dropkv {
namespace {

void CopyTo(const std::vector<double>& from, float* to, int64_t first) {
  if (to == nullptr) return;
  std::transform(from.begin(), from.end(), to + first, [](double x) { return static_cast<float>(x); });
}

int64_t SkippedRows(const ObservationRows& rows, int32_t key_dim) {
  int64_t skipped = 0;
  for (int32_t h = 0; h < rows.query_heads; ++h)
    for (int32_t i = 0; i < rows.rows; ++i) {
      const float* q = rows.q + h * rows.head_stride + i * rows.row_stride;
      skipped += std::all_of(q, q + key_dim, [](float x) { return std::isfinite(x); }) ? 0 : 1;
    }
  return skipped;
}

void CountFlags(const std::vector<uint8_t>& flags, EvictReport& report) {
  for (const uint8_t flag : flags) {
    report.nonfinite_tokens += (flag & reference::kNonFinite) != 0 ? 1 : 0;
    report.dominant_tokens += (flag & reference::kDominant) != 0 ? 1 : 0;
  }
}

}  // namespace

KeepList RunReference(const Plan& plan, std::span<const LayerInput> layers, const EvictOutput& output,
                      EvictReport& report) {
  const EvictShape& shape = plan.shape;
  const bool certificate = output.output_error != nullptr || output.evicted_mass != nullptr;
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    const LayerInput& in = layers[layer];
    const reference::Scores scores =
        reference::Score(in.kv, in.rows, in.attention, plan.policy, in.layer_index, shape.generated);
    if (plan.policy.needs_queries() || certificate) report.skipped_rows += SkippedRows(in.rows, shape.key_dim);
    CountFlags(scores.flags, report);
    std::vector<double> pooled;
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      const double* raw = scores.raw.data() + int64_t{head} * shape.tokens;
      const std::vector<double> part = reference::Pool(raw, shape.tokens, plan.policy.pool, plan.policy.window);
      pooled.insert(pooled.end(), part.begin(), part.end());
    }
    const int64_t first = int64_t{layer} * shape.kv_heads * shape.tokens;
    CopyTo(scores.raw, output.raw_scores, first);
    CopyTo(pooled, output.scores, first);
    const KeepList keep = reference::Select(plan.policy, plan.budget, shape.kv_heads, shape.tokens, scores.raw.data(),
                                            pooled.data(), scores.flags.data(), shape.generated);
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      const auto list = keep.head(0, head);
      positions.insert(positions.end(), list.begin(), list.end());
      offsets.push_back(static_cast<int64_t>(positions.size()));
    }
    if (!certificate) continue;
    const reference::Certificate measured = reference::Certify(in.kv, in.rows, in.attention, keep, 0);
    CopyTo(measured.output_error, output.output_error, int64_t{layer} * shape.query_heads);
    CopyTo(measured.evicted_mass, output.evicted_mass, int64_t{layer} * shape.query_heads);
  }
  return {shape.layers, shape.kv_heads, std::move(offsets), std::move(positions)};
}

}  // namespace dropkv
