#include "eval/report/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "eval/report/made_results.h"
#include "eval/report/tables.h"

namespace dropkv::eval {
namespace {

// Two samples of one task; all of a setting's scores are equal, so that every interval has no width.
Results Small() {
  std::vector<Row> rows;
  for (const char* id : {"1", "2"}) {
    rows.push_back(MadeRow("vt", id, "full", "100%", 0.8));
    rows.push_back(MadeRow("vt", id, "snapkv", "5%", 0.5));
    rows.push_back(MadeRow("vt", id, "drop|kv", "5%", 0.6));
    rows.back().kl = 0.125;
    rows.back().top1 = 0.9;
  }
  Results results = MadeResults(rows);
  RunRecord& run = results.runs.front();
  run.model_bytes = 1234567;
  run.libllama = "b1";
  run.kv_type = "f16";
  run.threads = 2;
  run.batch = 8;
  run.seed = 42;
  run.samples = 2;
  run.lengths = {4096};
  run.questions = {"seen"};
  run.command = "dropkv eval -m model.gguf \\\n  --out x";
  run.settings = {"snapkv", "drop|kv"};
  return results;
}

TEST(MarkdownReport, Exact) {
  EXPECT_EQ(MarkdownReport(Summarise(Small())), R"(# model

| protocol | |
| --- | --- |
| model | model |
| file | model.gguf, 1,234,567 bytes |
| sha256 | aa |
| libllama | b1 |
| threads | 2 |
| decoded together | up to 8 keep lists |
| cache | f16, flash attention on |
| question | seen |
| seed | 42 |
| samples a task | 2 |
| lengths | 4,096 |
| settings | snapkv, drop\|kv |

    dropkv eval -m model.gguf \
      --out x

Intervals: 95%, from 2000 resamples of the samples within each task. Differences are paired.

## ruler, 4,096 tokens, question seen

full cache 80.0 [80.0, 80.0]; 2 samples, 1 task.

### Score

| setting | 5% |
| --- | ---: |
| snapkv | 50.0 [50.0, 50.0] |
| drop\|kv | 60.0 [60.0, 60.0] |

Mean of the tasks' means, 0 to 100, with its 95% interval; columns: the share or number of tokens kept.

### Score against the full cache

| setting | 5% |
| --- | ---: |
| snapkv | -30.0 [-30.0, -30.0] \* |
| drop\|kv | -20.0 [-20.0, -20.0] \* |

Paired over the samples that both have, in points, 95% interval. \*: the interval excludes zero. Many comparisons are made: one in twenty excludes zero by chance.

### Score against snapkv

| setting | 5% |
| --- | ---: |
| drop\|kv | +10.0 [+10.0, +10.0] \* |

Paired over the samples that both have, in points, 95% interval. \*: the interval excludes zero. Many comparisons are made: one in twenty excludes zero by chance.

### Tasks at 5%

| task | samples | full | snapkv | drop\|kv |
| --- | ---: | ---: | ---: | ---: |
| vt | 2 | 80.0 | 50.0 | 60.0 |

### Fidelity to the full cache

| setting | budget | samples | KL, nats per token | same top token, % | KL against snapkv |
| --- | ---: | ---: | ---: | ---: | ---: |
| drop\|kv | 5% | 2 | 0.125 [0.125, 0.125] | 90.0 [90.0, 90.0] | - |

KL(full \|\| evicted) of the next-token distributions over a forced continuation, lower is nearer; the share of its tokens at which both have the same most likely token.

### Kept tokens, output error, time

| setting | budget | kept min/mean/max | of prompt | output error | prefill s | score ms | compact ms | decode s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| full | 100% | 1000 / 1000 / 1000 | 100.0% | 0.0000 | 0.00 | 0.0 | 0.0 | 0.00 |
| snapkv | 5% | 90 / 100 / 110 | 10.0% | 0.0000 | 0.00 | 0.0 | 0.0 | 0.00 |
| drop\|kv | 5% | 90 / 100 / 110 | 10.0% | 0.0000 | 0.00 | 0.0 | 0.0 | 0.00 |

Kept: of a layer's KV heads, over layers and samples. Output error: realised, over the rows that judged; it is no measure of quality. Times are means a sample; the prefill is shared.

)");
}

TEST(MarkdownReport, TextStaysText) {
  Results results = Small();
  for (Row& row : results.rows) row.task = "a<b>`c`\n| d | *e* ![x](y)";
  const std::string text = MarkdownReport(results);
  EXPECT_NE(text.find("| a&lt;b>\\`c\\`; \\| d \\| \\*e\\* ![x\\](y) | 2 |"), std::string::npos) << text;
}

TEST(TerminalReport, TablesAndNotes) {
  Results results = Small();
  results.remarks = {"x:3: the unfinished last line was skipped"};
  results.rows.front().warnings = {"strange \x1B[2J name"};
  const std::string text = TerminalReport(results);
  EXPECT_NE(text.find("model: ruler, 4,096 tokens, question seen\nfull cache 80.0 [80.0, 80.0]; 2 samples, 1 task\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("Score\n  setting                 5%\n  snapkv   50.0 [50.0, 50.0]\n"
                      "  drop|kv  60.0 [60.0, 60.0]\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("  drop|kv  +10.0 [+10.0, +10.0] *\n"), std::string::npos) << text;
  EXPECT_NE(text.find("note: x:3: the unfinished last line was skipped\n"), std::string::npos);
  EXPECT_NE(text.find("warning of 1 row: strange ?[2J name\n"), std::string::npos) << text;
}

TEST(TerminalReport, FewerSamplesAreSaid) {
  Results results = Small();
  results.rows.pop_back();
  results.run_of.pop_back();
  const std::string text = TerminalReport(results);
  EXPECT_NE(text.find("drop|kv       60.0 (n = 1)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("+10.0 (n = 1)\n"), std::string::npos) << text;
}

TEST(JsonReport, HoldsTheNumbers) {
  const nlohmann::json json = nlohmann::json::parse(JsonReport(Summarise(Small())));
  EXPECT_EQ(json["against"], "snapkv");
  const nlohmann::json& slice = json["models"][0]["slices"][0];
  EXPECT_EQ(slice["question"], "seen");
  ASSERT_EQ(slice["cells"].size(), 3U);
  EXPECT_EQ(slice["cells"][0]["setting"], "full");
  EXPECT_EQ(slice["cells"][0]["minus_full"], nullptr);
  EXPECT_NEAR(slice["cells"][2]["minus_against"]["value"].get<double>(), 10, 1e-9);
  EXPECT_NEAR(slice["cells"][2]["minus_against"]["interval"][0].get<double>(), 10, 1e-9);
  EXPECT_EQ(slice["cells"][2]["tasks"]["vt"]["samples"], 2);
}

TEST(Texts, NoNegativeZero) {
  EXPECT_EQ(DifferenceText({.value = -0.04, .interval = Interval{-0.04, 0.06}, .samples = 2}), "0.0 [0.0, +0.1]");
  EXPECT_EQ(EstimateText({.value = -0.0, .interval = std::nullopt, .samples = 2}), "0.0");
  EXPECT_EQ(DifferenceText({.value = 0.0004, .interval = std::nullopt, .samples = 1}, 3), "0.000");
}

}  // namespace
}  // namespace dropkv::eval
