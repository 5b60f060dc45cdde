// 64-bit FNV-1a: tells contents apart, proves nothing.
#pragma once

#include <cstdint>
#include <string_view>

namespace dropkv {

// before: the hash of what came earlier; the hash of parts one after the other is that of the whole.
constexpr uint64_t Fnv1a64(std::string_view bytes, uint64_t before = 0xcbf29ce484222325U) {
  uint64_t hash = before;
  for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace dropkv
