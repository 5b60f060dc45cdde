#include <set>

#include "eval/ruler/corpus.h"
#include "eval/ruler/haystack.h"
#include "eval/ruler/prose.h"
#include "eval/ruler/ruler_test_case.h"
#include "eval/ruler/word_lists.h"

namespace dropkv::eval {
namespace {

using Views = std::vector<std::string_view>;

Views Sentences(const Haystack& haystack) { return haystack.Take(0, static_cast<int64_t>(haystack.pieces())); }

TEST(Haystack, SplitsSentences) {
  const Haystack haystack(
      "Mr. A. Smith came.  He\nsaid \"Go!\" and left. \"Why?\" she asked. No. 5 is e.g. here. \t(It ends.) Dr. Who? "
      "yes. 7 "
      "more");
  EXPECT_EQ(Sentences(haystack), (Views{"Mr. A. Smith came.", "He said \"Go!\" and left.", "\"Why?\" she asked.",
                                        "No. 5 is e.g. here.", "(It ends.)", "Dr. Who? yes.", "7 more"}));
  EXPECT_EQ(haystack.pieces(), 24U);
}

TEST(Haystack, CutsTheLastSentenceAndBeginsAgain) {
  const Haystack haystack("One two. Three four five. Six.");
  EXPECT_EQ(haystack.sentences(), 3U);
  EXPECT_EQ(haystack.Take(1, 2), (Views{"Three four"}));
  EXPECT_EQ(haystack.Take(1, 7), (Views{"Three four five.", "Six.", "One two.", "Three"}));
  EXPECT_EQ(haystack.Take(2, 14),
            (Views{"Six.", "One two.", "Three four five.", "Six.", "One two.", "Three four five.", "Six.", "One"}));
}

TEST(Haystack, LongRunsAreCutBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "\xE5\xAD\x97";  // three bytes a character
  const Haystack haystack(text);
  EXPECT_EQ(haystack.pieces(), 5U);  // 150 bytes, 30 a piece
  EXPECT_EQ(haystack.Take(0, 1).at(0).size(), 30U);
  EXPECT_EQ(Sentences(haystack), Views{text});
  const Haystack run(std::string(5000, 'a'));
  EXPECT_EQ(run.sentences(), 2U);  // 157 pieces of 32 letters, 128 of them in the first
  EXPECT_EQ(Sentences(run).at(0).size(), 4096U);
  std::string list;
  for (int i = 0; i < 1000; ++i) list += "item ";
  EXPECT_EQ(Haystack(list).sentences(), 8U);  // 128 words at most
}

TEST(Haystack, WhiteSpaceIsFolded) {
  EXPECT_EQ(FoldWhiteSpace("\r\n a\t\tb \x01 c\x7F\n"), "a b c");
  EXPECT_EQ(FoldWhiteSpace(" \n"), "");
  EXPECT_EQ(Haystack(" \n").sentences(), 0U);
}

TEST(Haystack, InvalidUtf8IsFound) {
  EXPECT_EQ(FirstInvalidUtf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"), 10U);
  EXPECT_EQ(FirstInvalidUtf8("ab\xA3"), 2U);            // Latin-1
  EXPECT_EQ(FirstInvalidUtf8("a\xC3"), 1U);             // cut
  EXPECT_EQ(FirstInvalidUtf8("\xC0\x80"), 0U);          // overlong
  EXPECT_EQ(FirstInvalidUtf8("\xE0\x80\x80"), 0U);      // overlong
  EXPECT_EQ(FirstInvalidUtf8("\xED\xA0\x80"), 0U);      // surrogate
  EXPECT_EQ(FirstInvalidUtf8("\xF4\x90\x80\x80"), 0U);  // past U+10FFFF
}

TEST(Prose, NoSentenceComesTwiceIn128KTokens) {
  const std::string prose = BuiltInProse(kProseSentences);
  EXPECT_GT(CountPieces(prose), 131072);
  const Haystack haystack(prose);
  EXPECT_EQ(haystack.sentences(), static_cast<size_t>(kProseSentences));
  std::set<std::string_view> seen;
  for (const std::string_view sentence : Sentences(haystack)) {
    EXPECT_TRUE(seen.insert(sentence).second) << sentence;
    EXPECT_TRUE(sentence[0] >= 'A' && sentence[0] <= 'Z' && sentence.ends_with('.')) << sentence;
    EXPECT_EQ(sentence.find('.'), sentence.size() - 1) << sentence;
  }
  EXPECT_EQ(prose.find_first_of("0123456789"), std::string::npos);
  EXPECT_TRUE(prose.starts_with(BuiltInProse(5)));
}

TEST(WordLists, BuiltInOnesSuffice) {
  const WordLists words = BuiltInWords();
  EXPECT_GE(words.adjectives.size(), 200U);
  EXPECT_GE(words.nouns.size(), 200U);
  EXPECT_GE(words.common.size() + words.further.size(), 40000U);
  std::set<std::string> seen;
  for (const std::vector<std::string>* list : {&words.common, &words.further}) {
    for (const std::string& word : *list) {
      EXPECT_TRUE(seen.insert(word).second) << word;
      EXPECT_EQ(word.find_first_not_of("abcdefghijklmnopqrstuvwxyz"), std::string::npos) << word;
    }
  }
}

TEST(WordLists, LinesThatAreNoWordsAreLeftOut) {
  EXPECT_EQ(ReadWords("Apple\r\nice cream\nAA's\nwell-being\napple\n\n-x\npear"),
            (std::vector<std::string>{"Apple", "well-being", "pear"}));
}

class CorpusTest : public FolderTest {
 protected:
  Result<Corpus> Load(bool essay, bool words) const {
    CorpusParts parts;
    parts.essay = essay;
    parts.words = words;
    return LoadCorpus(folder_.string(), parts);
  }
};

TEST_F(CorpusTest, HaystackFilesAreJoinedInTheOrderOfTheirPaths) {
  Write("haystack/b/two.txt", "Second text.");
  Write("haystack/a.txt",
        "\xEF\xBB\xBF"
        "First text.");
  Write("haystack/c.md", "No text.");
  const Result<Corpus> corpus = Load(true, false);
  ASSERT_TRUE(corpus.ok()) << corpus.status().message();
  EXPECT_EQ(Sentences(corpus->essay), (Views{"First text.", "Second text."}));
  EXPECT_EQ(corpus->essay_name, "haystack/a.txt, haystack/b/two.txt");
  const std::vector<std::string> files = Split(corpus->files, "\n");
  ASSERT_EQ(files.size(), 2U);
  EXPECT_TRUE(files[0].starts_with("haystack/a.txt ") && files[0].ends_with(" 14")) << files[0];
  EXPECT_EQ(Split(files[1], " ").at(1).size(), 64U);
}

TEST_F(CorpusTest, TheOfficialEssaysGoBeforeOtherTexts) {
  Write("ruler/haystack/a.txt", "First text.");
  EXPECT_EQ(Load(true, false)->essay_name, "ruler/haystack/a.txt");
  Write("PaulGrahamEssays.json", R"({"text": "An essay.\n\nIt ends."})");
  const Result<Corpus> corpus = Load(true, false);
  ASSERT_TRUE(corpus.ok()) << corpus.status().message();
  EXPECT_EQ(Sentences(corpus->essay), (Views{"An essay.", "It ends."}));
  EXPECT_EQ(corpus->essay_name, "PaulGrahamEssays.json");
  Write("PaulGrahamEssays.json", R"({"texts": 1})");
  ExpectError(Load(true, false), Code::kInvalidArgument, {"PaulGrahamEssays.json", "text"});
}

TEST_F(CorpusTest, TextsThatCannotServeAreErrors) {
  Write("haystack/a.txt", "Pound \xA3 sign.");
  ExpectError(Load(true, false), Code::kInvalidArgument, {"a.txt", "UTF-8", "byte 6"});
  Write("haystack/a.txt", " \n");
  ExpectError(Load(true, false), Code::kInvalidArgument, {"a.txt", "no text"});
}

TEST_F(CorpusTest, AFolderWithoutTextsGivesTheBuiltInOnes) {
  const Result<Corpus> corpus = Load(true, true);
  ASSERT_TRUE(corpus.ok());
  EXPECT_NE(corpus->essay_name.find("built-in"), std::string::npos);
  EXPECT_EQ(corpus->words.nouns, BuiltInWords().nouns);
  EXPECT_EQ(corpus->files, "");
}

std::string Numbered(const std::string& stem, int count) {
  std::string lines;
  for (int i = 0; i < count; ++i)
    lines += stem + static_cast<char>('a' + i / 26) + static_cast<char>('a' + i % 26) + "\n";
  return lines;
}

TEST_F(CorpusTest, WordListsByEitherName) {
  Write("ruler/words/nounlist.txt", Numbered("n", 60));
  Write("ruler/words/adjectives.txt", Numbered("a", 50) + "naa\n");
  Write("ruler/words/verblist.txt", Numbered("v", 5));
  Write("ruler/words/english.txt", Numbered("e", 7) + "naa\nNAB\n");
  const Result<Corpus> corpus = Load(false, true);
  ASSERT_TRUE(corpus.ok()) << corpus.status().message();
  EXPECT_EQ(corpus->words.nouns.size(), 60U);
  EXPECT_EQ(corpus->words.adjectives.size(), 51U);
  EXPECT_EQ(corpus->words.common.size(), 115U);
  EXPECT_EQ(corpus->words.further.size(), 7U);
}

TEST_F(CorpusTest, OneListServesForAllWords) {
  Write("words.txt", Numbered("w", 120));
  const Result<Corpus> corpus = Load(false, true);
  ASSERT_TRUE(corpus.ok()) << corpus.status().message();
  EXPECT_EQ(corpus->words.nouns.size(), 120U);
  EXPECT_EQ(corpus->words.common.size(), 120U);
  EXPECT_TRUE(corpus->words.further.empty());
  Write("words.txt", Numbered("w", 20));
  ExpectError(Load(false, true), Code::kInvalidArgument, {"word lists", "20 nouns"});
}

// 120 words cannot fill 8192 tokens, and 60 x 60 / 2 keys cannot fill 65536.
TEST_F(CorpusTest, ListsThatAreTooShortForTheLengthAreErrors) {
  Write("words/nouns.txt", Numbered("n", 60));
  Write("words/adjectives.txt", Numbered("a", 60));
  RulerOptions options;
  options.tasks = {"cwe"};
  options.lengths = {8192};
  options.data = folder_.string();
  ExpectError(GenerateRuler(options, CountPieces), Code::kInvalidArgument, {"length 8192", "cwe", "120"});
  options.tasks = {"niah_multikey_2"};
  options.lengths = {65536};
  ExpectError(GenerateRuler(options, CountPieces), Code::kInvalidArgument, {"length 65536", "niah_multikey_2", "1800"});
}

}  // namespace
}  // namespace dropkv::eval
