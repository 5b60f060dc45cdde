#include "baseline/window_scores.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>

#include "core/workspace.h"
#include "cpu/score.h"
#include "reference/reference.h"

namespace dropkv::baseline {

RawScores EngineScores(const KvView& kv, int32_t generated, const ObservationRows& rows, const AttentionSpec& attention,
                       Signal signal, ThreadPool* pool) {
  const LayerInput input{kv, rows, attention, nullptr, nullptr, 0};
  const int32_t group = rows.query_heads / kv.kv_heads;
  const cpu::WaveShape shape{1,          kv.kv_heads,  group,           rows.rows, kv.tokens,
                             kv.key_dim, kv.value_dim, pool->threads(), generated};
  const cpu::Kernels& kernels = cpu::KernelTable().front();
  Workspace counting;
  std::optional<cpu::WaveScorer> scorer(std::in_place, kernels, pool, shape, counting, counting);
  std::vector<std::byte> memory(counting.bytes_needed());
  Workspace workspace(memory);
  scorer.emplace(kernels, pool, shape, workspace, workspace);
  const size_t count = static_cast<size_t>(kv.kv_heads) * shape.candidates();
  RawScores scores{std::vector<float>(count), std::vector<uint8_t>(count)};
  scorer->Attend({&input, 1}, signal == Signal::kDropKv, scores.flags.data());
  scorer->Score({&input, 1}, signal, scores.raw.data(), scores.flags.data());
  return scores;
}

bool NeedsEveryHead(const Recipe& recipe) {
  const Pooling& pool = recipe.policy.pool;
  const bool maximum = pool.kind == PoolKind::kMax && pool.before + pool.after > 0;
  return recipe.group == GroupRule::kMax || (maximum && !recipe.group_before_pool);
}

namespace {

// Mean, sum or maximum over `heads` rows of [heads, n] into out [n].
void Reduce(GroupRule rule, const float* rows, int32_t heads, int32_t n, double* out) {
  std::copy_n(rows, n, out);
  for (int32_t h = 1; h < heads; ++h) {
    const float* row = rows + static_cast<size_t>(h) * n;
    for (int32_t j = 0; j < n; ++j)
      out[j] = rule == GroupRule::kMax ? std::max<double>(out[j], row[j]) : out[j] + row[j];
  }
  if (rule != GroupRule::kMean) return;
  for (int32_t j = 0; j < n; ++j) out[j] /= heads;
}

}  // namespace

void PoolAndReduce(const Recipe& recipe, const std::vector<float>& raw, int32_t group, ThreadPool* pool,
                   LayerScores* scores) {
  const int32_t n = scores->tokens;
  const size_t of_head = static_cast<size_t>(n);
  const auto heads = static_cast<int32_t>(raw.size() / (of_head * scores->kv_heads));  // g, or 1: reduced already
  const Policy& policy = recipe.policy;
  const double factor = heads < group && recipe.group == GroupRule::kSum ? group : 1.0;
  pool->For(scores->kv_heads, [&](int64_t head, int32_t) {
    const float* from = raw.data() + head * heads * of_head;
    double* out = scores->score.data() + head * of_head;
    std::vector<float> pooled(heads * of_head);
    if (recipe.group_before_pool) {
      std::vector<float> reduced(of_head);
      Reduce(recipe.group, from, heads, n, out);
      std::copy_n(out, n, reduced.data());
      cpu::PoolScores(reduced.data(), n, policy.pool, policy.window, pooled.data());
      std::copy_n(pooled.data(), n, out);
    } else {
      for (int32_t h = 0; h < heads; ++h)
        cpu::PoolScores(from + h * of_head, n, policy.pool, policy.window, pooled.data() + h * of_head);
      Reduce(recipe.group, pooled.data(), heads, n, out);
    }
    if (factor == 1.0) return;
    for (int32_t j = 0; j < n; ++j) out[j] *= factor;
  });
}

void Force(const std::vector<uint8_t>& flags, const float* raw, LayerScores* scores) {
  for (size_t j = 0; j < flags.size(); ++j) {
    if (flags[j] == 0) continue;
    scores->forced[j] = 1;
    if ((flags[j] & reference::kNonFinite) != 0) {
      ++scores->nonfinite_tokens;
      scores->score[j] = std::numeric_limits<double>::quiet_NaN();
    } else if (raw != nullptr) {
      scores->score[j] = raw[j];
    }
  }
}

}  // namespace dropkv::baseline
