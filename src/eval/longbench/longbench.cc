#include "eval/longbench/longbench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "eval/longbench/data_file.h"
#include "eval/longbench/prompt.h"
#include "eval/longbench/sample_line.h"
#include "eval/longbench/tasks.h"

namespace dropkv::eval {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;

constexpr std::string_view kTemplatesFile = "dataset2prompt.json";

struct TaskFile {
  const LongBenchTask* task = nullptr;
  fs::path path;

  bool extended() const { return path.stem().string() == std::string(task->name) + "_e"; }  // LongBench-E
  std::string name() const { return std::string(task->name) + (extended() ? "_e" : ""); }
};

struct Templates {
  std::string path;  // empty: the built-in ones
  Json json;
};

// Where the templates may lie beside the data; the last is the layout of the official repository.
Result<Templates> ReadTemplates(const fs::path& folder, LongBenchSet* set) {
  const fs::path parent = folder / "..";
  for (const fs::path& path : {folder / kTemplatesFile, parent / kTemplatesFile, parent / "config" / kTemplatesFile}) {
    const Result<std::string> text = ReadDataFile(path);
    if (text.status().code() == Code::kNotFound) continue;
    if (!text.ok()) return text.status();
    Templates templates{.path = path.lexically_normal().string(), .json = Json::parse(*text, nullptr, false)};
    if (!templates.json.is_object())
      return InvalidArgument(fmt::format("{}: expected a JSON object of task names and templates", templates.path));
    set->data += DescribeFile(path, *text) + "\n";
    return templates;
  }
  set->remarks.push_back(
      fmt::format("templates: the built-in ones, in dropkv's own wording, as there is no {} in {} or "
                  "above it; scores are not those of the official templates",
                  kTemplatesFile, folder.string()));
  return Templates{};
}

Result<std::string> TemplateOf(const Templates& templates, const LongBenchTask& task) {
  if (templates.path.empty()) return std::string(task.own_template);
  const auto found = templates.json.find(std::string(task.name));
  if (found == templates.json.end() || !found->is_string())
    return InvalidArgument(fmt::format("{}: {}: expected a template as a string, got {}", templates.path, task.name,
                                       found == templates.json.end() ? "nothing" : found->type_name()));
  auto pattern = found->get<std::string>();
  if (const Result<Prompt> filled = FillTemplate(pattern, "", ""); !filled.ok())
    return InvalidArgument(fmt::format("{}: {}: {}", templates.path, task.name, filled.status().message()));
  return pattern;
}

Result<const LongBenchTask*> TaskOf(const std::string& name) {
  const std::string_view view = name;
  if (const LongBenchTask* task = FindLongBenchTask(view)) return task;
  if (view.ends_with("_e")) {
    const LongBenchTask* task = FindLongBenchTask(view.substr(0, view.size() - 2));
    if (task != nullptr && task->official_e > 0) return task;
    if (task != nullptr) return InvalidArgument(fmt::format("tasks: {}: LongBench-E has no {}", name, task->name));
  }
  return InvalidArgument(fmt::format("tasks: {}: expected one of {}, or one with \"_e\" for LongBench-E", name,
                                     fmt::join(LongBenchTasks(), ", ")));
}

Result<std::vector<TaskFile>> FilesOf(const LongBenchOptions& options) {
  std::vector<TaskFile> files;
  for (const std::string& name : options.tasks) {
    const Result<const LongBenchTask*> task = TaskOf(name);
    if (!task.ok()) return task.status();
    TaskFile file{*task, FindTaskFile(options.data, name)};
    if (file.path.empty()) return Status(Code::kNotFound, fmt::format("data: {}: no {}.jsonl", options.data, name));
    if (std::any_of(files.begin(), files.end(), [&](const TaskFile& other) { return other.path == file.path; }))
      return InvalidArgument(fmt::format("tasks: {}: {} is read for another task already", name, file.path.string()));
    files.push_back(std::move(file));
  }
  if (!files.empty()) return files;
  for (const LongBenchTask& task : LongBenchTaskTable()) {
    TaskFile file{&task, FindTaskFile(options.data, task.name)};
    if (file.extended() || file.path.stem() == task.name) files.push_back(std::move(file));
  }
  if (!files.empty()) return files;
  return Status(Code::kNotFound, fmt::format("data: {}: expected files like qasper.jsonl, found none", options.data));
}

Status CheckOptions(const LongBenchOptions& options) {
  if (options.data.empty()) return InvalidArgument("data: expected the folder with LongBench's files, got none");
  std::error_code error;
  if (!fs::is_directory(options.data, error))
    return Status(Code::kNotFound, fmt::format("data: {}: no such folder", options.data));
  if (options.samples < 0) return InvalidArgument(fmt::format("samples: expected 0 or more, got {}", options.samples));
  if (options.max_length < 0 || options.max_length == 1)
    return InvalidArgument(fmt::format("max_length: expected 0 or at least 2 tokens, got {}", options.max_length));
  return Status::Ok();
}

Sample MakeSample(const LongBenchTask& task, std::string name, LongBenchLine line, const Prompt& prompt) {
  Sample sample;
  sample.suite = "longbench";
  sample.task = std::move(name);
  sample.id = std::move(line.id);
  sample.category = task.category;
  sample.context = prompt.text.substr(0, prompt.context_end);
  sample.question = prompt.text.substr(prompt.context_end);
  sample.references = std::move(line.answers);
  sample.classes = std::move(line.classes);
  sample.metric = task.metric;
  sample.max_tokens = task.max_tokens;
  sample.chat_template = task.chat_template;
  sample.first_line = task.first_line;
  sample.stop_at_newline = task.stop_at_newline;
  return sample;
}

// What a reader of the scores must know about the file and the part of it that was taken.
void AddRemarks(const TaskFile& file, size_t lines, size_t taken, LongBenchSet* set) {
  const std::string name = file.name();
  const auto official = static_cast<size_t>(file.extended() ? file.task->official_e : file.task->official);
  if (file.extended())
    set->remarks.push_back(fmt::format("{}: LongBench-E, not comparable with LongBench", name));
  else if (file.path.stem() != name)
    set->remarks.push_back(fmt::format("{}: read from {}, no official file", name, file.path.filename().string()));
  if (lines != official)
    set->remarks.push_back(
        fmt::format("{}: {} of the official {} samples{}", name, lines, official, lines < official ? " (subset)" : ""));
  if (taken < lines)
    set->remarks.push_back(fmt::format("{}: the first {} of the file's {} samples", name, taken, lines));
}

class TaskReader {
 public:
  TaskReader(const LongBenchOptions& options, const TokenCounter& count, const MiddleCutter& cut, LongBenchSet* set)
      : options_(options), count_(count), cut_(cut), set_(set) {}

