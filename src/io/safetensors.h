// Safetensors files: the length of a header, a JSON header with names, dtypes, shapes and byte ranges, then the data.
//
// The reader takes a file for hostile: everything that the header says is checked before any of it is used, and a file
// that fails a check is refused with its name and the tensor's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::io {

using StringMap = std::map<std::string, std::string, std::less<>>;

// The format's limit on the header.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// No tensor of ours has more than 4; a list of extents is a cheap way to take memory.
inline constexpr size_t kMaxTensorRank = 32;

// Bytes of an element of "F64", "F32", "F16", "BF16", "I64" .. "I8", "U64" .. "U8", "BOOL"; 0 for other dtypes.
int64_t ElementBytes(std::string_view dtype);

// "[2, 160]".
std::string ShapeText(std::span<const int64_t> shape);

class Safetensors {
 public:
  struct Tensor {
    std::string dtype;           // as the file says
    std::vector<int64_t> shape;  // row-major
    uint64_t begin = 0;          // of its bytes, from the start of the file
    uint64_t bytes = 0;

    int64_t elements() const;
  };
  using Tensors = std::map<std::string, Tensor, std::less<>>;

  // Reads and checks the header; data is read when it is asked for. Errors: kNotFound and kIo where the file is not
  // there or cannot be read, kInvalidArgument where it is not a safetensors file: no header or one beyond the file or
  // the limit, no JSON, names twice, extents that overflow, ranges that overlap, run backwards, leave bytes out, end
  // beyond the file or disagree with the shape.
  static Result<Safetensors> Open(const std::string& path);

  Safetensors(Safetensors&& other) noexcept;
  Safetensors& operator=(Safetensors&& other) noexcept;
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;
  ~Safetensors();

  const std::string& path() const { return path_; }
  const Tensors& tensors() const { return tensors_; }
  const StringMap& metadata() const { return metadata_; }

  // Null where there is no tensor of that name.
  const Tensor* Find(std::string_view name) const;

  // All elements, from any dtype that ElementBytes knows, little-endian; BOOL gives 0 and 1. float32 rounds to nearest.
  // Errors: kNotFound, kUnsupported (dtype), kIo. Safe from several threads.
  Result<std::vector<double>> ReadDoubles(std::string_view name) const;
  Result<std::vector<float>> ReadFloats(std::string_view name) const;
  // Elements first .. first + target.size() - 1 in row-major order; kInvalidArgument where the tensor has fewer.
  Status ReadFloats(std::string_view name, int64_t first, std::span<float> target) const;

  // A metadata entry as a finite number; kNotFound where it is missing, kInvalidArgument where it is no number.
  Result<double> Number(std::string_view key) const;

 private:
  Safetensors() = default;
  template <typename T>
  Result<std::vector<T>> ReadAll(std::string_view name) const;
  template <typename T>
  Status Read(std::string_view name, int64_t first, std::span<T> target) const;
  Status ReadBytes(uint64_t begin, std::span<std::byte> target) const;

  std::string path_;
  int file_ = -1;
  Tensors tensors_;
  StringMap metadata_;
};

// One tensor to be written; `data` is the caller's.
struct TensorSource {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

template <typename T>
TensorSource MakeTensorSource(std::string name, std::string dtype, std::vector<int64_t> shape,
                              const std::vector<T>& values) {
  return {std::move(name), std::move(dtype), std::move(shape), std::as_bytes(std::span(values))};
}

// Writes a file whose tensors are aligned to their elements. It is written beside `path` and takes its name at the end:
// an error leaves no file behind and an old one as it was. Errors: kInvalidArgument where a name comes twice, data and
// shape disagree, or `path` is there and is no regular file; kIo.
Status WriteSafetensors(const std::string& path, std::vector<TensorSource> tensors, const StringMap& metadata);

}  // namespace dropkv::io
