#include "llama/evict.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace dropkv::llama {
namespace {

double Mean(const std::vector<float>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

Result<Evicted> Evict(const Prefilled& prefilled, Engine* engine, const Policy& policy, const Budget& budget) {
  Evicted evicted;
  const int32_t n = prefilled.size();
  if (prefilled.layers.empty()) {
    const Result<KeepCount> count = ResolveBudget(budget, policy, n);
    if (!count.ok()) return count.status();
    evicted.report.budget = {n, count->raised};
    return evicted;
  }
  const LayerInfo& first = prefilled.tap->layers().at(prefilled.layers.front());
  const auto layers = static_cast<int32_t>(prefilled.layers.size());
  const EvictShape shape{layers, first.query_heads, first.kv_heads, n, first.key_dim, first.value_dim};
  const Result<Plan> plan = engine->MakePlan(shape, policy, budget);
  if (!plan.ok()) return plan.status();

  // The last rows of what was captured are the policy's window; row i of them sees n - rows + i + 1 tokens.
  const int32_t captured = prefilled.rows();
  const int32_t rows = std::min(policy.window, n);
  if (rows > captured)
    return Status(Code::kFailedPrecondition, "the prefill kept " + std::to_string(captured) +
                                                 " rows of queries, the policy's window needs " + std::to_string(rows));
  std::vector<int32_t> visible(rows);
  for (int32_t i = 0; i < rows; ++i) visible[i] = n - rows + i + 1;
  std::vector<LayerInput> inputs(layers);
  for (int32_t i = 0; i < layers; ++i) {
    const int32_t number = prefilled.layers[i];
    const LayerInfo& layer = prefilled.tap->layers().at(number);
    Result<KvView> view = layer.View(layer.cells);
    if (!view.ok()) return view.status();
    inputs[i].kv = *view;
    inputs[i].layer_index = number;
    inputs[i].attention = layer.Attention();
    if (rows == 0) continue;
    const int64_t row_stride = static_cast<int64_t>(layer.query_heads) * layer.key_dim;
    const float* q = prefilled.capture->queries(number).data() + (captured - rows) * row_stride;
    inputs[i].rows = {q, layer.key_dim, row_stride, layer.query_heads, rows, visible.data()};
  }

  std::vector<std::byte> workspace(plan->workspace_bytes);
  const size_t heads = static_cast<size_t>(layers) * first.query_heads;
  std::vector<float> error(heads);
  std::vector<float> mass(heads);
  EvictOutput output;
  output.output_error = error.data();
  output.evicted_mass = mass.data();
  Result<KeepList> keep = engine->Run(*plan, inputs, workspace, output, &evicted.report);
  if (!keep.ok()) return keep.status();
  evicted.keep = std::move(*keep);
  evicted.score_seconds = evicted.report.attend_s + evicted.report.score_s + evicted.report.select_s;
  evicted.output_error = Mean(error);
  evicted.evicted_mass = Mean(mass);
  return evicted;
}

}  // namespace dropkv::llama
