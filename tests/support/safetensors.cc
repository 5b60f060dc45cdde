#include "support/safetensors.h"

#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/element.h"

namespace dropkv::testing {
namespace {

constexpr size_t kLengthBytes = 8;

// Bytes of an element; 0 for a dtype that this reader does not know.
int64_t ElementBytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "U8" || dtype == "I8" || dtype == "BOOL") return 1;
  return 0;
}

template <typename T>
double LoadAs(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return static_cast<double>(value);
}

// Element at `source`; only for dtypes that ElementBytes knows.
double LoadNumber(std::string_view dtype, const std::byte* source) {
  if (dtype == "F64") return LoadAs<double>(source);
  if (dtype == "F32") return LoadAs<float>(source);
  if (dtype == "F16") return LoadElement(source, DType::kF16, 0);
  if (dtype == "BF16") return LoadElement(source, DType::kBF16, 0);
  if (dtype == "I64") return LoadAs<int64_t>(source);
  if (dtype == "U64") return LoadAs<uint64_t>(source);
  if (dtype == "I32") return LoadAs<int32_t>(source);
  if (dtype == "U32") return LoadAs<uint32_t>(source);
  if (dtype == "I16") return LoadAs<int16_t>(source);
  if (dtype == "U16") return LoadAs<uint16_t>(source);
  if (dtype == "I8") return LoadAs<int8_t>(source);
  return LoadAs<uint8_t>(source);
}

Result<std::vector<std::byte>> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return Status(Code::kIo, path + ": cannot be opened");
  std::vector<std::byte> bytes(static_cast<size_t>(file.tellg()));
  file.seekg(0);
  if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size())))
    return Status(Code::kIo, path + ": cannot be read");
  return bytes;
}

// One header entry, checked against the bytes behind the header.
Result<Safetensors::Tensor> ParseTensor(const nlohmann::json& entry, std::span<const std::byte> data) {
  Safetensors::Tensor tensor;
  tensor.dtype = entry.at("dtype").get<std::string>();
  tensor.shape = entry.at("shape").get<std::vector<int64_t>>();
  const auto range = entry.at("data_offsets").get<std::vector<uint64_t>>();
  if (range.size() != 2 || range[0] > range[1] || range[1] > data.size())
    return InvalidArgument("data_offsets outside the file");
  for (const int64_t extent : tensor.shape)
    if (extent < 0) return InvalidArgument("negative extent");
  tensor.data = data.subspan(range[0], range[1] - range[0]);
  const int64_t element = ElementBytes(tensor.dtype);
  if (element != 0 && tensor.elements() * element != static_cast<int64_t>(tensor.data.size()))
    return InvalidArgument("shape and data_offsets disagree");
  return tensor;
}

}  // namespace

int64_t Safetensors::Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

Result<Safetensors> Safetensors::Open(const std::string& path) {
  Result<std::vector<std::byte>> bytes = ReadFile(path);
  if (!bytes.ok()) return bytes.status();
  Safetensors file;
  file.bytes_ = std::move(*bytes);
  uint64_t length = 0;
  if (file.bytes_.size() >= kLengthBytes) std::memcpy(&length, file.bytes_.data(), kLengthBytes);
  if (length == 0 || length > file.bytes_.size() - kLengthBytes)
    return InvalidArgument(path + ": no safetensors header");
  const auto* text = reinterpret_cast<const char*>(file.bytes_.data()) + kLengthBytes;
  const auto data = std::span<const std::byte>(file.bytes_).subspan(kLengthBytes + length);
  try {
    const nlohmann::json header = nlohmann::json::parse(text, text + length);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        for (const auto& [key, value] : entry.items()) file.metadata_[key] = value.get<std::string>();
        continue;
      }
      Result<Tensor> tensor = ParseTensor(entry, data);
      if (!tensor.ok())
        return InvalidArgument(
            std::string(path).append(": tensor ").append(name).append(": ").append(tensor.status().message()));
      file.tensors_[name] = *tensor;
    }
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument(path + ": " + error.what());
  }
  return file;
}

const Safetensors::Tensor* Safetensors::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

Result<std::vector<double>> Safetensors::ReadDoubles(std::string_view name) const {
  const Tensor* tensor = Find(name);
  if (tensor == nullptr) return Status(Code::kNotFound, "tensor " + std::string(name) + ": not in the file");
  const int64_t bytes = ElementBytes(tensor->dtype);
  if (bytes == 0) return Unsupported("tensor " + std::string(name) + ": dtype " + tensor->dtype);
  std::vector<double> values(static_cast<size_t>(tensor->elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = LoadNumber(tensor->dtype, tensor->data.data() + i * bytes);
  return values;
}

Result<std::vector<float>> Safetensors::ReadFloats(std::string_view name) const {
  const Result<std::vector<double>> doubles = ReadDoubles(name);
  if (!doubles.ok()) return doubles.status();
  return std::vector<float>(doubles->begin(), doubles->end());
}

Result<double> Safetensors::Number(std::string_view key) const {
  const auto found = metadata_.find(key);
  double value = 0.0;
  if (found != metadata_.end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size()) return value;
  }
  return Status(Code::kNotFound, "metadata " + std::string(key) + ": missing or no number");
}

}  // namespace dropkv::testing
