#include <fmt/format.h>

#include <algorithm>

#include "eval/report/report.h"
#include "eval/report/tables.h"

namespace dropkv::eval {
namespace {

// Names come from files: no control character reaches the terminal.
std::string Plain(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  return text;
}

// Characters of UTF-8, as many columns for the scripts that names are written in.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string Line(const std::vector<std::string>& cells, const std::vector<size_t>& widths) {
  std::string line = " ";
  for (size_t i = 0; i < cells.size(); ++i) {
    const std::string cell = Plain(cells[i]);
    const std::string space(widths[i] - Width(cell), ' ');
    line += i == 0 ? fmt::format(" {}{}", cell, space) : fmt::format("  {}{}", space, cell);
  }
  line.resize(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// Room for the star behind every number of a column that has one, so that the numbers stay below each other.
void AlignStars(Table* table) {
  for (size_t i = 1; i < table->head.size(); ++i) {
    const auto starred = [&](const std::vector<std::string>& row) { return row[i].ends_with(" *"); };
    if (std::ranges::none_of(table->rows, starred)) continue;
    for (auto& row : table->rows)
      if (!starred(row)) row[i] += "  ";
  }
}

std::string TableText(Table table) {
  AlignStars(&table);
  std::vector<size_t> widths;
  for (const std::string& name : table.head) widths.push_back(Width(name));
  for (const auto& row : table.rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  std::string text = Plain(table.title) + "\n" + Line(table.head, widths);
  for (const auto& row : table.rows) text += Line(row, widths);
  return text;
}

std::string ModelText(const ModelSummary& model, const std::string& against) {
  std::string text;
  for (const Slice& slice : model.slices) {
    text += fmt::format("{}: {}\n{}\n", Plain(model.label), Plain(SliceTitle(slice)), Plain(SliceHead(slice)));
    if (const std::string counts = SampleCounts(slice); !counts.empty()) text += Plain(counts) + "\n";
    for (const Table& table :
         {ScoreTable(slice), CategoryTable(slice), DifferenceToFullTable(slice),
          DifferenceToAgainstTable(slice, against), FidelityTable(slice, against), CostTable(slice)})
      if (!table.rows.empty()) text += TableText(table);
    text += "\n";
  }
  for (const auto& [warning, rows] : model.warnings)
    text += fmt::format("warning of {} row{}: {}\n", rows, rows == 1 ? "" : "s", Plain(warning));
  return text;
}

}  // namespace

std::string TerminalReport(const Summary& summary) {
  std::string text;
  for (const ModelSummary& model : summary.models) text += ModelText(model, summary.against);
  text += "Brackets: 95% intervals, bootstrap over samples within each task. *: the interval excludes zero.\n";
  for (const std::string& remark : summary.remarks) text += fmt::format("note: {}\n", Plain(remark));
  return text;
}

}  // namespace dropkv::eval
