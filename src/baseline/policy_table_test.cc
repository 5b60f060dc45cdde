#include "baseline/policy_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

namespace dropkv::baseline {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Bars that end a cell.
std::ptrdiff_t Cells(const std::string& line) {
  std::ptrdiff_t bars = 0;
  for (size_t i = 0; i < line.size(); ++i)
    if (line[i] == '|' && (i == 0 || line[i - 1] != '\\')) ++bars;
  return bars - 1;
}

TEST(PolicyTable, DocumentIsWhatTheProgramPrints) {
  std::ifstream file(DROPKV_POLICIES_DOCUMENT);
  ASSERT_TRUE(file) << DROPKV_POLICIES_DOCUMENT;
  const std::string text(std::istreambuf_iterator<char>(file), {});
  EXPECT_EQ(Lines(text), Lines(PolicyDocument())) << "make it again: dropkv policies --markdown > docs/policies.md";
}

TEST(PolicyTable, MarkdownHasARowOfNineCellsForEveryPolicy) {
  const std::vector<std::string> lines = Lines(PolicyTableMarkdown(Recipes()));
  ASSERT_EQ(lines.size(), Recipes().size() + 2);
  for (const std::string& line : lines) EXPECT_EQ(Cells(line), 9) << line;
}

TEST(PolicyTable, DocumentNamesEveryPreset) {
  const std::string text = PolicyDocument();
  for (const Recipe& recipe : Recipes())
    EXPECT_NE(text.find("\n| `" + recipe.name() + "` |"), std::string::npos) << recipe.name();
}

TEST(PolicyTable, TextFitsATerminal) {
  const std::vector<std::string> lines = Lines(PolicyTableText(Recipes()));
  ASSERT_EQ(lines.size(), 3 * Recipes().size() + 1);
  for (const std::string& line : lines) {
    EXPECT_LE(line.size(), 126U) << line;
    EXPECT_FALSE(line.ends_with(' ')) << line;
    EXPECT_TRUE(std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c <= '~'; })) << line;
  }
}

TEST(PolicyTable, CellsFollowTheSettings) {
  const auto row = [](std::string_view name) { return RowOf(*FindRecipe(name)); };
  const PolicyRow critical = row("criticalada0.3.snapkv.w32.k7");
  EXPECT_EQ(critical.name, "criticalada0.3.snapkv.w32.k7");
  EXPECT_EQ(critical.window, "32");
  EXPECT_EQ(critical.pooling, "mean 7 of the past");
  EXPECT_EQ(critical.is_protected, "last 32");
  EXPECT_EQ(critical.allocator, "ada 0.3, two stages");
  EXPECT_EQ(critical.needs, "window q, k, v, W_O");
  EXPECT_EQ(critical.cost, "w n d + n d D");
  EXPECT_EQ(row("laq").window, "0 + 8");
  EXPECT_EQ(row("laq").is_protected, "-");
  EXPECT_EQ(row("laq++").window, "8 + 8");
  EXPECT_EQ(row("laq++").needs, "window q, generated q, k");
  EXPECT_EQ(row("tova").window, "1");
  EXPECT_EQ(row("h2o").window, "-");
  EXPECT_EQ(row("knorm").is_protected, "-");
  EXPECT_EQ(row("knorm").window, "-");
  EXPECT_EQ(row("compactor").is_protected, "first 8, last 4");
  EXPECT_EQ(row("compactor").needs, "all q, k, k before RoPE, v");
  EXPECT_EQ(row("h2o").is_protected, "last 8");
  EXPECT_EQ(row("h2o").cost, "n^2 d");
  EXPECT_EQ(row("vatp-scissorhands").cost, "400 n d");
  EXPECT_EQ(row("vatp").is_protected, "first 20, latest half");
  EXPECT_EQ(row("layerdefensivekv").allocator, "flat (model)");
  EXPECT_EQ(row("chunkkv.10.snapkv").allocator, "uniform, chunks of 10");
  EXPECT_EQ(row("pyramidkv").allocator, "uniform, pyramid");
  EXPECT_EQ(row("full").needs, "-");
  EXPECT_EQ(row("full").is_protected, "all");
}

}  // namespace
}  // namespace dropkv::baseline
