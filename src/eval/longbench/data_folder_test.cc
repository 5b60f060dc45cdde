// Reads LongBench files as they are: folders longbench/full, mini and short of DROPKV_DATA; skips what is missing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "eval/longbench/longbench.h"
#include "eval/metrics/metrics.h"

namespace dropkv::eval {
namespace {

namespace fs = std::filesystem;

int32_t CountQuarters(std::string_view text) { return static_cast<int32_t>(text.size() / 4); }

std::string CutQuarters(std::string_view text, int32_t tokens) {
  const auto half = 4 * static_cast<size_t>(tokens / 2);
  return std::string(text.substr(0, half)) + std::string(text.substr(text.size() - half));
}

std::optional<std::string> Folder(const char* name) {
  const char* data = std::getenv("DROPKV_DATA");
  if (data == nullptr) return std::nullopt;
  const fs::path folder = fs::path(data) / "longbench" / name;
  if (!fs::is_directory(folder)) return std::nullopt;
  return folder.string();
}

Result<LongBenchSet> Read(const std::string& folder, std::vector<std::string> tasks, int32_t max_length = 0) {
  return ReadLongBench({.tasks = std::move(tasks), .data = folder, .max_length = max_length}, CountQuarters,
                       CutQuarters);
}

// A reference is the best answer to its own sample, wherever the metric lets an answer be right.
void ExpectReferencesScore(const LongBenchSet& set) {
  for (const Sample& sample : set.samples) {
    double best = 0;
    for (const std::string& reference : sample.references) best = std::max(best, ScoreAnswer(sample, reference));
    EXPECT_GT(best, 1 - 1e-6) << sample.task << " " << sample.id;
    EXPECT_LE(best, 1) << sample.task << " " << sample.id;
    EXPECT_LT(ScoreAnswer(sample, ""), 1e-6) << sample.task << " " << sample.id;
    EXPECT_FALSE(sample.context.empty());
    EXPECT_FALSE(sample.question.empty());
  }
}

TEST(LongBenchData, MiniHasAllTasks) {
  const std::optional<std::string> folder = Folder("mini");
  if (!folder) GTEST_SKIP() << "DROPKV_DATA/longbench/mini is not there";
  const Result<LongBenchSet> set = Read(*folder, {});
  ASSERT_TRUE(set.ok()) << set.status().message();
  std::map<std::string, int> counts;
  for (const Sample& sample : set->samples) ++counts[sample.task];
  const std::map<std::string, int> expected = {
      {"narrativeqa", 6}, {"qasper", 9},       {"multifieldqa_en", 7}, {"hotpotqa", 13},
      {"2wikimqa", 13},   {"musique", 7},      {"gov_report", 12},     {"qmsum", 6},
      {"multi_news", 11}, {"trec", 8},         {"triviaqa", 12},       {"samsum", 15},
      {"lcc", 26},        {"repobench-p", 23}, {"passage_count", 4},   {"passage_retrieval_en", 15}};
  EXPECT_EQ(counts, expected);
  EXPECT_EQ(set->remarks.size(), 16U) << "every task is a subset; the templates are the folder's";
  ExpectReferencesScore(*set);
}

TEST(LongBenchData, CutPromptsKeepTheirQuestions) {
  const std::optional<std::string> folder = Folder("mini");
  if (!folder) GTEST_SKIP() << "DROPKV_DATA/longbench/mini is not there";
  const Result<LongBenchSet> whole = Read(*folder, {});
  const Result<LongBenchSet> cut = Read(*folder, {}, 1000);
  ASSERT_TRUE(whole.ok() && cut.ok());
  ASSERT_EQ(whole->samples.size(), cut->samples.size());
  int shorter = 0;
  for (size_t i = 0; i < whole->samples.size(); ++i) {
    const Sample& a = whole->samples[i];
    const Sample& b = cut->samples[i];
    EXPECT_LE(b.context.size() + b.question.size(), 4003U) << a.task << " " << a.id;
    if (b.context.size() < a.context.size()) ++shorter;
    // Whole where the last 2000 bytes hold it, else its end.
    EXPECT_TRUE(a.question.ends_with(b.question)) << a.task << " " << a.id;
    if (a.question.size() <= 2000) EXPECT_EQ(a.question, b.question) << a.task << " " << a.id;
  }
  EXPECT_GT(shorter, 170) << "nearly all prompts are longer";
}

TEST(LongBenchData, FullFileIsNoSubset) {
  const std::optional<std::string> folder = Folder("full");
  if (!folder) GTEST_SKIP() << "DROPKV_DATA/longbench/full is not there";
  const Result<LongBenchSet> set = Read(*folder, {});
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples.size(), 200U);
  EXPECT_TRUE(set->remarks.empty()) << set->remarks[0];
  ExpectReferencesScore(*set);
  const Result<LongBenchSet> meetings = Read(*folder, {"qmsum"});
  ASSERT_FALSE(meetings.ok()) << "meetings are no LongBench samples";
  EXPECT_TRUE(meetings.status().message().ends_with("line 1: field \"input\": expected a string, got nothing"))
      << meetings.status().message();
}

TEST(LongBenchData, ShortFilesHaveOtherNames) {
  const std::optional<std::string> folder = Folder("short");
  if (!folder) GTEST_SKIP() << "DROPKV_DATA/longbench/short is not there";
  const Result<LongBenchSet> set = Read(*folder, {"hotpotqa", "triviaqa"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples.size(), 65U);
  EXPECT_EQ(set->remarks.size(), 4U) << "two names, two subsets";
  ExpectReferencesScore(*set);
}

}  // namespace
}  // namespace dropkv::eval
