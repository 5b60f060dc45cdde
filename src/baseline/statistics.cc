#include "baseline/statistics.h"

#include <algorithm>
#include <string>

#include "baseline/column_sums.h"
#include "baseline/gram.h"
#include "baseline/head_reader.h"
#include "cpu/attend.h"

namespace dropkv::baseline {
namespace {

std::string Got(int64_t value) { return ", got " + std::to_string(value); }

Status Missing(const char* what) {
  return {Code::kFailedPrecondition, std::string("statistics: expected ") + what + ", which were not gathered"};
}

StatisticsPlan::Local LocalOf(const Recipe& recipe) {
  if (recipe.scorer == Scorer::kLocalAttention) return {recipe.block, 0, 0};
  return {recipe.block, recipe.policy.sink, recipe.recent};
}

// What one recipe reads.
StatisticsPlan PlanOf(const Recipe& recipe) {
  StatisticsPlan plan;
  const Scorer scorer = recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer;
  switch (scorer) {
    case Scorer::kAttentionSum:
    case Scorer::kAttentionMean:
      plan.column_sums = true;
      break;
    case Scorer::kVatp:
      plan.column_sums = recipe.block == 0;
      plan.recent_sums = recipe.block != 0;
      plan.recent_rows = recipe.block;
      break;
    case Scorer::kExpected:
      plan.moments = true;
      plan.covariance = recipe.covariance;
      plan.moments_skip = recipe.policy.sink;
      break;
    case Scorer::kCapKv:
      plan.moments = true;
      plan.moments_skip = recipe.policy.sink;
      break;
    case Scorer::kCompactor:
    case Scorer::kLocalAttention:
      plan.local.push_back(LocalOf(recipe));
      break;
    default:
      break;
  }
  return plan;
}

Status CheckPlan(const StatisticsPlan& plan) {
  if (plan.recent_sums && plan.recent_rows < 1)
    return InvalidArgument("plan.recent_rows: expected at least 1" + Got(plan.recent_rows));
  if (plan.moments_skip < 0) return InvalidArgument("plan.moments_skip: expected at least 0" + Got(plan.moments_skip));
  for (const StatisticsPlan::Local& local : plan.local) {
    if (local.chunk < 1) return InvalidArgument("plan.local.chunk: expected at least 1" + Got(local.chunk));
    if (local.skip_first < 0 || local.skip_last < 0)
      return InvalidArgument("plan.local: expected skips of at least 0" +
                             Got(std::min(local.skip_first, local.skip_last)));
  }
  return Status::Ok();
}

}  // namespace

void StatisticsPlan::Add(const Recipe& recipe) {
  const StatisticsPlan more = PlanOf(recipe);
  column_sums = column_sums || more.column_sums;
  if (more.recent_sums) recent_rows = more.recent_rows;
  recent_sums = recent_sums || more.recent_sums;
  if (more.moments) moments_skip = more.moments_skip;
  moments = moments || more.moments;
  covariance = covariance || more.covariance;
  for (const Local& which : more.local)
    if (std::find(local.begin(), local.end(), which) == local.end()) local.push_back(which);
}

PromptStatistics::PromptStatistics(const StatisticsPlan& plan, int32_t query_heads, int32_t kv_heads, int32_t tokens,
                                   int32_t key_dim)
    : plan_(plan), query_heads_(query_heads), kv_heads_(kv_heads), tokens_(tokens), key_dim_(key_dim) {
  const size_t columns = static_cast<size_t>(kv_heads) * tokens;
  if (plan.column_sums) column_sums_.assign(columns, 0.0);
  if (plan.recent_sums) recent_sums_.assign(columns, 0.0);
  const size_t row = static_cast<size_t>(query_heads) * key_dim;
  if (wants_moments()) {
    moment_rows_.assign(query_heads, 0);
    query_sums_.assign(row, 0.0);
  }
  if (plan.covariance) query_grams_.assign(row * key_dim, 0.0);
  if (!CheckPlan(plan).ok()) return;  // Add says so
  for (const StatisticsPlan::Local& which : plan.local)
    local_.emplace_back(which, query_heads, kv_heads, tokens, key_dim);
}

Status PromptStatistics::CheckChunk(const KvView& kv, const Rope& rope, const float* q, const float* q_pre,
                                    int32_t first, int32_t count) const {
  DROPKV_RETURN_IF_ERROR(CheckPlan(plan_));
  DROPKV_RETURN_IF_ERROR(CheckKvView(kv));
  if (kv.kv_heads != kv_heads_ || kv.key_dim != key_dim_)
    return InvalidArgument("kv: expected [Hkv, d] = [" + std::to_string(kv_heads_) + ", " + std::to_string(key_dim_) +
                           "], got [" + std::to_string(kv.kv_heads) + ", " + std::to_string(kv.key_dim) + "]");
  if (query_heads_ < 1 || query_heads_ % kv_heads_ != 0 || query_heads_ / kv_heads_ > kMaxGroup)
    return InvalidArgument("query_heads: expected 1 to 16 times the " + std::to_string(kv_heads_) + " KV heads" +
                           Got(query_heads_));
  if (first != added_)
    return InvalidArgument("first: expected " + std::to_string(added_) + ", the next row" + Got(first));
  if (count < 1 || count > tokens_ - first)
    return InvalidArgument("count: expected 1 to " + std::to_string(tokens_ - first) + " rows" + Got(count));
  if (kv.tokens < first + count)
    return InvalidArgument("kv.tokens: expected at least " + std::to_string(first + count) + Got(kv.tokens));
  if (q == nullptr) return InvalidArgument("q: expected a pointer, got null");
  if (wants_moments() && q_pre == nullptr && rope.dims == 0)
    return InvalidArgument("q_pre: expected the queries before RoPE, or a rope that undoes it; got neither");
  if (rope.dims < 0 || rope.dims > key_dim_ || rope.frequencies.size() != static_cast<size_t>(rope.dims / 2))
    return InvalidArgument("rope: expected at most " + std::to_string(key_dim_) +
                           " dims and a frequency for two, got " + std::to_string(rope.dims) + " and " +
                           std::to_string(rope.frequencies.size()));
  return Status::Ok();
}

Status PromptStatistics::Add(const KvView& kv, const AttentionSpec& attention, const Rope& rope, const float* q,
                             const float* q_pre, int32_t first, int32_t count, ThreadPool* pool) {
  DROPKV_RETURN_IF_ERROR(CheckChunk(kv, rope, q, q_pre, first, count));
  if (plan_.column_sums || plan_.recent_sums) {
    DROPKV_RETURN_IF_ERROR(AddColumns(kv, attention, q, first, count, pool));
  }
  if (wants_moments()) AddMoments(rope, q, q_pre, first, count, pool);
  for (LocalAttention& local : local_) DROPKV_RETURN_IF_ERROR(local.Add(kv, q, first, count, pool));
  added_ += count;
  return Status::Ok();
}

// Rows before the recent ones, then the recent ones.
Status PromptStatistics::AddColumns(const KvView& kv, const AttentionSpec& attention, const float* q, int32_t first,
                                    int32_t count, ThreadPool* pool) {
  const int32_t recent = plan_.recent_sums ? std::clamp(tokens_ - plan_.recent_rows - first, 0, count) : count;
  const int64_t row = int64_t{query_heads_} * key_dim_;
  const QueryChunk before{q, query_heads_, first, recent};
  const QueryChunk after{q + recent * row, query_heads_, first + recent, count - recent};
  if (plan_.column_sums) {
    DROPKV_RETURN_IF_ERROR(AddColumnSums(kv, attention, before, true, pool, tokens_, column_sums_.data()));
  }
  if (after.count == 0) return Status::Ok();
  std::vector<double> sums(static_cast<size_t>(kv_heads_) * tokens_, 0.0);
  DROPKV_RETURN_IF_ERROR(AddColumnSums(kv, attention, after, true, pool, tokens_, sums.data()));
  for (std::vector<double>* into : {&column_sums_, &recent_sums_})
    for (size_t i = 0; i < into->size(); ++i) (*into)[i] += sums[i];
  return Status::Ok();
}

void PromptStatistics::AddMoments(const Rope& rope, const float* q, const float* q_pre, int32_t first, int32_t count,
                                  ThreadPool* pool) {
  constexpr int32_t kBlock = 64;  // rows that are held as float64
  const bool undo = q_pre == nullptr;
  const float* from = undo ? q : q_pre;
  const int32_t begin = std::clamp(plan_.moments_skip - first, 0, count);
  std::vector<double> turns(undo ? static_cast<size_t>(count) * rope.dims : 0);
  for (int32_t i = 0; undo && i < count; ++i) rope.Turns(first + i, true, turns.data() + int64_t{i} * rope.dims);
  ForEach(pool, query_heads_, [&](int64_t head) {
    std::vector<double> rows(static_cast<size_t>(kBlock) * key_dim_);
    double* sum = query_sums_.data() + head * key_dim_;
    for (int32_t i = begin; i < count;) {
      int32_t held = 0;
      for (; i < count && held < kBlock; ++i) {
        const float* query = from + (int64_t{i} * query_heads_ + head) * key_dim_;
        if (!cpu::IsFinite(query, key_dim_)) continue;
        double* row = rows.data() + int64_t{held++} * key_dim_;
        std::copy_n(query, key_dim_, row);
        if (undo) rope.Turn(turns.data() + int64_t{i} * rope.dims, row);
        for (int32_t x = 0; x < key_dim_; ++x) sum[x] += row[x];
      }
      moment_rows_[head] += held;
      if (plan_.covariance) AddGram(rows.data(), held, key_dim_, query_grams_.data() + head * key_dim_ * key_dim_);
    }
  });
}

bool PromptStatistics::complete() const { return added_ == tokens_; }

const std::vector<double>& PromptStatistics::column_sums() const { return column_sums_; }

const std::vector<double>& PromptStatistics::recent_sums() const { return recent_sums_; }

std::vector<double> PromptStatistics::mean() const {
  std::vector<double> mean = query_sums_;
  for (size_t i = 0; i < mean.size(); ++i) {
    const int64_t rows = moment_rows_[i / key_dim_];
    mean[i] = rows > 0 ? mean[i] / static_cast<double>(rows) : 0.0;
  }
  return mean;
}

std::vector<double> PromptStatistics::covariance() const {
  const std::vector<double> means = mean();
  std::vector<double> covariance(query_grams_.size(), 0.0);
  const int64_t size = int64_t{key_dim_} * key_dim_;
  for (int32_t h = 0; plan_.covariance && h < query_heads_; ++h) {
    if (moment_rows_[h] == 0) continue;
    const double* gram = query_grams_.data() + h * size;
    const double* mean = means.data() + int64_t{h} * key_dim_;
    double* out = covariance.data() + h * size;
    for (int32_t i = 0; i < key_dim_; ++i)
      for (int32_t j = 0; j <= i; ++j) {
        const double value = gram[i * key_dim_ + j] / static_cast<double>(moment_rows_[h]) - mean[i] * mean[j];
        out[i * key_dim_ + j] = out[j * key_dim_ + i] = value;
      }
  }
  return covariance;
}

const std::vector<double>& PromptStatistics::local(const StatisticsPlan::Local& which) const {
  static const std::vector<double> none;
  const auto found = std::find(plan_.local.begin(), plan_.local.end(), which);
  return found == plan_.local.end() || local_.empty() ? none : local_[found - plan_.local.begin()].sums();
}

Status PromptStatistics::Serves(const Recipe& recipe, const KvView& kv) const {
  const StatisticsPlan needs = PlanOf(recipe);
  if (!needs.any()) return Status::Ok();
  if (kv.kv_heads != kv_heads_ || kv.tokens != tokens_ || kv.key_dim != key_dim_)
    return InvalidArgument("statistics: expected the cache's [Hkv, n, d] = [" + std::to_string(kv.kv_heads) + ", " +
                           std::to_string(kv.tokens) + ", " + std::to_string(kv.key_dim) + "], got [" +
                           std::to_string(kv_heads_) + ", " + std::to_string(tokens_) + ", " +
                           std::to_string(key_dim_) + "]");
  if (!complete())
    return {Code::kFailedPrecondition, "statistics: expected all " + std::to_string(tokens_) + " rows" + Got(added_)};
  if (needs.column_sums && !plan_.column_sums) return Missing("column sums");
  if (needs.recent_sums && (!plan_.recent_sums || plan_.recent_rows != needs.recent_rows))
    return Missing(("column sums of the last " + std::to_string(needs.recent_rows) + " rows").c_str());
  if (needs.moments && (!wants_moments() || plan_.moments_skip != needs.moments_skip))
    return Missing(("moments of positions from " + std::to_string(needs.moments_skip)).c_str());
  if (needs.covariance && !plan_.covariance) return Missing("covariances");
  for (const StatisticsPlan::Local& which : needs.local)
    if (std::find(plan_.local.begin(), plan_.local.end(), which) == plan_.local.end())
      return Missing(("sums of local attention over chunks of " + std::to_string(which.chunk)).c_str());
  return Status::Ok();
}

}  // namespace dropkv::baseline
