// Time of every preset's whole score for one layer, relative to snapkv's.
//
//   policy_bench [threads [repeats [n ...]]]       (2 threads, 5 repeats, n 8192 and 32768)
//
// Shape of Llama-3.1-8B: 32 query heads, 8 KV heads, d = dv = 128, hidden size 4096; keys and values float16, W_O
// float32. "own": the preset's window and pooling; "shared": window 32, mean 7, where the policy has a window to share.
// Policies that judge by all queries gather statistics during the prefill: gathering and score apart, for 2048 tokens.
//
// Times are CPU times of the process over the number of threads, the least of the repeats; every repeat runs all
// policies in turn, so that other work on the machine hits them alike. A policy that takes seconds runs twice.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "baseline/score.h"
#include "baseline/statistics.h"
#include "core/element.h"
#include "core/parallel.h"
#include "core/random.h"

namespace dropkv::bench {
namespace {

using baseline::Recipe;

constexpr int32_t kQueryHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kDim = 128;
constexpr int32_t kHidden = 4096;
constexpr int32_t kWindow = 32;
constexpr int32_t kReach = 3;  // mean 7
constexpr int32_t kStatisticsTokens = 2048;
constexpr int32_t kChunk = 256;  // queries that are added at a time
constexpr double kSlow = 1.0;    // seconds
constexpr double kKept = 0.1;
constexpr double kNever = std::numeric_limits<double>::infinity();

double CpuNow() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

float Number(uint64_t seed, uint64_t i) { return 3.4641F * (RandomUniform(seed, i) - 0.5F); }  // variance 1

std::vector<float> Numbers(size_t count, uint64_t seed) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = Number(seed, i);
  return numbers;
}

std::vector<uint16_t> Halves(size_t count, uint64_t seed) {
  std::vector<uint16_t> numbers(count);
  for (size_t i = 0; i < count; ++i) numbers[i] = FloatToHalf(Number(seed, i));
  return numbers;
}

// One layer of n tokens with the last kMaxRows queries, or with all of them, token by token.
class Case {
 public:
  Case(int32_t n, bool all_queries, const std::vector<float>& wo)
      : n_(n),
        rows_(all_queries ? n : kMaxRows),
        q_(Numbers(size_t{kQueryHeads} * rows_ * kDim, 1)),
        k_(Halves(size_t{kKvHeads} * n * kDim, 2)),
        v_(Halves(size_t{kKvHeads} * n * kDim, 3)),
        wo_(wo) {
    for (int32_t i = 0; i < kMaxRows; ++i) visible_.push_back(n - kMaxRows + i + 1);
  }

  baseline::Layer Make() const {
    baseline::Layer layer;
    const int64_t of_head = int64_t{n_} * kDim;
    layer.kv = {kKvHeads,
                n_,
                kDim,
                kDim,
                {k_.data(), DType::kF16, of_head, kDim, 1},
                {v_.data(), DType::kF16, of_head, kDim, 1},
                nullptr};
    const float* last = q_.data() + int64_t{rows_ - kMaxRows} * kQueryHeads * kDim;
    layer.rows = {last, kDim, int64_t{kQueryHeads} * kDim, kQueryHeads, kMaxRows, visible_.data()};
    layer.attention.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
    layer.rope = baseline::Rope::Standard(kDim, 500000.0);
    layer.wo = {kHidden, kQueryHeads * kDim, [this](int32_t row, float* out) {
                  std::copy_n(wo_.data() + size_t{static_cast<uint32_t>(row)} * kQueryHeads * kDim, kQueryHeads * kDim,
                              out);
                }};
    return layer;
  }

  // The statistics that the recipe needs.
  Status Gather(const Recipe& recipe, ThreadPool* pool, baseline::PromptStatistics* statistics) const {
    baseline::StatisticsPlan plan;
    plan.Add(recipe);
    *statistics = baseline::PromptStatistics(plan, kQueryHeads, kKvHeads, n_, kDim);
    const baseline::Layer layer = Make();
    for (int32_t first = 0; first < n_; first += kChunk) {
      const float* q = q_.data() + int64_t{first} * kQueryHeads * kDim;
      DROPKV_RETURN_IF_ERROR(statistics->Add(layer.kv, layer.attention, layer.rope, q, nullptr, first,
                                             std::min(kChunk, n_ - first), pool));
    }
    return Status::Ok();
  }

