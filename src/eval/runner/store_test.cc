#include "eval/runner/store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "eval/runner/grid.h"

namespace dropkv::eval {
namespace {

class Store : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static Row MakeRow(const std::string& id) {
    Row row;
    row.suite = "file";
    row.task = "task";
    row.id = id;
    row.setting = row.policy = "dropkv";
    row.budget = "10%";
    row.prompt_hash = "00000000000000" + id;
    row.answer = "line one\nline two";
    return row;
  }

  std::string Text() const {
    std::ifstream stream(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void Write(const std::string& text) const { std::ofstream(path_, std::ios::binary) << text; }

  const std::string folder_ = ::testing::TempDir() + "dropkv_store_" + std::to_string(getpid()) + "/inner";
  const std::string path_ = folder_ + "/results.jsonl";
};

TEST_F(Store, KeepsWhatIsThere) {
  {
    Result<ResultStore> store = ResultStore::Open(folder_);
    ASSERT_TRUE(store.ok()) << store.status().message();
    EXPECT_EQ(store->rows(), 0);
    ASSERT_TRUE(store->Append(MakeRow("11")).ok());
    EXPECT_EQ(Text(), ToJsonLine(MakeRow("11")) + "\n");  // at once, not at the end
    ASSERT_TRUE(store->Append(MakeRow("12")).ok());
  }
  const Result<ResultStore> store = ResultStore::Open(folder_);
  ASSERT_TRUE(store.ok());
  EXPECT_EQ(store->rows(), 2);
  EXPECT_EQ(store->cut_bytes(), 0);
  ASSERT_NE(store->Find(RowKey(MakeRow("12"))), nullptr);
  EXPECT_EQ(*store->Find(RowKey(MakeRow("12"))), "0000000000000012");
  EXPECT_EQ(store->Find(RowKey(MakeRow("13"))), nullptr);
}

TEST_F(Store, CutsATornLastLineWhereverItEnds) {
  const std::string whole = ToJsonLine(MakeRow("11")) + "\n" + ToJsonLine(MakeRow("12")) + "\n";
  const size_t first = whole.find('\n') + 1;
  std::filesystem::create_directories(folder_);
  for (const size_t end : {first + 1, first + 20, whole.size() - 2, whole.size() - 1}) {
    Write(whole.substr(0, end));
    Result<ResultStore> store = ResultStore::Open(folder_);
    ASSERT_TRUE(store.ok()) << store.status().message();
    EXPECT_EQ(store->rows(), 1);
    EXPECT_EQ(store->cut_bytes(), static_cast<int64_t>(end - first));
    ASSERT_TRUE(store->Append(MakeRow("12")).ok());
    EXPECT_EQ(Text(), whole);
  }
}

TEST_F(Store, NamesALineThatIsNoRow) {
  std::filesystem::create_directories(folder_);
  Write(ToJsonLine(MakeRow("11")) + "\n{\"suite\": 1}\n");
  const Result<ResultStore> store = ResultStore::Open(folder_);
  ASSERT_FALSE(store.ok());
  EXPECT_NE(store.status().message().find("results.jsonl, line 2: "), std::string::npos) << store.status().message();
}

TEST_F(Store, OneRunAtATime) {
  const Result<ResultStore> store = ResultStore::Open(folder_);
  ASSERT_TRUE(store.ok());
  EXPECT_EQ(ResultStore::Open(folder_).status().code(), Code::kFailedPrecondition);
}

TEST_F(Store, AFileInTheFoldersPlace) {
  std::filesystem::create_directories(std::filesystem::path(folder_).parent_path());
  std::ofstream(folder_) << "text";
  EXPECT_EQ(ResultStore::Open(folder_).status().code(), Code::kIo);
}

}  // namespace
}  // namespace dropkv::eval
