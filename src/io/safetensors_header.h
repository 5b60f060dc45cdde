// The JSON header of a safetensors file, checked.
#pragma once

#include <string_view>

#include "dropkv/status.h"
#include "io/safetensors.h"

namespace dropkv::io {

struct SafetensorsHeader {
  Safetensors::Tensors tensors;
  StringMap metadata;
};

// text: the header's bytes. data_begin, data_bytes: where the data lies in the file. Errors: kInvalidArgument, without
// the file's name.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_begin, uint64_t data_bytes);

// The name for a message: in quotes, cut short, without control characters.
std::string QuotedName(std::string_view name);

inline constexpr std::string_view kMetadataName = "__metadata__";

}  // namespace dropkv::io
