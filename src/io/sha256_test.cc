#include "io/sha256.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace dropkv::io {
namespace {

// The examples that are published with the standard.
TEST(Sha256, KnownTexts) {
  EXPECT_EQ(Sha256Text(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Text("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Text(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Parts of every size, across the ends of blocks and of the padding (55, 56, 63, 64 bytes).
TEST(Sha256, PartsMakeNoDifference) {
  for (const size_t length : {0, 1, 54, 55, 56, 57, 63, 64, 65, 127, 128, 200}) {
    const std::string text(length, 'x');
    for (const size_t part : {1, 7, 63, 64, 65}) {
      Sha256 hash;
      for (size_t from = 0; from < length; from += part)
        hash.Add(std::as_bytes(std::span(text).subspan(from, std::min(part, length - from))));
      EXPECT_EQ(hash.Finish(), Sha256Text(text)) << length << " bytes in parts of " << part;
    }
  }
}

TEST(Sha256, File) {
  const std::string path = ::testing::TempDir() + "dropkv_sha256_test";
  const std::string text(3000000, 'b');
  std::ofstream(path, std::ios::binary) << text;
  EXPECT_EQ(Sha256File(path).value(), Sha256Text(text));
  std::filesystem::remove(path);
  EXPECT_EQ(Sha256File(path).status().code(), Code::kIo);
}

}  // namespace
}  // namespace dropkv::io
