// From result rows to a table on the screen, Markdown and one self-contained HTML page.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"
#include "eval/report/summary.h"
#include "eval/row.h"

namespace dropkv::eval {

struct Results {
  std::vector<RunRecord> runs;       // of every folder
  std::vector<Row> rows;             // of all folders
  std::vector<size_t> run_of;        // runs[run_of[i]] is what rows[i] belongs to
  std::vector<std::string> remarks;  // lines that were passed over
};

// results.jsonl and run.json of every folder. A last line that a killed run left unfinished is skipped, what a second
// folder says again is dropped. Errors name the file and line; rows that say the same thing twice with different
// answers are an error, and so are rows whose eviction kept everything (CheckEviction).
Result<Results> ReadResults(const std::vector<std::string>& folders);

// Means, intervals and differences of all rows; models, suites, lengths and questions are kept apart. against: the
// setting that others are compared with beside the full cache; where a part of the results lacks it, so does its
// summary.
Summary Summarise(const Results& results, std::string_view against = "snapkv");

// Tables of the screen: score over budget per setting with 95% intervals, differences against the full cache.
std::string TerminalReport(const Summary& summary);
std::string MarkdownReport(const Summary& summary);
std::string HtmlReport(const Summary& summary);
std::string JsonReport(const Summary& summary);

inline std::string TerminalReport(const Results& results) { return TerminalReport(Summarise(results)); }
inline std::string MarkdownReport(const Results& results) { return MarkdownReport(Summarise(results)); }
inline std::string HtmlReport(const Results& results) { return HtmlReport(Summarise(results)); }

}  // namespace dropkv::eval
