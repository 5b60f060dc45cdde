#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>

#include "core/element.h"

namespace dropkv::io {
namespace {

namespace fs = std::filesystem;

// A folder of its own, removed at the end of the test.
class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("dropkv_io_" + std::to_string(::getpid()) + "_" +
                                                ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
    path_ = (folder_ / "file.safetensors").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result<Safetensors> OpenBytes(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return Safetensors::Open(path_);
  }

  static std::string FileOf(const std::string& header, const std::string& data, uint64_t length) {
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
  }
  static std::string FileOf(const std::string& header, const std::string& data) {
    return FileOf(header, data, header.size());
  }

  void ExpectError(const std::string& bytes, const std::string& reason) {
    const Result<Safetensors> file = OpenBytes(bytes);
    ASSERT_FALSE(file.ok()) << reason;
    EXPECT_EQ(file.status().code(), Code::kInvalidArgument);
    EXPECT_TRUE(file.status().message().starts_with(path_ + ": ")) << file.status().message();
    EXPECT_NE(file.status().message().find(reason), std::string::npos) << file.status().message();
    EXPECT_LT(file.status().message().size(), path_.size() + 600) << file.status().message();
  }

  // A header with one tensor, before 4 bytes of data.
  void ExpectEntryError(const std::string& entry, const std::string& reason) {
    ExpectError(FileOf("{\"a\":" + entry + "}", std::string(4, '\1')), reason);
  }

  std::vector<std::string> FilesInFolder() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
    return names;
  }

