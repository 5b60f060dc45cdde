// What a report says, as numbers: the tables, the page and the JSON are made from it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "eval/report/bootstrap.h"
#include "eval/row.h"

namespace dropkv::eval {

struct Estimate {
  double value = 0;
  std::optional<Interval> interval;  // 95%
  int32_t samples = 0;

  bool ExcludesZero() const { return interval && (interval->low > 0 || interval->high < 0); }
};

struct TaskScore {
  double score = 0;  // 0..100
  int32_t samples = 0;
};

inline constexpr int kDepthBuckets = 10;  // of 10% of the haystack each

// One setting at one budget. Scores are 0..100, and the plain mean of the tasks' means unless said otherwise.
struct Cell {
  std::string setting;
  std::string budget;
  Estimate score;
  std::optional<Estimate> category_score;  // mean of the means of LongBench's categories
  std::optional<Estimate> minus_full;      // over the samples that both have
  std::optional<Estimate> minus_against;   // the same against the reference setting at this budget
  std::optional<Estimate> kl;              // nats per token
  std::optional<Estimate> kl_minus_against;
  std::optional<Estimate> top1;  // percent
  std::map<std::string, TaskScore> tasks;
  std::array<TaskScore, kDepthBuckets> depths;  // of the samples with a single needle
  // Over samples and layers.
  int32_t kept_min = 0;
  double kept_mean = 0;
  int32_t kept_max = 0;
  double kept_share = 0;  // percent of the prompt
  // Means over samples.
  double output_error = 0;
  double prefill_s = 0;
  double score_s = 0;
  double compact_s = 0;
  double decode_s = 0;
};

// What may be compared: one suite at one length, the question seen or hidden.
struct Slice {
  std::string suite;
  int32_t length = 0;
  bool hidden = false;
  std::vector<std::string> tasks;
  std::vector<std::string> settings;  // without the full cache
  std::vector<std::string> budgets;   // of these settings, smallest first
  int32_t samples = 0;                // of the cell that has most
  std::optional<Cell> full;
  std::vector<Cell> cells;

  const Cell* Find(std::string_view setting, std::string_view budget) const;
  bool Has(std::string_view setting) const;
};

struct ModelSummary {
  std::string label;
  std::vector<RunRecord> runs;
  std::vector<Slice> slices;
  std::vector<std::pair<std::string, int32_t>> warnings;  // of the rows, with how many rows say it
};

struct Summary {
  std::string against;
  std::vector<ModelSummary> models;
  std::vector<std::string> remarks;
};

// Adds what is not there yet, in the order of its first appearance.
void AddOnce(std::vector<std::string>* list, const std::string& item);

// What tells two models apart: the hash of the file, or its name where there is none.
std::string ModelKey(const RunRecord& run);

}  // namespace dropkv::eval
