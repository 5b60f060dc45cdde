#include "eval/longbench/longbench.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "eval/metrics/metrics.h"

namespace dropkv::eval {
namespace {

namespace fs = std::filesystem;

int32_t CountBytes(std::string_view text) { return static_cast<int32_t>(text.size()); }

std::string CutBytes(std::string_view text, int32_t tokens) {
  const auto half = static_cast<size_t>(tokens / 2);
  return std::string(text.substr(0, half)) + std::string(text.substr(text.size() - half));
}

std::string Line(std::string_view task, std::string_view context, std::string_view input, std::string_view id) {
  return fmt::format(
      "{{\"input\": \"{}\", \"context\": \"{}\", \"answers\": [\"red\"], \"length\": 1, \"dataset\": "
      "\"{}\", \"language\": \"en\", \"all_classes\": [\"red\", \"blue\"], \"_id\": \"{}\"}}\n",
      input, context, task, id);
}

// A folder "data" inside one of its own, so that files may lie above it.
class LongBench : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(::testing::TempDir()) / fmt::format("dropkv_longbench_{}_{}", test->name(), ::getpid());
    fs::create_directories(root_ / "data");
  }
  void TearDown() override { fs::remove_all(root_); }

  void Write(const fs::path& name, std::string_view text) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
  }
  Result<LongBenchSet> Read(std::vector<std::string> tasks, int32_t samples = 0, int32_t max_length = 0) {
    const LongBenchOptions options{
        .tasks = std::move(tasks), .data = (root_ / "data").string(), .samples = samples, .max_length = max_length};
    return ReadLongBench(options, CountBytes, CutBytes);
  }
  // The error of a read that must fail, the folder's name left out.
  std::string Error(std::vector<std::string> tasks, int32_t samples = 0, int32_t max_length = 0) {
    const Result<LongBenchSet> set = Read(std::move(tasks), samples, max_length);
    if (set.ok()) return "no error";
    std::string message = set.status().message();
    const std::string folder = root_.string() + "/";
    for (size_t at = message.find(folder); at != std::string::npos; at = message.find(folder))
      message.erase(at, folder.size());
    return message;
  }

  fs::path root_;
};

constexpr std::string_view kTemplates =
    R"({"qasper": "Read {context} then {input}:", "trec": "{context}\n{input}", "samsum": "S {context}|{input}"})";

