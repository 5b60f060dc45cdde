#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "io/safetensors.h"
#include "io/safetensors_header.h"

namespace dropkv::io {
namespace {

constexpr size_t kHeaderAlignment = 8;  // so that the data is aligned to every element

std::string SystemError(int number) { return std::generic_category().message(number); }

Status CheckSource(const TensorSource& tensor) {
  int64_t bytes = ElementBytes(tensor.dtype);
  if (bytes == 0 || tensor.name == kMetadataName)
    return InvalidArgument("tensor " + QuotedName(tensor.name) + ": name or dtype " + QuotedName(tensor.dtype) +
                           " cannot be written");
  for (const int64_t extent : tensor.shape) bytes *= extent;
  if (bytes == static_cast<int64_t>(tensor.data.size())) return Status::Ok();
  return InvalidArgument("tensor " + QuotedName(tensor.name) + ": shape " + ShapeText(tensor.shape) + " of " +
                         tensor.dtype + " takes " + std::to_string(bytes) + " bytes, got " +
                         std::to_string(tensor.data.size()));
}

// Length and header, for tensors in the order of their data.
std::string HeaderBytes(const std::vector<TensorSource>& tensors, const StringMap& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataName)] = metadata;
  size_t offset = 0;
  for (const TensorSource& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

// Where the file lies in the end: through a link, the file that it names. Devices and folders are refused: a file of
// that name would take their place.
Result<std::filesystem::path> TargetOf(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::regular) return std::filesystem::canonical(path, error);
  if (status.type() == std::filesystem::file_type::not_found && !path.empty()) return std::filesystem::path(path);
  return InvalidArgument(path + ": expected a new name or a regular file");
}

// A file that is removed again unless it was given its final name.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) {
    static std::atomic<int> counter{0};
    path_ = target;
    path_ += ".part-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    file_ = std::fopen(path_.c_str(), "wbx");
    error_ = file_ == nullptr ? errno : 0;
    created_ = file_ != nullptr;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    Close();
    std::error_code ignored;
    if (created_) std::filesystem::remove(path_, ignored);
  }

  void Write(std::span<const std::byte> bytes) {
    if (error_ != 0 || bytes.empty()) return;
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) error_ = errno;
  }

  // 0, or the first error of all.
  int Finish(const std::filesystem::path& target) {
    Close();
    if (error_ != 0) return error_;
    std::error_code error;
    std::filesystem::rename(path_, target, error);
    created_ = static_cast<bool>(error);
    return error.value();
  }

 private:
  void Close() {
    if (file_ != nullptr && std::fclose(file_) != 0 && error_ == 0) error_ = errno;
    file_ = nullptr;
  }

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  int error_ = 0;
  bool created_ = false;
};

}  // namespace

Status WriteSafetensors(const std::string& path, std::vector<TensorSource> tensors, const StringMap& metadata) {
  for (const TensorSource& tensor : tensors) {
    const Status checked = CheckSource(tensor);
    if (!checked.ok()) return {checked.code(), path + ": " + checked.message()};
  }
  // Large elements first: every tensor is then aligned to its own.
  std::sort(tensors.begin(), tensors.end(), [](const TensorSource& a, const TensorSource& b) {
    return std::pair(-ElementBytes(a.dtype), a.name) < std::pair(-ElementBytes(b.dtype), b.name);
  });
  std::vector<std::string> names(tensors.size());
  std::transform(tensors.begin(), tensors.end(), names.begin(), [](const TensorSource& tensor) { return tensor.name; });
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    return InvalidArgument(path + ": tensor " + QuotedName(*twice) + " is there twice");
  const Result<std::filesystem::path> target = TargetOf(path);
  if (!target.ok()) return target.status();
  TemporaryFile file(*target);
  const std::string header = HeaderBytes(tensors, metadata);
  file.Write(std::as_bytes(std::span(header)));
  for (const TensorSource& tensor : tensors) file.Write(tensor.data);
  const int error = file.Finish(*target);
  return error == 0 ? Status::Ok() : Status(Code::kIo, path + ": cannot be written: " + SystemError(error));
}

}  // namespace dropkv::io
