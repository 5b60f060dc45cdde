#include "eval/report/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "dropkv/policy.h"
#include "eval/report/report.h"

namespace dropkv::eval {
namespace {

using SampleRows = std::map<std::string, const Row*>;  // by sample key

struct SliceRows {
  SampleRows full;
  std::map<std::pair<std::string, std::string>, SampleRows> cells;  // by setting and budget
  std::map<std::string, std::string> category_of;                   // by task
};

// Percentages before numbers of tokens, each by size.
std::tuple<bool, double> BudgetOrder(const std::string& text) {
  const Result<Budget> budget = ParseBudget(text);
  if (!budget.ok()) return {true, 0};
  return {!budget->fraction, budget->fraction ? *budget->fraction : static_cast<double>(budget->tokens)};
}

// One stratum a task with the values that `value` (Row -> optional double) finds.
template <typename Value>
std::vector<Stratum> Strata(const Slice& slice, const SampleRows& rows, Value value) {
  std::vector<Stratum> strata(slice.tasks.size());
  for (const auto& [key, row] : rows) {
    const auto task = static_cast<size_t>(std::ranges::find(slice.tasks, row->task) - slice.tasks.begin());
    strata[task].stream = task;
    if (const std::optional<double> number = value(*row)) strata[task].values.push_back(*number);
  }
  std::erase_if(strata, [](const Stratum& stratum) { return stratum.values.empty(); });
  for (Stratum& stratum : strata) stratum.weight = 1.0 / static_cast<double>(strata.size());
  return strata;
}

std::optional<Estimate> MakeEstimate(const std::vector<Stratum>& strata, double scale) {
  if (strata.empty()) return std::nullopt;
  Estimate estimate;
  estimate.value = scale * WeightedMean(strata);
  estimate.interval = BootstrapInterval(strata);
  if (estimate.interval) estimate.interval = {scale * estimate.interval->low, scale * estimate.interval->high};
  for (const Stratum& stratum : strata) estimate.samples += static_cast<int32_t>(stratum.values.size());
  return estimate;
}

std::optional<double> ScoreOf(const Row& row) { return row.score; }
std::optional<double> KlOf(const Row& row) { return row.kl; }
std::optional<double> Top1Of(const Row& row) { return row.top1; }

// Paired: only samples that both have count.
template <typename Value>
std::optional<Estimate> Difference(const Slice& slice, const SampleRows& rows, const SampleRows& reference,
                                   double scale, Value value) {
  const auto difference = [&](const Row& row) -> std::optional<double> {
    const auto other = reference.find(row.sample_key());
    if (other == reference.end()) return std::nullopt;
    const std::optional<double> a = value(row);
    const std::optional<double> b = value(*other->second);
    return a && b ? std::optional<double>(*a - *b) : std::nullopt;
  };
  return MakeEstimate(Strata(slice, rows, difference), scale);
}

// Each category weighs the same, and in it each task. Nothing where the tasks have no categories.
std::optional<Estimate> CategoryScore(const Slice& slice, const SliceRows& all, const SampleRows& rows) {
  std::map<std::string, int32_t> tasks_in;
  std::vector<Stratum> strata = Strata(slice, rows, ScoreOf);
  for (const Stratum& stratum : strata) ++tasks_in[all.category_of.at(slice.tasks[stratum.stream])];
  if (tasks_in.empty() || tasks_in.contains("")) return std::nullopt;
  for (Stratum& stratum : strata)
    stratum.weight =
        1.0 / (static_cast<double>(tasks_in.size()) * tasks_in[all.category_of.at(slice.tasks[stratum.stream])]);
  return MakeEstimate(strata, 100);
}

void Count(double score, TaskScore* sum) {
  sum->score += 100 * score;
  ++sum->samples;
}

void Divide(TaskScore* sum) {
  if (sum->samples > 0) sum->score /= sum->samples;
}

void AddTasksAndDepths(const SampleRows& rows, Cell* cell) {
  for (const auto& [key, row] : rows) {
    Count(row->score, &cell->tasks[row->task]);
    if (row->depths.size() != 1) continue;  // of several needles the score does not say which one was found
    const int bucket = static_cast<int>(row->depths.front() * kDepthBuckets / 100);
    Count(row->score, &cell->depths[static_cast<size_t>(std::clamp(bucket, 0, kDepthBuckets - 1))]);
  }
  for (auto& [task, score] : cell->tasks) Divide(&score);
  for (TaskScore& score : cell->depths) Divide(&score);
}

void AddMeans(const SampleRows& rows, Cell* cell) {
  const auto samples = static_cast<double>(rows.size());
  double layers = 0;
  bool first = true;
  for (const auto& [key, row] : rows) {
    for (const KeptTokens& kept : row->kept) {
      cell->kept_min = first ? kept.min : std::min(cell->kept_min, kept.min);
      cell->kept_max = first ? kept.max : std::max(cell->kept_max, kept.max);
      cell->kept_mean += kept.mean;
      cell->kept_share += row->prompt_tokens > 0 ? 100 * kept.mean / row->prompt_tokens : 0;
      first = false;
      ++layers;
    }
    cell->output_error += row->output_error / samples;
    cell->prefill_s += row->prefill_s / samples;
    cell->score_s += row->score_s / samples;
    cell->compact_s += row->compact_s / samples;
    cell->decode_s += row->decode_s / samples;
  }
  if (layers == 0) return;
  cell->kept_mean /= layers;
  cell->kept_share /= layers;
}

// reference: rows of the setting that is compared with; empty: none.
Cell MakeCell(const Slice& slice, const SliceRows& all, const SampleRows& rows, const SampleRows& reference) {
  Cell cell;
  cell.setting = rows.begin()->second->setting;
  cell.budget = rows.begin()->second->budget;
  cell.score = *MakeEstimate(Strata(slice, rows, ScoreOf), 100);
  cell.category_score = CategoryScore(slice, all, rows);
  cell.kl = MakeEstimate(Strata(slice, rows, KlOf), 1);
  cell.top1 = MakeEstimate(Strata(slice, rows, Top1Of), 100);
  if (&rows != &all.full) cell.minus_full = Difference(slice, rows, all.full, 100, ScoreOf);
  if (&rows != &reference) {
    cell.minus_against = Difference(slice, rows, reference, 100, ScoreOf);
    cell.kl_minus_against = Difference(slice, rows, reference, 1, KlOf);
  }
  AddTasksAndDepths(rows, &cell);
  AddMeans(rows, &cell);
  return cell;
}

void AddCells(const SliceRows& rows, std::string_view against, Slice* slice) {
  if (!rows.full.empty()) slice->full = MakeCell(*slice, rows, rows.full, rows.full);
  const SampleRows none;
  for (const std::string& setting : slice->settings)
    for (const std::string& budget : slice->budgets) {
      const auto cell = rows.cells.find({setting, budget});
      if (cell == rows.cells.end()) continue;
      const auto reference = rows.cells.find({std::string(against), budget});
      slice->cells.push_back(
          MakeCell(*slice, rows, cell->second, reference == rows.cells.end() ? none : reference->second));
    }
  slice->samples = slice->full ? slice->full->score.samples : 0;
  for (const Cell& cell : slice->cells) slice->samples = std::max(slice->samples, cell.score.samples);
}

// Names in the order in which the runs list them; only those that have rows.
std::vector<std::string> Ordered(const std::vector<std::string>& listed, const std::set<std::string>& present) {
  std::vector<std::string> names;
  for (const std::string& name : listed)
    if (present.contains(name)) AddOnce(&names, name);
  for (const std::string& name : present) AddOnce(&names, name);
  return names;
}

Slice MakeSlice(const ModelSummary& model, const std::vector<const Row*>& rows, std::string_view against) {
  Slice slice;
  slice.suite = rows.front()->suite;
  slice.length = rows.front()->length;
  slice.hidden = rows.front()->hidden;
  SliceRows grouped;
  std::set<std::string> tasks;
  std::set<std::string> settings;
  std::set<std::string> budgets;
  for (const Row* row : rows) {
    tasks.insert(row->task);
    grouped.category_of[row->task] = row->category;
    if (row->full()) {
      grouped.full[row->sample_key()] = row;
      continue;
    }
    settings.insert(row->setting);
    budgets.insert(row->budget);
    grouped.cells[{row->setting, row->budget}][row->sample_key()] = row;
  }
  std::vector<std::string> listed_tasks;
  std::vector<std::string> listed_settings;
  for (const RunRecord& run : model.runs) {
    for (const std::string& task : run.tasks) AddOnce(&listed_tasks, task);
    for (const std::string& setting : run.settings) AddOnce(&listed_settings, setting);
  }
  slice.tasks = Ordered(listed_tasks, tasks);
  slice.settings = Ordered(listed_settings, settings);
  slice.budgets.assign(budgets.begin(), budgets.end());
  std::ranges::stable_sort(slice.budgets, {}, BudgetOrder);
  AddCells(grouped, against, &slice);
  return slice;
}

// The model's name; with the file's, and then the hash, where several models have that name.
void SetLabels(std::vector<ModelSummary>* models) {
  const auto unique = [&](const auto& name_of) {
    std::set<std::string> names;
    for (const ModelSummary& model : *models) names.insert(name_of(model.runs.front()));
    return names.size() == models->size();
  };
  const auto name = [](const RunRecord& run) { return run.model.empty() ? run.model_file : run.model; };
  const auto file = [&](const RunRecord& run) { return fmt::format("{} ({})", name(run), run.model_file); };
  const auto hash = [&](const RunRecord& run) { return file(run) + " " + run.model_sha256.substr(0, 8); };
  const bool by_name = unique(name);
  const bool by_file = unique(file);
  for (ModelSummary& model : *models) {
    const RunRecord& run = model.runs.front();
    model.label = by_name ? name(run) : by_file ? file(run) : hash(run);
  }
}

}  // namespace

void AddOnce(std::vector<std::string>* list, const std::string& item) {
  if (std::ranges::find(*list, item) == list->end()) list->push_back(item);
}

std::string ModelKey(const RunRecord& run) { return run.model_sha256.empty() ? run.model_file : run.model_sha256; }

const Cell* Slice::Find(std::string_view setting, std::string_view budget) const {
  for (const Cell& cell : cells)
    if (cell.setting == setting && cell.budget == budget) return &cell;
  return nullptr;
}

bool Slice::Has(std::string_view setting) const { return std::ranges::find(settings, setting) != settings.end(); }

Summary Summarise(const Results& results, std::string_view against) {
  Summary summary{.against = std::string(against), .models = {}, .remarks = results.remarks};
  std::vector<std::string> keys;
  for (const RunRecord& run : results.runs) AddOnce(&keys, ModelKey(run));
  for (const std::string& key : keys) {
    ModelSummary model;
    for (const RunRecord& run : results.runs)
      if (ModelKey(run) == key) model.runs.push_back(run);
    std::map<std::tuple<std::string, int32_t, bool>, std::vector<const Row*>> slices;
    std::map<std::string, int32_t> warnings;
    for (size_t i = 0; i < results.rows.size(); ++i) {
      const Row& row = results.rows[i];
      if (ModelKey(results.runs[results.run_of[i]]) != key) continue;
      slices[{row.suite, row.length, row.hidden}].push_back(&row);
      for (const std::string& warning : row.warnings) ++warnings[warning];
    }
    for (const auto& [what, rows] : slices) model.slices.push_back(MakeSlice(model, rows, against));
    model.warnings.assign(warnings.begin(), warnings.end());
    summary.models.push_back(std::move(model));
  }
  SetLabels(&summary.models);
  return summary;
}

}  // namespace dropkv::eval
