// The tables of a report: the same on the screen, in Markdown and on the page.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "eval/report/summary.h"

namespace dropkv::eval {

struct Table {
  std::string title;
  std::vector<std::string> head;               // the first column holds names, the others numbers
  std::vector<std::vector<std::string>> rows;  // empty: there is nothing to say, and no renderer shows the table
  std::string note;                            // below the table; may be empty
};

// "1,234,567"
std::string Grouped(int64_t number);
// "46.3 [44.0, 48.5]", two more digits for small units such as nats; without brackets where there is no interval.
std::string EstimateText(const Estimate& estimate, int digits = 1);
// "+0.9 [+0.1, +1.9] *": with the star where the interval excludes zero.
std::string DifferenceText(const Estimate& estimate, int digits = 1);

// "ruler, 4,096 tokens, question hidden"
std::string SliceTitle(const Slice& slice);
// "full cache 83.4 [81.0, 85.7]; 520 samples, 13 tasks"
std::string SliceHead(const Slice& slice);
// "samples: vt 40, cwe 16"; empty where all tasks have equally many.
std::string SampleCounts(const Slice& slice);

Table ScoreTable(const Slice& slice);
Table CategoryTable(const Slice& slice);
Table DifferenceToFullTable(const Slice& slice);
Table DifferenceToAgainstTable(const Slice& slice, std::string_view against);
// Means of every task at one budget, the full cache first.
Table TaskTable(const Slice& slice, const std::string& budget);
// What tells methods apart with few samples: divergence from the full cache over a forced continuation.
Table FidelityTable(const Slice& slice, std::string_view against);
// What was kept, what that did to the outputs, what it took.
Table CostTable(const Slice& slice);
// What was run, on what: a name and a value a row, without a head. One for all runs of a model: of a field in which
// they differ, every value once. Of data files the hash's first digits, of commands the first few and without machine
// paths.
Table ProtocolTable(const std::vector<RunRecord>& runs);
Table WarningTable(const ModelSummary& model);

// All of the above but protocol and warnings, in the order of a report; tables without rows left out.
std::vector<Table> SliceTables(const Slice& slice, std::string_view against);

}  // namespace dropkv::eval
