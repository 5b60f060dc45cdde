#include <nlohmann/json.hpp>
#include <set>

#include "eval/ruler/corpus.h"
#include "eval/ruler/haystack.h"
#include "eval/ruler/prose.h"
#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

using Json = nlohmann::json;

constexpr int kArticles = 12;
constexpr int kParagraphs = 10;  // of each

// Paragraphs of 40 to 130 words that begin with their number.
class Paragraphs {
 public:
  std::string Make(int number) {
    std::string text = "Paragraph " + std::to_string(number) + " is about topic" + std::to_string(number) + ".";
    for (const std::string_view sentence : prose_.Take(static_cast<size_t>(number) * 20, 40 + number * 37 % 90)) {
      text += " ";
      text += sentence;
    }
    return text;
  }

 private:
  Haystack prose_{BuiltInProse(6000)};
};

// Every third paragraph has a question that cannot be answered, in the form of version 2.0.
Json SquadJson() {
  Paragraphs paragraphs;
  Json articles = Json::array();
  for (int a = 0; a < kArticles; ++a) {
    Json list = Json::array();
    for (int p = 0; p < kParagraphs; ++p) {
      const std::string number = std::to_string(a * kParagraphs + p);
      const Json answer = {{"text", "topic" + number}, {"answer_start", 0}};
      Json questions = Json::array();
      questions.push_back({{"question", "What is paragraph " + number + "  about?"}});
      questions[0]["answers"] = Json::array({answer, answer});
      if (p % 3 == 0) {
        questions.push_back({{"question", "impossible"}, {"answers", Json::array()}, {"is_impossible", true}});
        questions[0]["is_impossible"] = false;
      }
      list.push_back({{"context", paragraphs.Make(a * kParagraphs + p)}, {"qas", questions}});
    }
    articles.push_back({{"title", "article"}, {"paragraphs", list}});
  }
  return {{"version", "v2.0"}, {"data", articles}};
}

// Ten paragraphs a question, the gold ones third and eighth.
Json HotpotJson() {
  Paragraphs paragraphs;
  Json list = Json::array();
  for (int q = 0; q < kArticles; ++q) {
    Json context = Json::array();
    for (int p = 0; p < kParagraphs; ++p) {
      const int number = q * kParagraphs + p;
      const std::string text = paragraphs.Make(number);
      const Json sentences = Json::array({text.substr(0, 20), text.substr(20)});
      context.push_back(Json::array({"Title " + std::to_string(number), sentences}));
    }
    const std::string first = "Title " + std::to_string(q * kParagraphs + 2);
    const std::string second = "Title " + std::to_string(q * kParagraphs + 7);
    const Json facts = Json::array({Json::array({first, 0}), Json::array({second, 1}), Json::array({first, 1})});
    list.push_back({{"question", "Question number " + std::to_string(q) + "?"},
                    {"answer", "answer" + std::to_string(q)},
                    {"supporting_facts", facts},
                    {"context", context}});
  }
  return list;
}

std::vector<std::string> DocumentsOf(const Sample& sample) {
  std::vector<std::string> documents;
  size_t at = sample.context.find("Document 1:\n");
  for (int i = 1; at != std::string::npos; ++i) {
    const size_t begin = sample.context.find('\n', at) + 1;
    const size_t next = sample.context.find("\n\nDocument " + std::to_string(i + 1) + ":\n", begin);
    const size_t end = next == std::string::npos ? sample.context.size() - 2 : next;
    documents.push_back(sample.context.substr(begin, end - begin));
    at = next == std::string::npos ? next : next + 2;
  }
  return documents;
}

// Within one paragraph of the limit.
void ExpectWithinOneParagraph(const Sample& sample, const std::vector<std::string>& documents,
                              const TokenCounter& count) {
  const int32_t tokens = count(PromptOf(sample)) + sample.max_tokens;
  size_t longest = 0;
  for (const std::string& document : documents) longest = std::max(longest, document.size());
  EXPECT_LE(tokens, sample.length);
  EXPECT_GE(tokens, std::min(sample.length * 0.95, sample.length - static_cast<double>(longest) / 3));
}

class QuestionsTest : public FolderTest {};

TEST_F(QuestionsTest, Qa1HoldsTheGoldParagraphOnceAmongOthers) {
  Write("qa_1/own.json", SquadJson().dump());
  std::set<std::string> first_golds;
  for (const Sample& sample : GenerateTask("qa_1", 5, folder_.string())) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    const std::vector<std::string> documents = DocumentsOf(sample);
    ExpectWithinOneParagraph(sample, documents, CountPieces);
    ASSERT_EQ(sample.references.size(), 1U);
    const std::string number = sample.references[0].substr(std::string("topic").size());
    EXPECT_TRUE(sample.question.ends_with("\n\nQuestion: What is paragraph " + number + " about?")) << sample.question;
    EXPECT_TRUE(sample.question.starts_with("Answer the question "));
    EXPECT_EQ(sample.prefix, " Answer:");
    EXPECT_EQ(sample.metric, Metric::kStringMatchPart);
    EXPECT_EQ(sample.max_tokens, 32);
    std::set<std::string> different;
    size_t golds = 0;
    size_t same_article = 0;
    for (const std::string& document : documents) {
      different.insert(document);
      golds += document.starts_with("Paragraph " + number + " is") ? 1 : 0;
      same_article += std::stoi(document.substr(10)) / kParagraphs == std::stoi(number) / kParagraphs ? 1 : 0;
    }
    EXPECT_EQ(golds, 1U);
    EXPECT_GT(documents.size(), 5U);
    if (documents.size() <= kArticles * kParagraphs) EXPECT_EQ(different.size(), documents.size());
    EXPECT_GE(same_article, std::min<size_t>(documents.size(), kParagraphs));
    if (sample.length == 2048) first_golds.insert(number);
  }
  EXPECT_EQ(first_golds.size(), 5U);  // five samples ask five questions
}

