#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

struct FoundNeedle {
  std::string key;
  std::string value;
  size_t before = 0;  // sentences or lines of hay before it
};

struct FoundHay {
  std::vector<FoundNeedle> needles;
  size_t units = 0;  // sentences or lines that are not needles
};

constexpr std::string_view kOpening = "One of the special magic ";

// One of the special magic numbers for KEY is: VALUE.
FoundNeedle ParseNeedle(const std::string& text) {
  const std::vector<std::string> words = Split(text.substr(kOpening.size()), " ");
  EXPECT_EQ(words.size(), 5U) << text;
  EXPECT_TRUE(words[0] == "numbers" || words[0] == "uuids") << text;
  EXPECT_EQ(words[1] + words[3], "foris:") << text;
  FoundNeedle needle{words[2], words[4]};
  if (needle.value.ends_with('.')) needle.value.pop_back();
  return needle;
}

// The built-in prose has a full stop and a blank at the end of sentences only.
FoundHay ParseHay(const Sample& sample, const std::string& between) {
  FoundHay hay;
  const std::string text = sample.context.substr(sample.context.find('\n') + 1);
  for (const std::string& unit : Split(text.substr(0, text.size() - 1), between)) {
    const size_t at = unit.find(kOpening);
    if (at != 0) ++hay.units;
    if (at == std::string::npos) continue;
    hay.needles.push_back(ParseNeedle(unit.substr(at)));  // before it a last sentence that was cut, if at > 0
    hay.needles.back().before = hay.units;
  }
  return hay;
}

void ExpectItem(Item item, const std::string& text) {
  if (item == Item::kNumber) {
    EXPECT_EQ(text.size(), 7U);
    EXPECT_EQ(text.find_first_not_of("0123456789"), std::string::npos) << text;
    EXPECT_NE(text[0], '0');
  } else if (item == Item::kUuid) {
    ASSERT_EQ(text.size(), 36U);
    for (size_t i = 0; i < text.size(); ++i) {
      const bool hyphen = i == 8 || i == 13 || i == 18 || i == 23;
      EXPECT_TRUE(hyphen ? text[i] == '-' : std::isxdigit(static_cast<unsigned char>(text[i])) != 0) << text;
    }
    EXPECT_EQ(text[14], '4');
    EXPECT_NE(std::string("89ab").find(text[19]), std::string::npos) << text;
  } else {
    EXPECT_EQ(Split(text, "-").size(), 2U) << text;
  }
}

void ExpectQuestion(const NeedleShape& shape, const Sample& sample, const std::vector<std::string>& keys) {
  const std::string kind = shape.value == Item::kUuid ? "uuid" : "number";
  if (shape.queries * shape.values == 1) {
    EXPECT_EQ(sample.question,
              "What is the special magic " + kind + " for " + keys[0] + " mentioned in the provided text?");
    EXPECT_EQ(sample.prefix, " The special magic " + kind + " for " + keys[0] + " mentioned in the provided text is");
    return;
  }
  const std::string query = keys.size() == 1 ? keys[0] : keys[0] + ", " + keys[1] + ", " + keys[2] + ", and " + keys[3];
  EXPECT_EQ(sample.question,
            "What are all the special magic " + kind + "s for " + query + " mentioned in the provided text?");
  EXPECT_EQ(sample.prefix, " The special magic " + kind + "s for " + query + " mentioned in the provided text are");
}

// The units before a needle at `depth` of a haystack of so many.
size_t UnitsBefore(size_t units, double depth) { return static_cast<size_t>(static_cast<double>(units) * depth / 100); }

void ExpectDepth(double depth, const FoundNeedle& needle, const FoundHay& hay, bool among_needles) {
  bool known = false;
  for (int step = 0; step < 40; ++step) known |= depth == std::round(step * 100.0 / 39);
  EXPECT_TRUE(known) << depth;
  if (!among_needles) EXPECT_EQ(needle.before, UnitsBefore(hay.units, depth)) << depth << " of " << hay.units;
}

class NeedlesTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NeedlesTest, HideEveryValueOnceAtTheDepthsStated) {
  const NeedleShape& shape = FindRulerTask(GetParam())->needles;
  const bool among_needles = shape.hay == Hay::kNeedles;
  for (const Sample& sample : GenerateTask(GetParam())) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    ExpectFits(sample, CountPieces);
    const FoundHay hay = ParseHay(sample, shape.hay == Hay::kEssay ? ". " : "\n");
    std::set<std::string> keys;
    std::set<std::string> values;
    std::vector<std::string> asked;
    for (const FoundNeedle& needle : hay.needles) {
      keys.insert(needle.key);
      values.insert(needle.value);
      EXPECT_EQ(Occurrences(PromptOf(sample), needle.value), 1U) << needle.value;
    }
    EXPECT_EQ(values.size(), hay.needles.size());
    if (among_needles) {
      EXPECT_EQ(keys.size(), hay.needles.size());
      EXPECT_GT(hay.needles.size(), 20U);
      EXPECT_EQ(hay.units, 0U);
    } else {
      EXPECT_EQ(keys.size(), static_cast<size_t>(shape.keys));
      EXPECT_EQ(hay.needles.size(), static_cast<size_t>(shape.keys * shape.values));
      EXPECT_GT(hay.units, 20U);
    }
    ASSERT_EQ(sample.references.size(), static_cast<size_t>(shape.queries * shape.values));
    ASSERT_EQ(sample.depths.size(), sample.references.size());
    for (size_t i = 0; i < sample.references.size(); ++i) {
      const auto needle = std::find_if(hay.needles.begin(), hay.needles.end(),
                                       [&](const FoundNeedle& each) { return each.value == sample.references[i]; });
      ASSERT_NE(needle, hay.needles.end()) << sample.references[i];
      ExpectItem(shape.key, needle->key);
      ExpectItem(shape.value, needle->value);
      ExpectDepth(sample.depths[i], *needle, hay, among_needles);
      if (among_needles) {
        const auto before = static_cast<size_t>(needle - hay.needles.begin());
        EXPECT_EQ(before, UnitsBefore(hay.needles.size() - 1, sample.depths[i]));
      }
      if (i % static_cast<size_t>(shape.values) == 0) asked.push_back(needle->key);
      EXPECT_EQ(needle->key, asked.back());
    }
    ExpectQuestion(shape, sample, asked);
  }
}

INSTANTIATE_TEST_SUITE_P(All, NeedlesTest,
                         ::testing::Values("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
                                           "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery"),
                         [](const auto& test) { return test.param; });

TEST(Needles, DepthsCoverTheWholeHaystack) {
  RulerOptions options;
  options.tasks = {"niah_single_1"};
  options.lengths = {1024};
  options.samples = 200;
  std::array<int, 4> quarters{};
  for (const Sample& sample : Generate(options).samples) {
    quarters[std::min<size_t>(3, static_cast<size_t>(sample.depths.at(0) / 25))]++;
  }
  for (const int count : quarters) EXPECT_GT(count, 25);  // 50 expected, more than four standard deviations below
}

// The one that is asked for is any of the four, not always the first.
TEST(Needles, DistractorsStandOnBothSides) {
  RulerOptions options;
  options.tasks = {"niah_multikey_1"};
  options.lengths = {1024};
  options.samples = 40;
  std::array<int, 4> places{};
  for (const Sample& sample : Generate(options).samples) {
    const FoundHay hay = ParseHay(sample, ". ");
    for (size_t i = 0; i < hay.needles.size(); ++i) {
      if (hay.needles[i].value == sample.references.at(0)) places.at(i)++;
    }
  }
  for (const int count : places) EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace dropkv::eval
