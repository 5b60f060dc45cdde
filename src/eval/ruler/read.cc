// Files that RULER's own generator wrote, or that have the same fields.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "eval/ruler/ruler.h"
#include "eval/ruler/split_prompt.h"
#include "eval/ruler/tasks.h"

namespace dropkv::eval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMostTokens = int64_t{1} << 30;
constexpr int32_t kUnknownTaskTokens = 128;

// The official layout is .../4096/data/niah_single_1/validation.jsonl; others name the file after the task.
std::string TaskOfPath(const fs::path& path) {
  std::string stem = path.stem().string();
  std::string folder = path.parent_path().filename().string();
  if (FindRulerTask(stem) != nullptr) return stem;
  if (FindRulerTask(folder) != nullptr) return folder;
  return (stem == "validation" || stem == "test") && !folder.empty() ? folder : stem;
}

// One line of the file; errors name it.
class Line {
 public:
  Line(const std::string& path, size_t number, const std::string& text)
      : where_(fmt::format("{}:{}", path, number)), text_(text) {}

  Status Parse() {
    try {
      json_ = Json::parse(text_);
    } catch (const Json::exception& error) {
      return InvalidArgument(fmt::format("{}: not JSON: {}", where_, error.what()));
    }
    if (!json_.is_object()) return Wrong("the line", "an object with input and outputs", json_);
    return {};
  }

  bool Has(const char* field) const { return json_.contains(field) && !json_[field].is_null(); }

  // Leaves `text` as it is where the field is absent.
  Status Text(const char* field, std::string& text) const {
    if (!Has(field)) return {};
    if (!json_[field].is_string()) return Wrong(field, "a string", json_[field]);
    text = json_[field].get<std::string>();
    return {};
  }

  Status Number(const char* field, int64_t least, int64_t most, int64_t& number) const {
    if (!Has(field)) return {};
    const Json& value = json_[field];
    const auto expected = fmt::format("a whole number from {} to {}", least, most);
    if (!value.is_number_integer()) return Wrong(field, expected, value);
    const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most);
    if (too_large || value.get<int64_t>() < least || value.get<int64_t>() > most) return Wrong(field, expected, value);
    number = value.get<int64_t>();
    return {};
  }

  // A list of strings; numbers count as their digits, and one string as a list of one.
  Status References(std::vector<std::string>& references) const {
    const std::string expected = "a list of strings, none empty";
    if (!Has("outputs")) return Missing("outputs", expected);
    const Json& outputs = json_["outputs"];
    const Json list = outputs.is_string() ? Json::array({outputs}) : outputs;
    if (!list.is_array() || list.empty()) return Wrong("outputs", expected, outputs);
    for (const Json& output : list) {
      if (!output.is_string() && !output.is_number_integer()) return Wrong("outputs", expected, output);
      references.push_back(output.is_string() ? output.get<std::string>() : output.dump());
      if (references.back().empty()) return Wrong("outputs", expected, output);
    }
    return {};
  }

  Status Missing(const std::string& field, const std::string& expected) const {
    return InvalidArgument(fmt::format("{}: {}: expected {}, got none", where_, field, expected));
  }

  Status Wrong(const std::string& field, const std::string& expected, const Json& got) const {
    std::string shown = got.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (shown.size() > kShown) shown = shown.substr(0, kShown) + "...";
    return InvalidArgument(fmt::format("{}: {}: expected {}, got {}", where_, field, expected, shown));
  }

 private:
  static constexpr size_t kShown = 60;

  std::string where_;
  const std::string& text_;
  Json json_;
};

Status ReadPrompt(const Line& line, Sample& sample) {
  std::string input;
  DROPKV_RETURN_IF_ERROR(line.Text("input", input));
  DROPKV_RETURN_IF_ERROR(line.Text("context", sample.context));
  DROPKV_RETURN_IF_ERROR(line.Text("question", sample.question));
  DROPKV_RETURN_IF_ERROR(line.Text("answer_prefix", sample.prefix));
  if (line.Has("context")) return {};
  if (input.empty()) return line.Missing("input", "a string that is not empty, or the field context");
  if (line.Has("question")) {
    if (!input.ends_with(sample.question)) {
      return line.Wrong("question", "the end of input, as there is no context", sample.question);
    }
    sample.context = input.substr(0, input.size() - sample.question.size());
    return {};
  }
  if (!line.Has("answer_prefix")) sample.prefix = CutAnswerPrefix(input);
  sample.question = CutQuestion(sample.task, input);
  sample.context = std::move(input);
  return {};
}

