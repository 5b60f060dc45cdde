#include <nlohmann/json.hpp>

#include "eval/ruler/ruler_test_case.h"

namespace dropkv::eval {
namespace {

using Json = nlohmann::json;

class ReadTest : public FolderTest {
 protected:
  // The one sample of a file with this line.
  Sample ReadOne(const std::string& name, const Json& line) const {
    const Result<std::vector<Sample>> samples = ReadRulerFile(Write(name, line.dump() + "\n"));
    EXPECT_TRUE(samples.ok()) << samples.status().message();
    return samples.ok() ? samples->at(0) : Sample{};
  }
};

Json Official(const std::string& input, const std::string& prefix) {
  return {{"index", 3},
          {"input", input},
          {"outputs", {"one", "two"}},
          {"length", 4001},
          {"length_w_model_temp", 4020},
          {"answer_prefix", prefix},
          {"token_position_answer", 17}};
}

struct Form {
  std::string task;
  std::string context;
  std::string question;
  std::string prefix;
};

// The forms of the official prompts.
const std::vector<Form>& Forms() {
  static const std::vector<Form> forms = {
      {"niah_single_1", "Intro.\nOne of the special magic numbers for a-b is: 1234567.\n",
       "What is the special magic number for a-b mentioned in the provided text?",
       " The special magic number for a-b mentioned in the provided text is"},
      {"niah_multiquery", "Intro. What is the special magic of it? Question: none.\n",
       "What are all the special magic numbers for a-b, c-d, and e-f mentioned in the provided text?",
       " The special magic numbers for a-b, c-d, and e-f mentioned in the provided text are"},
      {"vt", "Track.\nVAR A = 1\nQuestion: Find all 1. Answer: According to it, they are: A\n\nTrack.\nVAR B = 2\n",
       "Question: Find all variables that are assigned the value 2 in the text above.",
       " Answer: According to the chain(s) of variable assignment in the text above, 1 variables are assgined the "
       "value 2, "
       "they are: "},
      {"cwe", "Below.\n1. a\nQuestion: What are the 10? Answer: The top 10: 1. a\nBelow.\n1. b 2. c\n",
       "Question: What are the 10 most common words in the above list?",
       " Answer: The top 10 words that appear most often in the list are:"},
      {"fwe", "Read the following coded text. aaa ... bbb\n",
       "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three?",
       " Answer: According to the coded text above, the three most frequently appeared words are:"},
      {"qa_1", "Answer the question based on the given documents.\n\nDocument 1:\nQuestion: is this one?\n\n",
       "Answer the question based on the given documents.\n\nQuestion: Who was it?", " Answer:"},
  };
  return forms;
}

TEST_F(ReadTest, OfficialLinesWithAnAnswerPrefix) {
  for (const Form& form : Forms()) {
    SCOPED_TRACE(form.task);
    const Sample sample =
        ReadOne("4096/data/" + form.task + "/validation.jsonl", Official(form.context + form.question, form.prefix));
    EXPECT_EQ(sample.suite, "validation.jsonl");
    EXPECT_EQ(sample.task, form.task);
    EXPECT_EQ(sample.id, "3");
    EXPECT_EQ(sample.length, 4096);
    EXPECT_EQ(sample.context, form.context);
    EXPECT_EQ(sample.question, form.question);
    EXPECT_EQ(sample.prefix, form.prefix);
    EXPECT_EQ(sample.references, (std::vector<std::string>{"one", "two"}));
    EXPECT_EQ(sample.metric, FindRulerTask(form.task)->metric);
    EXPECT_EQ(sample.max_tokens, FindRulerTask(form.task)->max_tokens);
  }
}

TEST_F(ReadTest, TheAnswerPrefixIsCutOffTheInput) {
  for (const Form& form : Forms()) {
    SCOPED_TRACE(form.task);
    Json line = Official(form.context + form.question + form.prefix, "");
    line.erase("answer_prefix");
    const Sample sample = ReadOne(form.task + ".jsonl", line);
    EXPECT_EQ(sample.context, form.context);
    EXPECT_EQ(sample.question, form.question);
    EXPECT_EQ(sample.prefix, form.prefix);
    EXPECT_EQ(sample.task, form.task);
    EXPECT_EQ(sample.suite, form.task + ".jsonl");
  }
}

// What looks like a prefix, but does not end as one, is left where it is.
TEST_F(ReadTest, InputsWithoutAPrefixStayWhole) {
  for (const std::string end : {" Answer: 42", " Answer: one:\ntwo", " The special magic number is hidden"}) {
    Json line = Official("Text.\nQuestion: What is it?" + end, "");
    line.erase("answer_prefix");
    const Sample sample = ReadOne("vt.jsonl", line);
    EXPECT_EQ(sample.prefix, "");
    EXPECT_EQ(sample.context, "Text.\n");
    EXPECT_EQ(sample.question, "Question: What is it?" + end);
  }
}

TEST_F(ReadTest, OwnFields) {
  const Json line = {{"task", "mine"},        {"context", "A b.\n"}, {"question", "What?"}, {"answer_prefix", "It is"},
                     {"outputs", "a string"}, {"max_tokens", 7},     {"length", 6000}};
  const Sample sample = ReadOne("some.jsonl", line);
  EXPECT_EQ(sample.task, "mine");
  EXPECT_EQ(sample.context, "A b.\n");
  EXPECT_EQ(sample.question, "What?");
  EXPECT_EQ(sample.prefix, "It is");
  EXPECT_EQ(sample.references, std::vector<std::string>{"a string"});
  EXPECT_EQ(sample.max_tokens, 7);
  EXPECT_EQ(sample.length, 6000);
  EXPECT_EQ(sample.id, "1");
  EXPECT_EQ(sample.metric, Metric::kStringMatchAll);
}

TEST_F(ReadTest, UnknownTasks) {
  const Json line = {{"input", "Some text.\nMore of it.\nWho came?"}, {"outputs", {12}}};
  const Sample sample = ReadOne("guests.jsonl", line);
  EXPECT_EQ(sample.task, "guests");
  EXPECT_EQ(sample.context, "Some text.\nMore of it.\n");
  EXPECT_EQ(sample.question, "Who came?");
  EXPECT_EQ(sample.references, std::vector<std::string>{"12"});
  EXPECT_EQ(sample.max_tokens, 128);
  EXPECT_EQ(sample.length, 0);
  EXPECT_EQ(ReadOne("guests/test.jsonl", line).task, "guests");
  const Sample whole = ReadOne("a.jsonl", {{"input", "Go on:"}, {"outputs", {"x"}}});
  EXPECT_EQ(whole.context, "Go on:");
  EXPECT_EQ(whole.question, "");
}

TEST_F(ReadTest, AQuestionAtTheEndOfTheInput) {
  Json line = {{"input", "Text. Tell me."}, {"question", "Tell me."}, {"outputs", {"x"}}};
  EXPECT_EQ(ReadOne("a.jsonl", line).context, "Text. ");
  line["question"] = "Tell us.";
  ExpectError(ReadRulerFile(Write("a.jsonl", line.dump())), Code::kInvalidArgument,
              {"a.jsonl:1", "question", "Tell us."});
}

TEST_F(ReadTest, MeasuredLengthsBecomeFittedOnes) {
  const std::string line = R"({"input": "T?", "outputs": ["x"], "length": )";
  const auto lengths = [&](const std::string& name, const std::vector<int>& given) {
    std::string text;
    for (const int length : given) text += line + std::to_string(length) + "}\n";
    std::vector<int> read;
    for (const Sample& sample : *ReadRulerFile(Write(name, text))) read.push_back(sample.length);
    return read;
  };
  EXPECT_EQ(lengths("a.jsonl", {3181, 4096, 16001, 3200, 0}), (std::vector<int>{4096, 4096, 16384, 4096, 0}));
  EXPECT_EQ(lengths("b.jsonl", {6000, 4096, 12800}), (std::vector<int>{6000, 4096, 12800}));
  EXPECT_EQ(lengths("16384/data/vt/validation.jsonl", {3181, 17000}), (std::vector<int>{16384, 32768}));
}

TEST_F(ReadTest, IdsAreMadeUnique) {
  std::string text = "\xEF\xBB\xBF";
  for (const int index : {5, 5, 6})
    text += R"({"input": "T?", "outputs": ["x"], "index": )" + std::to_string(index) + "}\r\n\r\n";
  const std::vector<Sample> samples = *ReadRulerFile(Write("vt.jsonl", text));
  ASSERT_EQ(samples.size(), 3U);
  EXPECT_EQ(samples[0].id, "5");
  EXPECT_EQ(samples[1].id, "5#3");
  EXPECT_EQ(samples[2].id, "6");
}

// What the generator makes, written in the official form, is read back as it was.
TEST_F(ReadTest, GeneratedSamplesAreReadBack) {
  RulerOptions options;
  options.tasks = WithoutQuestions();
  options.lengths = {2048};
  options.samples = 1;
  for (const Sample& made : Generate(options).samples) {
    const Json line = {{"index", 0}, {"input", PromptOf(made)}, {"outputs", made.references}, {"length", 2048}};
    const Sample read = ReadOne(made.task + "/validation.jsonl", line);
    EXPECT_EQ(read.context, made.context);
    EXPECT_EQ(read.question, made.question);
    EXPECT_EQ(read.prefix, made.prefix);
    EXPECT_EQ(read.references, made.references);
    EXPECT_EQ(read.task, made.task);
    EXPECT_EQ(read.max_tokens, made.max_tokens);
  }
}

TEST_F(ReadTest, WrongLinesAreErrorsThatNameThem) {
  const std::string good = R"({"input": "Q?", "outputs": ["a"]})";
  const auto error = [&](const std::string& line, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.push_back("bad.jsonl:3");
    ExpectError(ReadRulerFile(Write("bad.jsonl", good + "\n\n" + line + "\n")), Code::kInvalidArgument, all);
  };
  error("{", {"JSON"});
  error(std::string(100000, '['), {"JSON"});
  error("{\"input\": \"\xA3\", \"outputs\": [\"a\"]}", {"JSON"});
  error("[1]", {"object"});
  error(R"({"outputs": ["a"]})", {"input", "none"});
  error(R"({"input": "", "outputs": ["a"]})", {"input"});
  error(R"({"input": 5, "outputs": ["a"]})", {"input", "string", "5"});
  error(R"({"input": "Q?"})", {"outputs", "none"});
  error(R"({"input": "Q?", "outputs": []})", {"outputs", "[]"});
  error(R"({"input": "Q?", "outputs": ["a", ""]})", {"outputs", "empty"});
  error(R"({"input": "Q?", "outputs": [["a"]]})", {"outputs"});
  error(R"({"input": "Q?", "outputs": {"a": 1}})", {"outputs"});
  error(R"({"input": "Q?", "outputs": ["a"], "length": -1})", {"length", "-1"});
  error(R"({"input": "Q?", "outputs": ["a"], "length": 1e30})", {"length"});
  error(R"({"input": "Q?", "outputs": ["a"], "length": 18446744073709551615})", {"length"});
  error(R"({"input": "Q?", "outputs": ["a"], "max_tokens": 0})", {"max_tokens"});
  error(R"({"input": "Q?", "outputs": ["a"], "index": "x"})", {"index"});
  error(R"({"input": "Q?", "outputs": ["a"], "task": 3})", {"task"});
  error(R"({"input": "Q?", "outputs": ["a"], "task": ""})", {"task"});
  error(R"({"input": "Q?", "outputs": ["a"], "answer_prefix": []})", {"answer_prefix"});
}

TEST_F(ReadTest, FilesThatAreNotThereOrEmpty) {
  ExpectError(ReadRulerFile(folder_.string() + "/none.jsonl"), Code::kNotFound, {"none.jsonl"});
  ExpectError(ReadRulerFile(folder_.string()), Code::kNotFound, {folder_.string()});
  ExpectError(ReadRulerFile(Write("empty.jsonl", "\n \n")), Code::kInvalidArgument, {"empty.jsonl"});
}

}  // namespace
}  // namespace dropkv::eval
