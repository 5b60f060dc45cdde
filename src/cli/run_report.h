// What `dropkv run` shows when it is done: a table, or one JSON object.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "baseline/recipe.h"
#include "cli/generate.h"
#include "dropkv/engine.h"
#include "llama/look_ahead.h"

namespace dropkv::cli {

struct Turn {
  std::string question;
  Answer answer;
};

struct RunRecord {
  baseline::Recipe policy;
  std::string budget;  // as typed; "100%" for the full cache
  std::string decode;  // what ran: "full", "native", "ragged stop", "ragged replace"
  int32_t kept_min = 0;
  double kept_mean = 0;
  int32_t kept_max = 0;
  int64_t kv_bytes_before = 0;
  int64_t kv_bytes_after = 0;
  double score_s = 0;
  double compact_s = 0;
  double output_error = 0;
  double evicted_mass = 0;
  llama::DraftReport draft;      // no tokens: nothing was drafted
  int32_t judged_by = 0;         // tokens behind the prompt whose queries were asked too
  int32_t certificate_rows = 0;  // prompt rows that the two above are measured over
  EvictReport evict;
  std::vector<std::string> warnings;
  int64_t resident_before = 0;  // bytes; 0: not measured (several runs share a prefill)
  int64_t resident_after = 0;
  std::vector<Turn> turns;
  std::string verdict;  // "right", "WRONG"; empty where no answer was expected
};

struct RunSummary {
  std::string model;
  std::string device;  // "CPU", or the GPU's name
  int32_t layers = 0;
  int32_t sliding_layers = 0;
  int32_t prompt_tokens = 0;
  bool hidden = false;
  double prefill_s = 0;
  double statistics_s = 0;  // of all queries, gathered for the policies that need them; not part of prefill_s
  double copy_s = 0;        // of bringing a GPU's cache to host memory, once for all runs; not part of prefill_s
  double self_test_worst = 0;
  std::vector<RunRecord> runs;
};

// "right" where the answer contains the expected text, upper and lower case alike; else "WRONG".
std::string Judge(std::string_view answer, std::string_view expected);

// tokens/s over all turns; 0 where no decode call was made.
double TokensPerSecond(const RunRecord& run);

// Remarks on a run: nothing evicted, budget raised, tokens kept for NaN, ...; empty where there is nothing to say.
std::vector<std::string> Remarks(const RunSummary& summary, const RunRecord& run);

std::string TableText(const RunSummary& summary);
std::string JsonText(const RunSummary& summary);

}  // namespace dropkv::cli
