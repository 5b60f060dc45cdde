#include <fmt/format.h>

#include <fstream>
#include <sstream>
#include <unordered_map>

#include "eval/report/report.h"

namespace dropkv::eval {
namespace {

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream)
    return Status(Code::kNotFound, path + ": cannot be opened; expected a folder that dropkv eval wrote to (--out)");
  std::ostringstream text;
  text << stream.rdbuf();
  if (stream.bad()) return Status(Code::kIo, path + ": reading failed");
  return text.str();
}

Status At(const std::string& where, const Status& status) { return {status.code(), where + ": " + status.message()}; }

// Collects rows and knows where each came from.
class Collector {
 public:
  Status AddFolder(const std::string& folder);

  Results TakeResults() { return std::move(results_); }

 private:
  Status AddRow(Row row, const std::string& where);
  // The same prompt of the same model.
  std::string PromptKey(const Row& row) const {
    return ModelKey(results_.runs.back()) + "\n" + row.sample_key() + (row.hidden ? "\nhidden" : "\nseen");
  }

  Results results_;
  std::vector<std::string> where_;                         // file and line of each row
  std::unordered_map<std::string, size_t> row_by_key_;     // prompt, setting and budget
  std::unordered_map<std::string, size_t> row_by_prompt_;  // the first row of each prompt
};

Status Collector::AddFolder(const std::string& folder) {
  const std::string record_path = folder + "/run.json";
  const Result<std::string> record_text = ReadFile(record_path);
  if (!record_text.ok()) return record_text.status();
  Result<RunRecord> record = ParseRunRecord(*record_text);
  if (!record.ok()) return At(record_path, record.status());
  results_.runs.push_back(std::move(*record));

  const std::string path = folder + "/results.jsonl";
  const Result<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  std::string_view rest = *text;
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t newline = rest.find('\n');
    const std::string_view line = rest.substr(0, newline);
    rest.remove_prefix(newline == std::string_view::npos ? rest.size() : newline + 1);
    if (line.empty()) continue;
    const std::string where = fmt::format("{}:{}", path, number);
    Result<Row> row = ParseRow(line);
    if (!row.ok() && newline == std::string_view::npos) {  // the run was killed while it wrote
      results_.remarks.push_back(where + ": the unfinished last line was skipped");
      return Status::Ok();
    }
    if (!row.ok()) return At(where, row.status());
    if (const Status evicted = CheckEviction(*row); !evicted.ok()) return At(where, evicted);
    DROPKV_RETURN_IF_ERROR(AddRow(std::move(*row), where));
  }
  return Status::Ok();
}

Status Collector::AddRow(Row row, const std::string& where) {
  const std::string prompt = PromptKey(row);
  const size_t index = results_.rows.size();
  const auto contradiction = [&](size_t other, const std::string& what) {
    return Status(Code::kFailedPrecondition,
                  fmt::format("{}: contradicts {}: sample {}, {}", where, where_[other], row.sample_key(), what));
  };
  const size_t first = row_by_prompt_.try_emplace(prompt, index).first->second;
  if (first != index && results_.rows[first].prompt_hash != row.prompt_hash)
    return contradiction(first, fmt::format("another prompt ({} and {}): of another seed or other data",
                                            row.prompt_hash, results_.rows[first].prompt_hash));
  const auto [same, is_new] = row_by_key_.try_emplace(prompt + "\n" + row.setting + "\n" + row.budget, index);
  if (!is_new) {
    const Row& before = results_.rows[same->second];
    if (before.answer == row.answer && before.score == row.score) return Status::Ok();
    return contradiction(same->second, fmt::format("setting {}, budget {}: another {}", row.setting, row.budget,
                                                   before.answer == row.answer ? "score" : "answer"));
  }
  results_.run_of.push_back(results_.runs.size() - 1);
  results_.rows.push_back(std::move(row));
  where_.push_back(where);
  return Status::Ok();
}

}  // namespace

Result<Results> ReadResults(const std::vector<std::string>& folders) {
  Collector collector;
  for (const std::string& folder : folders) DROPKV_RETURN_IF_ERROR(collector.AddFolder(folder));
  Results results = collector.TakeResults();
  if (results.rows.empty()) return InvalidArgument("no results in " + fmt::format("{}", fmt::join(folders, ", ")));
  return results;
}

}  // namespace dropkv::eval
