// SHA-256 (FIPS 180-4): which bytes a result was made from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "dropkv/status.h"

namespace dropkv::io {

class Sha256 {
 public:
  void Add(std::span<const std::byte> bytes);

  // 64 hexadecimal digits; nothing may be added afterwards.
  std::string Finish();

 private:
  void AddBlock(const std::byte* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> block_{};
  size_t filled_ = 0;  // of block_
  uint64_t bytes_ = 0;
};

std::string Sha256Text(std::string_view text);

// Errors: kIo, with the path.
Result<std::string> Sha256File(const std::string& path);

}  // namespace dropkv::io
