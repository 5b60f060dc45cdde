#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "eval/metrics/single_metrics.h"

namespace dropkv::eval {
namespace {

// The package's F of `common` words in the union and the distinct words of either side.
constexpr double F(double common, double predicted, double expected) {
  const double p = common / predicted;
  const double r = common / expected;
  return 2 * p * r / (p + r + 1e-8);
}

struct Case {
  std::string_view prediction;
  std::string_view reference;
  double expected;
  std::string_view why;
};

// Expected values: F(words in the union of the LCSs, distinct words predicted, distinct words expected), by hand.
constexpr Case kCases[] = {
    {"the cat sat", "the cat sat", F(3, 3, 3), "equal: 2 / (2 + 1e-8), not 1"},
    {"the cat sat", "the cat ran fast", F(2, 3, 4), "the, cat"},
    {"fast cat", "the cat ran fast", F(1, 2, 4), "out of order: one of the two"},
    {"d c b a", "a b c d", F(1, 4, 4), "reversed"},
    {"the the the", "the the", F(1, 1, 1), "words as a set"},
    {"a b a", "a b", F(2, 2, 2), "distinct words below the line"},
    {"a b. c d", "a b c d", F(4, 4, 4), "two sentences, one union"},
    {"a b c d", "a b. c d", F(4, 4, 4), "two sentences of the reference"},
    {"c d. a b", "a b. c d", F(4, 4, 4), "order of sentences does not matter"},
    {"b a. a", "a b", F(2, 2, 2), "tie: left, so (a b, b a) gives b; the second gives a"},
    {"b a. b", "a b", F(1, 2, 2), "tie: b again"},
    {"a b. b", "b a", F(2, 2, 2), "tie: (b a, a b) gives a; the second gives b"},
    {"5.3", "3.5", F(2, 2, 2), "a decimal point ends a sentence"},
    {"The cat", "the cat", F(1, 2, 2), "upper and lower case differ"},
    {"cat, dog", "cat dog", F(1, 2, 2), "punctuation belongs to the word"},
    {"cat dog.", "cat dog", F(2, 2, 2), "nothing after the last full stop"},
    {"cat...dog", "cat dog", F(2, 2, 2), "empty sentences are dropped"},
    {"a\nb\t c", "a b c", F(3, 3, 3), "any white space"},
    {"a\xe3\x80\x80"
     "b\xc2\xa0"
     "c",
     "a b c", F(3, 3, 3), "U+3000 and U+00A0 are white space"},
    {"x y", "a b", 0, "nothing common"},
    {"", "a b", 0, "no sentence predicted"},
    {"...", "a b", 0, "nor here"},
    {"a b", "", 0, "no sentence expected"},
    {"", "", 0, "on neither side"},
    {" ", " ", F(1, 1, 1), "white space is a sentence of one empty word"},
    {"a. .", "a", F(1, 2, 1), "a and the empty word"},
    {"a. .", "a. . .", F(2, 2, 2), "the empty word is common"},
};

TEST(RougeL, Golden) {
  for (const Case& c : kCases) EXPECT_NEAR(RougeL(c.prediction, c.reference), c.expected, 1e-14) << c.why;
}

std::string Words(int count, std::string_view prefix) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += prefix;
    text += std::to_string(i) + " ";
  }
  return text;
}

// The way back of two equal sentences takes as many steps as they have words.
TEST(RougeL, RecursionLimitGivesZero) {
  EXPECT_NEAR(RougeL(Words(990, "w"), Words(990, "w")), F(990, 990, 990), 1e-14);
  EXPECT_EQ(RougeL(Words(991, "w"), Words(991, "w")), 0);
  // Nothing common: all the way to the left, then done; the longer side alone does not reach the limit.
  EXPECT_NEAR(RougeL("x. " + Words(990, "w"), Words(2000, "v") + "x"), F(1, 991, 2001), 1e-14);
  EXPECT_EQ(RougeL("x. " + Words(991, "w"), Words(2000, "v") + "x"), 0);
  // One pair of sentences at the limit is enough, whatever the others give.
  EXPECT_EQ(RougeL("a b. " + Words(991, "w"), "a b. " + Words(991, "w")), 0);
}

}  // namespace
}  // namespace dropkv::eval
