#include "eval/metrics/single_metrics.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {
namespace {

struct Case {
  std::string_view prediction;
  std::string_view reference;
  double expected;
  std::string_view why;
};

struct MatchCase {
  std::string_view prediction;
  std::vector<std::string> references;
  double all;
  double part;
  std::string_view why;
};

TEST(StringMatch, Golden) {
  using namespace std::string_view_literals;
  const std::vector<MatchCase> cases = {
      {"A1", {"a1", "b2"}, 1.0 / 2, 1, "one of two, case aside"},
      {"a1 and b2", {"a1", "b2"}, 1, 1, "both"},
      {"b3", {"a1", "b2"}, 0, 0, "neither"},
      {"", {"a1"}, 0, 0, "empty prediction"},
      {"", {""}, 1, 1, "the empty reference is in every prediction"},
      {"a1", {}, 0, 0, "no references"},
      {"1,2,3", {"1", "1", "4"}, 2.0 / 3, 1, "a reference that comes twice counts twice"},
      {"01234567", {"123456"}, 1, 1, "inside a longer number"},
      {"12\x01"
       "34",
       {"1234"},
       0,
       0,
       "control characters become newlines: nothing is joined"},
      {"12\x01"
       "34",
       {"12\n34"},
       1,
       1,
       "the newline is there"},
      {"12\x01"
       "34",
       {"12\x01"
        "34"},
       0,
       0,
       "references are left alone"},
      {"12\x00"
       "34"sv,
       {"12", "34"},
       1,
       1,
       "NUL too"},
      {"12\x7f"
       "34",
       {"12\x7f"
        "34"},
       1,
       1,
       "U+007F is none of them"},
      {"12\t34", {"12\t34"}, 0, 0, "a tab is"},
      {" x ", {" x"}, 0, 0, "the prediction is stripped"},
      {"\x01x", {"\nx"}, 0, 0, "and stripped again after the replacement"},
      {"y x", {" x"}, 1, 1, "inner spaces stay"},
      {"\xc3\x89T\xc3\x89", {"\xc3\xa9t\xc3\xa9"}, 1, 1, "e with acute, upper and lower case"},
      {"\xd0\x9c\xd0\x98\xd0\xa0", {"\xd0\xbc\xd0\xb8\xd1\x80"}, 1, 1, "Cyrillic"},
  };
  for (const MatchCase& c : cases) {
    EXPECT_DOUBLE_EQ(StringMatchAll(c.prediction, c.references), c.all) << c.why;
    EXPECT_DOUBLE_EQ(StringMatchPart(c.prediction, c.references), c.part) << c.why;
  }
}

// Expected: 2PR / (P + R) with P = common / predicted words, R = common / expected words.
TEST(F1Score, Golden) {
  const Case cases[] = {
      {"The cat sat", "a cat", 2.0 / 3, "cat sat against cat: P 1/2, R 1"},
      {"cat", "cat", 1, "equal"},
      {"dog", "cat", 0, "nothing common"},
      {"", "cat", 0, "empty prediction"},
      {"cat", "", 0, "empty reference"},
      {"the", "The", 0, "articles only: no words left"},
      {"A an THE cat", "cat", 1, "all three articles go"},
      {"theatre band", "theatre band", 1, "not inside words"},
      {"theatre", "atre", 0, "nor at their start"},
      {"well-known", "wellknown", 1, "punctuation goes without leaving a space"},
      {"the-cat", "cat", 0, "punctuation first: thecat is no article"},
      {"a.n cat", "cat", 1, "but an is one now"},
      {"it's", "its", 1, "apostrophe"},
      {"snake_case", "snakecase", 1, "underscore is punctuation"},
      {"5%, $7", "5 7", 1, "percent, comma and dollar"},
      {"cat cat dog", "cat dog dog", 2.0 / 3, "multiset: cat, dog of three each"},
      {"cat cat", "cat", 2.0 / 3, "cat counts once: P 1/2, R 1"},
      {"dog cat", "cat dog", 1, "order does not matter"},
      {"a b c d", "b c d e f", 2 * 1.0 * 0.6 / 1.6, "b c d of 3 (a goes) and of 5: P 1, R 3/5"},
      {"\xe2\x80\x9c"
       "cat\xe2\x80\x9d",
       "cat", 0, "typographic quotes stay"},
      {"\xe2\x80\x9cthe cat", "cat", 2.0 / 3, "but end a word: the goes, the quote is a word"},
      {"\xc3\x89"
       "COLE",
       "\xc3\xa9"
       "cole",
       1, "ECOLE with acute, upper and lower case"},
      {"\xd0\x9c\xd0\x98\xd0\xa0", "\xd0\xbc\xd0\xb8\xd1\x80", 1, "Cyrillic"},
      {"\xce\x9f\xce\x94\xce\x9f\xce\xa3", "\xce\xbf\xce\xb4\xce\xbf\xcf\x82", 1, "final sigma"},
      {"\xc3\xa9"
       "a cat",
       "cat", 2.0 / 3, "a after e with acute is no article"},
      {"a\xcc\x81 cat", "cat", 2.0 / 3, "a combining mark is no word character: a goes, the mark stays"},
      {"a\xc2\xa0"
       "cat",
       "cat", 1, "a no-break space splits"},
      {"a\xe3\x80\x80"
       "cat",
       "cat", 1, "an ideographic space splits"},
      {"\xff cat", "cat", 2.0 / 3, "a bad byte is a word of its own"},
  };
  for (const Case& c : cases) EXPECT_DOUBLE_EQ(F1Score(c.prediction, c.reference), c.expected) << c.why;
}

struct ClassCase {
  std::string_view prediction;
  std::string_view reference;
  std::vector<std::string> classes;
  double expected;
  std::string_view why;
};

TEST(ClassificationScore, Golden) {
  const std::vector<ClassCase> cases = {
      {"It is a city.", "city", {"city", "mountain"}, 1, "alone"},
      {"city or mountain", "city", {"city", "mountain"}, 1.0 / 2, "two named"},
      {"city, lake, mountain", "city", {"city", "lake", "mountain"}, 1.0 / 3, "three named"},
      {"mountain", "city", {"city", "mountain"}, 0, "another one"},
      {"City", "city", {"city"}, 0, "upper and lower case differ"},
      {"", "city", {"city"}, 0, "empty prediction"},
      {"city", "city", {}, 0, "no classes"},
      {"village", "village", {"city"}, 0, "the truth is no class"},
      {"other city", "other city", {"city", "other city"}, 1, "a proper part of the truth goes"},
      {"other city, lake", "other city", {"city", "other city", "lake"}, 1.0 / 2, "but no other"},
      {"other city", "city", {"city", "other city"}, 1.0 / 2, "what contains the truth stays"},
      {"old river bank",
       "old river bank",
       {"river", "bank", "old river bank"},
       1.0 / 2,
       "two neighbours to be removed: the second is skipped"},
      {"old river bank",
       "old river bank",
       {"river", "bank", "old", "old river bank"},
       1.0 / 2,
       "of three the middle one is skipped"},
      {"old river bank lake",
       "old river bank",
       {"river", "lake", "bank", "old river bank"},
       1.0 / 2,
       "not neighbours: both go, lake and the truth are left"},
      {"old bank", "old bank", {"bank", "bank", "old bank"}, 1.0 / 2, "a class that is there twice"},
      {"old bank", "old bank", {"old bank", "bank"}, 1, "the last one is reached"},
  };
  for (const ClassCase& c : cases)
    EXPECT_DOUBLE_EQ(ClassificationScore(c.prediction, c.reference, c.classes), c.expected) << c.why;
}

TEST(RetrievalScore, Golden) {
  const Case cases[] = {
      {"Paragraph 19", "Paragraph 19", 1, "as asked for"},
      {"19", "Paragraph 19", 1, "the number alone"},
      {"Paragraph 19 or 20", "Paragraph 19", 1.0 / 2, "one of two runs"},
      {"19, 19 and 3", "Paragraph 19", 2.0 / 3, "each run counts"},
      {"119", "Paragraph 19", 0, "a run is taken whole"},
      {"019", "Paragraph 19", 0, "as text, not as a number"},
      {"19.5", "Paragraph 19", 1.0 / 2, "19 and 5"},
      {"nineteen", "Paragraph 19", 0, "no digits"},
      {"", "Paragraph 19", 0, "empty prediction"},
      {"7", "Paragraph x, Paragraph 7, Paragraph 8", 1, "the first label with digits"},
      {"19", "19", 0, "the truth lacks the label"},
      {"19 and \xef\xbc\x91\xef\xbc\x99", "Paragraph 19", 1.0 / 2, "full-width digits are a run, another one"},
  };
  for (const Case& c : cases) EXPECT_DOUBLE_EQ(RetrievalScore(c.prediction, c.reference), c.expected) << c.why;
}

TEST(CountScore, Golden) {
  const Case cases[] = {
      {"11", "11", 1, "right"},
      {"There are 11 of 12.", "11", 1.0 / 2, "one of two runs"},
      {"12", "11", 0, "wrong"},
      {"111", "11", 0, "a run is taken whole"},
      {"-11", "11", 1, "the sign is none of it"},
      {"eleven", "11", 0, "no digits"},
      {"", "11", 0, "empty prediction"},
      {"11", "11 ", 0, "the truth is compared as it is"},
      {"1,100", "100", 1.0 / 2, "1 and 100"},
  };
  for (const Case& c : cases) EXPECT_DOUBLE_EQ(CountScore(c.prediction, c.reference), c.expected) << c.why;
}

// Expected: round(100 * (1 - d / T)) / 100 with d = T - 2 * LCS.
TEST(EditSimilarity, Golden) {
  const std::string x39(39, 'x');
  const std::string y39(39, 'y');
  const std::string x37(37, 'x');
  const std::string y37(37, 'y');
  const std::string one_of_forty = x39 + "a";
  const std::string other_of_forty = y39 + "a";
  const std::string three_of_forty = x37 + "aaa";
  const std::string other_three = y37 + "aaa";
  const Case cases[] = {
      {"abc", "abc", 1, "equal"},
      {"", "", 1, "equal, both empty"},
      {"", "abc", 0, "empty prediction"},
      {"abc", "", 0, "empty reference"},
      {"abc", "xyz", 0, "nothing common"},
      {"abc", "abd", 0.67, "LCS 2 of T 6"},
      {"kitten", "sitting", 0.62, "LCS ittn, T 13: 0.615"},
      {"  x", "x", 0.5, "white space counts: LCS 1 of T 4"},
      {"\n\nx = 1\ny = 2", "x = 1", 1, "first line after leading newlines"},
      {"# note\nx = 1", "x = 1", 1, "not the comment of Python"},
      {"// note\nx = 1", "x = 1", 1, "nor of C"},
      {"```python\nx = 1\n```", "x = 1", 1, "nor the fence"},
      {"x = 1  # one\ny", "x = 1", 0, "a comment behind code drops the line; y has nothing common"},
      {"# a\n# b", "x = 1", 0, "no line left"},
      {"# a", "", 1, "no line left, and none expected"},
      {"x`y\n\nz", "z", 0, "the empty line is a line"},
      {"a/b", "a/b", 1, "one slash is no comment"},
      {"x = 1\r\ny", "x = 1", 0.91, "the carriage return stays: LCS 5 of T 11"},
      {"\xc3\xa9", "e", 0, "code points, not bytes"},
      {"n\xc3\xa9", "ne", 0.5, "LCS 1 of T 4"},
      {"abcdefgh", "aijklmno", 0.12, "LCS 1 of T 16: 12.5 to even"},
      {"abcdefgh", "abcijklm", 0.38, "LCS 3 of T 16: 37.5 to even"},
      {one_of_forty, other_of_forty, 0.03, "LCS 1 of T 80: 1 - 78/80 lies just above 2.5%"},
      {three_of_forty, other_three, 0.07, "LCS 3 of T 80: 1 - 74/80 lies just below 7.5%"},
  };
  for (const Case& c : cases) EXPECT_DOUBLE_EQ(EditSimilarity(c.prediction, c.reference), c.expected) << c.why;
}

}  // namespace
}  // namespace dropkv::eval
