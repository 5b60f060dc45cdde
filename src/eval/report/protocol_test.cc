#include <gtest/gtest.h>

#include "eval/report/made_results.h"
#include "eval/report/tables.h"

namespace dropkv::eval {
namespace {

TEST(Protocol, OneTableOfTwoFoldersInMarkdown) {
  EXPECT_EQ(MarkdownReport(MadeTwoFolders()), R"(# model

| protocol | |
| --- | --- |
| model | model |
| file | model.gguf, 0 bytes |
| sha256 | aa |
| threads | 1, 4 |
| cache | f16, flash attention on |
| question | seen |
| haystack | essay.txt |
| data | words/a.txt aaaaaaaaaaaa; words/b.txt bbbbbbbbbbbb; essay.txt eeeeeeeeeeee |
| seed | 42 |
| samples a task | all |
| tasks | vt, cwe |

    dropkv eval -m model.gguf --tasks vt --out vt
    dropkv eval -m model.gguf --tasks cwe --out cwe

Intervals: 95%, from 2000 resamples of the samples within each task. Differences are paired.

## ruler, 4,096 tokens, question seen

full cache 60.0; 3 samples, 2 tasks.

samples: vt 2, cwe 1

### Kept tokens, output error, time

| setting | budget | kept min/mean/max | of prompt | output error | prefill s | score ms | compact ms | decode s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| full | 100% | 1000 / 1000 / 1000 | 100.0% | 0.0000 | 0.00 | 0.0 | 0.0 | 0.00 |

Kept: of a layer's KV heads, over layers and samples. Output error: realised, over the rows that judged; it is no measure of quality. Times are means a sample; the prefill is shared.

)");
}

TEST(Protocol, OneListOfTwoFoldersOnThePage) {
  const std::string page = HtmlReport(MadeTwoFolders());
  const std::string list =
      "<details open=\"open\"><summary>Protocol</summary><dl><dt>model</dt><dd>model</dd>"
      "<dt>file</dt><dd>model.gguf, 0 bytes</dd><dt>sha256</dt><dd class=\"code\">aa</dd><dt>threads</dt><dd>1, 4</dd>"
      "<dt>cache</dt><dd>f16, flash attention on</dd><dt>question</dt><dd>seen</dd><dt>haystack</dt><dd>essay.txt</dd>"
      "<dt>data</dt><dd>words/a.txt aaaaaaaaaaaa\nwords/b.txt bbbbbbbbbbbb\nessay.txt eeeeeeeeeeee</dd>"
      "<dt>seed</dt><dd>42</dd><dt>samples a task</dt><dd>all</dd><dt>tasks</dt><dd>vt, cwe</dd>"
      "<dt>command</dt><dd class=\"code\">dropkv eval -m model.gguf --tasks vt --out vt\n"
      "dropkv eval -m model.gguf --tasks cwe --out cwe</dd></dl>\n</details>\n";
  const size_t at = page.find(list);
  ASSERT_NE(at, std::string::npos) << page;
  EXPECT_EQ(page.find("<dl>", at + list.size()), std::string::npos);
  EXPECT_NE(page.find("2 tasks</p>\n<p>samples: vt 2, cwe 1</p>\n"), std::string::npos);
}

TEST(Protocol, SamplesOfUnequalTasksOnTheScreen) {
  Results results = MadeTwoFolders();
  EXPECT_NE(TerminalReport(results).find("3 samples, 2 tasks\nsamples: vt 2, cwe 1\n"), std::string::npos);
  results.rows.push_back(MadeRow("cwe", "2", "dropkv", "5%", 0));  // the cell that has most counts: still one of cwe
  results.run_of.push_back(1);
  EXPECT_NE(TerminalReport(results).find("samples: vt 2, cwe 1\n"), std::string::npos);
  results.rows.push_back(MadeRow("cwe", "3", "dropkv", "5%", 0));
  results.run_of.push_back(1);
  EXPECT_EQ(TerminalReport(results).find("samples: "), std::string::npos);
}

// The value of one row; empty where there is no such row.
std::string Value(const std::vector<RunRecord>& runs, const std::string& name) {
  for (const auto& row : ProtocolTable(runs).rows)
    if (row.front() == name) return row.back();
  return "";
}

TEST(Protocol, EveryValueOnceInItsOrder) {
  RunRecord a = MadeRun("model", "aa");
  a.samples = 40;
  a.lengths = {8192, 4096};
  a.budgets = {"5%", "10%"};
  a.settings = {"dropkv", "snapkv"};
  a.questions = {"hidden"};
  a.machine = "CPU, 2 cores";
  a.started = "2026-01-02T00:00:00Z";
  RunRecord b = a;
  b.samples = 0;
  b.lengths = {4096, 16384};
  b.budgets = {"30%", "5%"};
  b.settings = {"snapkv", "caote"};
  b.questions = {"seen", "hidden"};
  b.machine = "CPU, 4 cores";
  b.started = "2026-01-01T00:00:00Z";
  b.flash_attention = false;
  b.options = "--fidelity 32";
  const std::vector<RunRecord> runs = {a, b, a};
  EXPECT_EQ(Value(runs, "samples a task"), "40, all");
  EXPECT_EQ(Value(runs, "lengths"), "8,192, 4,096, 16,384");
  EXPECT_EQ(Value(runs, "budgets"), "5%, 10%, 30%");
  EXPECT_EQ(Value(runs, "settings"), "dropkv, snapkv, caote");
  EXPECT_EQ(Value(runs, "question"), "hidden, seen");
  EXPECT_EQ(Value(runs, "machine"), "CPU, 2 cores; CPU, 4 cores");
  EXPECT_EQ(Value(runs, "started"), "2026-01-02T00:00:00Z, 2026-01-01T00:00:00Z");
  EXPECT_EQ(Value(runs, "cache"), ", flash attention on; , flash attention off");
  EXPECT_EQ(Value(runs, "options"), "none; --fidelity 32");
  EXPECT_EQ(Value({a, a}, "options"), "");
}

TEST(Protocol, HaystackAndDataAreUnited) {
  const std::string hash = "0123456789abcdef";
  RunRecord a = MadeRun("model", "aa");
  a.haystack = "none";
  a.data = "my file.txt " + hash + " 5\nno hash 5\nshort abc 5";
  RunRecord b = a;
  b.haystack = "emma.txt, persuasion.txt";
  b.data = "my file.txt " + hash + " 5\nmy file.txt f" + hash + " 5\n";
  RunRecord c = a;
  c.haystack = "persuasion.txt, lady.txt";
  c.data = "";
  EXPECT_EQ(Value({a, a}, "haystack"), "none");
  EXPECT_EQ(Value({a, b, c}, "haystack"), "emma.txt, persuasion.txt, lady.txt");
  EXPECT_EQ(Value({a, b, c}, "data"), "my file.txt 0123456789ab\nno hash 5\nshort abc 5\nmy file.txt f0123456789a");
}

std::string CommandsOf(const std::vector<std::string>& commands) {
  std::vector<RunRecord> runs;
  for (const std::string& command : commands) {
    runs.push_back(MadeRun("model", "aa"));
    runs.back().command = command;
  }
  return Value(runs, "command");
}

TEST(Protocol, CommandsLoseTheFoldersOfAbsolutePaths) {
  EXPECT_EQ(CommandsOf({"x -m /a/b/qwen.gguf --out=/c/d/ -r e/f.txt --pool 3,20"}),
            "x -m qwen.gguf --out=d -r e/f.txt --pool 3,20");
  EXPECT_EQ(CommandsOf({"x '/a b/c d.gguf' \"/e/f\" '(1) /g/h' / /i,/j/k /l,m/n"}),
            "x 'c d.gguf' \"f\" '(1) h' / i,k n");
}

TEST(Protocol, AFewCommandsStandForAll) {
  const auto command = [](const std::string& task) { return "x -m m --tasks " + task + " --out /r/" + task; };
  EXPECT_EQ(CommandsOf({command("a"), command("b"), command("a"), command("c")}),
            "x -m m --tasks a --out a\nx -m m --tasks b --out b\nx -m m --tasks c --out c");
  const std::string three = CommandsOf({command("a"), command("b"), command("c")});
  EXPECT_EQ(CommandsOf({command("a"), command("b"), command("c"), command("d"), command("e")}),
            three + "\n# and 2 more that differ in --tasks and --out");
  EXPECT_EQ(CommandsOf({command("a"), command("b"), command("c"), command("d") + " --seed=-1"}),
            three + "\n# and 1 more that differ in --tasks, --out and --seed");
  EXPECT_EQ(CommandsOf({command("a"), command("b"), command("c"), command("d") + " --seed 1 -t 2"}),
            three + "\n# and 1 more");
  EXPECT_EQ(CommandsOf({command("a"), command("b"), command("c"), "y" + command("d")}), three + "\n# and 1 more");
  EXPECT_EQ(CommandsOf({"x -s 1 -t", "x -s 2 -t", "x -s -3 -t", "x -s=4 -t"}),
            "x -s 1 -t\nx -s 2 -t\nx -s -3 -t\n# and 1 more that differ in -s");
}

}  // namespace
}  // namespace dropkv::eval
