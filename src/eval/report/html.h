// The pieces of the HTML page. All text that comes in is escaped here, whoever wrote it; the page is well-formed XML
// too.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eval/report/summary.h"
#include "eval/report/tables.h"

namespace dropkv::eval {

// For element content and for attribute values in double quotes.
std::string HtmlEscape(std::string_view text);

// A drop-down list whose options have the values 0, 1, ...
std::string HtmlSelect(std::string_view label, const std::vector<std::string>& options);

// Title, table that a click on a column's head sorts, note. heading: the level of the title, 1 to 6.
std::string HtmlTable(const Table& table, int heading);

// Score over budget, one line a setting, with its legend; empty where nothing was evicted.
std::string HtmlChart(const Slice& slice);

// Score over length and depth of the needle, beside that of the full cache; empty where no sample has a single needle.
std::string HtmlHeatMaps(const ModelSummary& model, std::string_view suite, bool hidden);

// Style sheet and script, complete.
const char* HtmlStyle();
const char* HtmlScript();

}  // namespace dropkv::eval
