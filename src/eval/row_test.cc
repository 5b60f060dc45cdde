#include "eval/row.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace dropkv::eval {
namespace {

// Every field differs from its default, so that one that is forgotten shows.
Row FilledRow() {
  Row row;
  row.suite = "ruler";
  row.task = "niah_single_2";
  row.category = "needle";
  row.id = "17";
  row.length = 4096;
  row.depths = {12.5, 100};
  row.prompt_hash = "00ff00ff00ff00ff";
  row.prompt_tokens = 4001;
  row.setting = "dropkv w=8";
  row.policy = "dropkv";
  row.budget = "2.5%";
  row.hidden = true;
  row.window = 8;
  row.rows = "window:8+draft:8@10%";
  row.pool = "3,20";
  row.heads = "ada";
  row.decode = "native";
  row.answer = "line one\nline \"two\"\t\xC3\xA9";
  row.answer_tokens = 9;
  row.score = 0.75;
  row.kept = {{90, 100.25, 110}, {100, 100, 100}};
  row.output_error = 0.125;
  row.kl = 0.0625;
  row.top1 = 0.875;
  row.prefill_s = 1.5;
  row.draft_s = 0.375;
  row.score_s = 0.25;
  row.compact_s = 0.5;
  row.decode_s = 2.5;
  row.warnings = {"one", "two"};
  return row;
}

RunRecord FilledRun() {
  RunRecord run;
  run.model = "Some Model";
  run.model_file = "some.gguf";
  run.model_sha256 = "abcd";
  run.model_bytes = 5'000'000'000;
  run.libllama = "b1234";
  run.dropkv_version = "0.1.0";
  run.machine = "2 cores";
  run.command = "dropkv eval -m \"some.gguf\"";
  run.chat_template = "model's";
  run.haystack = "built in";
  run.data = "a.txt 12\nb.txt 34";
  run.options = "--fidelity 32";
  run.kv_type = "f16";
  run.flash_attention = false;
  run.threads = 2;
  run.batch = 16;
  run.seed = 4'000'000'000U;
  run.samples = 40;
  run.lengths = {4096, 8192};
  run.tasks = {"vt", "cwe"};
  run.settings = {"dropkv"};
  run.budgets = {"5%", "10%"};
  run.questions = {"seen", "hidden"};
  run.started = "2025-01-02T03:04:05Z";
  return run;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Row, OneLineHoldsEveryField) {
  EXPECT_EQ(ToJsonLine(FilledRow()),
            R"({"suite":"ruler","task":"niah_single_2","category":"needle","id":"17","length":4096,)"
            R"("depths":[12.5,100.0],"prompt_hash":"00ff00ff00ff00ff","prompt_tokens":4001,)"
            R"("setting":"dropkv w=8","policy":"dropkv","budget":"2.5%","hidden":true,"window":8,)"
            R"("rows":"window:8+draft:8@10%","pool":"3,20",)"
            R"("heads":"ada","decode":"native","answer":"line one\nline \"two\"\té","answer_tokens":9,"score":0.75,)"
            R"("kept":[{"min":90,"mean":100.25,"max":110},{"min":100,"mean":100.0,"max":100}],"output_error":0.125,)"
            R"("kl":0.0625,"top1":0.875,"prefill_s":1.5,"draft_s":0.375,"score_s":0.25,"compact_s":0.5,"decode_s":2.5,)"
            R"("warnings":["one","two"]})");
}

TEST(Row, ComesBackAsItWas) {
  const Row row = FilledRow();
  const Result<Row> back = ParseRow(ToJsonLine(row));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(ToJsonLine(*back), ToJsonLine(row));
  EXPECT_EQ(back->answer, row.answer);
  EXPECT_EQ(back->kept[0].mean, 100.25);
  EXPECT_EQ(back->sample_key(), "ruler/niah_single_2/4096/17");
}

TEST(Row, AbsentFidelityStaysAbsent) {
  Row row = FilledRow();
  row.kl.reset();
  row.top1 = std::numeric_limits<double>::quiet_NaN();
  const std::string line = ToJsonLine(row);
  EXPECT_EQ(line.find("kl"), std::string::npos);
  EXPECT_EQ(line.find("top1"), std::string::npos);
  const Result<Row> back = ParseRow(line);
  ASSERT_TRUE(back.ok());
  EXPECT_FALSE(back->kl.has_value());
  EXPECT_FALSE(back->top1.has_value());
}

TEST(Row, InvalidUtf8IsReplaced) {
  Row row = FilledRow();
  row.answer = "caf\xC3";  // the first byte of two
  const Result<Row> back = ParseRow(ToJsonLine(row));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->answer, "caf\xEF\xBF\xBD");
}

TEST(Row, OutputErrorMayBeUndefined) {
  Row row = FilledRow();
  row.output_error = std::numeric_limits<double>::quiet_NaN();
  const Result<Row> back = ParseRow(ToJsonLine(row));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_TRUE(std::isnan(back->output_error));
}

