// From result rows to a table on the screen, Markdown and one self-contained HTML page.
#pragma once

#include <string>
#include <vector>

#include "dropkv/status.h"
#include "eval/row.h"

namespace dropkv::eval {

struct Results {
  std::vector<RunRecord> runs;  // of every folder
  std::vector<Row> rows;        // of all folders
};

// results.jsonl and run.json of every folder. A last line that a killed run left unfinished is skipped. Errors name the
// file and line; rows that say the same thing twice with different answers are an error.
Result<Results> ReadResults(const std::vector<std::string>& folders);

// Tables of the screen: score over budget per setting with 95% intervals, differences against the full cache.
std::string TerminalReport(const Results& results);
std::string MarkdownReport(const Results& results);
std::string HtmlReport(const Results& results);

}  // namespace dropkv::eval
