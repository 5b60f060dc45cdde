#include "io/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

namespace dropkv::io {
namespace {

using Json = nlohmann::json;

constexpr size_t kLongestName = 80;  // characters of a name in a message

// One tensor's entry while it is read; offsets count from the start of the data.
struct Entry {
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape;
  std::optional<std::vector<uint64_t>> offsets;
};

// Takes the parser's events one by one: {NAME: {"dtype": "..", "shape": [..], "data_offsets": [..]}} and
// {"__metadata__": {KEY: TEXT}}. Whatever does not belong there ends the reading, so nothing nests deeper than this.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  bool start_object(size_t) override {
    if (depth_ == 0 || (depth_ == 1 && !in_list_)) {
      ++depth_;
      return true;
    }
    return Fail("expected " + Expected() + ", got an object");
  }

  bool end_object() override {
    if (depth_-- != 2 || in_metadata_) return true;
    if (!entry_.dtype || !entry_.shape || !entry_.offsets)
      return Fail(std::string("lacks ") + (!entry_.dtype ? "dtype" : !entry_.shape ? "shape" : "data_offsets"));
    entries_.emplace_back(name_, std::move(entry_));
    return true;
  }

  bool key(string_t& key) override {
    if (depth_ == 1) {
      name_ = key;
      in_metadata_ = key == kMetadataName;
      entry_ = Entry{};
      const bool is_new = in_metadata_ ? !std::exchange(seen_metadata_, true) : names_.insert({key, {}}).second;
      return is_new || Fail("is there twice");
    }
    key_ = key;
    if (in_metadata_) return !metadata_.contains(key) || Fail("the key " + QuotedName(key) + " is there twice");
    const bool known = key == "dtype" || key == "shape" || key == "data_offsets";
    if (!known) return Fail("has an unknown key " + QuotedName(key));
    const bool is_new = key == "dtype" ? !entry_.dtype : key == "shape" ? !entry_.shape : !entry_.offsets;
    return is_new || Fail("the key " + QuotedName(key) + " is there twice");
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && !in_list_ && in_metadata_) {
      metadata_[key_] = std::move(value);
      return true;
    }
    if (depth_ == 2 && !in_list_ && key_ == "dtype") {
      entry_.dtype = std::move(value);
      return true;
    }
    return Fail("expected " + Expected() + ", got " + QuotedName(value));
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || in_list_ || in_metadata_ || key_ == "dtype")
      return Fail("expected " + Expected() + ", got a list");
    in_list_ = true;
    List().emplace();
    return true;
  }

  bool end_array() override {
    in_list_ = false;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_list_) return Fail("expected " + Expected() + ", got a number");
    if (List()->size() == kMaxTensorRank)
      return Fail(key_ + ": expected at most " + std::to_string(kMaxTensorRank) + " numbers, got more");
    List()->push_back(value);
    return true;
  }

  bool number_integer(number_integer_t value) override { return FailNumber(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return FailNumber(text.substr(0, kLongestName)); }
  bool boolean(bool value) override { return FailNumber(value ? "true" : "false"); }
  bool null() override { return FailNumber("null"); }
  bool binary(binary_t&) override { return FailNumber("binary data"); }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    // The library's own prefix ("[json.exception.parse_error.101] ") says nothing to a reader.
    const std::string text = error.what();
    const size_t end = text.find("] ");
    error_ = "the header is not JSON (byte " + std::to_string(position) + "): " + Printable(text, end);
    return false;
  }

  const std::string& error() const { return error_; }
  std::vector<std::pair<std::string, Entry>>& entries() { return entries_; }
  StringMap& metadata() { return metadata_; }

 private:
  std::optional<std::vector<uint64_t>>& List() { return key_ == "shape" ? entry_.shape : entry_.offsets; }

  static std::string Printable(const std::string& text, size_t prefix_end) {
    std::string out = text.substr(prefix_end == std::string::npos ? 0 : prefix_end + 2, 3 * kLongestName);
    std::replace_if(
        out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
    return out;
  }

  std::string Expected() const {
    if (depth_ == 0) return "an object";
    if (depth_ == 1) return "an object with dtype, shape and data_offsets";
    if (in_metadata_) return QuotedName(key_) + " as a text";
    if (in_list_) return key_ + " as whole numbers";
    return key_ == "dtype" ? "dtype as a text" : key_ + " as a list";
  }

  bool FailNumber(const std::string& got) {
    return Fail("expected " + Expected() + (in_list_ ? " of at least 0" : "") + ", got " + got);
  }

  bool Fail(const std::string& reason) {
    if (depth_ == 0) {
      error_ = "the header: " + reason;
    } else {
      error_ = (in_metadata_ ? std::string(kMetadataName) : "tensor " + QuotedName(name_)) + ": " + reason;
    }
    return false;
  }

  int depth_ = 0;
  bool in_list_ = false;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string name_;
  std::string key_;
  Entry entry_;
  std::map<std::string, bool, std::less<>> names_;
  std::vector<std::pair<std::string, Entry>> entries_;
  StringMap metadata_;
  std::string error_;
};

