#include "eval/longbench/sample_line.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dropkv::eval {
namespace {

TEST(LongBenchLine, ReadsTheOfficialFields) {
  const Result<LongBenchLine> line = ParseLongBenchLine(
      R"({"input": "who?", "context": "a \u00e9 \u0000b", "answers": ["x", "y"], "length": 3, "dataset": "qasper",)"
      R"( "language": "en", "all_classes": null, "_id": "id1"})",
      *FindLongBenchTask("qasper"));
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->input, "who?");
  EXPECT_EQ(line->context, std::string("a \xc3\xa9 \0b", 7));
  EXPECT_EQ(line->answers, (std::vector<std::string>{"x", "y"}));
  EXPECT_TRUE(line->classes.empty());
  EXPECT_EQ(line->id, "id1");
}

TEST(LongBenchLine, ReadsClassesAndNeedsNoUnusedField) {
  const Result<LongBenchLine> line = ParseLongBenchLine(
      R"({"input": "", "context": "", "answers": ["a"], "all_classes": ["a", "b"], "_id": "i", "dataset": "trec_e"})",
      *FindLongBenchTask("trec"));
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->classes, (std::vector<std::string>{"a", "b"}));
}

TEST(LongBenchLine, NamesTheFieldThatIsWrong) {
  const std::pair<std::string_view, std::string_view> cases[] = {
      {R"({"context": "", "answers": ["a"], "_id": "i"})", "field \"input\": expected a string, got nothing"},
      {R"({"input": "", "answers": ["a"], "_id": "i"})", "field \"context\": expected a string, got nothing"},
      {R"({"input": "", "context": ["x"], "answers": ["a"], "_id": "i"})",
       "field \"context\": expected a string, got array"},
      {R"({"input": 5, "context": "", "answers": ["a"], "_id": "i"})",
       "field \"input\": expected a string, got number"},
      {R"({"input": "", "context": "", "answers": ["a"], "_id": null})", "field \"_id\": expected a string, got null"},
      {R"({"input": "", "context": "", "_id": "i"})",
       "field \"answers\": expected a list of at least one string, got nothing"},
      {R"({"input": "", "context": "", "answers": "a", "_id": "i"})",
       "field \"answers\": expected a list of at least one string, got string"},
      {R"({"input": "", "context": "", "answers": [], "_id": "i"})",
       "field \"answers\": expected a list of at least one string, got an empty list"},
      {R"({"input": "", "context": "", "answers": ["a", {}], "_id": "i"})",
       "field \"answers\": expected a list of at least one string, got object as element 1"},
      {R"({"input": "", "context": "", "answers": ["a"], "_id": "i"})",
       "field \"all_classes\": expected a list of at least one string, got nothing"},
      {R"({"input": "", "context": "", "answers": ["a"], "_id": "i", "all_classes": null})",
       "field \"all_classes\": expected a list of at least one string, got null"},
      {R"({"input": "", "context": "", "answers": ["a"], "_id": "i", "all_classes": ["a"], "dataset": "qasper"})",
       "field \"dataset\": expected trec, got \"qasper\""},
      {R"({"input": "", "context": "", "answers": ["a"], "_id": "i", "all_classes": ["a"], "dataset": 1})",
       "field \"dataset\": expected a string, got number"},
  };
  for (const auto& [text, message] : cases) {
    const Result<LongBenchLine> line = ParseLongBenchLine(text, *FindLongBenchTask("trec"));
    ASSERT_FALSE(line.ok()) << text;
    EXPECT_EQ(line.status().message(), message) << text;
  }
}

TEST(LongBenchLine, TakesNoClassesOfAnotherType) {
  const Result<LongBenchLine> line = ParseLongBenchLine(
      R"({"input": "", "context": "", "answers": ["a"], "_id": "i", "all_classes": 3})", *FindLongBenchTask("qasper"));
  ASSERT_FALSE(line.ok());
  EXPECT_EQ(line.status().message(), "field \"all_classes\": expected a list of at least one string, got number");
}

TEST(LongBenchLine, RefusesWhatIsNoJsonObject) {
  const std::pair<std::string, std::string_view> cases[] = {
      {"hello", "no JSON (or text that is not UTF-8) at byte 1"},
      {R"({"input": "x)", "no JSON (or text that is not UTF-8) at byte 13"},
      {R"({"input": "x"} {})", "no JSON (or text that is not UTF-8) at byte 16"},
      {"{\"input\": \"\xff\"}", "no JSON (or text that is not UTF-8) at byte 12"},
      {R"({"input": "\ud800"})", "no JSON (or text that is not UTF-8) at byte 18"},
      {R"({"input": 1e999})", "a number beyond the range of double"},
      {"[1]", "expected a JSON object, got array"},
      {"null", "expected a JSON object, got null"},
      {std::string(200000, '['), "no JSON (or text that is not UTF-8) at byte 200001"},
      {std::string(200000, '[') + std::string(200000, ']'), "expected a JSON object, got array"},
  };
  for (const auto& [text, message] : cases) {
    const Result<LongBenchLine> line = ParseLongBenchLine(text, *FindLongBenchTask("qasper"));
    ASSERT_FALSE(line.ok()) << text.substr(0, 40);
    EXPECT_EQ(line.status().message(), message) << text.substr(0, 40);
  }
}

}  // namespace
}  // namespace dropkv::eval
