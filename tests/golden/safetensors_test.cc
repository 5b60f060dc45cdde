// The reader of the golden files, on files of its own.
#include "support/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

namespace dropkv::testing {
namespace {

// A file that is removed at the end of the test.
class SafetensorsTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  Result<Safetensors> Open(const std::string& header, const std::string& data, uint64_t length_more = 0) {
    std::ofstream file(path_, std::ios::binary);
    const uint64_t length = header.size() + length_more;
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header << data;
    file.close();
    return Safetensors::Open(path_);
  }

  const std::string path_ = ::testing::TempDir() + "dropkv_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors";
};

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

TEST_F(SafetensorsTest, ReadsTensorsAndMetadata) {
  const Result<Safetensors> file = Open(
      R"({"__metadata__":{"n":"12","scale":"0.25","case":"x"},)"
      R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[2,26]},"half":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
      R"("bytes":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"odd":{"dtype":"F8","shape":[2],"data_offsets":[0,2]}})",
      std::string("\x00\x3E", 2) + Bytes({1, 2, 3, 4, 5, -6.5F}));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->tensors().size(), 4U);
  EXPECT_EQ(file->Find("a")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file->Find("a")->dtype, "F32");
  EXPECT_EQ(file->Find("b"), nullptr);
  EXPECT_EQ(*file->ReadFloats("a"), (std::vector<float>{1, 2, 3, 4, 5, -6.5F}));
  EXPECT_EQ(*file->ReadDoubles("half"), std::vector<double>{1.5});
  EXPECT_EQ(*file->ReadDoubles("bytes"), (std::vector<double>{0, 62}));
  EXPECT_EQ(*file->Number("n"), 12.0);
  EXPECT_EQ(*file->Number("scale"), 0.25);
  EXPECT_EQ(file->metadata().find("case")->second, "x");
  EXPECT_EQ(file->Number("case").status().code(), Code::kNotFound);
  EXPECT_EQ(file->Number("none").status().code(), Code::kNotFound);
  EXPECT_EQ(file->ReadDoubles("b").status().code(), Code::kNotFound);
  EXPECT_EQ(file->ReadFloats("odd").status().code(), Code::kUnsupported);
}

TEST_F(SafetensorsTest, RefusesBrokenFiles) {
  const auto expect_error = [&](const char* header, const char* reason, uint64_t length_more = 0) {
    const Result<Safetensors> file = Open(header, Bytes({1}), length_more);
    ASSERT_FALSE(file.ok()) << header;
    EXPECT_EQ(file.status().code(), Code::kInvalidArgument);
    EXPECT_NE(file.status().message().find(reason), std::string::npos) << file.status().message();
  };
  expect_error("", "no safetensors header");
  expect_error("{}", "no safetensors header", 1000);
  expect_error("{}", "no safetensors header", ~uint64_t{0} - 5);
  expect_error("{,}", "parse error");
  expect_error("[1]", "json");
  expect_error(R"({"a":{"dtype":"F32","shape":[1]}})", "data_offsets");
  expect_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "outside the file");
  expect_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "disagree");
  expect_error(R"({"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}})", "negative extent");
  expect_error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "outside the file");
}

TEST_F(SafetensorsTest, NamesAFileThatIsNotThere) {
  const Result<Safetensors> file = Safetensors::Open(path_);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kIo);
  EXPECT_NE(file.status().message().find(path_), std::string::npos);
}

}  // namespace
}  // namespace dropkv::testing