TEST_F(LongBench, FillsTheFoldersTemplates) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper.jsonl", Line("qasper", "a {b}", "why", "1") + "\n" + Line("qasper", "c", "how", "2"));
  const Result<LongBenchSet> set = Read({"qasper"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  ASSERT_EQ(set->samples.size(), 2U);
  const Sample& sample = set->samples[0];
  EXPECT_EQ(sample.suite, "longbench");
  EXPECT_EQ(sample.task, "qasper");
  EXPECT_EQ(sample.id, "1");
  EXPECT_EQ(sample.category, "single-document QA");
  EXPECT_EQ(sample.length, 0);
  EXPECT_EQ(sample.context, "Read a {b}");
  EXPECT_EQ(sample.question, " then why:");
  EXPECT_EQ(sample.prefix, "");
  EXPECT_EQ(sample.references, (std::vector<std::string>{"red"}));
  EXPECT_EQ(sample.metric, Metric::kF1);
  EXPECT_EQ(sample.max_tokens, 128);
  EXPECT_TRUE(sample.chat_template);
  EXPECT_FALSE(sample.first_line);
  EXPECT_FALSE(sample.stop_at_newline);
  EXPECT_EQ(set->samples[1].context, "Read c");
  EXPECT_EQ(set->remarks, (std::vector<std::string>{"qasper: 2 of the official 200 samples (subset)"}));
}

TEST_F(LongBench, FewShotTasksTakeTheirFirstLineAndNoChatTemplate) {
  Write("dataset2prompt.json", kTemplates);  // above the data
  Write("data/trec.jsonl", Line("trec", "q1", "q2", "1"));
  Write("data/samsum.jsonl", Line("samsum", "d1", "d2", "1"));
  const Result<LongBenchSet> set = Read({"samsum", "trec"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  ASSERT_EQ(set->samples.size(), 2U);
  EXPECT_EQ(set->samples[0].task, "samsum") << "in the order asked for";
  EXPECT_TRUE(set->samples[0].stop_at_newline);
  EXPECT_EQ(set->samples[1].classes, (std::vector<std::string>{"red", "blue"}));
  EXPECT_FALSE(set->samples[1].stop_at_newline);
  for (const Sample& sample : set->samples) {
    EXPECT_FALSE(sample.chat_template);
    EXPECT_TRUE(sample.first_line);
    EXPECT_EQ(sample.category, "few-shot");
  }
  EXPECT_DOUBLE_EQ(ScoreAnswer(set->samples[1], "\nred\nblue"), 1);
  EXPECT_DOUBLE_EQ(ScoreAnswer(set->samples[1], "red or blue"), 1.0 / 2);
}

TEST_F(LongBench, SaysWhichFilesWereRead) {
  Write("config/dataset2prompt.json", kTemplates);
  Write("data/qasper.jsonl", Line("qasper", "c", "i", "1"));
  const Result<LongBenchSet> set = Read({"qasper"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  const std::string bytes = std::to_string(Line("qasper", "c", "i", "1").size());
  EXPECT_TRUE(set->data.starts_with("dataset2prompt.json fnv1a64:")) << set->data;
  EXPECT_NE(set->data.find("\nqasper.jsonl fnv1a64:"), std::string::npos) << set->data;
  EXPECT_TRUE(set->data.ends_with(" " + bytes + "\n")) << set->data;
  Write("data/qasper.jsonl", Line("qasper", "d", "i", "1"));
  const Result<LongBenchSet> other = Read({"qasper"});
  ASSERT_TRUE(other.ok());
  EXPECT_NE(other->data, set->data) << "another byte, another hash";
}

TEST_F(LongBench, WithoutTemplatesUsesItsOwnAndSaysSo) {
  Write("data/qasper.jsonl", Line("qasper", "CONTEXT", "INPUT", "1"));
  const Result<LongBenchSet> set = Read({"qasper"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_TRUE(set->samples[0].context.ends_with("CONTEXT"));
  EXPECT_NE(set->samples[0].question.find("Question: INPUT"), std::string::npos);
  ASSERT_EQ(set->remarks.size(), 2U);
  EXPECT_TRUE(set->remarks[0].starts_with("templates: the built-in ones")) << set->remarks[0];
}

TEST_F(LongBench, MarksLongBenchE) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper_e.jsonl", Line("qasper", "c", "i", "1"));
  const std::vector<std::string> remarks = {"qasper_e: LongBench-E, not comparable with LongBench",
                                            "qasper_e: 1 of the official 224 samples (subset)"};
  for (const char* name : {"qasper", "qasper_e"}) {
    const Result<LongBenchSet> set = Read({name});
    ASSERT_TRUE(set.ok()) << set.status().message();
    EXPECT_EQ(set->samples[0].task, "qasper_e");
    EXPECT_EQ(set->samples[0].category, "single-document QA");
    EXPECT_EQ(set->remarks, remarks);
  }
  Write("data/qasper.jsonl", Line("qasper", "c", "i", "1") + Line("qasper", "d", "i", "2"));
  const Result<LongBenchSet> both = Read({"qasper", "qasper_e"});
  ASSERT_TRUE(both.ok()) << both.status().message();
  ASSERT_EQ(both->samples.size(), 3U);
  EXPECT_EQ(both->samples[1].task, "qasper");
  EXPECT_EQ(both->samples[2].task, "qasper_e");
}

TEST_F(LongBench, TakesAFileOfAnotherNameWhereItIsTheOnlyOne) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper_short.jsonl", Line("qasper", "c", "i", "1"));
  const Result<LongBenchSet> set = Read({"qasper"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples[0].task, "qasper");
  EXPECT_EQ(set->remarks[0], "qasper: read from qasper_short.jsonl, no official file");
  EXPECT_EQ(Error({}), "data: data: expected files like qasper.jsonl, found none");
  Write("data/qasper_long.jsonl", Line("qasper", "c", "i", "1"));
  EXPECT_EQ(Error({"qasper"}), "data: data: no qasper.jsonl") << "which of the two is not known";
}

TEST_F(LongBench, WithoutTasksTakesWhatTheFolderHas) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/trec_e.jsonl", Line("trec", "c", "i", "1"));
  Write("data/qasper.jsonl", Line("qasper", "c", "i", "1"));
  Write("data/samsum_part.jsonl", "not read");
  const Result<LongBenchSet> set = Read({});
  ASSERT_TRUE(set.ok()) << set.status().message();
  ASSERT_EQ(set->samples.size(), 2U);
  EXPECT_EQ(set->samples[0].task, "qasper");
  EXPECT_EQ(set->samples[1].task, "trec_e");
}

TEST_F(LongBench, TakesTheFirstSamplesAndReadsNoFurther) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper.jsonl", Line("qasper", "a", "i", "1") + Line("qasper", "b", "i", "2") + "broken\n");
  const Result<LongBenchSet> set = Read({"qasper"}, 2);
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples.size(), 2U);
  EXPECT_EQ(set->remarks, (std::vector<std::string>{"qasper: 3 of the official 200 samples (subset)",
                                                    "qasper: the first 2 of the file's 3 samples"}));
  EXPECT_EQ(Error({"qasper"}, 3), "data/qasper.jsonl: line 3: no JSON (or text that is not UTF-8) at byte 1");
}

TEST_F(LongBench, EverySampleHasItsOwnIdentifier) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper.jsonl", Line("qasper", "a", "i", "x") + "\n" + Line("qasper", "b", "i", "x"));
  const Result<LongBenchSet> set = Read({"qasper"});
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples[0].id, "x");
  EXPECT_EQ(set->samples[1].id, "x#3") << "told apart by its line";
}

TEST_F(LongBench, CutsTheMiddleOfTheFilledPrompt) {
  Write("data/dataset2prompt.json", kTemplates);
  // "Read 0123456789 then i:" has 23 bytes; of 16 the first 8 and the last 8 stay, of 6 three each.
  Write("data/qasper.jsonl", Line("qasper", "0123456789", "i", "1") + Line("qasper", "0", "i", "2"));
  const Result<LongBenchSet> set = Read({"qasper"}, 0, 16);
  ASSERT_TRUE(set.ok()) << set.status().message();
  EXPECT_EQ(set->samples[0].context, "Read 012");
  EXPECT_EQ(set->samples[0].question, " then i:");
  EXPECT_EQ(set->samples[1].context, "Read 0") << "14 bytes: whole";
  EXPECT_EQ(set->remarks.back(), "qasper: the middle of 1 of 2 prompts was cut at 16 tokens");
  const Result<LongBenchSet> tight = Read({"qasper"}, 1, 6);
  ASSERT_TRUE(tight.ok()) << tight.status().message();
  EXPECT_EQ(tight->samples[0].context, "Rea");
  EXPECT_EQ(tight->samples[0].question, " i:");
  EXPECT_EQ(tight->remarks.back(), "qasper: of 1 prompts the cut took part of the question");
}

TEST_F(LongBench, NamesWhatIsWrong) {
  Write("data/dataset2prompt.json", kTemplates);
  Write("data/qasper.jsonl", Line("qasper", "a", "i", "1") + "{\"input\": 3}\n");
  EXPECT_EQ(Error({"qasper"}), "data/qasper.jsonl: line 2: field \"input\": expected a string, got number");
  Write("data/qasper.jsonl", Line("qasper", "a", "i", "1") + "\n\n" + Line("qasper", "a", "i", "1").substr(0, 30));
  EXPECT_EQ(Error({"qasper"}), "data/qasper.jsonl: line 4: no JSON (or text that is not UTF-8) at byte 31");
  Write("data/qasper.jsonl", Line("trec", "a", "i", "1"));
  EXPECT_EQ(Error({"qasper"}), "data/qasper.jsonl: line 1: field \"dataset\": expected qasper, got \"trec\"");
  for (const char* empty : {"", "\n \r\n"}) {
    Write("data/qasper.jsonl", empty);
    EXPECT_EQ(Error({"qasper"}), "data/qasper.jsonl: expected samples, one a line, got none");
  }
  EXPECT_EQ(Error({"trec"}), "data: data: no trec.jsonl");
  Write("data/trec_e_part.jsonl", Line("trec", "a", "i", "1"));
  EXPECT_EQ(Error({"trec_e"}), "data: data: no trec_e.jsonl") << "LongBench-E's file and no other";
  EXPECT_EQ(Error({"qasper", "qasper"}), "tasks: qasper: data/qasper.jsonl is read for another task already");
  EXPECT_EQ(Error({"qmsum_e"}), "tasks: qmsum_e: LongBench-E has no qmsum");
  EXPECT_TRUE(Error({"gsm8k"}).starts_with("tasks: gsm8k: expected one of narrativeqa, qasper, ")) << Error({"gsm8k"});
  EXPECT_EQ(Error({"qasper"}, -1), "samples: expected 0 or more, got -1");
  EXPECT_EQ(Error({"qasper"}, 0, 1), "max_length: expected 0 or at least 2 tokens, got 1");
  EXPECT_EQ(Error({"qasper"}, 0, -5), "max_length: expected 0 or at least 2 tokens, got -5");
  fs::create_directory(root_ / "data/lcc.jsonl");
  EXPECT_EQ(Error({"lcc"}), "data: data: no lcc.jsonl") << "a folder is no file";
}

TEST_F(LongBench, NamesWhatIsWrongWithTheTemplates) {
  Write("data/qasper.jsonl", Line("qasper", "a", "i", "1"));
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"", "data/dataset2prompt.json: expected a JSON object of task names and templates"},
      {"[]", "data/dataset2prompt.json: expected a JSON object of task names and templates"},
      {"{\"qasper\": \"\xff\"}", "data/dataset2prompt.json: expected a JSON object of task names and templates"},
      {"{}", "data/dataset2prompt.json: qasper: expected a template as a string, got nothing"},
      {R"({"qasper": 1})", "data/dataset2prompt.json: qasper: expected a template as a string, got number"},
      {R"({"qasper": "{input}"})", "data/dataset2prompt.json: qasper: no field {context}"},
  };
  for (const auto& [text, message] : cases) {
    Write("data/dataset2prompt.json", text);
    EXPECT_EQ(Error({"qasper"}), message);
  }
}

TEST(LongBenchFolder, MustBeGivenAndBeThere) {
  const Result<LongBenchSet> none = ReadLongBench({}, CountBytes, CutBytes);
  EXPECT_EQ(none.status().message(), "data: expected the folder with LongBench's files, got none");
  const Result<LongBenchSet> missing = ReadLongBench({.tasks = {}, .data = "/nowhere/at/all"}, CountBytes, CutBytes);
  EXPECT_EQ(missing.status().message(), "data: /nowhere/at/all: no such folder");
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace dropkv::eval
