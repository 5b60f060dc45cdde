#include "eval/longbench/prompt.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace dropkv::eval {
namespace {

// A byte is a token.
int32_t CountBytes(std::string_view text) { return static_cast<int32_t>(text.size()); }

std::string CutBytes(std::string_view text, int32_t tokens) {
  const auto half = static_cast<size_t>(tokens / 2);
  return std::string(text.substr(0, half)) + std::string(text.substr(text.size() - half));
}

Prompt Cut(std::string_view context, std::string_view question, int32_t max_length) {
  Prompt prompt{.text = std::string(context) + std::string(question), .context_end = context.size()};
  return CutMiddle(std::move(prompt), max_length, CountBytes, CutBytes);
}

std::string Context(const Prompt& prompt) { return prompt.text.substr(0, prompt.context_end); }
std::string Question(const Prompt& prompt) { return prompt.text.substr(prompt.context_end); }

TEST(FillTemplate, FillsAndSplitsAfterTheContext) {
  const Result<Prompt> prompt = FillTemplate("Read: {context}\nQ: {input}\nA:", "some text", "what?");
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(Context(*prompt), "Read: some text");
  EXPECT_EQ(Question(*prompt), "\nQ: what?\nA:");
  EXPECT_FALSE(prompt->cut);
}

TEST(FillTemplate, BracesInValuesAreText) {
  const Result<Prompt> prompt = FillTemplate("{context}|{input}", "if (a) { {input} }", "{context} }{");
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(Context(*prompt), "if (a) { {input} }");
  EXPECT_EQ(Question(*prompt), "|{context} }{");
}

TEST(FillTemplate, DoubledBracesAreBraces) {
  const Result<Prompt> prompt = FillTemplate("{{{context}}} }}{{input}}", "c", "i");
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(prompt->text, "{c} }{input}");
  EXPECT_EQ(Context(*prompt), "{c");
}

TEST(FillTemplate, SplitsAfterTheLastContextAndTakesInputBefore) {
  const Result<Prompt> prompt = FillTemplate("{input}:{context},{context}.", "c", "i");
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(Context(*prompt), "i:c,c");
  EXPECT_EQ(Question(*prompt), ".");
}

TEST(FillTemplate, SaysWhatIsWrong) {
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"{input}", "no field {context}"},
      {"", "no field {context}"},
      {"{{context}}", "no field {context}"},
      {"{context} {length}", "the field \"length\", expected context or input"},
      {"{context} {}", "the field \"\", expected context or input"},
      {"{context} {input", "no \"}\" to the \"{\" at byte 10"},
      {"{context} {", "no \"}\" to the \"{\" at byte 10"},
      {"{context} }", "a single \"}\" at byte 10, expected \"}}\""},
  };
  for (const auto& [pattern, message] : cases) {
    const Result<Prompt> prompt = FillTemplate(pattern, "c", "i");
    ASSERT_FALSE(prompt.ok()) << pattern;
    EXPECT_EQ(prompt.status().message(), message) << pattern;
    EXPECT_EQ(prompt.status().code(), Code::kInvalidArgument);
  }
}

TEST(CutMiddle, LeavesWhatFits) {
  const Prompt prompt = Cut("0123456789", "abcd", 14);
  EXPECT_EQ(Context(prompt), "0123456789");
  EXPECT_EQ(Question(prompt), "abcd");
  EXPECT_FALSE(prompt.cut);
}

TEST(CutMiddle, KeepsTheWholeQuestion) {
  const Prompt prompt = Cut("0123456789", "abcd", 13);  // 012345 + 89abcd
  EXPECT_EQ(Context(prompt), "01234589");
  EXPECT_EQ(Question(prompt), "abcd");
  EXPECT_TRUE(prompt.cut);
  EXPECT_FALSE(prompt.question_cut);
}

TEST(CutMiddle, EndsExactlyAtTheQuestion) {
  const Prompt prompt = Cut("0123456789", "abcd", 8);
  EXPECT_EQ(Context(prompt), "0123");
  EXPECT_EQ(Question(prompt), "abcd");
  EXPECT_FALSE(prompt.question_cut);
}

TEST(CutMiddle, TakesTheRestOfTheQuestionWhereItsStartIsGone) {
  const Prompt prompt = Cut("0123456789", "abcdefgh", 10);  // 01234 + defgh
  EXPECT_EQ(Context(prompt), "01234");
  EXPECT_EQ(Question(prompt), "defgh");
  EXPECT_TRUE(prompt.question_cut);
}

TEST(CutMiddle, KeepsTheContextsEndThatLiesBeforeTheCut) {
  const Prompt prompt = Cut("012", "abcdefghijkl", 10);  // 012ab + hijkl
  EXPECT_EQ(Context(prompt), "012");
  EXPECT_EQ(Question(prompt), "abhijkl");
  EXPECT_TRUE(prompt.question_cut);
}

TEST(CutMiddle, SplitsNoCharacter) {
  // The rest of the question begins inside the second euro sign: its last byte goes to the context.
  const Prompt prompt = Cut("0123456789",
                            "\xe2\x82\xac\xe2\x82\xac"
                            "ab",
                            6);  // 012 + \xac ab
  EXPECT_EQ(Context(prompt), "012\xac");
  EXPECT_EQ(Question(prompt), "ab");
}

TEST(CutMiddle, SurvivesACutterThatWritesAnotherText) {
  Prompt prompt{.text = "0123456789abcd", .context_end = 10};
  prompt = CutMiddle(std::move(prompt), 4, CountBytes, [](std::string_view, int32_t) { return std::string("?!"); });
  EXPECT_EQ(Context(prompt), "?!");
  EXPECT_EQ(Question(prompt), "");
  prompt = CutMiddle(Prompt{.text = "abc", .context_end = 1}, 2, CountBytes,
                     [](std::string_view, int32_t) { return std::string(); });
  EXPECT_EQ(prompt.text, "");
  EXPECT_EQ(prompt.context_end, 0U);
}

}  // namespace
}  // namespace dropkv::eval
