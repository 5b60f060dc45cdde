// LongBench (v1), the 16 English and code tasks: the official files, templates and truncation.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"
#include "eval/sample.h"

namespace dropkv::eval {

std::span<const std::string_view> LongBenchTasks();

// Cuts the middle out of a text of more than `tokens` tokens: the first and last trunc(tokens / 2) tokens as text.
using MiddleCutter = std::function<std::string(std::string_view text, int32_t tokens)>;

struct LongBenchOptions {
  std::vector<std::string> tasks;
  std::string data;        // folder with TASK.jsonl (or TASK_e.jsonl) and optionally dataset2prompt.json
  int32_t samples = 0;     // the first ones of each task; 0: all
  int32_t max_length = 0;  // tokens of the filled prompt; longer ones lose their middle; 0: no limit
};

struct LongBenchSet {
  std::vector<Sample> samples;
  std::string data;                  // files that were read, as in RulerSet
  std::vector<std::string> remarks;  // "qasper: 12 of the official 200 samples (subset)", LongBench-E, own templates
};

// Tasks in the order asked for, samples in the file's. Sample::task is TASK or TASK_e, by the file that was read.
// Errors name the option, or the file, its line and the field, what was expected and what came. A cut prompt whose
// context's end is cut away has for its question what is left of it.
Result<LongBenchSet> ReadLongBench(const LongBenchOptions& options, const TokenCounter& count, const MiddleCutter& cut);

}  // namespace dropkv::eval
