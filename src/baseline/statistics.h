// What all queries of a prompt say about a layer, gathered while the prefill runs: queries come chunk by chunk, in
// order, and are not kept. No n x n matrix and no copy of the queries exists at any time.
#pragma once

#include <cstdint>
#include <vector>

#include "baseline/input.h"
#include "baseline/local_attention.h"
#include "baseline/recipe.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Which statistics to gather; the union over several recipes.
struct StatisticsPlan {
  bool column_sums = false;  // sum over all rows of p
  bool recent_sums = false;  // the same over the last `recent_rows` rows (needs the prompt's length)
  int32_t recent_rows = 400;
  bool moments = false;     // mean of the queries before RoPE of positions >= moments_skip
  bool covariance = false;  // and their covariance
  int32_t moments_skip = 4;
  // Local attention, one entry for each (chunk, skips) asked.
  using Local = LocalSpan;
  std::vector<Local> local;

  bool any() const { return column_sums || recent_sums || moments || covariance || !local.empty(); }
  // What `recipe` needs beside what is asked for already. Recipes that differ in recent_rows or moments_skip cannot
  // share statistics: the last one's are gathered, and PromptStatistics::Serves refuses the others.
  void Add(const Recipe& recipe);
};

class PromptStatistics {
 public:
  PromptStatistics() = default;
  // n: length of the whole prompt. Shapes as in KvView and ObservationRows.
  PromptStatistics(const StatisticsPlan& plan, int32_t query_heads, int32_t kv_heads, int32_t tokens, int32_t key_dim);

  // Queries of positions first .. first + count - 1, [count, Hq, d] after RoPE, dims contiguous; token by token in the
  // prompt's order, without gaps. kv: all tokens up to first + count at least. rope undoes the rotation for the
  // moments; q_pre [count, Hq, d] is taken instead where it is not null. Rows with NaN or Inf judge nothing; tokens
  // with NaN or Inf in key or value take no part. Errors: shapes, order, or moments without q_pre and rope; nothing was
  // added then.
  Status Add(const KvView& kv, const AttentionSpec& attention, const Rope& rope, const float* q, const float* q_pre,
             int32_t first, int32_t count, ThreadPool* pool);

  // All n rows were added.
  bool complete() const;

  // Sum over rows, mean over the group, of p: [Hkv, n].
  const std::vector<double>& column_sums() const;
  const std::vector<double>& recent_sums() const;
  std::vector<double> mean() const;        // [Hq, d] of the queries before RoPE, positions >= moments_skip
  std::vector<double> covariance() const;  // [Hq, d, d] centred products / (n - moments_skip)
  // Column sums of the local attention, mean over the group: [Hkv, n - skip_first - skip_last]; empty where they were
  // not asked for.
  const std::vector<double>& local(const StatisticsPlan::Local& which) const;

  const StatisticsPlan& plan() const { return plan_; }

  // Whether all that `recipe` reads was gathered, over all rows, for a cache of this shape; else what is missing.
  Status Serves(const Recipe& recipe, const KvView& kv) const;

 private:
  Status CheckChunk(const KvView& kv, const Rope& rope, const float* q, const float* q_pre, int32_t first,
                    int32_t count) const;
  Status AddColumns(const KvView& kv, const AttentionSpec& attention, const float* q, int32_t first, int32_t count,
                    ThreadPool* pool);
  void AddMoments(const Rope& rope, const float* q, const float* q_pre, int32_t first, int32_t count, ThreadPool* pool);

  bool wants_moments() const { return plan_.moments || plan_.covariance; }

  StatisticsPlan plan_;
  int32_t query_heads_ = 0;
  int32_t kv_heads_ = 0;
  int32_t tokens_ = 0;
  int32_t key_dim_ = 0;
  int32_t added_ = 0;  // rows
  std::vector<double> column_sums_;
  std::vector<double> recent_sums_;
  std::vector<int64_t> moment_rows_;   // [Hq] finite rows that the moments hold
  std::vector<double> query_sums_;     // [Hq, d]
  std::vector<double> query_grams_;    // [Hq, d, d] sums of products, lower triangles
  std::vector<LocalAttention> local_;  // as in the plan
};

}  // namespace dropkv::baseline
