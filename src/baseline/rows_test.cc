#include "baseline/rows.h"

#include <gtest/gtest.h>

#include <utility>

#include "baseline/recipe.h"

namespace dropkv::baseline {
namespace {

RowsSetting Read(std::string_view text) {
  const Result<RowsSetting> setting = ParseRows(text);
  EXPECT_TRUE(setting.ok()) << text << ": " << setting.status().message();
  return setting.ok() ? *setting : RowsSetting{};
}

bool Contains(const Status& status, std::string_view text) { return status.message().find(text) != std::string::npos; }

TEST(ParseRows, ReadsEverySource) {
  const RowsSetting window = Read("window:16");
  EXPECT_TRUE(window.sources.window);
  EXPECT_EQ(window.window, 16);
  EXPECT_EQ(window.sources.generated(), 0);
  const RowsSetting delay = Read("delay:8");
  EXPECT_FALSE(delay.sources.window);
  EXPECT_EQ(delay.window, 0);
  EXPECT_EQ(delay.sources.delay, 8);
  const RowsSetting draft = Read("draft:3");
  EXPECT_EQ(draft.sources.draft, 3);
  EXPECT_EQ(draft.sources.draft_budget.fraction, 0.1);
  EXPECT_EQ(draft.sources.draft_window, 0);
  const RowsSetting oracle = Read("oracle:64+window:64");
  EXPECT_TRUE(oracle.sources.window);
  EXPECT_EQ(oracle.window, 64);
  EXPECT_EQ(oracle.sources.oracle, 64);
  EXPECT_EQ(oracle.sources.generated(), 64);
}

TEST(ParseRows, ReadsTheDraftsSettings) {
  EXPECT_EQ(Read("draft:8@2.5%").sources.draft_budget.fraction, 0.025);
  const RowsSetting tokens = Read("window:8+draft:8@256@w32");
  EXPECT_FALSE(tokens.sources.draft_budget.fraction.has_value());
  EXPECT_EQ(tokens.sources.draft_budget.tokens, 256);
  EXPECT_EQ(tokens.sources.draft_window, 32);
  const RowsSetting same = Read("draft:8@w16@same");
  EXPECT_EQ(same.sources.draft_window, 16);
  EXPECT_EQ(DraftBudget(same.sources, Budget::Tokens(77)).tokens, 77);
  EXPECT_EQ(DraftBudget(tokens.sources, Budget::Tokens(77)).tokens, 256);
}

TEST(ParseRows, RefusesEverythingElse) {
  for (const char* text : {"",
                           "+",
                           "window",
                           "window:",
                           "window:0",
                           "window:129",
                           "window:8+",
                           "window:8+window:8",
                           "windows:8",
                           "w8",
                           "delay:0",
                           "delay:65",
                           "delay:-1",
                           "delay:8.0",
                           "delay:+8",
                           "delay: 8",
                           "delay:8 ",
                           "delay:8@10%",
                           "window:8@w32",
                           "draft",
                           "draft:8@",
                           "draft:8@0%",
                           "draft:8@101%",
                           "draft:8@0",
                           "draft:8@0.1",
                           "draft:8@10%@256",
                           "draft:8@same@10%",
                           "draft:8@w",
                           "draft:8@w0",
                           "draft:8@w129",
                           "draft:8@w8@w8",
                           "draft:8@x",
                           "draft:8@x0",
                           "draft:8@x5",
                           "draft:8@x2@x2",
                           "draft:8+draft:8",
                           "oracle:99999999999",
                           "delay:8+draft:8",
                           "draft:8+oracle:8",
                           "window:8+delay:1+oracle:1",
                           "window:65+draft:64",
                           "DRAFT:8"}) {
    const Result<RowsSetting> setting = ParseRows(text);
    EXPECT_FALSE(setting.ok()) << text;
    EXPECT_EQ(setting.status().code(), Code::kInvalidArgument) << text;
    EXPECT_TRUE(setting.status().message().starts_with("rows: expected ")) << text << setting.status().message();
  }
  EXPECT_TRUE(Contains(ParseRows("delay:8+draft:8").status(), "one of delay, draft and oracle"));
  EXPECT_TRUE(Contains(ParseRows("window:65+draft:64").status(), "at most 128 in all"));
  EXPECT_TRUE(Contains(ParseRows("window:65+draft:64").status(), ", 129"));
  EXPECT_TRUE(Contains(ParseRows("draft:8@0.1").status(), "did you mean 10%?"));
  EXPECT_TRUE(Contains(ParseRows("ahead:8").status(), "\"ahead\" is no source"));
  EXPECT_TRUE(Contains(ParseRows("window:8@10%").status(), "behind a draft only"));
}

TEST(RowsText, IsWhatParseRowsReads) {
  const auto round = [](std::string_view text) {
    const RowsSetting setting = Read(text);
    return RowsText(setting.sources, setting.window);
  };
  for (const char* text : {"window:8", "window:128", "delay:8", "window:8+delay:64", "window:8+draft:8@10%",
                           "draft:8@2.5%", "draft:1@256", "window:8+draft:8@same@w32", "window:8+draft:8@10%@w32@x2",
                           "draft:8@5%@x4", "draft:8@33.3333%", "oracle:16", "window:1+oracle:1"})
    EXPECT_EQ(round(text), text);
  EXPECT_EQ(round("draft:8"), "draft:8@10%");
  EXPECT_EQ(round("draft:8@w32@5.0%+window:08"), "window:8+draft:8@5%@w32");
  EXPECT_EQ(round("draft:8@x3@5%"), "draft:8@5%@x3");
  EXPECT_EQ(round("draft:8@x1"), "draft:8@10%");
  EXPECT_EQ(RowsText(RowSources{}, 8), "window:8");
}

TEST(CheckSources, NamesTheField) {
  const auto refused = [](auto&& change, std::string_view field) {
    RowSources rows;
    change(rows);
    const Status status = CheckSources(rows, 64);
    return !status.ok() && status.message().starts_with(std::string(field) + ": expected ");
  };
  EXPECT_TRUE(CheckSources({}, 128).ok());
  EXPECT_TRUE(CheckSources({}, 0).ok());
  EXPECT_TRUE(CheckSources({.window = false, .delay = 64}, 128).ok());  // 64 rows judge
  EXPECT_TRUE(refused([](RowSources& rows) { rows.delay = -1; }, "rows.delay"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft = 65; }, "rows.draft"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.oracle = 65; }, "rows.oracle"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.window = false; }, "rows"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.delay = rows.oracle = 1; }, "rows"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft_budget = Budget{}; }, "rows.draft_budget"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft = 8, rows.draft_budget = Budget::Fraction(1.5); },
                      "rows.draft_budget"));
  EXPECT_TRUE(
      refused([](RowSources& rows) { rows.draft = 8, rows.draft_budget = Budget::Tokens(-1); }, "rows.draft_budget"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft_window = 8; }, "rows.draft_window"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft_rounds = 2; }, "rows.draft_rounds"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft = 8, rows.draft_rounds = 5; }, "rows.draft_rounds"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft = 8, rows.draft_rounds = 0; }, "rows.draft_rounds"));
  EXPECT_TRUE(refused([](RowSources& rows) { rows.draft = 8, rows.draft_window = 129; }, "rows.draft_window"));
}

