// The same properties on the texts, words and questions of a data folder outside the tree.
#include <cstdlib>
#include <set>

#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

class DataTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("DROPKV_DATA");
    if (folder == nullptr) GTEST_SKIP() << "DROPKV_DATA is not set";
    options_.data = folder;
    options_.samples = 3;
  }

  RulerOptions options_;
};

TEST_F(DataTest, AllTasksFit) {
  options_.tasks.assign(RulerTasks().begin(), RulerTasks().end());
  options_.lengths = {2048, 4096, kLongTest};
  const RulerSet set = Generate(options_);
  EXPECT_EQ(set.samples.size(), 13U * 3U * 3U);
  EXPECT_NE(set.haystack.find(".txt"), std::string::npos) << set.haystack;
  EXPECT_NE(set.data.find("qa_1/"), std::string::npos) << set.data;
  for (const Sample& sample : set.samples) {
    SCOPED_TRACE(sample.task + " " + std::to_string(sample.length) + " " + sample.id);
    const int32_t tokens = CountPieces(PromptOf(sample)) + sample.max_tokens;
    EXPECT_LE(tokens, sample.length);
    const bool question = sample.task.starts_with("qa_");
    EXPECT_GE(tokens, question ? sample.length * 0.95 - 300 : sample.length * 0.95);
    if (!sample.task.starts_with("niah")) continue;
    for (const std::string& value : sample.references) EXPECT_EQ(Occurrences(PromptOf(sample), value), 1U) << value;
  }
}

TEST_F(DataTest, QuestionsHaveTheirAnswerAmongTheDocuments) {
  options_.tasks = {"qa_1"};
  options_.lengths = {2048};
  options_.samples = 100;
  std::set<std::string> questions;
  for (const Sample& sample : Generate(options_).samples) {
    questions.insert(sample.question);
    EXPECT_GE(Occurrences(sample.context, sample.references.at(0)), 1U) << sample.question;
    EXPECT_GE(Occurrences(sample.context, "\n\nDocument "), 3U);
  }
  EXPECT_EQ(questions.size(), 100U);
}

TEST_F(DataTest, AskingForMoreQuestionsThanThereAreIsAnError) {
  options_.tasks = {"qa_2"};
  options_.lengths = {4096};
  options_.samples = 1000000;
  ExpectError(GenerateRuler(options_, CountPieces), Code::kInvalidArgument, {"qa_2", "questions", "1000000"});
}

}  // namespace
}  // namespace dropkv::eval
