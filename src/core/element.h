// Scalar access to cache elements of any dtype: for the reference, for checks and for tests. Kernels have their own
// loads.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "dropkv/cache_view.h"

namespace dropkv {

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 0x1FU;
  const uint32_t mantissa = half & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xFFU : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

// Round to nearest, ties to even.
inline uint16_t FloatToHalf(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U;
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;
  if (magnitude < 0x38800000U) {  // below the smallest normal half: the scaled value is the mantissa
    return sign | static_cast<uint16_t>(std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24F));
  }
  const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return sign | static_cast<uint16_t>((rounded - 0x38000000U) >> 13);
}

inline float BFloatToFloat(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

inline uint16_t FloatToBFloat(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16) | 0x40U;
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// Element `offset` (in elements, from the tensor's start).
inline float LoadElement(const void* data, DType dtype, int64_t offset) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  switch (dtype) {
    case DType::kF32: {
      float value;
      std::memcpy(&value, bytes + offset * 4, 4);
      return value;
    }
    case DType::kF16:
    case DType::kBF16: {
      uint16_t value;
      std::memcpy(&value, bytes + offset * 2, 2);
      return dtype == DType::kF16 ? HalfToFloat(value) : BFloatToFloat(value);
    }
    case DType::kQ8_0: {
      const unsigned char* block = bytes + offset / kQ8BlockElements * kQ8BlockBytes;
      uint16_t scale;
      std::memcpy(&scale, block, 2);
      const auto quant = static_cast<int8_t>(block[2 + offset % kQ8BlockElements]);
      return HalfToFloat(scale) * static_cast<float>(quant);
    }
  }
  return NAN;
}

// Element (head, token, dim) of `tensor`; `cells` as in KvView.
inline float LoadElement(const KvTensor& tensor, const int32_t* cells, int32_t head, int32_t token, int32_t dim) {
  const int64_t cell = cells != nullptr ? cells[token] : token;
  return LoadElement(tensor.data, tensor.dtype,
                     head * tensor.head_stride + cell * tensor.token_stride + dim * tensor.dim_stride);
}

}  // namespace dropkv
