#include "eval/report/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace dropkv::eval {
namespace {

constexpr const char* kMissing = "-";

// Without "-0.0".
double Rounded(double value, int digits) {
  const double unit = std::pow(10, digits);
  const double rounded = std::round(value * unit) / unit;
  return rounded == 0 ? 0 : rounded;
}

std::string Signed(double value, int digits) {
  const double rounded = Rounded(value, digits);
  return rounded == 0 ? fmt::format("{:.{}f}", 0.0, digits) : fmt::format("{:+.{}f}", rounded, digits);
}

std::string Milliseconds(double seconds) { return fmt::format("{:.1f}", 1e3 * seconds); }

using CellText = std::function<std::string(const Cell&)>;  // empty: the cell has nothing to say

// A row a setting, a column a budget. Rows in which nothing was measured are left out.
Table Grid(const Slice& slice, const CellText& text) {
  Table table;
  table.head = {"setting"};
  table.head.insert(table.head.end(), slice.budgets.begin(), slice.budgets.end());
  for (const std::string& setting : slice.settings) {
    std::vector<std::string> row = {setting};
    bool any = false;
    for (const std::string& budget : slice.budgets) {
      const Cell* cell = slice.Find(setting, budget);
      const std::string shown = cell == nullptr ? "" : text(*cell);
      any = any || !shown.empty();
      row.push_back(shown.empty() ? kMissing : shown);
    }
    if (any) table.rows.push_back(std::move(row));
  }
  return table;
}

std::string WithSamples(const std::string& text, const Estimate& estimate, const Slice& slice) {
  return estimate.samples == slice.samples ? text : fmt::format("{} (n = {})", text, estimate.samples);
}

std::string DifferenceNote(const char* what) {
  return fmt::format(
      "Paired over the samples that both have, {}, 95% interval. *: the interval excludes zero. Many comparisons are "
      "made: one in twenty excludes zero by chance.",
      what);
}

std::string TaskScoreText(const Cell& cell, const std::string& task) {
  const auto found = cell.tasks.find(task);
  return found == cell.tasks.end() ? kMissing : fmt::format("{:.1f}", Rounded(found->second.score, 1));
}

int32_t TaskSamples(const Cell& cell, const std::string& task) {
  const auto found = cell.tasks.find(task);
  return found == cell.tasks.end() ? 0 : found->second.samples;
}

std::vector<std::string> CostRow(const Cell& cell) {
  return {cell.setting,
          cell.budget,
          fmt::format("{} / {:.0f} / {}", cell.kept_min, cell.kept_mean, cell.kept_max),
          fmt::format("{:.1f}%", cell.kept_share),
          fmt::format("{:.4f}", cell.output_error),
          fmt::format("{:.2f}", cell.prefill_s),
          Milliseconds(cell.score_s),
          Milliseconds(cell.compact_s),
          fmt::format("{:.2f}", cell.decode_s)};
}

// Of the setting that has most.
int32_t MostSamples(const Slice& slice, const std::string& task) {
  int32_t most = slice.full ? TaskSamples(*slice.full, task) : 0;
  for (const Cell& cell : slice.cells) most = std::max(most, TaskSamples(cell, task));
  return most;
}

}  // namespace

std::string Grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), 1, ',');
  return text;
}

std::string EstimateText(const Estimate& estimate, int digits) {
  std::string text = fmt::format("{:.{}f}", Rounded(estimate.value, digits), digits);
  if (estimate.interval)
    text += fmt::format(" [{:.{}f}, {:.{}f}]", Rounded(estimate.interval->low, digits), digits,
                        Rounded(estimate.interval->high, digits), digits);
  return text;
}

std::string DifferenceText(const Estimate& estimate, int digits) {
  std::string text = Signed(estimate.value, digits);
  if (estimate.interval)
    text += fmt::format(" [{}, {}]", Signed(estimate.interval->low, digits), Signed(estimate.interval->high, digits));
  return text + (estimate.ExcludesZero() ? " *" : "");
}

std::string SliceTitle(const Slice& slice) {
  const std::string length = slice.length > 0 ? fmt::format(", {} tokens", Grouped(slice.length)) : "";
  return fmt::format("{}{}, question {}", slice.suite, length, slice.hidden ? "hidden" : "seen");
}

std::string SliceHead(const Slice& slice) {
  const std::string full =
      slice.full ? "full cache " + WithSamples(EstimateText(slice.full->score), slice.full->score, slice) + "; " : "";
  return fmt::format("{}{} sample{}, {} task{}", full, Grouped(slice.samples), slice.samples == 1 ? "" : "s",
                     slice.tasks.size(), slice.tasks.size() == 1 ? "" : "s");
}

std::string SampleCounts(const Slice& slice) {
  std::vector<std::string> counts;
  bool equal = true;
  for (const std::string& task : slice.tasks) {
    const int32_t samples = MostSamples(slice, task);
    equal = equal && samples == MostSamples(slice, slice.tasks.front());
    counts.push_back(fmt::format("{} {}", task, samples));
  }
  return equal ? "" : fmt::format("samples: {}", fmt::join(counts, ", "));
}

