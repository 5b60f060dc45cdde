#include "eval/report/html.h"

#include <gtest/gtest.h>

#include <regex>

#include "eval/report/made_results.h"

namespace dropkv::eval {
namespace {

// "" where every element is closed in its order; script and style hold no markup of their own.
std::string Unbalanced(const std::string& html) {
  const std::regex tag(R"(<(/?)([a-zA-Z][a-zA-Z0-9]*)([^<>]*)>)");
  std::vector<std::string> open;
  for (auto it = std::sregex_iterator(html.begin(), html.end(), tag); it != std::sregex_iterator(); ++it) {
    const std::string name = (*it)[2];
    if ((*it)[1] == "/") {
      if (open.empty() || open.back() != name) return "closed: " + it->str();
      open.pop_back();
    } else if (!(*it)[3].str().ends_with("/")) {
      open.push_back(name);
    }
  }
  return open.empty() ? "" : "left open: " + open.back();
}

size_t Count(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

// Every text that comes from outside is this.
constexpr const char* kHostile = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;]]>";

Results Hostile() {
  const std::string bad = kHostile;
  std::vector<Row> rows;
  for (const char* id : {"1", "2"})
    for (const std::string& setting : {std::string("full"), "snapkv" + bad}) {
      Row row = MadeRow("task" + bad, id, setting, setting == "full" ? "100%" : "5%", 0.5);
      row.suite = "suite" + bad;
      row.category = "category" + bad;
      row.answer = bad;
      row.depths = {50};
      row.kl = 0.5;
      row.top1 = 0.5;
      row.warnings = {"warning" + bad};
      rows.push_back(row);
    }
  Results results = MadeResults(rows);
  RunRecord& run = results.runs.front();
  for (std::string* text :
       {&run.model, &run.model_file, &run.model_sha256, &run.libllama, &run.dropkv_version, &run.machine, &run.command,
        &run.chat_template, &run.haystack, &run.data, &run.kv_type, &run.started})
    *text += bad;
  run.tasks = run.settings = run.budgets = run.questions = {bad};
  results.remarks = {bad};
  return results;
}

TEST(Html, EscapesEveryCharacterThatMeansSomething) {
  EXPECT_EQ(HtmlEscape("<a href=\"x\" b='y'>&\n\x01\x1B[0m"), "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;\n??[0m");
}

TEST(Html, NoTextBecomesMarkup) {
  const std::string page = HtmlReport(Summarise(Hostile(), "snapkv" + std::string(kHostile)));
  EXPECT_EQ(Count(page, "<script"), 1U);  // our own
  EXPECT_EQ(Count(page, "<img"), 0U);
  EXPECT_GT(Count(page, "&lt;script&gt;alert(1)&lt;/script&gt;"), 20U);
  EXPECT_EQ(Unbalanced(page), "");
  // No quote of a text ends an attribute: none is called onerror.
  const std::string bare = std::regex_replace(page, std::regex("\"[^\"]*\""), "\"\"");
  EXPECT_FALSE(std::regex_search(bare, std::regex(R"(<[^<>]*onerror)")));
}

TEST(Html, NothingIsLoaded) {
  const std::string page = HtmlReport(Summarise(Hostile()));
  for (const char* what : {"http:", "https:", "src=\"", "url(", "@import", "<link", "<iframe", "fetch(", "XMLHttp"})
    EXPECT_EQ(Count(page, what), 0U) << what;
  EXPECT_EQ(Count(page, "default-src 'none'"), 1U);
}

Results Plain() {
  std::vector<Row> rows;
  for (const int length : {4096, 8192})
    for (const char* id : {"1", "2"})
      for (const auto& [setting, budget] : {std::pair("full", "100%"), std::pair("snapkv", "5%"),
                                            std::pair("snapkv", "10%"), std::pair("dropkv", "5%")}) {
        rows.push_back(MadeRow("niah_single_1", id, setting, budget, setting == std::string("full") ? 1 : 0.25));
        rows.back().length = length;
        rows.back().depths = {id[0] == '1' ? 5.0 : 95.0};
      }
  return MadeResults(rows);
}

TEST(Html, PageIsBalancedAndEveryLinkHasItsTarget) {
  const std::string page = HtmlReport(Plain());
  EXPECT_EQ(Unbalanced(page), "");
  EXPECT_TRUE(page.starts_with("<!DOCTYPE html>\n<html lang=\"en\">"));
  const std::regex link(R"(href="#([^"]*)\")");
  size_t links = 0;
  for (auto it = std::sregex_iterator(page.begin(), page.end(), link); it != std::sregex_iterator(); ++it, ++links)
    EXPECT_EQ(Count(page, "id=\"" + (*it)[1].str() + "\""), 1U) << it->str();
  EXPECT_EQ(links, 3U);  // the model and its two lengths
}

TEST(Html, ChartHasAPointForEveryCell) {
  const Summary summary = Summarise(Plain());
  const std::string chart = HtmlChart(summary.models[0].slices[0]);
  EXPECT_EQ(Count(chart, "<title>snapkv at 5%: 25.0 [25.0, 25.0], n = 2</title>"), 1U);
  EXPECT_EQ(Count(chart, "<title>snapkv at 10%: "), 1U);
  EXPECT_EQ(Count(chart, "<title>dropkv at 5%: "), 1U);
  EXPECT_EQ(Count(chart, "<title>dropkv at 10%: "), 0U);
  EXPECT_EQ(Count(chart, "<title>full cache: 100.0 [100.0, 100.0], n = 2</title>"), 1U);
  EXPECT_EQ(Count(chart, "<button"), 2U);
}

TEST(Html, HeatMapHasAPanelForEveryMeasuredPair) {
  const Summary summary = Summarise(Plain());
  const std::string maps = HtmlHeatMaps(summary.models[0], "ruler", false);
  EXPECT_EQ(Count(maps, "data-key=\"0-0\""), 1U);  // settings stand in alphabetical order here
  EXPECT_EQ(Count(maps, "data-key=\"0-1\""), 0U);  // dropkv at 10% was not measured
  EXPECT_EQ(Count(maps, "data-key=\"1-0\""), 1U);
  EXPECT_EQ(Count(maps, "data-key=\"1-1\""), 1U);
  // Two depths of two lengths, three panels and the full cache.
  EXPECT_EQ(Count(maps, R"(<td class="h h3" title="1 sample">25</td>)"), 12U);
  EXPECT_EQ(Count(maps, R"(<td class="h h10" title="1 sample">100</td>)"), 4U);
  EXPECT_EQ(Count(maps, R"(<td class="h none">-</td>)"), 4U * 16U);
  EXPECT_EQ(HtmlHeatMaps(summary.models[0], "ruler", true), "");
  EXPECT_EQ(HtmlHeatMaps(summary.models[0], "longbench", false), "");
}

TEST(Html, OnlyTheFullCache) {
  Results results = Plain();
  std::erase_if(results.rows, [](const Row& row) { return !row.full(); });
  results.run_of.assign(results.rows.size(), 0);
  const Summary summary = Summarise(results);
  EXPECT_EQ(HtmlChart(summary.models[0].slices[0]), "");
  EXPECT_EQ(Unbalanced(HtmlReport(summary)), "");
}

// Scores that are all 0 or all 100 must not collapse the axis.
TEST(Html, AxisOfEqualScores) {
  for (const double score : {0.0, 1.0}) {
    Results results = Plain();
    for (Row& row : results.rows) row.score = score;
    const Summary summary = Summarise(results);
    const std::string chart = HtmlChart(summary.models[0].slices[0]);
    EXPECT_EQ(Count(chart, "nan"), 0U);
    EXPECT_EQ(Count(chart, "inf"), 0U);
    EXPECT_EQ(Count(chart, "<line class=\"grid\" x1=\"48\""), 2U);  // two ticks
  }
}

}  // namespace
}  // namespace dropkv::eval