 private:
  int32_t n_;
  int32_t rows_;
  std::vector<float> q_;  // [rows, Hq, d]
  std::vector<uint16_t> k_, v_;
  std::vector<int32_t> visible_;
  const std::vector<float>& wo_;
};

// One line of the table.
struct Line {
  Recipe own;
  std::optional<Recipe> shared;
  double gather = kNever;
  double own_time = kNever;
  double shared_time = kNever;
  int32_t runs = 0;
};

bool GathersStatistics(const Recipe& recipe) {
  const baseline::Needs needs = baseline::NeedsOf(recipe);
  return needs.all_queries || needs.pre_rope_queries;
}

std::vector<Line> Lines(bool statistics) {
  std::vector<Line> lines;
  for (const Recipe& recipe : baseline::Recipes()) {
    const bool baseline_of_others = recipe.name() == "snapkv";
    if (recipe.scorer == baseline::Scorer::kFull) continue;
    if (GathersStatistics(recipe) != statistics && !(statistics && baseline_of_others)) continue;
    Line& line = lines.emplace_back();
    line.own = recipe;
    const bool last_row = recipe.policy.window == 1;
    if (!baseline::NeedsOf(recipe).window_queries || last_row || statistics) continue;
    line.shared = recipe;
    line.shared->policy.window = kWindow;
    if (!baseline::PoolsScores(recipe)) continue;
    const bool past = recipe.policy.pool.past_only;
    line.shared->policy.pool = {PoolKind::kMean, kReach, kReach, past};
  }
  return lines;
}

// Seconds of one score, kept where it is the fastest so far.
Status Time(const Recipe& recipe, const baseline::Layer& layer, ThreadPool* pool, double* best) {
  const double start = CpuNow();
  const Result<baseline::LayerScores> scores = baseline::Score(recipe, layer, kKept, pool);
  if (!scores.ok()) return scores.status();
  *best = std::min(*best, (CpuNow() - start) / pool->threads());
  return Status::Ok();
}

Status TimeLine(const Case& data, bool statistics, ThreadPool* pool, Line* line) {
  if (++line->runs > 2 && line->own_time > kSlow) return Status::Ok();
  baseline::Layer layer = data.Make();
  baseline::PromptStatistics gathered;
  if (statistics && GathersStatistics(line->own)) {
    const double start = CpuNow();
    DROPKV_RETURN_IF_ERROR(data.Gather(line->own, pool, &gathered));
    line->gather = std::min(line->gather, (CpuNow() - start) / pool->threads());
    layer.statistics = &gathered;
  }
  DROPKV_RETURN_IF_ERROR(Time(line->own, layer, pool, &line->own_time));
  return line->shared ? Time(*line->shared, layer, pool, &line->shared_time) : Status::Ok();
}

std::string Cell(double seconds, double relative_to) {
  if (seconds == kNever) return fmt::format("{:>10} {:>7}", "-", "-");
  return fmt::format("{:10.2f} {:7.2f}", seconds * 1e3, seconds / relative_to);
}

Status Measure(int32_t n, bool statistics, int32_t repeats, const std::vector<float>& wo, ThreadPool* pool) {
  const Case data(n, statistics, wo);
  std::vector<Line> lines = Lines(statistics);
  for (int32_t repeat = 0; repeat < repeats; ++repeat)
    for (Line& line : lines) DROPKV_RETURN_IF_ERROR(TimeLine(data, statistics, pool, &line));
  const auto snapkv =
      std::find_if(lines.begin(), lines.end(), [](const Line& line) { return line.own.name() == "snapkv"; });
  fmt::print("\nn {}, {} threads: ms, and relative to snapkv\n{:20} {:>10} {:>7} {:>10} {:>7}\n", n, pool->threads(),
             "policy", "own", "", statistics ? "gather" : "shared", "");
  for (const Line& line : lines)
    fmt::print("{:20} {} {}\n", line.own.name(), Cell(line.own_time, snapkv->own_time),
               statistics ? Cell(line.gather, snapkv->own_time) : Cell(line.shared_time, snapkv->shared_time));
  return Status::Ok();
}

int Main(int argc, char** argv) {
  ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 2);
  const int32_t repeats = argc > 2 ? std::atoi(argv[2]) : 5;
  std::vector<int32_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {8192, 32768};
  const std::vector<float> wo = Numbers(size_t{kHidden} * kQueryHeads * kDim, 4);
  Status status = Measure(kStatisticsTokens, true, repeats, wo, &pool);
  for (size_t i = 0; status.ok() && i < sizes.size(); ++i) status = Measure(sizes[i], false, repeats, wo, &pool);
  if (status.ok()) return 0;
  fmt::print(stderr, "{}\n", status.message());
  return 1;
}

}  // namespace
}  // namespace dropkv::bench

int main(int argc, char** argv) { return dropkv::bench::Main(argc, argv); }
