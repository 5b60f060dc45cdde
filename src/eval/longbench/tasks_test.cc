#include "eval/longbench/tasks.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>

#include "eval/longbench/longbench.h"
#include "eval/longbench/prompt.h"

namespace dropkv::eval {
namespace {

struct Expected {
  std::string_view name;
  Metric metric;
  int32_t max_tokens;
  bool chat_template;
  int32_t official;
};

TEST(LongBenchTaskTable, IsTheOfficialOne) {
  using enum Metric;
  const Expected expected[] = {
      {"narrativeqa", kF1, 128, true, 200},     {"qasper", kF1, 128, true, 200},
      {"multifieldqa_en", kF1, 64, true, 150},  {"hotpotqa", kF1, 32, true, 200},
      {"2wikimqa", kF1, 32, true, 200},         {"musique", kF1, 32, true, 200},
      {"gov_report", kRougeL, 512, true, 200},  {"qmsum", kRougeL, 512, true, 200},
      {"multi_news", kRougeL, 512, true, 200},  {"trec", kClassification, 64, false, 200},
      {"triviaqa", kF1, 32, false, 200},        {"samsum", kRougeL, 128, false, 200},
      {"passage_count", kCount, 32, true, 200}, {"passage_retrieval_en", kRetrieval, 32, true, 200},
      {"lcc", kEditSimilarity, 64, false, 500}, {"repobench-p", kEditSimilarity, 64, false, 500},
  };
  ASSERT_EQ(LongBenchTaskTable().size(), std::size(expected));
  ASSERT_EQ(LongBenchTasks().size(), std::size(expected));
  for (size_t i = 0; i < std::size(expected); ++i) {
    const LongBenchTask& task = LongBenchTaskTable()[i];
    EXPECT_EQ(task.name, expected[i].name);
    EXPECT_EQ(LongBenchTasks()[i], expected[i].name);
    EXPECT_EQ(task.metric, expected[i].metric) << task.name;
    EXPECT_EQ(task.max_tokens, expected[i].max_tokens) << task.name;
    EXPECT_EQ(task.chat_template, expected[i].chat_template) << task.name;
    EXPECT_EQ(task.official, expected[i].official) << task.name;
    EXPECT_EQ(FindLongBenchTask(task.name), &task);
    EXPECT_EQ(task.first_line, task.name == "trec" || task.name == "triviaqa" || task.name == "samsum") << task.name;
    EXPECT_EQ(task.stop_at_newline, task.name == "samsum") << task.name;
  }
  EXPECT_EQ(FindLongBenchTask("dureader"), nullptr);
}

// 4750 samples in all, 1000 of them in the five Chinese tasks; LongBench-E has 13 tasks.
TEST(LongBenchTaskTable, SamplesAndCategoriesAddUp) {
  int32_t official = 0;
  int32_t extended = 0;
  std::set<std::string_view> categories;
  for (const LongBenchTask& task : LongBenchTaskTable()) {
    official += task.official;
    extended += task.official_e > 0 ? 1 : 0;
    categories.insert(task.category);
  }
  EXPECT_EQ(official, 3750);
  EXPECT_EQ(extended, 13);
  EXPECT_EQ(categories.size(), 6U);
}

TEST(LongBenchTaskTable, OwnTemplatesHoldContextBeforeInput) {
  for (const LongBenchTask& task : LongBenchTaskTable()) {
    const Result<Prompt> prompt = FillTemplate(task.own_template, "CONTEXT", "INPUT");
    ASSERT_TRUE(prompt.ok()) << task.name << ": " << prompt.status().message();
    const std::string question = prompt->text.substr(prompt->context_end);
    const bool has_input =
        task.name != "gov_report" && task.name != "multi_news" && task.name != "passage_count" && task.name != "lcc";
    EXPECT_EQ(question.find("INPUT") != std::string::npos, has_input) << task.name;
    EXPECT_FALSE(question.empty()) << task.name;
    EXPECT_TRUE(prompt->text.substr(0, prompt->context_end).ends_with("CONTEXT")) << task.name;
  }
}

}  // namespace
}  // namespace dropkv::eval
