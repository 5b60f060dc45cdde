// Files of a data folder, read whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::eval {

// The whole file. Errors: kNotFound where it is none, kIo where it cannot be read, kInvalidArgument where it is longer
// than the largest file that is taken (1 GiB).
Result<std::string> ReadDataFile(const std::filesystem::path& path);

// "qasper.jsonl fnv1a64:0123456789abcdef 1234": which file it was, for the record. A checksum, no proof.
std::string DescribeFile(const std::filesystem::path& path, std::string_view content);

struct NumberedLine {
  int32_t number;  // from 1
  std::string_view text;
};

// The lines that hold more than white space.
std::vector<NumberedLine> Lines(std::string_view text);

// The file of a task in a folder: TASK.jsonl, else TASK_e.jsonl (LongBench-E), else the only TASK_*.jsonl. "TASK_e"
// finds TASK_e.jsonl only. Empty: there is none.
std::filesystem::path FindTaskFile(const std::filesystem::path& folder, std::string_view task);

}  // namespace dropkv::eval
