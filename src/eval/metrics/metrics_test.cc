#include "eval/metrics/metrics.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {
namespace {

Sample MakeSample(Metric metric, std::vector<std::string> references) {
  Sample sample;
  sample.metric = metric;
  sample.references = std::move(references);
  return sample;
}

TEST(ScoreAnswer, EveryMetricIsItsOwn) {
  const std::string_view answer = "Paragraph 4 of 5";
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kStringMatchAll, {"4", "6"}), answer), 1.0 / 2);
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kStringMatchPart, {"4", "6"}), answer), 1);
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kF1, {"4"}), answer), 2.0 / 5) << "P 1/4, R 1";
  EXPECT_NEAR(ScoreAnswer(MakeSample(Metric::kRougeL, {"4"}), answer), 2.0 / 5, 1e-8) << "the same, with 1e-8";
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kRetrieval, {"Paragraph 4"}), answer), 1.0 / 2) << "4 of 4, 5";
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kRetrieval, {"4"}), answer), 0) << "no label";
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kCount, {"4"}), answer), 1.0 / 2);
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kEditSimilarity, {"4"}), answer), 0.12) << "LCS 1 of T 17: 11.8";
  Sample classes = MakeSample(Metric::kClassification, {"of"});
  classes.classes = {"of", "Paragraph", "none"};
  EXPECT_DOUBLE_EQ(ScoreAnswer(classes, answer), 1.0 / 2);
}

TEST(ScoreAnswer, TakesTheBestReference) {
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kF1, {"dog", "red cat", "cat"}), "cat"), 1);
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kF1, {"red cat", "dog"}), "cat"), 2.0 / 3);
  EXPECT_DOUBLE_EQ(ScoreAnswer(MakeSample(Metric::kF1, {}), "cat"), 0);
}

TEST(ScoreAnswer, FirstLineWhereTheTaskSaysSo) {
  Sample sample = MakeSample(Metric::kF1, {"cat"});
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, "\n\ncat\ndog"), 2.0 / 3) << "all lines";
  sample.first_line = true;
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, "\n\ncat\ndog"), 1);
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, " \ncat"), 0) << "only newlines are stripped: the first line is a space";
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, "\n\n"), 0);
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, ""), 0);
}

TEST(ScoreAnswer, FirstLineKeepsClassesOfLaterLinesOut) {
  Sample sample = MakeSample(Metric::kClassification, {"city"});
  sample.classes = {"city", "lake"};
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, "city\nlake"), 1.0 / 2);
  sample.first_line = true;
  EXPECT_DOUBLE_EQ(ScoreAnswer(sample, "city\nlake"), 1);
}

}  // namespace
}  // namespace dropkv::eval
