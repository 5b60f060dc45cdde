#include <map>

#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

struct Program {
  std::map<std::string, std::string> values;  // of the variables
  std::vector<std::string> assigned;          // in order
  std::vector<size_t> lines_before;           // of noise, each assignment
  size_t lines = 0;
};

// Runs the assignments of a text as a program.
Program Interpret(const std::string& text) {
  Program run;
  for (const std::string& line : Split(text, "\n")) {
    if (!line.starts_with("VAR ")) {
      ++run.lines;
      continue;
    }
    const std::vector<std::string> words = Split(line, " ");
    EXPECT_TRUE(words.size() == 4 || words.size() == 5) << line;
    EXPECT_EQ(words[2], "=");
    EXPECT_EQ(run.values.count(words[1]), 0U) << "assigned twice: " << line;
    if (words.size() == 5) EXPECT_EQ(run.values.count(words[4]), 1U) << "not yet assigned: " << line;
    run.values[words[1]] = words.size() == 5 ? run.values[words[4]] : words[3];
    run.assigned.push_back(words[1]);
    run.lines_before.push_back(run.lines);
  }
  return run;
}

std::string Between(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t from = text.find(begin);
  EXPECT_NE(from, std::string::npos) << begin;
  const size_t at = from + begin.size();
  return text.substr(at, text.find(end, at) - at);
}

TEST(Variables, AChainThatCanBeFollowed) {
  const std::string instruction = "Follow the chain(s) of variable assignments that are hidden in the text below.\n\n";
  for (const Sample& sample : GenerateTask("vt")) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    ExpectFits(sample, CountPieces);
    EXPECT_EQ(sample.max_tokens, 30);
    const std::vector<std::string> parts = Split(sample.context, instruction);
    ASSERT_EQ(parts.size(), 3U);  // nothing, the example, the text
    const std::string value = Between(sample.question, "assigned the value ", " in the text");
    EXPECT_EQ(value.size(), 5U);
    const Program run = Interpret(parts[2]);
    EXPECT_EQ(run.assigned, sample.references);
    ASSERT_EQ(run.assigned.size(), 5U);
    for (const std::string& name : run.assigned) {
      EXPECT_EQ(name.size(), 5U);
      EXPECT_EQ(run.values.at(name), value);
      EXPECT_EQ(Occurrences(sample.context, name), name == run.assigned.back() ? 1U : 2U) << name;
    }
    EXPECT_EQ(Occurrences(sample.context, value), 1U);
    for (size_t i = 0; i < run.assigned.size(); ++i) {
      EXPECT_DOUBLE_EQ(sample.depths.at(i),
                       100.0 * static_cast<double>(run.lines_before[i]) / static_cast<double>(run.lines));
      if (i > 0) EXPECT_GT(run.lines_before[i], run.lines_before[i - 1]) << "assignments side by side";
    }
    EXPECT_EQ(
        sample.prefix,
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        "value " +
            value + ", they are:");
  }
}

TEST(Variables, AnExampleWithItsAnswerGoesBefore) {
  const Sample sample = GenerateTask("vt", 1).at(0);
  const std::string example = sample.context.substr(0, sample.context.find("\n\nFollow"));
  const std::string value = Between(example, "assigned the value ", " in the text");
  EXPECT_EQ(sample.question.find(value), std::string::npos);
  const std::string text = Between(example, "below.\n\n", "Question: ");
  const Program run = Interpret(text);
  EXPECT_EQ(run.lines, 10U);
  std::string answer;
  for (const std::string& name : run.assigned) {
    EXPECT_EQ(name.size(), 3U);
    EXPECT_EQ(run.values.at(name), value);
    answer += " " + name;
  }
  EXPECT_EQ(run.assigned.size(), 5U);
  EXPECT_TRUE(example.ends_with("they are:" + answer)) << example;
}

}  // namespace
}  // namespace dropkv::eval
