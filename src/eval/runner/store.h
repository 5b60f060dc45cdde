// results.jsonl of an evaluation's folder: what is there already, and rows added to its end.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "dropkv/status.h"
#include "eval/row.h"

namespace dropkv::eval {

class ResultStore {
 public:
  // Makes the folder and the file where they are missing. A last line without its end, as a killed run leaves it, is
  // cut off. Errors: kIo; another process that has the file open; lines that are no rows, by their number.
  static Result<ResultStore> Open(const std::string& folder);

  ResultStore(ResultStore&& other) noexcept;
  ResultStore& operator=(ResultStore&&) = delete;
  ~ResultStore();

  // The prompt hash of the row of that key (RowKey); null: there is none.
  const std::string* Find(const std::string& key) const;

  // Written at once: a row that was appended is there whatever happens to the process.
  Status Append(const Row& row);

  int64_t rows() const { return static_cast<int64_t>(hashes_.size()); }
  int64_t cut_bytes() const { return cut_bytes_; }

 private:
  ResultStore() = default;
  Status Read();

  std::string path_;
  int file_ = -1;
  std::unordered_map<std::string, std::string> hashes_;
  int64_t cut_bytes_ = 0;
};

}  // namespace dropkv::eval