  std::string Content() const {
    std::ifstream stream(path_, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  }

  fs::path folder_;
  std::string path_;
};

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST_F(SafetensorsTest, ReadsEveryDtypeAndMetadata) {
  const std::string data = Bytes<double>({0.1, -2}) + Bytes<int64_t>({-3, 1LL << 40}) + Bytes<float>({1.5, INFINITY}) +
                           Bytes<int32_t>({-7, 8}) + Bytes<uint16_t>({FloatToHalf(1.5F), FloatToBFloat(-3.0F)}) +
                           Bytes<uint8_t>({200, 0, 7});
  const Result<Safetensors> file = OpenBytes(FileOf(
      R"({"__metadata__":{"n":"12","scale":"0.25","case":"x y","nan":"nan"},)"
      R"("f64":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},"i64":{"dtype":"I64","shape":[2,1],"data_offsets":[16,32]},)"
      R"("f32":{"dtype":"F32","shape":[2],"data_offsets":[32,40]},"i32":{"shape":[2],"data_offsets":[40,48],"dtype":"I32"},)"
      R"("f16":{"dtype":"F16","shape":[],"data_offsets":[48,50]},"bf16":{"dtype":"BF16","shape":[1],"data_offsets":[50,52]},)"
      R"("u8":{"dtype":"U8","shape":[1],"data_offsets":[52,53]},"bool":{"dtype":"BOOL","shape":[2],"data_offsets":[53,55]},)"
      R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[55,55]},"odd":{"dtype":"F8_E4M3","shape":[],"data_offsets":[55,55]}}   )",
      data));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->tensors().size(), 10U);
  EXPECT_EQ(file->Find("i64")->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(file->Find("i64")->dtype, "I64");
  EXPECT_EQ(file->Find("b"), nullptr);
  using Doubles = std::vector<double>;
  EXPECT_EQ(*file->ReadDoubles("f64"), (Doubles{0.1, -2}));
  EXPECT_EQ(*file->ReadFloats("f64"), (std::vector<float>{0.1F, -2}));
  EXPECT_EQ(*file->ReadDoubles("i64"), (Doubles{-3, 1099511627776.0}));
  EXPECT_EQ(*file->ReadFloats("f32"), (std::vector<float>{1.5, INFINITY}));
  EXPECT_EQ(*file->ReadDoubles("i32"), (Doubles{-7, 8}));
  EXPECT_EQ(*file->ReadFloats("f16"), std::vector<float>{1.5F});
  EXPECT_EQ(*file->ReadDoubles("bf16"), Doubles{-3});
  EXPECT_EQ(*file->ReadDoubles("u8"), Doubles{200});
  EXPECT_EQ(*file->ReadDoubles("bool"), (Doubles{0, 1}));
  EXPECT_EQ(*file->ReadDoubles("none"), Doubles{});
  EXPECT_EQ(file->ReadFloats("odd").status().code(), Code::kUnsupported);
  EXPECT_EQ(file->ReadDoubles("b").status().code(), Code::kNotFound);
  EXPECT_EQ(file->metadata().find("case")->second, "x y");
  EXPECT_EQ(*file->Number("n"), 12.0);
  EXPECT_EQ(*file->Number("scale"), 0.25);
  EXPECT_EQ(file->Number("case").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(file->Number("nan").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(file->Number("none").status().code(), Code::kNotFound);
}

TEST_F(SafetensorsTest, RefusesBrokenHeaders) {
  ExpectError("", "no safetensors header: the file has 0 bytes");
  ExpectError("1234567", "the file has 7 bytes");
  ExpectError(FileOf("{}", "", 1000), "given as 1000 bytes, the file has 2 left");
  ExpectError(FileOf("{}", "", ~uint64_t{0} - 5), "the format allows 100000000");
  ExpectError(FileOf("", "{}"), "not a safetensors file");
  ExpectError(FileOf("[1]", ""), "not a safetensors file");
  ExpectError(FileOf("\xEF\xBB\xBF{}", ""), "not a safetensors file");
  ExpectError(FileOf(" {}", ""), "not a safetensors file");
  ExpectError(FileOf("{,}", ""), "not JSON");
  ExpectError(FileOf("{} x", ""), "not JSON");
  ExpectError(FileOf(std::string("{}\0 ", 4), ""), "zero byte");
  ExpectError(FileOf(R"({"a)", ""), "not JSON");
  ExpectError(FileOf("{\"\xFF\":1}", ""), "not JSON");
  ExpectError(FileOf(R"({"a":1})", ""), "tensor 'a': expected an object");
  ExpectError(FileOf(R"({"__metadata__":{"a":1}})", ""), "__metadata__: expected 'a' as a text, got a number");
  ExpectError(FileOf(R"({"__metadata__":{"a":{}}})", ""), "__metadata__: expected 'a' as a text");
  ExpectError(FileOf(R"({"__metadata__":{"a":"1","a":"2"}})", ""), "__metadata__: the key 'a' is there twice");
  ExpectError(FileOf(R"({"__metadata__":{},"__metadata__":{}})", ""), "is there twice");
  ExpectError(FileOf(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                     R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                     "xy"),
              "tensor 'a': is there twice");
}

TEST_F(SafetensorsTest, RefusesBrokenEntries) {
  ExpectEntryError(R"({"dtype":"F32","shape":[1]})", "lacks data_offsets");
  ExpectEntryError(R"({"shape":[1],"data_offsets":[0,4]})", "lacks dtype");
  ExpectEntryError(R"({"dtype":"F32","data_offsets":[0,4]})", "lacks shape");
  ExpectEntryError(R"({"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]})", "'shape' is there twice");
  ExpectEntryError(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1})", "unknown key 'more'");
  ExpectEntryError(R"({"dtype":3,"shape":[1],"data_offsets":[0,4]})", "dtype as a text, got a number");
  ExpectEntryError(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})", "shape as a list, got a number");
  ExpectEntryError(R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})", "got a list");
  ExpectEntryError(R"({"dtype":"F32","shape":[{}],"data_offsets":[0,4]})", "got an object");
  ExpectEntryError(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", "whole numbers of at least 0, got -1");
  ExpectEntryError(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", "got 1.0");
  ExpectEntryError(R"({"dtype":"F32","shape":[1e400],"data_offsets":[0,4]})", "1e400");
  ExpectEntryError(R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})", "got '1'");
  ExpectEntryError(R"({"dtype":"F32","shape":[null],"data_offsets":[0,4]})", "got null");
  ExpectEntryError(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", "data_offsets: expected 2 numbers, got 1");
  ExpectEntryError(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", "run backwards");
  ExpectEntryError(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "end beyond the file's 4 bytes");
  ExpectEntryError(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", "shape [2] of F32 takes 8 bytes");
  ExpectEntryError(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]})", "overflows");
  ExpectEntryError(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]})", "overflows");
  ExpectEntryError(R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4]})", "bytes overflows");
  ExpectEntryError(R"({"dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999]})", "got 9999");
  ExpectEntryError(R"({"dtype":"U8","shape":[3],"data_offsets":[1,4]})", "leave bytes before them unused");
  ExpectEntryError(R"({"dtype":"U8","shape":[3],"data_offsets":[0,3]})", "1 bytes behind the last tensor");
  std::string ones = "1";
  for (int i = 0; i < 100000; ++i) ones += ",1";
  ExpectEntryError(R"({"dtype":"F32","shape":[)" + ones + R"(],"data_offsets":[0,4]})", "at most 32 numbers");
  ExpectError(FileOf(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                     "wxyz"),
              "tensor 'b': data_offsets overlap");
}