TEST(Row, ErrorsNameTheField) {
  const std::string line = ToJsonLine(FilledRow());
  const auto message = [&](const std::string& from, const std::string& to) {
    const Result<Row> row = ParseRow(Replaced(line, from, to));
    return row.ok() ? std::string("no error") : row.status().message();
  };
  EXPECT_EQ(message("\"task\":", "\"tusk\":"), "field task is missing");
  EXPECT_EQ(message("\"length\":4096", "\"length\":\"4096\""), "field length: expected a whole number, got string");
  EXPECT_EQ(message("\"length\":4096", "\"length\":40.5"), "field length: expected a whole number, got a number");
  EXPECT_EQ(message("4096", "3000000000"), "field length: 3000000000 is out of range");
  EXPECT_EQ(message("4096", "18446744073709551615"), "field length: 18446744073709551615 is out of range");
  EXPECT_EQ(message("\"score\":0.75", "\"score\":null"), "field score: expected a number, got null");
  EXPECT_EQ(message("\"score\":0.75", "\"score\":75"), "field score: expected 0 to 1, got 75");
  EXPECT_EQ(message("\"kl\":0.0625", "\"kl\":\"low\""), "field kl: expected a number, got string");
  EXPECT_EQ(message("\"hidden\":true", "\"hidden\":1"), "field hidden: expected true or false, got a number");
  EXPECT_EQ(message("[12.5,100.0]", "[12.5,\"x\"]"), "field depths[1]: expected a number, got string");
  EXPECT_EQ(message("\"mean\":100.0", "\"men\":100.0"), "field kept[1]: 'mean' is missing");
  EXPECT_EQ(message("[\"one\",\"two\"]", "\"one\""), "field warnings: expected a list, got string");
  EXPECT_EQ(message("2.5%", "some").substr(0, 13), "field budget:");
}

TEST(Row, NotJson) {
  const std::string line = ToJsonLine(FilledRow());
  EXPECT_EQ(ParseRow(line.substr(0, 100)).status().message().substr(0, 9), "not JSON:");
  EXPECT_EQ(ParseRow("[1]").status().message(), "expected a JSON object, got array");
  EXPECT_TRUE(ParseRow(Replaced(line, "{\"suite\"", "{\"later\":[1],\"suite\"")).ok());
}

TEST(Row, AnEvictionThatEvictedNothingIsAnError) {
  Row row = FilledRow();
  EXPECT_TRUE(CheckEviction(row).ok());
  row.kept = {{4001, 4001, 4001}, {4000, 4000.5, 4001}};  // one head of one layer lost one token
  EXPECT_TRUE(CheckEviction(row).ok());
  row.kept = {{4001, 4001, 4001}, {4001, 4001, 4001}};
  const Status status = CheckEviction(row);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "sample ruler/niah_single_2/4096/17, setting dropkv w=8: the budget of 2.5% asked for fewer than the 4001 "
            "tokens, but every layer kept all of them: this row measured no eviction");
  row.kept.clear();  // no layer that could evict
  EXPECT_FALSE(CheckEviction(row).ok());
}

TEST(Row, KeepingEverythingIsRightWhereItWasAskedFor) {
  Row row = FilledRow();
  row.kept = {{4001, 4001, 4001}};
  row.budget = "100%";
  EXPECT_TRUE(CheckEviction(row).ok());
  row.budget = "4001";
  EXPECT_TRUE(CheckEviction(row).ok());
  row.budget = "4000";
  EXPECT_FALSE(CheckEviction(row).ok());
  row.policy = "full";
  EXPECT_TRUE(CheckEviction(row).ok());
}

TEST(RunRecord, ComesBackAsItWas) {
  const RunRecord run = FilledRun();
  const std::string text = ToJson(run);
  EXPECT_EQ(text.substr(0, 28), "{\n  \"model\": \"Some Model\",\n ");
  const Result<RunRecord> back = ParseRunRecord(text);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(ToJson(*back), text);
  EXPECT_EQ(back->model_bytes, 5'000'000'000);
  EXPECT_EQ(back->options, "--fidelity 32");
  EXPECT_EQ(back->seed, 4'000'000'000U);
  EXPECT_EQ(back->batch, 16);
  EXPECT_EQ(back->questions, (std::vector<std::string>{"seen", "hidden"}));
}

TEST(RunRecord, OlderOnesHaveNoBatch) {
  const Result<RunRecord> back = ParseRunRecord(Replaced(ToJson(FilledRun()), "  \"batch\": 16,\n", ""));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_FALSE(back->batch.has_value());
  EXPECT_EQ(back->threads, 2);
}

TEST(RunRecord, ErrorsNameTheField) {
  const std::string text = ToJson(FilledRun());
  EXPECT_EQ(ParseRunRecord(Replaced(text, "\"seed\": 4000000000", "\"seed\": -1")).status().message(),
            "field seed: -1 is out of range");
  EXPECT_EQ(ParseRunRecord(Replaced(text, "\"threads\"", "\"thread\"")).status().message(), "field threads is missing");
  EXPECT_EQ(ParseRunRecord("").status().message().substr(0, 9), "not JSON:");
}

}  // namespace
}  // namespace dropkv::eval
