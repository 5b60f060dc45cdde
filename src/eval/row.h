// The result of one (sample, policy, budget): a line of results.jsonl.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::eval {

struct KeptTokens {
  int32_t min = 0;  // of a layer's KV heads
  double mean = 0;
  int32_t max = 0;
};

struct Row {
  // Which sample; `sample_key` is equal for all rows of one prompt (suite/task/length/id).
  std::string suite;
  std::string task;
  std::string category;
  std::string id;
  int32_t length = 0;          // nominal; 0: none
  std::vector<double> depths;  // percent; empty: no needles
  std::string prompt_hash;     // of the prompt's tokens, 16 hexadecimal digits
  int32_t prompt_tokens = 0;

  // What was done. `setting` names policy, window, pooling and heads shortly and is what tables are grouped by:
  // equal for all rows of one run of a policy, whatever the budget ("dropkv", "adadropkv", "snapkv w=32 k=7").
  std::string setting;
  std::string policy;
  std::string budget;  // as typed: "5%"; "100%" for the full cache
  bool hidden = false;
  int32_t window = 0;
  std::optional<std::string> rows;  // "window:8+draft:8@10%"; absent: the window's alone
  std::string pool;                 // "11", "3,20", "max:7"; "1": none
  std::string heads;                // "uniform", "ada", "ada-o", "flat"
  std::string decode;

  // What came of it.
  std::string answer;
  int32_t answer_tokens = 0;
  double score = 0;              // 0..1
  std::vector<KeptTokens> kept;  // per layer that sees the whole prompt; of the full cache all tokens
  double output_error = 0;       // realised, over the certificate's rows
  // Fidelity: against the full cache over a forced continuation; absent where it was not measured.
  std::optional<double> kl;       // nats per token, KL(full || evicted), mean
  std::optional<double> top1;     // share of the tokens at which both have the same most likely token
  double prefill_s = 0;           // shared by all rows of the sample
  std::optional<double> draft_s;  // of the rows behind the prompt: drafting, and asking for their queries
  double score_s = 0;
  double compact_s = 0;
  double decode_s = 0;
  std::vector<std::string> warnings;

  std::string sample_key() const;
  bool full() const { return policy == "full"; }
};

// One line of JSON without the newline; field names as above, absent optionals left out, invalid UTF-8 replaced.
std::string ToJsonLine(const Row& row);
// Errors: not JSON, a field missing or of another type, by its name. Unknown fields are passed over.
Result<Row> ParseRow(std::string_view line);

// An eviction that kept every token in every layer although its budget asked for less measured nothing: an error.
Status CheckEviction(const Row& row);

// What was run, on what: run.json beside the results.
struct RunRecord {
  std::string model;         // general.name
  std::string model_file;    // its name without folders
  std::string model_sha256;  // of the file
  int64_t model_bytes = 0;
  std::string libllama;        // version or build of the library that was loaded
  std::string dropkv_version;  // with the git revision
  std::string machine;         // CPU, cores, memory, devices
  std::string command;         // as typed
  std::string chat_template;   // "model's", "none"
  std::string haystack;        // where RULER's text came from
  std::string data;            // which files were read, with a hash each, one a line
  std::string options;         // further ones that change results, as typed: "--fidelity 32 --max-length 31500"
  std::string kv_type;
  bool flash_attention = true;
  int32_t threads = 0;
  std::optional<int32_t> batch;  // most keep lists that were decoded together; absent: by an earlier version, 1
  uint32_t seed = 0;
  int32_t samples = 0;  // a task
  std::vector<int32_t> lengths;
  std::vector<std::string> tasks;
  std::vector<std::string> settings;
  std::vector<std::string> budgets;
  std::vector<std::string> questions;  // "seen", "hidden"
  std::string started;                 // UTC, ISO 8601
};

std::string ToJson(const RunRecord& record);
Result<RunRecord> ParseRunRecord(std::string_view text);

}  // namespace dropkv::eval
