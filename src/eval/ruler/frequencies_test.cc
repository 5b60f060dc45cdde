#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

using Counts = std::map<std::string, int>;

// "1. word 2. word": the words' counts; the numbers must be 1, 2, 3, ...
Counts CountList(const std::string& list) {
  Counts counts;
  const std::vector<std::string> parts = Split(list, " ");
  EXPECT_EQ(parts.size() % 2, 0U);
  for (size_t i = 0; i + 1 < parts.size(); i += 2) {
    EXPECT_EQ(parts[i], std::to_string(i / 2 + 1) + ".");
    counts[parts[i + 1]]++;
  }
  return counts;
}

std::set<std::string> WordsWithCount(const Counts& counts, int count) {
  std::set<std::string> words;
  for (const auto& [word, each] : counts) {
    if (each == count) words.insert(word);
  }
  return words;
}

// Lines of the prompt: instruction, example list, its question with the answer, instruction, list.
TEST(CommonWords, TenWordsComeMoreOften) {
  for (const Sample& sample : GenerateTask("cwe")) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    ExpectFits(sample, CountPieces);
    const bool brief = sample.length < 4096;
    const std::vector<std::string> lines = Split(sample.context, "\n");
    ASSERT_EQ(lines.size(), 5U);
    EXPECT_EQ(lines[0], lines[3]);
    const Counts counts = CountList(lines[4]);
    const std::set<std::string> common = WordsWithCount(counts, brief ? 6 : 30);
    EXPECT_EQ(common.size(), 10U);
    EXPECT_EQ(WordsWithCount(counts, brief ? 1 : 3).size(), counts.size() - 10);
    EXPECT_EQ(std::set<std::string>(sample.references.begin(), sample.references.end()), common);
    EXPECT_EQ(sample.references.size(), 10U);

    const Counts example = CountList(lines[1]);
    const std::set<std::string> example_common = WordsWithCount(example, brief ? 3 : 10);
    EXPECT_EQ(example.size(), brief ? 20U : 40U);
    EXPECT_EQ(example_common.size(), 10U);
    EXPECT_EQ(WordsWithCount(example, brief ? 1 : 3).size(), example.size() - 10);
    for (const auto& [word, count] : example) EXPECT_EQ(counts.count(word), 0U) << word;
    const std::string question_and_prefix = sample.question + sample.prefix + " ";
    ASSERT_TRUE(lines[2].starts_with(question_and_prefix));
    const Counts answer = CountList(lines[2].substr(question_and_prefix.size()));
    EXPECT_EQ(WordsWithCount(answer, 1), example_common);
    EXPECT_TRUE(sample.depths.empty());
  }
}

TEST(CommonWords, LongListsGoOnWithFurtherWords) {
  RulerOptions options;
  options.tasks = {"cwe"};
  options.lengths = {65536};
  options.samples = 1;
  const Sample sample = Generate(options).samples.at(0);
  const Counts counts = CountList(Split(sample.context, "\n").at(4));
  EXPECT_GT(counts.size(), 1000U);  // more than there are nouns, adjectives and verbs
  EXPECT_EQ(WordsWithCount(counts, 3).size(), counts.size() - 10);
}

std::vector<std::pair<int, std::string>> Ranked(const std::string& text) {
  Counts counts;
  for (const std::string& word : Split(text, " ")) counts[word]++;
  std::vector<std::pair<int, std::string>> ranked;
  for (const auto& [word, count] : counts) ranked.emplace_back(count, word);
  std::sort(ranked.rbegin(), ranked.rend());
  return ranked;
}

// Is there a number of words N with floor(N / (r^2 zeta(2))) = count of rank r for the first ranks?
bool FollowZipf(const std::vector<std::pair<int, std::string>>& ranked) {
  const double zeta = std::numbers::pi * std::numbers::pi / 6;
  for (int words = static_cast<int>(ranked[0].first * zeta); words <= (ranked[0].first + 1) * zeta; ++words) {
    bool all = true;
    for (int rank = 1; rank <= 8; ++rank) {
      all &= static_cast<int>(words / (rank * rank * zeta)) == ranked[static_cast<size_t>(rank) - 1].first;
    }
    if (all) return true;
  }
  return false;
}

TEST(FrequentWords, FollowZipfsLawWithoutTies) {
  for (const Sample& sample : GenerateTask("fwe")) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    ExpectFits(sample, CountPieces);
    const size_t begin = sample.context.find("frequent ones. ") + std::string("frequent ones. ").size();
    const auto ranked = Ranked(sample.context.substr(begin, sample.context.size() - 1 - begin));
    ASSERT_GT(ranked.size(), 8U);
    EXPECT_TRUE(FollowZipf(ranked));
    EXPECT_EQ(ranked[0].second, "...");
    for (size_t rank = 1; rank <= 4; ++rank) EXPECT_GT(ranked[rank - 1].first, ranked[rank].first);
    EXPECT_EQ(sample.references, (std::vector<std::string>{ranked[1].second, ranked[2].second, ranked[3].second}));
    for (size_t i = 1; i < ranked.size(); ++i) {
      EXPECT_EQ(ranked[i].second.size(), 6U);
      EXPECT_EQ(ranked[i].second.find_first_not_of("abcdefghijklmnopqrstuvwxyz"), std::string::npos);
    }
    EXPECT_TRUE(sample.question.starts_with("Question: "));
  }
}

}  // namespace
}  // namespace dropkv::eval
