// What LongBench fixes for each task.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "eval/sample.h"

namespace dropkv::eval {

struct LongBenchTask {
  std::string_view name;
  std::string_view category;
  Metric metric;
  int32_t max_tokens;
  bool chat_template;
  bool first_line;
  bool stop_at_newline;
  int32_t official;    // samples of the official file
  int32_t official_e;  // of LongBench-E's; 0: the task is not in it
  std::string_view own_template;
};

// Names by category, as the official table lists them.
std::span<const LongBenchTask> LongBenchTaskTable();

// Null where there is no such task.
const LongBenchTask* FindLongBenchTask(std::string_view name);

}  // namespace dropkv::eval
