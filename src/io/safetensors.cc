#include "io/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <system_error>

#include "core/element.h"
#include "io/safetensors_header.h"

namespace dropkv::io {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr uint64_t kLengthBytes = 8;
constexpr size_t kBlock = 1 << 16;  // bytes that are converted at a time; a multiple of every element

std::string SystemError() { return std::generic_category().message(errno); }

template <typename T, typename From>
void Convert(const std::byte* source, size_t count, T* target) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, source + i * sizeof value, sizeof value);
    target[i] = static_cast<T>(value);
  }
}

template <typename T>
void ConvertHalf(DType dtype, const std::byte* source, size_t count, T* target) {
  for (size_t i = 0; i < count; ++i) target[i] = LoadElement(source, dtype, static_cast<int64_t>(i));
}

// dtype: one that ElementBytes knows.
template <typename T>
void ConvertElements(std::string_view dtype, const std::byte* source, size_t count, T* target) {
  if (dtype == "F64") return Convert<T, double>(source, count, target);
  if (dtype == "F32") return Convert<T, float>(source, count, target);
  if (dtype == "F16") return ConvertHalf(DType::kF16, source, count, target);
  if (dtype == "BF16") return ConvertHalf(DType::kBF16, source, count, target);
  if (dtype == "I64") return Convert<T, int64_t>(source, count, target);
  if (dtype == "U64") return Convert<T, uint64_t>(source, count, target);
  if (dtype == "I32") return Convert<T, int32_t>(source, count, target);
  if (dtype == "U32") return Convert<T, uint32_t>(source, count, target);
  if (dtype == "I16") return Convert<T, int16_t>(source, count, target);
  if (dtype == "U16") return Convert<T, uint16_t>(source, count, target);
  if (dtype == "I8") return Convert<T, int8_t>(source, count, target);
  Convert<T, uint8_t>(source, count, target);
  if (dtype == "BOOL") std::transform(target, target + count, target, [](T x) { return static_cast<T>(x != T{0}); });
}

}  // namespace

int64_t ElementBytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "U8" || dtype == "I8" || dtype == "BOOL") return 1;
  return 0;
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

int64_t Safetensors::Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

Safetensors::Safetensors(Safetensors&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      tensors_(std::move(other.tensors_)),
      metadata_(std::move(other.metadata_)) {}

Safetensors& Safetensors::operator=(Safetensors&& other) noexcept {
  path_ = std::move(other.path_);
  std::swap(file_, other.file_);
  tensors_ = std::move(other.tensors_);
  metadata_ = std::move(other.metadata_);
  return *this;
}

Safetensors::~Safetensors() {
  if (file_ >= 0) ::close(file_);
}

Result<Safetensors> Safetensors::Open(const std::string& path) {
  Safetensors file;
  file.path_ = path;
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  file.file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.file_ < 0) return Status(errno == ENOENT ? Code::kNotFound : Code::kIo, path + ": " + SystemError());
  struct stat info {};
  if (::fstat(file.file_, &info) != 0) return Status(Code::kIo, path + ": " + SystemError());
  if (!S_ISREG(info.st_mode)) return Status(Code::kIo, path + ": expected a regular file");
  const auto size = static_cast<uint64_t>(info.st_size);
  uint64_t length = 0;
  if (size < kLengthBytes)
    return InvalidArgument(path + ": no safetensors header: the file has " + std::to_string(size) + " bytes");
  DROPKV_RETURN_IF_ERROR(file.ReadBytes(0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > kMaxHeaderBytes)
    return InvalidArgument(path + ": no safetensors header: its length is given as " + std::to_string(length) +
                           " bytes, the format allows " + std::to_string(kMaxHeaderBytes));
  if (length > size - kLengthBytes)
    return InvalidArgument(path + ": no safetensors header: its length is given as " + std::to_string(length) +
                           " bytes, the file has " + std::to_string(size - kLengthBytes) + " left");
  std::string text(length, ' ');
  DROPKV_RETURN_IF_ERROR(file.ReadBytes(kLengthBytes, std::as_writable_bytes(std::span(text))));
  const uint64_t data = kLengthBytes + length;
  Result<SafetensorsHeader> header = ParseSafetensorsHeader(text, data, size - data);
  if (!header.ok()) return InvalidArgument(path + ": " + header.status().message());
  file.tensors_ = std::move(header->tensors);
  file.metadata_ = std::move(header->metadata);
  return file;
}

const Safetensors::Tensor* Safetensors::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

Status Safetensors::ReadBytes(uint64_t begin, std::span<std::byte> target) const {
  for (size_t done = 0; done < target.size();) {
    const ssize_t got = ::pread(file_, target.data() + done, target.size() - done, static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return {Code::kIo, path_ + ": " + SystemError()};
    if (got == 0) return {Code::kIo, path_ + ": became shorter while it was read"};
    done += static_cast<size_t>(got);
  }
  return Status::Ok();
}

template <typename T>
Status Safetensors::Read(std::string_view name, int64_t first, std::span<T> target) const {
  const Tensor* tensor = Find(name);
  const std::string what = path_ + ": tensor " + QuotedName(name) + ": ";
  if (tensor == nullptr) return {Code::kNotFound, what + "not in the file"};
  const auto element = static_cast<uint64_t>(ElementBytes(tensor->dtype));
  if (element == 0) return Unsupported(what + "dtype " + QuotedName(tensor->dtype) + " is none that is read here");
  const auto count = static_cast<int64_t>(target.size());
  if (first < 0 || first > tensor->elements() || count > tensor->elements() - first)
    return InvalidArgument(what + "expected a range of its " + std::to_string(tensor->elements()) + " elements, got " +
                           std::to_string(count) + " from " + std::to_string(first));
  const uint64_t begin = tensor->begin + static_cast<uint64_t>(first) * element;
  if (tensor->dtype == (sizeof(T) == 8 ? "F64" : "F32")) return ReadBytes(begin, std::as_writable_bytes(target));
  std::vector<std::byte> block(std::min<uint64_t>(kBlock, target.size() * element));
  for (size_t done = 0; done < target.size();) {
    const size_t part = std::min<size_t>(block.size() / element, target.size() - done);
    DROPKV_RETURN_IF_ERROR(ReadBytes(begin + done * element, std::span(block).first(part * element)));
    ConvertElements(tensor->dtype, block.data(), part, target.data() + done);
    done += part;
  }
  return Status::Ok();
}

template <typename T>
Result<std::vector<T>> Safetensors::ReadAll(std::string_view name) const {
  const Tensor* tensor = Find(name);
  const bool known = tensor != nullptr && ElementBytes(tensor->dtype) != 0;
  std::vector<T> values(known ? static_cast<size_t>(tensor->elements()) : 0);
  DROPKV_RETURN_IF_ERROR(Read(name, 0, std::span(values)));
  return values;
}

Result<std::vector<double>> Safetensors::ReadDoubles(std::string_view name) const { return ReadAll<double>(name); }

Result<std::vector<float>> Safetensors::ReadFloats(std::string_view name) const { return ReadAll<float>(name); }

Status Safetensors::ReadFloats(std::string_view name, int64_t first, std::span<float> target) const {
  return Read(name, first, target);
}

Result<double> Safetensors::Number(std::string_view key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return Status(Code::kNotFound, path_ + ": metadata " + QuotedName(key) + ": missing");
  const std::string& text = found->second;
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && std::isfinite(value)) return value;
  return InvalidArgument(path_ + ": metadata " + QuotedName(key) + ": expected a number, got " + QuotedName(text));
}

}  // namespace dropkv::io
