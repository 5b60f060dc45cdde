// Reads safetensors files: a length, a JSON header with names, dtypes, shapes and byte ranges, then the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::testing {

class Safetensors {
 public:
  struct Tensor {
    std::string dtype;                // as the file says: "F64", "F32", "F16", "BF16", "I64", "I32", "U8", ...
    std::vector<int64_t> shape;       // row-major
    std::span<const std::byte> data;  // little-endian, contiguous; lives as long as the reader

    int64_t elements() const;
  };

  // Reads the whole file. Errors: kIo where it cannot be read, kInvalidArgument where it is not a safetensors file or a
  // tensor's range and shape do not fit together.
  static Result<Safetensors> Open(const std::string& path);

  // The tensors view the bytes of this object: it moves, it does not copy.
  Safetensors(Safetensors&&) = default;
  Safetensors& operator=(Safetensors&&) = default;
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;

  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

  // Null where there is no tensor of that name.
  const Tensor* Find(std::string_view name) const;

  // All elements as float64, from any dtype named above; kNotFound and kUnsupported.
  Result<std::vector<double>> ReadDoubles(std::string_view name) const;
  // The same as float32, rounded to nearest.
  Result<std::vector<float>> ReadFloats(std::string_view name) const;

  // A metadata entry as a number; kNotFound where it is missing or no number.
  Result<double> Number(std::string_view key) const;

 private:
  Safetensors() = default;

  std::vector<std::byte> bytes_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace dropkv::testing
