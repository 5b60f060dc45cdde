// What the tests of the RULER tasks share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "eval/ruler/ruler.h"
#include "eval/ruler/tasks.h"

namespace dropkv::eval {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int32_t kLongTest = 6000;
#else
inline constexpr int32_t kLongTest = 16384;
#endif

inline bool IsLetter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

// Like word pieces: four letters of a word are a token; so is everything else but blanks.
inline int32_t CountPieces(std::string_view text) {
  int32_t tokens = 0;
  for (size_t i = 0; i < text.size();) {
    size_t letters = 0;
    while (i + letters < text.size() && IsLetter(text[i + letters])) ++letters;
    tokens += static_cast<int32_t>((letters + 3) / 4);
    if (letters == 0 && text[i] != ' ') ++tokens;
    i += std::max<size_t>(letters, 1);
  }
  return tokens;
}

// Neither additive nor monotonic: longer text may have up to five tokens less.
inline int32_t CountJumpily(std::string_view text) {
  return static_cast<int32_t>((text.size() + 3) / 4 + text.size() % 6);
}

inline std::string PromptOf(const Sample& sample) { return sample.context + sample.question + sample.prefix; }

inline size_t Occurrences(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

inline std::vector<std::string> Split(std::string_view text, std::string_view separator) {
  std::vector<std::string> parts;
  for (size_t at = text.find(separator); at != std::string_view::npos; at = text.find(separator)) {
    parts.emplace_back(text.substr(0, at));
    text.remove_prefix(at + separator.size());
  }
  if (!text.empty()) parts.emplace_back(text);
  return parts;
}

inline std::vector<std::string> WithoutQuestions() {
  std::vector<std::string> tasks(RulerTasks().begin(), RulerTasks().end());
  std::erase_if(tasks, [](const std::string& task) { return task.starts_with("qa_"); });
  return tasks;
}

inline RulerSet Generate(const RulerOptions& options, const TokenCounter& count = CountPieces) {
  Result<RulerSet> set = GenerateRuler(options, count);
  EXPECT_TRUE(set.ok()) << set.status().message();
  return set.ok() ? std::move(*set) : RulerSet{};
}

// Samples of one task at 2048, at 4096 and at a longer length.
inline std::vector<Sample> GenerateTask(const std::string& task, int32_t samples = 3, const std::string& data = "") {
  RulerOptions options;
  options.tasks = {task};
  options.lengths = {2048, 4096, kLongTest};
  options.samples = samples;
  options.data = data;
  return Generate(options).samples;
}

inline void ExpectFits(const Sample& sample, const TokenCounter& count, int32_t template_tokens = 0) {
  const int32_t tokens = count(PromptOf(sample)) + sample.max_tokens + template_tokens;
  EXPECT_LE(tokens, sample.length) << sample.task << " " << sample.id;
  EXPECT_GE(tokens, sample.length * 0.95) << sample.task << " " << sample.length << " " << sample.id;
}

// An error that holds `parts`.
template <typename T>
void ExpectError(const Result<T>& result, Code code, const std::vector<std::string>& parts) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), code) << result.status().message();
  for (const std::string& part : parts) {
    EXPECT_NE(result.status().message().find(part), std::string::npos) << part << " in " << result.status().message();
  }
}

class FolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::path(::testing::TempDir()) / ("dropkv_ruler_" + std::to_string(::getpid()) + "_" +
                                                       ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  std::filesystem::path folder_;
};

}  // namespace dropkv::eval