TEST_F(SafetensorsTest, DeepNestingAndLongNamesAreRefused) {
  const std::string deep(1 << 20, '[');
  ExpectError(FileOf("{\"a\":" + deep, ""), "got a list");
  std::string objects;
  for (int i = 0; i < (1 << 17); ++i) objects += "{\"dtype\":";
  ExpectError(FileOf(objects, ""), "got an object");
  ExpectError(FileOf("{\"" + std::string(1 << 20, 'n') + "\\n\":1}", ""), "nnn...'");
  ExpectError(FileOf(R"({"a\u0000\n\u001b[31m":1})", ""), "'a???[31m'");
}

TEST_F(SafetensorsTest, NamesFilesThatCannotBeRead) {
  const Result<Safetensors> missing = Safetensors::Open(path_);
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
  EXPECT_NE(missing.status().message().find(path_), std::string::npos);
  for (const std::string& path : {folder_.string(), std::string("/dev/null")}) {
    const Result<Safetensors> file = Safetensors::Open(path);
    EXPECT_EQ(file.status().code(), Code::kIo);
    EXPECT_NE(file.status().message().find("regular file"), std::string::npos) << file.status().message();
  }
}

TEST_F(SafetensorsTest, NoticesThatTheFileBecameShorter) {
  const Result<Safetensors> file =
      OpenBytes(FileOf(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", Bytes<float>({1, 2})));
  ASSERT_TRUE(file.ok());
  fs::resize_file(path_, fs::file_size(path_) - 3);
  EXPECT_EQ(file->ReadFloats("a").status().code(), Code::kIo);
  EXPECT_EQ(file->ReadDoubles("a").status().code(), Code::kIo);
}

// Larger than the block that is converted at a time.
TEST_F(SafetensorsTest, WritesWhatItReads) {
  std::vector<uint8_t> bytes(100001);
  std::vector<int32_t> numbers(33333);
  std::vector<float> floats(40000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 % 251);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int32_t>(i * 3) - 50000;
  for (size_t i = 0; i < floats.size(); ++i) floats[i] = std::sin(static_cast<float>(i));
  const StringMap metadata{{"note", "two\nlines, \"quotes\""}, {"n", "3"}};
  ASSERT_TRUE(WriteSafetensors(path_,
                               {MakeTensorSource("bytes", "U8", {100001}, bytes),
                                MakeTensorSource("numbers", "I32", {3, 11111}, numbers),
                                MakeTensorSource("floats", "F32", {40000}, floats)},
                               metadata)
                  .ok());
  EXPECT_EQ(FilesInFolder(), std::vector<std::string>{"file.safetensors"});
  const Result<Safetensors> file = Safetensors::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->metadata(), metadata);
  EXPECT_EQ(*file->ReadDoubles("bytes"), std::vector<double>(bytes.begin(), bytes.end()));
  EXPECT_EQ(*file->ReadDoubles("numbers"), std::vector<double>(numbers.begin(), numbers.end()));
  EXPECT_EQ(*file->ReadFloats("floats"), floats);
  EXPECT_EQ(file->Find("numbers")->shape, (std::vector<int64_t>{3, 11111}));
  std::vector<float> part(20000);
  ASSERT_TRUE(file->ReadFloats("numbers", 13333, part).ok());
  EXPECT_TRUE(std::equal(part.begin(), part.end(), numbers.begin() + 13333));
  ASSERT_TRUE(file->ReadFloats("floats", 20000, part).ok());
  EXPECT_TRUE(std::equal(part.begin(), part.end(), floats.begin() + 20000));
  for (const int64_t first : {int64_t{-1}, int64_t{20001}, std::numeric_limits<int64_t>::max()})
    EXPECT_EQ(file->ReadFloats("floats", first, part).code(), Code::kInvalidArgument);
  for (const auto& [name, tensor] : file->tensors())
    EXPECT_EQ(tensor.begin % static_cast<uint64_t>(ElementBytes(tensor.dtype)), 0U) << name;
  ASSERT_TRUE(WriteSafetensors(path_, {}, {}).ok());
  EXPECT_TRUE(Safetensors::Open(path_)->tensors().empty());
}

TEST_F(SafetensorsTest, AFailedWriteLeavesTheOldFileAlone) {
  std::ofstream(path_) << "old";
  const std::vector<float> values{1, 2, 3};
  const auto expect_error = [&](const std::string& path, const std::vector<TensorSource>& tensors, Code code,
                                const std::string& reason) {
    const Status status = WriteSafetensors(path, tensors, {});
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
    EXPECT_EQ(FilesInFolder(), std::vector<std::string>{"file.safetensors"});
    EXPECT_EQ(Content(), "old");
  };
  const auto good = MakeTensorSource("a", "F32", {3}, values);
  expect_error(path_, {MakeTensorSource("a", "F32", {4}, values)}, Code::kInvalidArgument, "takes 16 bytes, got 12");
  expect_error(path_, {MakeTensorSource("a", "F31", {3}, values)}, Code::kInvalidArgument, "'F31'");
  expect_error(path_, {MakeTensorSource("__metadata__", "F32", {3}, values)}, Code::kInvalidArgument, "__metadata__");
  expect_error(path_, {good, good}, Code::kInvalidArgument, "'a' is there twice");
  expect_error(folder_.string(), {good}, Code::kInvalidArgument, "regular file");
  expect_error("/dev/full", {good}, Code::kInvalidArgument, "regular file");
  expect_error("", {good}, Code::kInvalidArgument, "regular file");
  expect_error((folder_ / "nowhere" / "file").string(), {good}, Code::kIo, "cannot be written");
  ASSERT_TRUE(WriteSafetensors(path_, {good}, {}).ok());
  EXPECT_TRUE(Safetensors::Open(path_).ok());
}

TEST_F(SafetensorsTest, WritesThroughALink) {
  std::ofstream(path_) << "old";
  const std::string link = (folder_ / "link").string();
  fs::create_symlink(path_, link);
  ASSERT_TRUE(WriteSafetensors(link, {}, {}).ok());
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(Safetensors::Open(path_).ok());
}

// Changes a valid file at random: bytes, lengths, numbers and pieces of the header.
class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string Mutate(std::string file, size_t header) {
    for (size_t i = 0, changes = 1 + Below(3); i < changes; ++i) Change(header, &file);
    return file;
  }

 private:
  size_t Below(size_t count) { return random_() % count; }

  void Change(size_t header, std::string* file) {
    if (file->empty()) return;
    const size_t in_header = std::min(file->size() - 1, 8 + Below(header));
    switch (Below(8)) {
      case 0:
        (*file)[Below(file->size())] = static_cast<char>(random_());
        return;
      case 1:
        (*file)[in_header] = static_cast<char>(random_());
        return;
      case 2:
        file->resize(Below(file->size() + 1));
        return;
      case 3:
        file->erase(in_header, 1 + Below(20));
        return;
      case 4:
        file->insert(in_header, file->substr(std::min(file->size() - 1, 8 + Below(header)), Below(60)));
        return;
      case 5:
        (*file)[Below(8)] = static_cast<char>(Below(4) == 0 ? random_() : 0);
        return;
      default:
        break;
    }
    // Replaces a character by a token of JSON, and mends the length so that the damage reaches the parser.
    static constexpr const char* kTokens[] = {
        "0", "-1", "1e9", "18446744073709551615", "[", "]", "{", "}", "\"", ",", ":", "null", "9", " ", "3", "\\u0000"};
    const std::string token = kTokens[Below(std::size(kTokens))];
    file->replace(in_header, 1, token);
    uint64_t length = 0;
    if (file->size() < 8) return;
    std::memcpy(&length, file->data(), 8);
    length += token.size() - 1;
    std::memcpy(file->data(), &length, 8);
  }

  std::mt19937 random_;
};

TEST_F(SafetensorsTest, SurvivesMutatedFiles) {
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> bytes{1, 0, 1};
  ASSERT_TRUE(WriteSafetensors(path_,
                               {MakeTensorSource("q", "F32", {2, 3}, floats), MakeTensorSource("k", "F32", {6}, floats),
                                MakeTensorSource("mask", "BOOL", {3}, bytes)},
                               {{"scale", "0.25"}})
                  .ok());
  const std::string original = Content();
  const size_t header = original.size() - 51 - 8;
  int refused = 0;
  int read = 0;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    const Result<Safetensors> file = OpenBytes(Mutator(seed).Mutate(original, header));
    if (!file.ok()) {
      EXPECT_EQ(file.status().code(), Code::kInvalidArgument) << seed;
      EXPECT_TRUE(file.status().message().starts_with(path_)) << seed;
      ++refused;
      continue;
    }
    ++read;
    for (const auto& [name, tensor] : file->tensors()) {
      const Result<std::vector<double>> values = file->ReadDoubles(name);
      EXPECT_EQ(values.ok(), ElementBytes(tensor.dtype) != 0) << seed;
      if (values.ok()) EXPECT_EQ(static_cast<int64_t>(values->size()), tensor.elements()) << seed;
    }
  }
  EXPECT_GT(refused, 1500);
  EXPECT_GT(read, 100);  // damage to data and names is not an error of the format
}

}  // namespace
}  // namespace dropkv::io