bool Multiply(uint64_t a, uint64_t b, uint64_t* product) {
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  if (b != 0 && a > kLargest / b) return false;
  *product = a * b;
  return true;
}

std::string RangeText(uint64_t begin, uint64_t end) {
  return std::string("[").append(std::to_string(begin)).append(", ").append(std::to_string(end)).append("]");
}

Result<Safetensors::Tensor> CheckEntry(Entry& entry, uint64_t data_begin, uint64_t data_bytes) {
  const std::vector<uint64_t>& offsets = *entry.offsets;
  if (offsets.size() != 2)
    return InvalidArgument("data_offsets: expected 2 numbers, got " + std::to_string(offsets.size()));
  if (offsets[0] > offsets[1])
    return InvalidArgument("data_offsets " + RangeText(offsets[0], offsets[1]) + " run backwards");
  if (offsets[1] > data_bytes)
    return InvalidArgument("data_offsets " + RangeText(offsets[0], offsets[1]) + " end beyond the file's " +
                           std::to_string(data_bytes) + " bytes of data (is the file cut off?)");
  Safetensors::Tensor tensor{std::move(*entry.dtype), {}, data_begin + offsets[0], offsets[1] - offsets[0]};
  uint64_t count = 1;
  for (const uint64_t extent : *entry.shape) {
    if (!Multiply(count, extent, &count) || extent > std::numeric_limits<int64_t>::max())
      return InvalidArgument("shape: the number of elements overflows");
    tensor.shape.push_back(static_cast<int64_t>(extent));
  }
  const auto element = static_cast<uint64_t>(ElementBytes(tensor.dtype));
  uint64_t bytes = 0;
  if (!Multiply(count, element, &bytes)) return InvalidArgument("shape: the number of bytes overflows");
  if (element != 0 && bytes != tensor.bytes)
    return InvalidArgument("shape " + ShapeText(tensor.shape) + " of " + tensor.dtype + " takes " +
                           std::to_string(bytes) + " bytes, but data_offsets hold " + std::to_string(tensor.bytes));
  return tensor;
}

// Tensors must fill the data: each byte belongs to one of them.
Status CheckCoverage(const Safetensors::Tensors& tensors, uint64_t data_begin, uint64_t data_bytes) {
  std::vector<std::pair<const std::string*, const Safetensors::Tensor*>> order;
  order.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) order.emplace_back(&name, &tensor);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->bytes) < std::pair(b.second->begin, b.second->bytes);
  });
  uint64_t end = data_begin;
  for (const auto& [name, tensor] : order) {
    if (tensor->begin != end)
      return InvalidArgument("tensor " + QuotedName(*name) + ": data_offsets " +
                             (tensor->begin < end ? "overlap another tensor's" : "leave bytes before them unused"));
    end = tensor->begin + tensor->bytes;
  }
  const uint64_t unused = data_begin + data_bytes - end;
  if (unused == 0) return Status::Ok();
  return InvalidArgument(std::to_string(unused) + " bytes behind the last tensor belong to none");
}

}  // namespace

std::string QuotedName(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, kLongestName)) text += static_cast<unsigned char>(c) < ' ' || c == 0x7F ? '?' : c;
  return text + (name.size() > kLongestName ? "...'" : "'");
}

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_begin, uint64_t data_bytes) {
  // The JSON library would take a NUL for the end and skip a byte order mark.
  if (!text.starts_with('{')) return InvalidArgument("the header does not begin with '{': not a safetensors file");
  if (text.find('\0') != std::string_view::npos) return InvalidArgument("the header is not JSON: it holds a zero byte");
  HeaderReader reader;
  if (!Json::sax_parse(text.begin(), text.end(), &reader)) return InvalidArgument(reader.error());
  SafetensorsHeader header;
  header.metadata = std::move(reader.metadata());
  for (auto& [name, entry] : reader.entries()) {
    Result<Safetensors::Tensor> tensor = CheckEntry(entry, data_begin, data_bytes);
    if (!tensor.ok()) return InvalidArgument("tensor " + QuotedName(name) + ": " + tensor.status().message());
    header.tensors.emplace(std::move(name), std::move(*tensor));
  }
  DROPKV_RETURN_IF_ERROR(CheckCoverage(header.tensors, data_begin, data_bytes));
  return header;
}

}  // namespace dropkv::io