TEST_F(QuestionsTest, TheSameQuestionsAreAskedAtEveryLength) {
  Write("ruler/qa_1/own.json", SquadJson().dump());
  const std::vector<Sample> samples = GenerateTask("qa_1", 4, folder_.string());
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(samples[i].question, samples[4 + i].question);
}

TEST_F(QuestionsTest, TheGoldParagraphStandsAnywhere) {
  Write("squad.json", SquadJson().dump());
  RulerOptions options;
  options.tasks = {"qa_1"};
  options.lengths = {2048};
  options.samples = 40;
  options.data = folder_.string();
  int first_half = 0;
  for (const Sample& sample : Generate(options).samples) {
    const std::vector<std::string> documents = DocumentsOf(sample);
    const std::string opening = "Paragraph " + sample.references.at(0).substr(5) + " is";
    size_t at = 0;
    while (!documents.at(at).starts_with(opening)) ++at;
    first_half += at * 2 < documents.size() ? 1 : 0;
  }
  EXPECT_GT(first_half, 8);
  EXPECT_LT(first_half, 32);
}

TEST_F(QuestionsTest, Qa2HoldsBothGoldParagraphsOnce) {
  Write("hotpotqa.json", HotpotJson().dump());
  for (const Sample& sample : GenerateTask("qa_2", 4, folder_.string())) {
    SCOPED_TRACE(std::to_string(sample.length) + " " + sample.id);
    const std::vector<std::string> documents = DocumentsOf(sample);
    ExpectWithinOneParagraph(sample, documents, CountPieces);
    const int question = std::stoi(sample.references.at(0).substr(std::string("answer").size()));
    EXPECT_TRUE(sample.question.ends_with("Question: Question number " + std::to_string(question) + "?"));
    for (const int gold : {2, 7}) {
      const std::string opening = "Title " + std::to_string(question * kParagraphs + gold) + "\nParagraph ";
      EXPECT_EQ(Occurrences(sample.context, opening), 1U) << opening;
    }
  }
}

// 400 tokens hold the two gold paragraphs of some questions and nothing else of the ten.
TEST_F(QuestionsTest, DistractorsGiveWayToTheGoldParagraphs) {
  Write("hotpotqa.json", HotpotJson().dump());
  RulerOptions options;
  options.tasks = {"qa_2"};
  options.lengths = {800};
  options.samples = 3;
  options.data = folder_.string();
  for (const Sample& sample : Generate(options).samples) {
    const size_t documents = DocumentsOf(sample).size();
    EXPECT_GE(documents, 2U);
    EXPECT_LT(documents, 10U);
  }
}

TEST_F(QuestionsTest, MissingFilesAndTooFewQuestionsAreErrors) {
  RulerOptions options;
  options.tasks = {"qa_1"};
  options.lengths = {2048};
  ExpectError(GenerateRuler(options, CountPieces), Code::kNotFound,
              {"qa_1", "squad.json", "qa_1/*.json", "no data folder was given"});
  options.data = folder_.string();
  options.tasks = {"niah_single_1", "qa_2"};
  ExpectError(GenerateRuler(options, CountPieces), Code::kNotFound, {"qa_2", "hotpotqa.json", folder_.string()});
  Write("hotpotqa.json", HotpotJson().dump());
  options.samples = 13;
  ExpectError(GenerateRuler(options, CountPieces), Code::kInvalidArgument, {"qa_2", "12 questions", "13"});
  options.samples = 12;
  options.tasks = {"qa_2"};
  options.lengths = {100};
  ExpectError(GenerateRuler(options, CountPieces), Code::kInvalidArgument, {"length 100", "qa_2", "tokens at least"});
}

TEST_F(QuestionsTest, FilesThatAreNotInTheirFormAreErrors) {
  QaSet set;
  const auto expect = [](const Status& status, const std::vector<std::string>& parts) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    for (const std::string& part : parts) EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  expect(AddSquad("a.json", "{", set), {"a.json", "SQuAD"});
  expect(AddSquad("a.json", "[]", set), {"a.json", "SQuAD"});
  expect(AddSquad("a.json", R"({"data": [{"paragraphs": []}, {"paragraphs": [{"context": 3, "qas": []}]}]})", set),
         {"a.json", "data[1].paragraphs[0]", "string"});
  expect(AddHotpotQa("b.json", R"({"data": []})", set), {"b.json", "HotpotQA"});
  expect(AddHotpotQa("b.json", R"([{"question": "q", "answer": "a", "context": [["t", "s"]]}, 7])", set),
         {"b.json", "question 1"});
  expect(AddHotpotQa("b.json", R"([{"question": "q", "answer": "a", "context": [["t"]]}])", set),
         {"b.json", "question 0"});
}

TEST(QaFiles, TwoFilesShareTheirDocuments) {
  QaSet set;
  const std::string json = SquadJson().dump();
  ASSERT_TRUE(AddSquad("a", json, set).ok());
  ASSERT_TRUE(AddSquad("b", json, set).ok());
  EXPECT_EQ(set.documents.size(), static_cast<size_t>(kArticles * kParagraphs));
  EXPECT_EQ(set.questions.size(), static_cast<size_t>(2 * kArticles * kParagraphs));
  EXPECT_EQ(set.questions[0].gold, set.questions[kArticles * kParagraphs].gold);
}

}  // namespace
}  // namespace dropkv::eval
