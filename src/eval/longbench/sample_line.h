// One line of a LongBench file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"
#include "eval/longbench/tasks.h"

namespace dropkv::eval {

struct LongBenchLine {
  std::string input;
  std::string context;
  std::vector<std::string> answers;
  std::vector<std::string> classes;  // empty: null in the file
  std::string id;
};

// Fields that are not used (length, language) may be missing; `dataset`, where it is there, must name the task. Errors
// name the field, what was expected and what came, or the byte at which the line is no JSON.
Result<LongBenchLine> ParseLongBenchLine(std::string_view line, const LongBenchTask& task);

}  // namespace dropkv::eval
