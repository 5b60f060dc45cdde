#include "eval/runner/suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

#include "eval/longbench/longbench.h"
#include "eval/ruler/ruler.h"
#include "io/sha256.h"

namespace dropkv::eval {
namespace {

using llama::Token;

Result<std::string> FileLine(const std::string& path) {
  const Result<std::string> hash = io::Sha256File(path);
  if (!hash.ok()) return Status(hash.status().code(), "--suite: " + hash.status().message());
  const std::filesystem::path file(path);
  std::error_code error;
  return fmt::format("{} {} {}", file.filename().string(), *hash, std::filesystem::file_size(file, error));
}

// The suites name their own option in front of a message; the flag takes its place.
Status OfFlag(const Status& status) {
  constexpr std::pair<std::string_view, std::string_view> kFlags[] = {{"data: ", "--data: "},
                                                                      {"tasks: ", "--tasks: "},
                                                                      {"task ", "--tasks: "},
                                                                      {"lengths: ", "--length: "},
                                                                      {"samples: ", "--samples: "}};
  for (const auto& [option, flag] : kFlags)
    if (status.message().starts_with(option))
      return {status.code(), std::string(flag) + status.message().substr(option.size())};
  return status;
}

void AddAll(std::vector<Sample> samples, Suite* suite) {
  for (Sample& sample : samples) suite->items.push_back({std::move(sample), {}});
}

Result<Suite> LoadRuler(const SuiteOptions& options, const TokenCounter& count) {
  RulerOptions ruler;
  ruler.tasks = options.tasks;
  if (ruler.tasks.empty()) ruler.tasks.assign(RulerTasks().begin(), RulerTasks().end());
  ruler.lengths = options.lengths;
  ruler.samples = options.samples;
  ruler.seed = options.seed;
  ruler.data = options.data;
  ruler.template_tokens = options.template_tokens;
  Result<RulerSet> set = GenerateRuler(ruler, count);
  if (!set.ok()) return OfFlag(set.status());
  Suite suite;
  AddAll(std::move(set->samples), &suite);
  suite.haystack = std::move(set->haystack);
  suite.data = std::move(set->data);
  return suite;
}

Result<Suite> LoadLongBench(const SuiteOptions& options, const llama::Model& model, const TokenCounter& count) {
  if (options.data.empty())
    return InvalidArgument("--data: --suite longbench expects the folder of its files (or DROPKV_DATA), got nothing");
  LongBenchOptions longbench;
  longbench.tasks = options.tasks;
  if (longbench.tasks.empty()) longbench.tasks.assign(LongBenchTasks().begin(), LongBenchTasks().end());
  longbench.data = options.data;
  longbench.samples = options.samples;
  longbench.max_length = options.max_length;
  const MiddleCutter cut = [&model](std::string_view text, int32_t most) {
    const std::vector<Token> tokens = model.Tokenize(text, false, false);
    const auto half = static_cast<size_t>(most / 2);
    if (tokens.size() <= 2 * half) return std::string(text);
    std::string out;
    for (size_t i = 0; i < half; ++i) out += model.Piece(tokens[i]);
    for (size_t i = tokens.size() - half; i < tokens.size(); ++i) out += model.Piece(tokens[i]);
    return out;
  };
  Result<LongBenchSet> set = ReadLongBench(longbench, count, cut);
  if (!set.ok()) return OfFlag(set.status());
  Suite suite;
  AddAll(std::move(set->samples), &suite);
  suite.data = std::move(set->data);
  suite.remarks = std::move(set->remarks);
  return suite;
}

Result<Suite> LoadFile(const SuiteOptions& options) {
  Result<std::vector<Sample>> samples = ReadRulerFile(options.suite);
  if (!samples.ok()) return samples.status();
  Suite suite;
  std::map<std::pair<std::string, int32_t>, int32_t> taken;
  for (Sample& sample : *samples) {
    const std::vector<std::string>& tasks = options.tasks;
    if (!tasks.empty() && std::find(tasks.begin(), tasks.end(), sample.task) == tasks.end()) continue;
    int32_t& count = taken[{sample.task, sample.length}];
    if (options.samples > 0 && count == options.samples) continue;
    ++count;
    suite.items.push_back({std::move(sample), {}});
  }
  Result<std::string> line = FileLine(options.suite);
  if (!line.ok()) return line.status();
  suite.data = std::move(*line);
  return suite;
}

// Windows of `length` tokens, one behind the other, of which the last `forced` are the continuation.
Status AddWindows(const SuiteOptions& options, const std::string& name, int32_t length, const std::vector<Token>& begin,
                  const std::vector<Token>& text, Suite* suite) {
  const auto own = static_cast<size_t>(length) - begin.size();
  if (length <= options.forced + static_cast<int32_t>(begin.size()))
    return InvalidArgument(
        fmt::format("--length: expected more than the {} tokens of the continuation, got {}", options.forced, length));
  if (text.size() < own)
    return InvalidArgument(
        fmt::format("--length: expected at most the {} tokens of {}, got {}", text.size(), options.suite, length));
  const size_t windows = text.size() / own;
  for (size_t i = 0; i < windows; ++i) {
    if (options.samples > 0 && i == static_cast<size_t>(options.samples)) break;
    Item& item = suite->items.emplace_back();
    item.sample.suite = name;
    item.sample.task = "text";
    item.sample.id = std::to_string(i);
    item.sample.length = length;
    item.sample.chat_template = false;
    const auto first = text.begin() + static_cast<std::ptrdiff_t>(i * own);
    const auto middle = first + static_cast<std::ptrdiff_t>(own - options.forced);
    item.window.tokens = begin;
    item.window.tokens.insert(item.window.tokens.end(), first, middle);
    item.window.forced.assign(middle, middle + options.forced);
  }
  return Status::Ok();
}

Result<Suite> LoadText(const SuiteOptions& options, const llama::Model& model) {
  std::error_code error;
  const std::filesystem::path path(options.suite);
  if (!std::filesystem::is_regular_file(path, error))
    return Status(Code::kNotFound,
                  "--suite: expected ruler, longbench, a .jsonl file or a text file, got '" + options.suite + "'");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return Status(Code::kIo, "--suite: cannot read " + options.suite);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  Suite suite;
  const std::vector<Token> tokens = model.Tokenize(text, false, false);
  const std::vector<Token> begin = BeginOfText(model);
  for (const int32_t length : options.lengths)
    DROPKV_RETURN_IF_ERROR(AddWindows(options, path.filename().string(), length, begin, tokens, &suite));
  Result<std::string> line = FileLine(options.suite);
  if (!line.ok()) return line.status();
  suite.data = std::move(*line);
  return suite;
}

}  // namespace

Result<Suite> LoadSuite(const SuiteOptions& options, const llama::Model& model) {
  const TokenCounter count = [&model](std::string_view text) {
    return static_cast<int32_t>(model.Tokenize(text, false, false).size());
  };
  Result<Suite> suite = options.suite == "ruler"            ? LoadRuler(options, count)
                        : options.suite == "longbench"      ? LoadLongBench(options, model, count)
                        : options.suite.ends_with(".jsonl") ? LoadFile(options)
                                                            : LoadText(options, model);
  if (!suite.ok()) return suite;
  if (suite->items.empty()) return InvalidArgument("--suite: " + options.suite + " has no samples of these tasks");
  Interleave(&suite->items);
  return suite;
}

void Interleave(std::vector<Item>* items) {
  std::map<std::pair<std::string, int32_t>, int32_t> seen;
  std::vector<std::pair<int32_t, Item>> numbered;
  for (Item& item : *items) {
    const int32_t number = seen[{item.sample.task, item.sample.length}]++;
    numbered.emplace_back(number, std::move(item));
  }
  std::stable_sort(numbered.begin(), numbered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  items->clear();
  for (auto& [number, item] : numbered) items->push_back(std::move(item));
}

}  // namespace dropkv::eval