  Status Read(const TaskFile& file, const std::string& pattern) {
    const Result<std::string> content = ReadDataFile(file.path);
    if (!content.ok()) return content.status();
    const std::vector<NumberedLine> lines = Lines(*content);
    if (lines.empty())
      return InvalidArgument(fmt::format("{}: expected samples, one a line, got none", file.path.string()));

    const std::string name = file.name();
    const size_t taken = options_.samples == 0 ? lines.size() : std::min<size_t>(options_.samples, lines.size());
    AddRemarks(file, lines.size(), taken, set_);
    set_->data += DescribeFile(file.path, *content) + "\n";
    std::set<std::string> ids;
    int cut = 0;
    int question_cut = 0;
    for (size_t i = 0; i < taken; ++i) {
      Result<Prompt> prompt = ReadLine(lines[i], file, pattern, &ids);
      if (!prompt.ok())
        return {prompt.status().code(),
                fmt::format("{}: line {}: {}", file.path.string(), lines[i].number, prompt.status().message())};
      cut += prompt->cut ? 1 : 0;
      question_cut += prompt->question_cut ? 1 : 0;
    }
    if (cut > 0)
      set_->remarks.push_back(fmt::format("{}: the middle of {} of {} prompts was cut at {} tokens", name, cut, taken,
                                          options_.max_length));
    if (question_cut > 0)
      set_->remarks.push_back(fmt::format("{}: of {} prompts the cut took part of the question", name, question_cut));
    return Status::Ok();
  }

 private:
  // Adds the line's sample; the prompt without its text tells whether it was cut.
  Result<Prompt> ReadLine(const NumberedLine& line, const TaskFile& file, const std::string& pattern,
                          std::set<std::string>* ids) {
    Result<LongBenchLine> fields = ParseLongBenchLine(line.text, *file.task);
    if (!fields.ok()) return fields.status();
    // An identifier that comes again is told apart by its line, so that every sample has its own.
    if (!ids->insert(fields->id).second) {
      fields->id += fmt::format("#{}", line.number);
      ids->insert(fields->id);
    }
    Result<Prompt> prompt = FillTemplate(pattern, fields->context, fields->input);
    if (!prompt.ok()) return prompt.status();
    if (options_.max_length > 0) *prompt = CutMiddle(std::move(*prompt), options_.max_length, count_, cut_);
    set_->samples.push_back(MakeSample(*file.task, file.name(), std::move(*fields), *prompt));
    prompt->text.clear();
    return prompt;
  }

  const LongBenchOptions& options_;
  const TokenCounter& count_;
  const MiddleCutter& cut_;
  LongBenchSet* set_;
};

}  // namespace

Result<LongBenchSet> ReadLongBench(const LongBenchOptions& options, const TokenCounter& count,
                                   const MiddleCutter& cut) {
  DROPKV_RETURN_IF_ERROR(CheckOptions(options));
  const Result<std::vector<TaskFile>> files = FilesOf(options);
  if (!files.ok()) return files.status();
  LongBenchSet set;
  const Result<Templates> templates = ReadTemplates(options.data, &set);
  if (!templates.ok()) return templates.status();
  TaskReader reader(options, count, cut, &set);
  for (const TaskFile& file : *files) {
    const Result<std::string> pattern = TemplateOf(*templates, *file.task);
    if (!pattern.ok()) return pattern.status();
    DROPKV_RETURN_IF_ERROR(reader.Read(file, *pattern));
  }
  return set;
}

}  // namespace dropkv::eval
