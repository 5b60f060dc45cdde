#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "eval/report/made_results.h"

namespace dropkv::eval {
namespace {

class ReadResultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(::testing::TempDir()) / (std::string("dropkv_read_") + test->name());
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string Folder(const std::string& name, const RunRecord& run, const std::string& lines) const {
    const std::filesystem::path folder = root_ / name;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "run.json") << ToJson(run);
    std::ofstream(folder / "results.jsonl") << lines;
    return folder.string();
  }
  static std::string Lines(const std::vector<Row>& rows) {
    std::string text;
    for (const Row& row : rows) text += ToJsonLine(row) + "\n";
    return text;
  }

  std::filesystem::path root_;
  const Row full_ = MadeRow("vt", "1", "full", "100%", 1);
  const Row evicted_ = MadeRow("vt", "1", "snapkv", "10%", 0.5);
  const RunRecord run_ = MadeRun("model", "aa");
};

TEST_F(ReadResultsTest, RowsOfSeveralFolders) {
  const std::string a = Folder("a", run_, Lines({full_, evicted_}));
  const std::string b = Folder("b", MadeRun("other", "bb"), Lines({full_}));
  const Result<Results> results = ReadResults({a, b});
  ASSERT_TRUE(results.ok()) << results.status().message();
  ASSERT_EQ(results->rows.size(), 3U);
  EXPECT_EQ(results->rows[1].setting, "snapkv");
  EXPECT_EQ(results->run_of, (std::vector<size_t>{0, 0, 1}));
  EXPECT_EQ(results->runs[1].model, "other");
  EXPECT_TRUE(results->remarks.empty());
}

TEST_F(ReadResultsTest, ATornLastLineIsSkippedAndSaid) {
  const std::string whole = Lines({full_, evicted_});
  const std::string folder = Folder("a", run_, whole.substr(0, whole.size() - 30));
  const Result<Results> results = ReadResults({folder});
  ASSERT_TRUE(results.ok()) << results.status().message();
  EXPECT_EQ(results->rows.size(), 1U);
  EXPECT_EQ(results->remarks,
            std::vector<std::string>{folder + "/results.jsonl:2: the unfinished last line was skipped"});
}

TEST_F(ReadResultsTest, ALastLineWithoutItsNewlineCounts) {
  const std::string whole = Lines({full_, evicted_});
  const Result<Results> results = ReadResults({Folder("a", run_, whole.substr(0, whole.size() - 1))});
  ASSERT_TRUE(results.ok());
  EXPECT_EQ(results->rows.size(), 2U);
}

TEST_F(ReadResultsTest, ATornLineElsewhereIsAnError) {
  const std::string torn = ToJsonLine(full_).substr(0, 50) + "\n";
  const auto message = [&](const std::string& text) {
    return ReadResults({Folder("a", run_, text)}).status().message();
  };
  const std::string path = (root_ / "a/results.jsonl").string();
  EXPECT_TRUE(message(torn + Lines({evicted_})).starts_with(path + ":1: not JSON:"));
  EXPECT_TRUE(message(Lines({evicted_}) + torn).starts_with(path + ":2: not JSON:"));
}

TEST_F(ReadResultsTest, TheSameAgainIsDropped) {
  Row again = evicted_;
  again.decode_s = 9;  // another run's time
  const std::string a = Folder("a", run_, Lines({full_, evicted_}));
  const std::string b = Folder("b", run_, Lines({again}));
  const Result<Results> results = ReadResults({a, b});
  ASSERT_TRUE(results.ok()) << results.status().message();
  ASSERT_EQ(results->rows.size(), 2U);
  EXPECT_EQ(results->rows[1].decode_s, 0);
}

TEST_F(ReadResultsTest, AContradictionIsAnError) {
  Row answer = evicted_;
  answer.answer = "another";
  Row score = evicted_;
  score.score = 0.25;
  Row prompt = MadeRow("vt", "1", "dropkv", "10%", 0.5);
  prompt.prompt_hash = "other";
  const std::string a = Folder("a", run_, Lines({full_, evicted_}));
  const auto message = [&](const RunRecord& run, const Row& row) {
    return ReadResults({a, Folder("b", run, Lines({row}))}).status().message();
  };
  const std::string where = (root_ / "b/results.jsonl:1: contradicts ").string() + a;
  EXPECT_EQ(message(run_, answer),
            where + "/results.jsonl:2: sample ruler/vt/4096/1, setting snapkv, budget 10%: another answer");
  EXPECT_EQ(message(run_, score),
            where + "/results.jsonl:2: sample ruler/vt/4096/1, setting snapkv, budget 10%: another score");
  EXPECT_EQ(message(run_, prompt), where +
                                       "/results.jsonl:1: sample ruler/vt/4096/1, another prompt (other and hash of "
                                       "1): of another seed or other data");
}

TEST_F(ReadResultsTest, WhatDiffersInModelQuestionOrBudgetIsNoContradiction) {
  Row hidden = evicted_;
  hidden.hidden = true;
  hidden.answer = "another";
  hidden.prompt_hash = "with a boundary";
  Row budget = evicted_;
  budget.budget = "20%";
  budget.answer = "another";
  Row model = evicted_;
  model.answer = "another";
  const std::string a = Folder("a", run_, Lines({full_, evicted_, hidden, budget}));
  const std::string b = Folder("b", MadeRun("other", "bb"), Lines({model}));
  const Result<Results> results = ReadResults({a, b});
  ASSERT_TRUE(results.ok()) << results.status().message();
  EXPECT_EQ(results->rows.size(), 5U);
}

TEST_F(ReadResultsTest, AnEvictionThatKeptEverythingIsRefused) {
  Row nothing = evicted_;
  nothing.kept = {{1000, 1000, 1000}};
  const std::string folder = Folder("a", run_, Lines({full_, nothing}));
  const Status status = ReadResults({folder}).status();
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_TRUE(status.message().starts_with(folder + "/results.jsonl:2: sample ruler/vt/4096/1, setting snapkv: "))
      << status.message();
}

TEST_F(ReadResultsTest, WhatIsMissingIsNamed) {
  const std::string none = (root_ / "none").string();
  EXPECT_EQ(ReadResults({none}).status().code(), Code::kNotFound);
  EXPECT_TRUE(ReadResults({none}).status().message().starts_with(none + "/run.json: cannot be opened"));
  const std::string broken = Folder("broken", run_, "");
  EXPECT_EQ(ReadResults({broken}).status().message(), "no results in " + broken);
  std::ofstream(broken + "/run.json") << "{}";
  EXPECT_EQ(ReadResults({broken}).status().message(), broken + "/run.json: field model is missing");
}

}  // namespace
}  // namespace dropkv::eval
