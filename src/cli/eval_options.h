// What `dropkv eval` was asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dropkv/dtype.h"
#include "dropkv/status.h"
#include "eval/runner/grid.h"

namespace dropkv::cli {

struct EvalOptions {
  std::string model;
  std::string suite = "ruler";          // or "longbench", or a file
  std::vector<std::string> tasks;       // empty: all
  std::vector<int32_t> lengths;         // tokens
  std::vector<eval::Setting> settings;  // policies with head rules, flags and sharing applied; without full
  std::vector<std::string> budgets;     // as typed
  std::vector<bool> hidden;             // question modes
  int32_t samples = 0;                  // of each task and length; 0: all
  uint32_t seed = 42;
  std::string data;  // folder; empty: none
  std::string out;   // folder
  DType kv_type = DType::kF16;
  bool flash_attention = true;
  int32_t threads = 0;
  int32_t gpu_layers = -1;  // as in RunOptions
  int32_t context = 0;      // most tokens, prompt and answer; 0: what the model was trained for
  int32_t max_length = 0;   // longbench: tokens of a filled prompt; 0: what the context holds
  int32_t fidelity = 0;     // tokens; 0: not measured
  int32_t batch = 16;       // keep lists decoded together: where that stops to gain (docs/eval.md)
  double time_limit = 0;    // seconds; 0: none
  bool raw = false;
  bool ignore_eos = false;
  bool skip_too_long = false;
  std::string command;  // as typed
};

// Parses the arguments behind `dropkv eval`. Errors name the flag, what was expected and what came. On "--help" the
// result is empty.
Result<std::optional<EvalOptions>> ParseEval(std::vector<std::string> arguments);

// Those that change results and stand nowhere else in run.json: "--fidelity 32 --ctx 8192".
std::string RecordedOptions(const EvalOptions& options);

// The text of `dropkv eval --help`.
std::string EvalHelp();

}  // namespace dropkv::cli
