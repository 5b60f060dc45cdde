#include "eval/runner/record.h"

#include <fmt/format.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include "dropkv/version.h"
#include "eval/runner/revision.h"

namespace dropkv::eval {
namespace {

std::string RecordPath(const std::string& folder) { return folder + "/run.json"; }

std::string CpuName() {
  std::ifstream stream("/proc/cpuinfo");
  for (std::string line; std::getline(stream, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

template <typename T>
std::vector<T> United(std::vector<T> before, const std::vector<T>& now) {
  for (const T& value : now)
    if (std::find(before.begin(), before.end(), value) == before.end()) before.push_back(value);
  return before;
}

// RULER tasks without prose read none.
bool HasHaystack(const RunRecord& record) { return !record.haystack.empty() && record.haystack != "none"; }

// Lines by their first word, the file's name: files that only one of the runs read are no difference.
Status MergeData(const std::string& before, const std::string& now, std::string* merged) {
  std::map<std::string, std::string> files;
  *merged = before;
  std::istringstream old_lines(before);
  for (std::string line; std::getline(old_lines, line);) files[line.substr(0, line.find(' '))] = line;
  std::istringstream new_lines(now);
  for (std::string line; std::getline(new_lines, line);) {
    const auto found = files.find(line.substr(0, line.find(' ')));
    if (found != files.end() && found->second != line)
      return InvalidArgument(fmt::format("data: '{}' there, '{}' now", found->second, line));
    if (found == files.end()) *merged += (merged->empty() ? "" : "\n") + line;
  }
  return Status::Ok();
}

}  // namespace

std::string DropKvVersion() {
  const std::string revision = kGitRevision;
  return std::string(Version()) + (revision.empty() ? "" : " (" + revision + ")");
}

std::string LlamaVersion() { return fmt::format("{}, ggml {} ({})", llama_version(), ggml_version(), ggml_commit()); }

std::string Machine() {
  const double gib = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) /
                     (1024.0 * 1024.0 * 1024.0);
  std::string text =
      fmt::format("{}, {} hardware threads, {:.1f} GiB memory", CpuName(), std::thread::hardware_concurrency(), gib);
  for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
    ggml_backend_dev_t device = ggml_backend_dev_get(i);
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) continue;
    text += fmt::format("; {} ({})", ggml_backend_dev_description(device), ggml_backend_dev_name(device));
  }
  return text;
}

std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

Result<std::optional<RunRecord>> ReadRecord(const std::string& folder) {
  const std::string path = RecordPath(folder);
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::optional<RunRecord>();
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return Status(Code::kIo, "cannot read " + path);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  Result<RunRecord> record = ParseRunRecord(text);
  if (!record.ok()) return Status(record.status().code(), path + ": " + record.status().message());
  return std::optional(std::move(*record));
}

Status WriteRecord(const std::string& folder, const RunRecord& record) {
  const std::string path = RecordPath(folder);
  const std::string next = path + ".new";
  {
    std::ofstream stream(next, std::ios::binary | std::ios::trunc);
    stream << ToJson(record);
    stream.close();
    if (!stream) return {Code::kIo, "cannot write to " + next};
  }
  std::error_code error;
  std::filesystem::rename(next, path, error);
  return error ? Status(Code::kIo, "cannot write to " + path + ": " + error.message()) : Status::Ok();
}

Result<RunRecord> MergeRecords(const std::string& folder, const RunRecord& before, const RunRecord& now) {
  const auto differs = [&](const std::string& what) {
    return InvalidArgument("--out: " + folder + " holds results of another run: " + what);
  };
  const auto flag = [](bool on) { return std::string(on ? "on" : "off"); };
  const bool both = HasHaystack(before) && HasHaystack(now);
  struct Field {
    const char* name;
    std::string before;
    std::string now;
  };
  const Field fields[] = {
      {"model", before.model, now.model},
      {"model SHA-256", before.model_sha256, now.model_sha256},
      {"libllama", before.libllama, now.libllama},
      {"--kv", before.kv_type, now.kv_type},
      {"--fa", flag(before.flash_attention), flag(now.flash_attention)},
      {"chat template", before.chat_template, now.chat_template},
      {"--seed", std::to_string(before.seed), std::to_string(now.seed)},
      {"haystack", both ? before.haystack : "", both ? now.haystack : ""},
      {"options", before.options, now.options},
      // Its rows of the certificate are those of the widest window among them.
      {"settings", fmt::format("{}", fmt::join(before.settings, "; ")),
       fmt::format("{}", fmt::join(now.settings, "; "))},
  };
  for (const Field& field : fields)
    if (field.before != field.now)
      return differs(fmt::format("{}: '{}' there, '{}' now", field.name, field.before, field.now));
  RunRecord merged = now;
  const Status data = MergeData(before.data, now.data, &merged.data);
  if (!data.ok()) return differs(data.message());
  if (!HasHaystack(now)) merged.haystack = before.haystack;
  merged.started = before.started;
  merged.samples = std::max(before.samples, now.samples);
  merged.lengths = United(before.lengths, now.lengths);
  merged.tasks = United(before.tasks, now.tasks);
  merged.budgets = United(before.budgets, now.budgets);
  merged.questions = United(before.questions, now.questions);
  return merged;
}

}  // namespace dropkv::eval
