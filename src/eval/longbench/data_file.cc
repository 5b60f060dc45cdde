#include "eval/longbench/data_file.h"

#include <fmt/format.h>

#include <cstddef>
#include <fstream>
#include <ios>
#include <limits>
#include <system_error>

#include "core/fnv.h"

namespace dropkv::eval {
namespace fs = std::filesystem;
namespace {

constexpr uintmax_t kLargestFile = uintmax_t{1} << 30;

bool IsFile(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

}  // namespace

Result<std::string> ReadDataFile(const fs::path& path) {
  if (!IsFile(path)) return Status(Code::kNotFound, fmt::format("{}: no such file", path.string()));
  std::error_code error;
  const uintmax_t bytes = fs::file_size(path, error);
  if (error) return Status(Code::kIo, fmt::format("{}: {}", path.string(), error.message()));
  if (bytes > kLargestFile)
    return InvalidArgument(
        fmt::format("{}: {} bytes, expected at most {} in a file", path.string(), bytes, kLargestFile));
  std::ifstream file(path, std::ios::binary);
  std::string content(bytes, '\0');
  if (!file.read(content.data(), static_cast<std::streamsize>(bytes)))
    return Status(Code::kIo, fmt::format("{}: cannot be read", path.string()));
  return content;
}

std::string DescribeFile(const fs::path& path, std::string_view content) {
  return fmt::format("{} fnv1a64:{:016x} {}", path.filename().string(), Fnv1a64(content), content.size());
}

std::vector<NumberedLine> Lines(std::string_view text) {
  std::vector<NumberedLine> lines;
  for (int32_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) lines.push_back({number, line});
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return lines;
}

fs::path FindTaskFile(const fs::path& folder, std::string_view task) {
  const std::string name(task);
  if (fs::path path = folder / (name + ".jsonl"); IsFile(path)) return path;
  if (name.ends_with("_e")) return {};
  if (fs::path path = folder / (name + "_e.jsonl"); IsFile(path)) return path;
  fs::path found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (!file.starts_with(name + "_") || !file.ends_with(".jsonl") || !IsFile(entry->path())) continue;
    if (!found.empty()) return {};
    found = entry->path();
  }
  return found;
}

}  // namespace dropkv::eval
