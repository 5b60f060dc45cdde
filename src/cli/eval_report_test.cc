#include "cli/eval_report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "eval/report/made_results.h"

namespace dropkv::cli {
namespace {

class EvalReportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(::testing::TempDir()) / (std::string("dropkv_report_") + test->name());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    std::ofstream(root_ / "run.json") << eval::ToJson(eval::MadeRun("model", "aa"));
    std::ofstream rows(root_ / "results.jsonl");
    for (const char* setting : {"snapkv", "dropkv"})
      rows << eval::ToJsonLine(eval::MadeRow("vt", "1", setting, "5%", 0.5)) << "\n";
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // What the call writes to standard output.
  static std::string Output(const std::vector<std::string>& arguments) {
    ::testing::internal::CaptureStdout();
    const Status status = EvalReport(arguments);
    EXPECT_TRUE(status.ok()) << status.message();
    return ::testing::internal::GetCapturedStdout();
  }
  static std::string Message(const std::vector<std::string>& arguments) { return EvalReport(arguments).message(); }
  std::string Text(const char* name) const {
    std::ostringstream text;
    text << std::ifstream(root_ / name).rdbuf();
    return text.str();
  }
  std::string Path(const char* name) const { return (root_ / name).string(); }

  std::filesystem::path root_;
};

TEST_F(EvalReportTest, WritesWhatIsAskedFor) {
  const std::string tables = Output({root_.string(), "--markdown", Path("r.md"), "--html", Path("r.html")});
  EXPECT_EQ(tables.find("model: ruler, 4,096 tokens, question seen\n"), 0U) << tables;
  EXPECT_TRUE(Text("r.md").starts_with("# model\n"));
  EXPECT_TRUE(Text("r.html").starts_with("<!DOCTYPE html>"));
  EXPECT_TRUE(Output({"--json", root_.string()}).starts_with("{\n  \"against\": \"snapkv\""));
  EXPECT_TRUE(Output({"--help"}).starts_with("usage: dropkv eval report"));
}

TEST_F(EvalReportTest, AgainstAnotherSetting) {
  EXPECT_NE(Output({root_.string()}).find("Score against snapkv\n"), std::string::npos);
  EXPECT_NE(Output({root_.string(), "--against", "dropkv"}).find("Score against dropkv\n"), std::string::npos);
  EXPECT_EQ(EvalReport({root_.string(), "--against", "dropvk"}).code(), Code::kNotFound);
  EXPECT_EQ(Message({root_.string(), "--against", "dropvk"}),
            "--against: expected one of the settings dropkv, snapkv; got 'dropvk'");
}

TEST_F(EvalReportTest, ErrorsNameTheArgument) {
  EXPECT_TRUE(Message({}).starts_with("eval report: expected a folder"));
  EXPECT_EQ(Message({root_.string(), "--html"}), "eval report: --html: expected a value behind it");
  EXPECT_EQ(Message({root_.string(), "--pdf"}),
            "eval report: expected --against, --markdown, --html, --json or a folder, got '--pdf'");
  EXPECT_TRUE(Message({Path("none")}).starts_with(Path("none") + "/run.json: cannot be opened"));
  EXPECT_EQ(Message({root_.string(), "--html", Path("none/r.html")}), Path("none/r.html") + ": writing failed");
}

}  // namespace
}  // namespace dropkv::cli
