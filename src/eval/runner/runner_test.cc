// What a run is planned and described by: pace, order, prompt hashes, run records.
#include "eval/runner/runner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "eval/runner/record.h"

namespace dropkv::eval {
namespace {

TEST(Pace, SecondsPerToken) {
  Pace pace;
  EXPECT_EQ(pace.Estimate(1000), 0);
  pace.Add(1000, 10);
  pace.Add(3000, 50);
  EXPECT_DOUBLE_EQ(pace.Estimate(8000), 120);
}

TEST(Pace, Text) {
  EXPECT_EQ(DurationText(0.4), "0 s");
  EXPECT_EQ(DurationText(89.4), "89 s");
  EXPECT_EQ(DurationText(90), "2 min");
  EXPECT_EQ(DurationText(5369), "89 min");
  EXPECT_EQ(DurationText(5370), "1 h 30 min");
  EXPECT_EQ(DurationText(7500), "2 h 05 min");
}

TEST(Interleave, FirstSamplesOfAllTasksAndLengthsComeFirst) {
  std::vector<Item> items;
  for (const char* task : {"a", "b"}) {
    for (const int32_t length : {100, 200}) {
      for (const char* id : {"x", "y"}) {
        Item& item = items.emplace_back();
        item.sample.task = task;
        item.sample.length = length;
        item.sample.id = id;
      }
    }
  }
  Interleave(&items);
  std::string order;
  for (const Item& item : items) order += item.sample.task + std::to_string(item.sample.length) + item.sample.id + " ";
  EXPECT_EQ(order, "a100x a200x b100x b200x a100y a200y b100y b200y ");
}

// FNV-1a of the tokens as four bytes each, computed apart.
TEST(PromptHash, OfAllTokensInOrder) {
  EXPECT_EQ(PromptHash({}), "cbf29ce484222325");
  EXPECT_EQ(PromptHash({{97}, {}, {}}), "ac804b820e4fe984");
  EXPECT_EQ(PromptHash({{1, 2, 300}, {}, {}}), "25036777fc974335");
  EXPECT_EQ(PromptHash({{1}, {2, 300}, {}}), "25036777fc974335");
  EXPECT_EQ(PromptHash({{1}, {2}, {300}}), "25036777fc974335");
}

RunRecord MakeRecord() {
  RunRecord record;
  record.model = "tiny";
  record.model_sha256 = "aa";
  record.libllama = "1";
  record.kv_type = "f16";
  record.chat_template = "model's";
  record.seed = 42;
  record.samples = 10;
  record.haystack = "prose";
  record.data = "one.txt aa 1\ntwo.txt bb 2";
  record.lengths = {4096};
  record.tasks = {"vt"};
  record.settings = {"dropkv", "snapkv"};
  record.budgets = {"5%"};
  record.questions = {"seen"};
  record.started = "2000-01-01T00:00:00Z";
  return record;
}

TEST(Record, AFurtherRunMayAddToTheGrid) {
  RunRecord now = MakeRecord();
  now.lengths = {8192};
  now.budgets = {"5%", "10%"};
  now.questions = {"hidden"};
  now.samples = 5;
  now.data = "two.txt bb 2\nthree.txt cc 3";
  now.machine = "another";
  now.batch = 4;  // the same rows but for near-ties
  now.started = "2000-01-02T00:00:00Z";
  const Result<RunRecord> merged = MergeRecords("folder", MakeRecord(), now);
  ASSERT_TRUE(merged.ok()) << merged.status().message();
  EXPECT_EQ(merged->lengths, (std::vector<int32_t>{4096, 8192}));
  EXPECT_EQ(merged->budgets, (std::vector<std::string>{"5%", "10%"}));
  EXPECT_EQ(merged->questions, (std::vector<std::string>{"seen", "hidden"}));
  EXPECT_EQ(merged->samples, 10);
  EXPECT_EQ(merged->data, "one.txt aa 1\ntwo.txt bb 2\nthree.txt cc 3");
  EXPECT_EQ(merged->machine, "another");
  EXPECT_EQ(merged->batch, 4);
  EXPECT_EQ(merged->started, "2000-01-01T00:00:00Z");
}

TEST(Record, TasksWithoutProseHaveNoHaystack) {
  const auto merged = [](const char* before, const char* now) {
    RunRecord first = MakeRecord();
    RunRecord second = MakeRecord();
    first.haystack = before;
    second.haystack = now;
    const Result<RunRecord> record = MergeRecords("folder", first, second);
    return record.ok() ? record->haystack : "refused";
  };
  EXPECT_EQ(merged("none", "essays"), "essays");
  EXPECT_EQ(merged("essays", "none"), "essays");
  EXPECT_EQ(merged("essays", "essays"), "essays");
  EXPECT_EQ(merged("essays", "prose"), "refused");
}

TEST(Record, WhatChangesResultsIsNamed) {
  const auto refusal = [](auto change) {
    RunRecord now = MakeRecord();
    change(&now);
    const Result<RunRecord> merged = MergeRecords("folder", MakeRecord(), now);
    return merged.ok() ? "" : merged.status().message();
  };
  const auto holds = [](const std::string& text, const std::string& part) {
    return text.find("folder") != std::string::npos && text.find(part) != std::string::npos;
  };
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->model_sha256 = "bb"; }), "model SHA-256: 'aa' there, 'bb' now");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->libllama = "2"; }), "libllama");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->kv_type = "q8_0"; }), "--kv: 'f16' there, 'q8_0' now");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->flash_attention = false; }), "--fa: 'on' there, 'off' now");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->chat_template = "none"; }), "chat template");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->seed = 43; }), "--seed: '42' there, '43' now");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->haystack = "essays"; }), "haystack");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->options = "--fidelity 8"; }), "options");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->settings = {"dropkv"}; }), "settings: 'dropkv; snapkv' there");
  EXPECT_PRED2(holds, refusal([](RunRecord* r) { r->data = "one.txt ab 1"; }),
               "data: 'one.txt aa 1' there, 'one.txt ab 1' now");
}

TEST(Record, WrittenAndReadBack) {
  const std::string folder = ::testing::TempDir() + "dropkv_record_" + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  EXPECT_FALSE(ReadRecord(folder).value().has_value());
  RunRecord record = MakeRecord();
  ASSERT_TRUE(WriteRecord(folder, record).ok());
  record.options = "--fidelity 8";
  ASSERT_TRUE(WriteRecord(folder, record).ok());
  const Result<std::optional<RunRecord>> read = ReadRecord(folder);
  ASSERT_TRUE(read.ok() && read->has_value());
  EXPECT_EQ(ToJson(**read), ToJson(record));
  EXPECT_EQ((*read)->options, "--fidelity 8");
  std::filesystem::remove_all(folder);
}

TEST(Record, DescribesTheMachine) {
  EXPECT_NE(Machine().find("GiB memory"), std::string::npos) << Machine();
  EXPECT_EQ(DropKvVersion().find_first_not_of("0123456789."), DropKvVersion().find(" (")) << DropKvVersion();
  EXPECT_EQ(Now().size(), std::string("2000-01-01T00:00:00Z").size());
}

}  // namespace
}  // namespace dropkv::eval
