// Element types of caches and tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "dropkv/export.h"

namespace dropkv {

// Pinned numbers (C ABI).
enum class DType : int {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kQ8_0 = 3,  // blocks of 32 elements: one f16 scale, then 32 int8; 34 bytes a block
};

inline constexpr int64_t kQ8BlockElements = 32;
inline constexpr int64_t kQ8BlockBytes = 34;

// "f32", "f16", "bf16", "q8_0"; "?" for a value outside the enumeration.
DROPKV_API std::string_view DTypeName(DType dtype);

// Bytes taken by `elements` contiguous elements. q8_0: `elements` must be a multiple of 32.
constexpr int64_t DTypeBytes(DType dtype, int64_t elements) {
  switch (dtype) {
    case DType::kF32:
      return elements * 4;
    case DType::kF16:
    case DType::kBF16:
      return elements * 2;
    case DType::kQ8_0:
      return elements / kQ8BlockElements * kQ8BlockBytes;
  }
  return 0;
}

}  // namespace dropkv