TEST(SetRows, ReplacesTheSourcesAndANamedWindow) {
  Recipe recipe = FindRecipe("snapkv").value();
  SetRows(Read("draft:8"), &recipe);
  EXPECT_EQ(recipe.policy.window, 64);
  EXPECT_FALSE(recipe.rows.window);
  EXPECT_EQ(recipe.rows.draft, 8);
  SetRows(Read("window:16+delay:4"), &recipe);
  EXPECT_EQ(recipe.policy.window, 16);
  EXPECT_EQ(RowsText(recipe.rows, recipe.policy.window), "window:16+delay:4");
  EXPECT_TRUE(CheckRecipe(recipe).ok());
}

TEST(JudgesByRows, IsWhatReadsTheWindowsQueries) {
  for (const char* name : {"dropkv", "dropkv-compat", "dropkv-wo", "snapkv", "adakv", "criticalkv", "andpro",
                           "andpro_code", "caote", "caote-tova", "tova", "finch", "obcache", "defensivekv", "cake",
                           "chunkkv", "chunk-dropkv", "criticalada-dropkv"})
    EXPECT_TRUE(JudgesByRows(FindRecipe(name).value())) << name;
  for (const char* name : {"full", "streaming", "random", "knorm", "keydiff", "lagkv", "cur", "expected", "capkv",
                           "compactor", "noncausal", "h2o", "observed", "vatp", "caote-h2o", "critical-knorm"})
    EXPECT_FALSE(JudgesByRows(FindRecipe(name).value())) << name;
}

TEST(CheckRowSources, RefusesGeneratedRowsWhereNoRowIsRead) {
  const auto message = [](std::string_view name, std::string_view rows) {
    Recipe recipe = FindRecipe(name).value();
    SetRows(Read(rows), &recipe);
    EXPECT_EQ(CheckRecipe(recipe).message(), CheckRowSources(recipe).message()) << name;
    return CheckRowSources(recipe).message();
  };
  EXPECT_EQ(message("dropkv", "window:8+draft:8"), "");
  EXPECT_EQ(message("tova", "delay:8"), "");
  EXPECT_EQ(message("knorm", "window:8+draft:8@10%"),
            "rows: expected the window alone for policy knorm, which reads keys and values, not the queries of rows, "
            "got \"window:8+draft:8@10%\"");
  for (const auto& [name, reads] : {std::pair{"vatp", "the queries of all rows of the prompt"},
                                    {"h2o", "the queries of all rows of the prompt"},
                                    {"capkv", "the prompt's queries before RoPE"},
                                    {"streaming", "positions"},
                                    {"full", "nothing"}})
    EXPECT_NE(message(name, "delay:8").find(std::string("which reads ") + reads), std::string::npos) << name;
  Recipe wide = FindRecipe("snapkv.w128").value();
  wide.rows.draft = 1;
  EXPECT_TRUE(Contains(CheckRecipe(wide), "at most 128 in all"));
}

TEST(DraftRecipe, CutsByTheWindowAlone) {
  Recipe recipe = FindRecipe("dropkv").value();
  recipe.rows = Read("draft:8@w32").sources;
  recipe.protect_window = false;
  const Recipe draft = DraftRecipe(recipe);
  EXPECT_EQ(draft.policy.window, 32);
  EXPECT_TRUE(draft.protect_window);
  EXPECT_EQ(RowsText(draft.rows, draft.policy.window), "window:32");
  EXPECT_TRUE(CheckRecipe(draft).ok());
  recipe.rows.draft_window = 0;
  EXPECT_EQ(DraftRecipe(recipe).policy.window, 8);
}

}  // namespace
}  // namespace dropkv::baseline