Result<Sample> ReadSample(const Line& line, size_t number, const fs::path& path) {
  Sample sample;
  sample.suite = path.filename().string();
  sample.task = TaskOfPath(path);
  DROPKV_RETURN_IF_ERROR(line.Text("task", sample.task));
  if (sample.task.empty()) return line.Missing("task", "a name");
  const RulerTask* task = FindRulerTask(sample.task);
  int64_t index = static_cast<int64_t>(number);
  int64_t length = 0;
  int64_t max_tokens = task != nullptr ? task->max_tokens : kUnknownTaskTokens;
  DROPKV_RETURN_IF_ERROR(line.Number("index", INT64_MIN, INT64_MAX, index));
  DROPKV_RETURN_IF_ERROR(line.Number("length", 0, kMostTokens, length));
  DROPKV_RETURN_IF_ERROR(line.Number("max_tokens", 1, kMostTokens, max_tokens));
  DROPKV_RETURN_IF_ERROR(line.References(sample.references));
  DROPKV_RETURN_IF_ERROR(ReadPrompt(line, sample));
  sample.id = std::to_string(index);
  sample.length = static_cast<int32_t>(length);
  sample.max_tokens = static_cast<int32_t>(max_tokens);
  sample.metric = task != nullptr ? task->metric : Metric::kStringMatchAll;
  return sample;
}

// A folder of the path that is a number of tokens; 0: none.
int32_t LengthOfPath(const fs::path& path) {
  int32_t length = 0;
  for (const fs::path& part : path.parent_path()) {
    const std::string name = part.string();
    const bool digits = !name.empty() && name.size() <= 8 && name.find_first_not_of("0123456789") == std::string::npos;
    if (digits && std::stol(name) >= 128) length = static_cast<int32_t>(std::stol(name));
  }
  return length;
}

// The official field is the number of tokens that a sample came to, not the one that it was fitted to.
void SetFittedLengths(const fs::path& path, std::vector<Sample>& samples) {
  const int32_t of_path = LengthOfPath(path);
  const bool round = std::all_of(samples.begin(), samples.end(),
                                 [](const Sample& each) { return each.length % 100 == 0 || each.length % 128 == 0; });
  for (Sample& sample : samples) {
    if (of_path >= sample.length && of_path > 0) {
      sample.length = of_path;
    } else if (!round && sample.length > 0) {
      sample.length = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(sample.length)));
    }
  }
}

// The official `index` of needle tasks is a position in the text, and may come twice.
void MakeIdsUnique(const std::vector<size_t>& lines, std::vector<Sample>& samples) {
  std::set<std::tuple<std::string, int32_t, std::string>> seen;
  for (size_t i = 0; i < samples.size(); ++i) {
    Sample& sample = samples[i];
    while (!seen.emplace(sample.task, sample.length, sample.id).second) sample.id += fmt::format("#{}", lines[i]);
  }
}

}  // namespace

Result<std::vector<Sample>> ReadRulerFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  if (!file || !fs::is_regular_file(path, error)) {
    return Status(Code::kNotFound, fmt::format("{}: no file that can be read", path));
  }
  std::vector<Sample> samples;
  std::vector<size_t> lines;
  std::string text;
  for (size_t number = 1; std::getline(file, text); ++number) {
    if (number == 1 && text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    Line line(path, number, text);
    DROPKV_RETURN_IF_ERROR(line.Parse());
    Result<Sample> sample = ReadSample(line, number, path);
    if (!sample.ok()) return sample.status();
    samples.push_back(std::move(*sample));
    lines.push_back(number);
  }
  if (file.bad()) return Status(Code::kIo, fmt::format("{}: cannot be read", path));
  if (samples.empty()) return InvalidArgument(fmt::format("{}: expected one sample a line, got none", path));
  SetFittedLengths(path, samples);
  MakeIdsUnique(lines, samples);
  return samples;
}

}  // namespace dropkv::eval
