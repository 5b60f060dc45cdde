// What `dropkv run` was asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/dtype.h"
#include "dropkv/status.h"

namespace dropkv::cli {

enum class DecodeWay { kAuto, kNative, kRagged };

struct RunOptions {
  std::string model;
  std::string document;  // text of --file; empty: none
  bool has_document = false;
  std::vector<std::string> questions;      // --prompt, in order
  bool hidden = false;                     // --question hidden
  std::vector<std::string> budgets;        // as typed
  std::vector<baseline::Recipe> policies;  // in the order they run, `full` first; flags and sharing applied
  DecodeWay decode = DecodeWay::kAuto;
  DType kv_type = DType::kF16;
  bool flash_attention = true;
  int32_t context = 0;      // most tokens, prompt and answers together; 0: what the model was trained for
  int32_t threads = 0;      // 0: one per core
  int32_t gpu_layers = -1;  // layers on a GPU; negative: all where there is one
  float temperature = 0;
  uint32_t seed = 0;
  int32_t max_tokens = 128;
  std::string prefix;  // begins the assistant's turn
  std::string expect;  // what a right answer to the first question contains; empty: not judged
  bool raw = false;    // no chat template
  bool ignore_eos = false;
  bool json = false;
};

// Parses the arguments behind `dropkv run` and reads --file. Errors name the flag, what was expected and what came.
// `arguments` in order; on "--help" the result is empty.
Result<std::optional<RunOptions>> ParseRun(std::vector<std::string> arguments);

// An error unless the document or a question holds text.
Status CheckPrompt(const RunOptions& options);

// The text of `dropkv run --help`.
std::string RunHelp();

}  // namespace dropkv::cli
