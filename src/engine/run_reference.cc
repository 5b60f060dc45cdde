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

// Selection and certificate of one plan, from a layer's scores.
void EvictLayer(const LayerInput& in, int32_t layer, const reference::Scores& scores, const std::vector<double>& pooled,
                PlanRun& run) {
  const Plan& plan = *run.plan;
  const EvictShape& shape = plan.shape;
  if (plan.policy.needs_queries() || WantsCertificate(run.output))
    run.report.skipped_rows += SkippedRows(in.rows, shape.key_dim);
  CountFlags(scores.flags, run.report);
  const int64_t first = int64_t{layer} * shape.kv_heads * shape.tokens;
  CopyTo(scores.raw, run.output.raw_scores, first);
  CopyTo(pooled, run.output.scores, first);
  const KeepList keep = reference::Select(plan.policy, plan.budget, shape.kv_heads, shape.tokens, scores.raw.data(),
                                          pooled.data(), scores.flags.data(), shape.generated);
  for (int32_t head = 0; head < shape.kv_heads; ++head) {
    const auto list = keep.head(0, head);
    run.positions.insert(run.positions.end(), list.begin(), list.end());
    run.offsets.push_back(static_cast<int64_t>(run.positions.size()));
  }
  if (!WantsCertificate(run.output)) return;
  const reference::Certificate measured = reference::Certify(in.kv, in.rows, in.attention, keep, 0);
  CopyTo(measured.output_error, run.output.output_error, int64_t{layer} * shape.query_heads);
  CopyTo(measured.evicted_mass, run.output.evicted_mass, int64_t{layer} * shape.query_heads);
}

}  // namespace

void RunReference(std::span<const LayerInput> layers, std::span<PlanRun> runs) {
  const EvictShape& shape = runs.front().plan->shape;
  const Policy& policy = runs.front().plan->policy;
  for (PlanRun& run : runs) run.offsets.push_back(0);
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    const LayerInput& in = layers[layer];
    const reference::Scores scores =
        reference::Score(in.kv, in.rows, in.attention, policy, in.layer_index, shape.generated);
    std::vector<double> pooled;
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      const double* raw = scores.raw.data() + int64_t{head} * shape.tokens;
      const std::vector<double> part = reference::Pool(raw, shape.tokens, policy.pool, policy.window);
      pooled.insert(pooled.end(), part.begin(), part.end());
    }
    for (PlanRun& run : runs) EvictLayer(in, layer, scores, pooled, run);
  }
  for (PlanRun& run : runs) run.Finish();
}

}  // namespace dropkv