Table ScoreTable(const Slice& slice) {
  Table table = Grid(slice, [&](const Cell& cell) { return WithSamples(EstimateText(cell.score), cell.score, slice); });
  table.title = "Score";
  table.note =
      "Mean of the tasks' means, 0 to 100, with its 95% interval; columns: the share or number of tokens kept.";
  return table;
}

Table CategoryTable(const Slice& slice) {
  Table table = Grid(
      slice, [](const Cell& cell) { return cell.category_score ? EstimateText(*cell.category_score) : std::string(); });
  table.title = "Score, mean of categories";
  if (slice.full && slice.full->category_score)
    table.note = "Full cache: " + EstimateText(*slice.full->category_score) + ".";
  return table;
}

Table DifferenceToFullTable(const Slice& slice) {
  Table table = Grid(slice, [&](const Cell& cell) {
    return cell.minus_full ? WithSamples(DifferenceText(*cell.minus_full), *cell.minus_full, slice) : std::string();
  });
  table.title = "Score against the full cache";
  table.note = DifferenceNote("in points");
  return table;
}

Table DifferenceToAgainstTable(const Slice& slice, std::string_view against) {
  Table table = Grid(slice, [&](const Cell& cell) {
    return cell.minus_against ? WithSamples(DifferenceText(*cell.minus_against), *cell.minus_against, slice)
                              : std::string();
  });
  table.title = fmt::format("Score against {}", against);
  table.note = DifferenceNote("in points");
  return table;
}

Table TaskTable(const Slice& slice, const std::string& budget) {
  Table table;
  table.title = "Tasks at " + budget;
  table.head = {"task", "samples"};
  std::vector<const Cell*> cells;
  if (slice.full) cells.push_back(&*slice.full);
  for (const std::string& setting : slice.settings)
    if (const Cell* cell = slice.Find(setting, budget)) cells.push_back(cell);
  for (const Cell* cell : cells) table.head.push_back(cell->setting);
  for (const std::string& task : slice.tasks) {
    int32_t samples = 0;
    std::vector<std::string> row = {task, ""};
    for (const Cell* cell : cells) {
      samples = std::max(samples, TaskSamples(*cell, task));
      row.push_back(TaskScoreText(*cell, task));
    }
    row[1] = std::to_string(samples);
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table FidelityTable(const Slice& slice, std::string_view against) {
  Table table;
  table.title = "Fidelity to the full cache";
  table.head = {"setting", "budget", "samples", "KL, nats per token", "same top token, %"};
  const bool compared = slice.Has(against);
  if (compared) table.head.push_back(fmt::format("KL against {}", against));
  for (const Cell& cell : slice.cells) {
    if (!cell.kl && !cell.top1) continue;
    table.rows.push_back({cell.setting, cell.budget, std::to_string(cell.kl ? cell.kl->samples : cell.top1->samples),
                          cell.kl ? EstimateText(*cell.kl, 3) : kMissing,
                          cell.top1 ? EstimateText(*cell.top1) : kMissing});
    if (compared)
      table.rows.back().push_back(cell.kl_minus_against ? DifferenceText(*cell.kl_minus_against, 3) : kMissing);
  }
  table.note =
      "KL(full || evicted) of the next-token distributions over a forced continuation, lower is nearer; the share of "
      "its "
      "tokens at which both have the same most likely token.";
  return table;
}

Table CostTable(const Slice& slice) {
  Table table;
  table.title = "Kept tokens, output error, time";
  table.head = {"setting",   "budget",   "kept min/mean/max", "of prompt", "output error",
                "prefill s", "score ms", "compact ms",        "decode s"};
  if (slice.full) table.rows.push_back(CostRow(*slice.full));
  for (const Cell& cell : slice.cells) table.rows.push_back(CostRow(cell));
  table.note =
      "Kept: of a layer's KV heads, over layers and samples. Output error: realised, over the rows that judged; it is "
      "no "
      "measure of quality. Times are means a sample; the prefill is shared.";
  return table;
}

Table WarningTable(const ModelSummary& model) {
  Table table;
  table.title = "Warnings of the rows";
  table.head = {"warning", "rows"};
  for (const auto& [text, count] : model.warnings) table.rows.push_back({text, std::to_string(count)});
  return table;
}

std::vector<Table> SliceTables(const Slice& slice, std::string_view against) {
  std::vector<Table> tables = {ScoreTable(slice), CategoryTable(slice), DifferenceToFullTable(slice),
                               DifferenceToAgainstTable(slice, against)};
  for (const std::string& budget : slice.budgets) tables.push_back(TaskTable(slice, budget));
  tables.push_back(FidelityTable(slice, against));
  tables.push_back(CostTable(slice));
  std::erase_if(tables, [](const Table& table) { return table.rows.empty(); });
  return tables;
}

}  // namespace dropkv::eval
