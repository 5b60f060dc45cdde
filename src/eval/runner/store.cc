#include "eval/runner/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "eval/runner/grid.h"

namespace dropkv::eval {
namespace {

Status Failed(const std::string& what, const std::string& path) {
  return {Code::kIo, fmt::format("cannot {} {}: {}", what, path, std::strerror(errno))};  // NOLINT: one thread
}

}  // namespace

ResultStore::ResultStore(ResultStore&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      hashes_(std::move(other.hashes_)),
      cut_bytes_(other.cut_bytes_) {}

ResultStore::~ResultStore() {
  if (file_ >= 0) close(file_);
}

Result<ResultStore> ResultStore::Open(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return Status(Code::kIo, "--out: cannot make the folder " + folder + ": " + error.message());
  ResultStore store;
  store.path_ = folder + "/results.jsonl";
  store.file_ = open(store.path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (store.file_ < 0) return Failed("open", store.path_);
  if (flock(store.file_, LOCK_EX | LOCK_NB) != 0)
    return Status(Code::kFailedPrecondition, "--out: another run is writing to " + store.path_);
  DROPKV_RETURN_IF_ERROR(store.Read());
  return store;
}

Status ResultStore::Read() {
  std::ifstream stream(path_, std::ios::binary);
  int64_t whole = 0;  // bytes of complete lines
  int64_t number = 0;
  for (std::string line; std::getline(stream, line) && !stream.eof();) {
    ++number;
    whole += static_cast<int64_t>(line.size()) + 1;
    Result<Row> row = ParseRow(line);
    if (!row.ok()) return {row.status().code(), fmt::format("{}, line {}: {}", path_, number, row.status().message())};
    hashes_[RowKey(*row)] = row->prompt_hash;
  }
  const off_t size = lseek(file_, 0, SEEK_END);
  if (size < 0) return Failed("read", path_);
  cut_bytes_ = size - whole;
  if (cut_bytes_ > 0 && ftruncate(file_, whole) != 0) return Failed("shorten", path_);
  return Status::Ok();
}

const std::string* ResultStore::Find(const std::string& key) const {
  const auto found = hashes_.find(key);
  return found == hashes_.end() ? nullptr : &found->second;
}

Status ResultStore::Append(const Row& row) {
  const std::string line = ToJsonLine(row) + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t written = write(file_, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failed("write to", path_);
    done += static_cast<size_t>(written);
  }
  hashes_[RowKey(row)] = row.prompt_hash;
  return Status::Ok();
}

}  // namespace dropkv::eval
