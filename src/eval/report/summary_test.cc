#include "eval/report/summary.h"

#include <gtest/gtest.h>

#include "eval/report/made_results.h"

namespace dropkv::eval {
namespace {

// Task a: four samples, task b: two. snapkv is 0.1 below dropkv on every sample.
Results Pairs() {
  std::vector<Row> rows;
  const double a[] = {0.2, 0.4, 0.9, 1.0};
  for (int i = 0; i < 4; ++i) {
    rows.push_back(MadeRow("a", std::to_string(i), "full", "100%", 1));
    rows.push_back(MadeRow("a", std::to_string(i), "snapkv", "5%", a[i] - 0.1));
    rows.push_back(MadeRow("a", std::to_string(i), "dropkv", "5%", a[i]));
  }
  for (int i = 0; i < 2; ++i) {
    rows.push_back(MadeRow("b", std::to_string(i), "full", "100%", 0.5));
    rows.push_back(MadeRow("b", std::to_string(i), "snapkv", "5%", 0.2 + 0.2 * i));
    rows.push_back(MadeRow("b", std::to_string(i), "dropkv", "5%", 0.3 + 0.2 * i));
  }
  return MadeResults(rows);
}

const Slice& OnlySlice(const Summary& summary) {
  EXPECT_EQ(summary.models.size(), 1U);
  EXPECT_EQ(summary.models.front().slices.size(), 1U);
  return summary.models.front().slices.front();
}

TEST(Summarise, MeanOfTasksNotOfSamples) {
  const Summary summary = Summarise(Pairs());
  const Slice& slice = OnlySlice(summary);
  EXPECT_EQ(slice.samples, 6);
  ASSERT_TRUE(slice.full.has_value());
  EXPECT_DOUBLE_EQ(slice.full->score.value, 75);  // of samples: 83.3
  EXPECT_DOUBLE_EQ(slice.full->score.interval->low, 75);
  EXPECT_DOUBLE_EQ(slice.full->score.interval->high, 75);
  const Cell* cell = slice.Find("dropkv", "5%");
  ASSERT_NE(cell, nullptr);
  EXPECT_NEAR(cell->score.value, 100 * (0.625 + 0.4) / 2, 1e-9);
  EXPECT_EQ(cell->score.samples, 6);
  EXPECT_NEAR(cell->tasks.at("a").score, 62.5, 1e-9);
  EXPECT_EQ(cell->tasks.at("b").samples, 2);
}

TEST(Summarise, DifferencesArePaired) {
  const Summary summary = Summarise(Pairs());
  const Cell* cell = OnlySlice(summary).Find("dropkv", "5%");
  ASSERT_NE(cell, nullptr);
  // Both scores scatter widely, their difference does not at all.
  EXPECT_GT(cell->score.interval->high - cell->score.interval->low, 20);
  ASSERT_TRUE(cell->minus_against.has_value());
  EXPECT_NEAR(cell->minus_against->value, 10, 1e-9);
  EXPECT_NEAR(cell->minus_against->interval->low, 10, 1e-9);
  EXPECT_NEAR(cell->minus_against->interval->high, 10, 1e-9);
  EXPECT_TRUE(cell->minus_against->ExcludesZero());
  EXPECT_NEAR(cell->minus_full->value, 51.25 - 75, 1e-9);
  EXPECT_FALSE(OnlySlice(summary).Find("snapkv", "5%")->minus_against.has_value());
}

TEST(Summarise, OnlyCommonSamplesCountInADifference) {
  Results results = Pairs();
  std::erase_if(results.rows,
                [](const Row& row) { return row.setting == "snapkv" && row.task == "a" && row.id == "3"; });
  for (Row& row : results.rows)
    if (row.setting == "dropkv" && row.task == "a" && row.id == "3") row.score = 0;
  results.run_of.assign(results.rows.size(), 0);
  const Summary summary = Summarise(results);
  const Cell* cell = OnlySlice(summary).Find("dropkv", "5%");
  EXPECT_EQ(cell->minus_against->samples, 5);
  EXPECT_NEAR(cell->minus_against->value, 10, 1e-9);
  EXPECT_EQ(cell->minus_full->samples, 6);
}

TEST(Summarise, AnotherReference) {
  const Summary summary = Summarise(Pairs(), "dropkv");
  EXPECT_NEAR(OnlySlice(summary).Find("snapkv", "5%")->minus_against->value, -10, 1e-9);
  EXPECT_FALSE(OnlySlice(summary).Find("dropkv", "5%")->minus_against.has_value());
  const Summary none = Summarise(Pairs(), "nobody");
  EXPECT_FALSE(OnlySlice(none).Find("snapkv", "5%")->minus_against.has_value());
}

TEST(Summarise, TheOrderOfRowsDoesNotMatter) {
  Results results = Pairs();
  const Summary before = Summarise(results);
  std::reverse(results.rows.begin(), results.rows.end());
  const Summary after = Summarise(results);
  EXPECT_EQ(JsonReport(before), JsonReport(after));
}

TEST(Summarise, MeanOfCategories) {
  std::vector<Row> rows;
  const std::pair<const char*, const char*> tasks[] = {{"x", "one"}, {"y", "one"}, {"z", "two"}};
  const double scores[] = {0.2, 0.4, 0.9};
  for (int task = 0; task < 3; ++task)
    for (const char* id : {"1", "2"}) {
      rows.push_back(MadeRow(tasks[task].first, id, "snapkv", "5%", scores[task]));
      rows.back().category = tasks[task].second;
    }
  const Summary summary = Summarise(MadeResults(rows));
  const Cell* cell = OnlySlice(summary).Find("snapkv", "5%");
  EXPECT_NEAR(cell->score.value, 50, 1e-9);
  EXPECT_NEAR(cell->category_score->value, 100 * (0.3 + 0.9) / 2, 1e-9);
  EXPECT_NEAR(cell->category_score->interval->low, 60, 1e-9);
  EXPECT_FALSE(OnlySlice(summary).full.has_value());
  EXPECT_FALSE(cell->minus_full.has_value());
}

TEST(Summarise, ModelsLengthsAndQuestionsAreKeptApart) {
  Results results = Pairs();
  Row longer = MadeRow("a", "0", "dropkv", "5%", 0);
  longer.length = 8192;
  Row hidden = MadeRow("a", "0", "dropkv", "5%", 0);
  hidden.hidden = true;
  Row other = MadeRow("a", "0", "dropkv", "5%", 0);
  other.suite = "longbench";
  for (const Row& row : {longer, hidden, other}) results.rows.push_back(row);
  results.rows.push_back(MadeRow("a", "0", "dropkv", "5%", 0));
  results.run_of.assign(results.rows.size(), 0);
  results.runs.push_back(MadeRun("model", "bb"));  // the same name, another file
  results.runs.back().model_file = "q8.gguf";
  results.run_of.back() = 1;
  const Summary summary = Summarise(results);
  ASSERT_EQ(summary.models.size(), 2U);
  EXPECT_EQ(summary.models[0].label, "model (model.gguf)");
  EXPECT_EQ(summary.models[1].label, "model (q8.gguf)");
  ASSERT_EQ(summary.models[0].slices.size(), 4U);
  EXPECT_EQ(summary.models[0].slices[0].suite, "longbench");
  EXPECT_NEAR(summary.models[0].slices[1].Find("dropkv", "5%")->score.value, 51.25, 1e-9);
  EXPECT_TRUE(summary.models[0].slices[2].hidden);
  EXPECT_EQ(summary.models[0].slices[3].length, 8192);
  EXPECT_FALSE(summary.models[1].slices[0].Find("dropkv", "5%")->score.interval.has_value());  // a single sample
}

TEST(Summarise, TwoRunsOfOneModelAreOne) {
  Results results = Pairs();
  results.runs.push_back(results.runs.front());
  results.run_of.back() = 1;
  const Summary summary = Summarise(results);
  ASSERT_EQ(summary.models.size(), 1U);
  EXPECT_EQ(summary.models[0].runs.size(), 2U);
  EXPECT_EQ(OnlySlice(summary).samples, 6);
}

TEST(Summarise, OrderOfSettingsTasksAndBudgets) {
  std::vector<Row> rows;
  for (const char* budget : {"512", "10%", "5%", "64", "2.5%"}) rows.push_back(MadeRow("b", "1", "snapkv", budget, 0));
  rows.push_back(MadeRow("a", "1", "dropkv", "5%", 0));
  Results results = MadeResults(rows);
  results.runs.front().settings = {"snapkv", "gone", "dropkv"};
  results.runs.front().tasks = {"b", "a"};
  const Summary summary = Summarise(results);
  const Slice& slice = OnlySlice(summary);
  EXPECT_EQ(slice.budgets, (std::vector<std::string>{"2.5%", "5%", "10%", "64", "512"}));
  EXPECT_EQ(slice.settings, (std::vector<std::string>{"snapkv", "dropkv"}));
  EXPECT_EQ(slice.tasks, (std::vector<std::string>{"b", "a"}));
}

TEST(Summarise, FidelityWhereItWasMeasured) {
  std::vector<Row> rows;
  for (const char* id : {"1", "2", "3"})
    for (const char* setting : {"snapkv", "dropkv"}) rows.push_back(MadeRow("a", id, setting, "5%", 0));
  const double kl[] = {0.5, 0.25, 0.7, 0.45};  // sample 1: snapkv, dropkv; sample 2; sample 3 was not measured
  for (size_t i = 0; i < 4; ++i) {
    rows[i].kl = kl[i];
    rows[i].top1 = 0.75;
  }
  const Summary summary = Summarise(MadeResults(rows));
  const Cell* cell = OnlySlice(summary).Find("dropkv", "5%");
  EXPECT_NEAR(cell->kl->value, 0.35, 1e-9);
  EXPECT_EQ(cell->kl->samples, 2);
  EXPECT_NEAR(cell->top1->value, 75, 1e-9);
  EXPECT_NEAR(cell->kl_minus_against->value, -0.25, 1e-9);
  EXPECT_NEAR(cell->kl_minus_against->interval->high, -0.25, 1e-9);
}

TEST(Summarise, KeptTokensErrorsAndTimes) {
  std::vector<Row> rows = {MadeRow("a", "1", "snapkv", "5%", 0), MadeRow("a", "2", "snapkv", "5%", 0)};
  rows[0].kept = {{40, 50, 60}, {50, 50, 50}};
  rows[1].kept = {{100, 100, 100}, {90, 100, 120}};
  rows[1].prompt_tokens = 2000;
  rows[0].output_error = 0.1;
  rows[1].output_error = 0.3;
  rows[0].score_s = 1;
  rows[1].score_s = 2;
  rows[0].warnings = {"w"};
  rows[1].warnings = {"w", "v"};
  const Summary summary = Summarise(MadeResults(rows));
  const Cell* cell = OnlySlice(summary).Find("snapkv", "5%");
  EXPECT_EQ(cell->kept_min, 40);
  EXPECT_EQ(cell->kept_max, 120);
  EXPECT_NEAR(cell->kept_mean, 75, 1e-9);
  EXPECT_NEAR(cell->kept_share, 5, 1e-9);
  EXPECT_NEAR(cell->output_error, 0.2, 1e-9);
  EXPECT_NEAR(cell->score_s, 1.5, 1e-9);
  EXPECT_EQ(summary.models[0].warnings, (std::vector<std::pair<std::string, int32_t>>{{"v", 1}, {"w", 2}}));
}

TEST(Summarise, DepthsOfSingleNeedles) {
  const double depths[] = {0, 9.9, 10, 100};
  std::vector<Row> rows;
  for (int i = 0; i < 4; ++i) {
    rows.push_back(MadeRow("a", std::to_string(i), "snapkv", "5%", i == 0 ? 0 : 1));
    rows.back().depths = {depths[i]};
  }
  rows.push_back(MadeRow("a", "several", "snapkv", "5%", 0));
  rows.back().depths = {15, 95};
  const Summary summary = Summarise(MadeResults(rows));
  const Cell* cell = OnlySlice(summary).Find("snapkv", "5%");
  EXPECT_EQ(cell->depths[0].samples, 2);
  EXPECT_NEAR(cell->depths[0].score, 50, 1e-9);
  EXPECT_EQ(cell->depths[1].samples, 1);
  EXPECT_EQ(cell->depths[9].samples, 1);
  EXPECT_NEAR(cell->depths[9].score, 100, 1e-9);
}

}  // namespace
}  // namespace dropkv::eval
