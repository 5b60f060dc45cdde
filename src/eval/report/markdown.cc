#include <fmt/format.h>

#include "eval/report/report.h"
#include "eval/report/tables.h"

namespace dropkv::eval {
namespace {

// Text from models and files as text: no markup, no HTML, no new cell. Of brackets only links: intervals stay readable.
std::string Escaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool link = c == ']' && i + 1 < text.size() && (text[i + 1] == '(' || text[i + 1] == '[');
    if (c == '\n') {
      out += "; ";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      if (link || std::string_view("|`*\\").find(c) != std::string_view::npos) out += '\\';
      out += c;
    }
  }
  return out;
}

std::string Line(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& cell : cells) line += fmt::format(" {} |", Escaped(cell));
  return line + "\n";
}

std::string TableText(const Table& table) {
  std::string text = Line(table.head) + "| --- |";
  for (size_t i = 1; i < table.head.size(); ++i) text += " ---: |";
  text += "\n";
  for (const auto& row : table.rows) text += Line(row);
  return text;
}

std::string Section(const Table& table) {
  std::string text = fmt::format("### {}\n\n{}\n", Escaped(table.title), TableText(table));
  if (!table.note.empty()) text += Escaped(table.note) + "\n\n";
  return text;
}

// A command is shown as it was typed: indented code.
std::string Command(const std::string& command) {
  std::string text = "\n    ";
  for (const char c : command) text += c == '\n' ? std::string("\n    ") : std::string(1, c);
  return text + "\n\n";
}

std::string Protocol(const std::vector<RunRecord>& runs) {
  std::string text = "| protocol | |\n| --- | --- |\n";
  std::string command = "\n";
  for (const auto& row : ProtocolTable(runs).rows)
    if (row.front() == "command")
      command = Command(row.back());
    else
      text += Line(row);
  return text + command;
}

}  // namespace

std::string MarkdownReport(const Summary& summary) {
  std::string text;
  for (const ModelSummary& model : summary.models) {
    text += fmt::format("# {}\n\n", Escaped(model.label));
    text += Protocol(model.runs);
    text += fmt::format(
        "Intervals: 95%, from {} resamples of the samples within each task. Differences are paired.\n\n", kResamples);
    for (const Slice& slice : model.slices) {
      text += fmt::format("## {}\n\n{}.\n\n", Escaped(SliceTitle(slice)), Escaped(SliceHead(slice)));
      if (const std::string counts = SampleCounts(slice); !counts.empty()) text += Escaped(counts) + "\n\n";
      for (const Table& table : SliceTables(slice, summary.against)) text += Section(table);
    }
    if (!model.warnings.empty()) text += Section(WarningTable(model));
  }
  for (const std::string& remark : summary.remarks) text += fmt::format("- {}\n", Escaped(remark));
  return text;
}

}  // namespace dropkv::eval
