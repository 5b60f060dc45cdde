#include "eval/row.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "dropkv/policy.h"

namespace dropkv::eval {
namespace {

using Json = nlohmann::ordered_json;

// The fields of both records, once for reading and writing: visit(name, field).
template <typename Visitor, typename Record>
void VisitRow(Visitor& visit, Record& row) {
  visit("suite", row.suite);
  visit("task", row.task);
  visit("category", row.category);
  visit("id", row.id);
  visit("length", row.length);
  visit("depths", row.depths);
  visit("prompt_hash", row.prompt_hash);
  visit("prompt_tokens", row.prompt_tokens);
  visit("setting", row.setting);
  visit("policy", row.policy);
  visit("budget", row.budget);
  visit("hidden", row.hidden);
  visit("window", row.window);
  visit("rows", row.rows);
  visit("pool", row.pool);
  visit("heads", row.heads);
  visit("decode", row.decode);
  visit("answer", row.answer);
  visit("answer_tokens", row.answer_tokens);
  visit("score", row.score);
  visit("kept", row.kept);
  visit("output_error", row.output_error);
  visit("kl", row.kl);
  visit("top1", row.top1);
  visit("prefill_s", row.prefill_s);
  visit("draft_s", row.draft_s);
  visit("score_s", row.score_s);
  visit("compact_s", row.compact_s);
  visit("decode_s", row.decode_s);
  visit("warnings", row.warnings);
}

template <typename Visitor, typename Record>
void VisitRun(Visitor& visit, Record& run) {
  visit("model", run.model);
  visit("model_file", run.model_file);
  visit("model_sha256", run.model_sha256);
  visit("model_bytes", run.model_bytes);
  visit("libllama", run.libllama);
  visit("dropkv_version", run.dropkv_version);
  visit("machine", run.machine);
  visit("command", run.command);
  visit("chat_template", run.chat_template);
  visit("haystack", run.haystack);
  visit("data", run.data);
  visit("options", run.options);
  visit("kv_type", run.kv_type);
  visit("flash_attention", run.flash_attention);
  visit("threads", run.threads);
  visit("batch", run.batch);
  visit("seed", run.seed);
  visit("samples", run.samples);
  visit("lengths", run.lengths);
  visit("tasks", run.tasks);
  visit("settings", run.settings);
  visit("budgets", run.budgets);
  visit("questions", run.questions);
  visit("started", run.started);
}

class Writer {
 public:
  template <typename T>
  void operator()(const char* name, const T& value) {
    json_[name] = value;
  }
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) {
    if (value) json_[name] = *value;
  }
  void operator()(const char* name, const std::vector<KeptTokens>& layers) {
    Json list = Json::array();
    for (const KeptTokens& kept : layers) list.push_back({{"min", kept.min}, {"mean", kept.mean}, {"max", kept.max}});
    json_[name] = std::move(list);
  }

  // JSON is UTF-8; a model's answer may end inside a character.
  std::string Text(int indent) const { return json_.dump(indent, ' ', false, Json::error_handler_t::replace); }

 private:
  Json json_ = Json::object();
};

const char* Shown(const Json& value) {
  return value.is_number_float() || value.is_number_integer() ? "a number" : value.type_name();
}

Status WrongType(std::string_view name, std::string_view expected, const Json& value) {
  return InvalidArgument(fmt::format("field {}: expected {}, got {}", name, expected, Shown(value)));
}

// Read: the value of one field into its member.
Status Read(const std::string& name, const Json& json, std::string* value) {
  if (!json.is_string()) return WrongType(name, "a string", json);
  *value = json.get<std::string>();
  return Status::Ok();
}

Status Read(const std::string& name, const Json& json, bool* value) {
  if (!json.is_boolean()) return WrongType(name, "true or false", json);
  *value = json.get<bool>();
  return Status::Ok();
}

template <typename T>
requires std::is_integral_v<T> Status Read(const std::string& name, const Json& json, T* value) {
  if (!json.is_number_integer()) return WrongType(name, "a whole number", json);
  const auto number = json.get<int64_t>();
  const bool beyond = json.is_number_unsigned() && number < 0;  // above 2^63
  if (beyond || number < static_cast<int64_t>(std::numeric_limits<T>::min()) ||
      number > static_cast<int64_t>(std::numeric_limits<T>::max()))
    return InvalidArgument(fmt::format("field {}: {} is out of range", name, json.dump()));
  *value = static_cast<T>(number);
  return Status::Ok();
}

Status Read(const std::string& name, const Json& json, double* value) {
  if (!json.is_number()) return WrongType(name, "a number", json);
  *value = json.get<double>();
  return Status::Ok();
}

Status Read(const std::string& name, const Json& json, KeptTokens* kept) {
  if (!json.is_object()) return WrongType(name, "an object of min, mean and max", json);
  for (const char* part : {"min", "mean", "max"})
    if (!json.contains(part)) return InvalidArgument(fmt::format("field {}: '{}' is missing", name, part));
  DROPKV_RETURN_IF_ERROR(Read(name + ".min", json["min"], &kept->min));
  DROPKV_RETURN_IF_ERROR(Read(name + ".mean", json["mean"], &kept->mean));
  return Read(name + ".max", json["max"], &kept->max);
}

template <typename T>
Status Read(const std::string& name, const Json& json, std::vector<T>* list) {
  if (!json.is_array()) return WrongType(name, "a list", json);
  for (const Json& item : json) {
    T value{};
    DROPKV_RETURN_IF_ERROR(Read(fmt::format("{}[{}]", name, list->size()), item, &value));
    list->push_back(std::move(value));
  }
  return Status::Ok();
}

class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}

  template <typename T>
  void operator()(const char* name, T& value) {
    if (!status_.ok()) return;
    const auto found = json_.find(name);
    status_ =
        found == json_.end() ? InvalidArgument(fmt::format("field {} is missing", name)) : Read(name, *found, &value);
  }
  template <typename T>
  void operator()(const char* name, std::optional<T>& value) {
    if (json_.find(name) == json_.end()) return;
    (*this)(name, value.emplace());
  }
  // A certificate without a finite row has no error: JSON's null.
  void operator()(const char* name, double& value) {
    const auto found = json_.find(name);
    if (found != json_.end() && found->is_null() && std::string_view(name) == "output_error")
      value = std::numeric_limits<double>::quiet_NaN();
    else
      this->operator()<double>(name, value);
  }

  const Status& status() const { return status_; }

 private:
  const Json& json_;
  Status status_;
};

Result<Json> ParseObject(std::string_view text) {
  try {
    Json json = Json::parse(text);
    if (json.is_object()) return json;
    return InvalidArgument(fmt::format("expected a JSON object, got {}", Shown(json)));
  } catch (const Json::exception& error) {
    return InvalidArgument(fmt::format("not JSON: {}", error.what()));
  }
}

Status CheckRow(const Row& row) {
  if (!(row.score >= 0 && row.score <= 1))
    return InvalidArgument(fmt::format("field score: expected 0 to 1, got {}", row.score));
  if (const Result<Budget> budget = ParseBudget(row.budget); !budget.ok())
    return InvalidArgument("field budget: " + budget.status().message());
  return Status::Ok();
}

}  // namespace

std::string Row::sample_key() const { return fmt::format("{}/{}/{}/{}", suite, task, length, id); }

std::string ToJsonLine(const Row& row) {
  Writer writer;
  Row finite = row;  // JSON has no NaN: an optional is left out
  for (std::optional<double>* value : {&finite.kl, &finite.top1})
    if (*value && !std::isfinite(**value)) value->reset();
  VisitRow(writer, finite);
  return writer.Text(-1);
}

Result<Row> ParseRow(std::string_view line) {
  const Result<Json> json = ParseObject(line);
  if (!json.ok()) return json.status();
  Row row;
  Reader reader(*json);
  VisitRow(reader, row);
  DROPKV_RETURN_IF_ERROR(reader.status());
  DROPKV_RETURN_IF_ERROR(CheckRow(row));
  return row;
}

std::string ToJson(const RunRecord& record) {
  Writer writer;
  VisitRun(writer, record);
  return writer.Text(2) + "\n";
}

Result<RunRecord> ParseRunRecord(std::string_view text) {
  const Result<Json> json = ParseObject(text);
  if (!json.ok()) return json.status();
  RunRecord record;
  Reader reader(*json);
  VisitRun(reader, record);
  DROPKV_RETURN_IF_ERROR(reader.status());
  return record;
}

Status CheckEviction(const Row& row) {
  if (row.full()) return Status::Ok();
  const Result<Budget> budget = ParseBudget(row.budget);
  if (!budget.ok()) return budget.status();
  const int32_t tokens = row.prompt_tokens;
  const bool less = budget->fraction ? *budget->fraction < 1 : budget->tokens < tokens;
  const bool kept_all = std::ranges::all_of(row.kept, [&](const KeptTokens& kept) { return kept.min >= tokens; });
  if (!less || !kept_all) return Status::Ok();
  return {
      Code::kFailedPrecondition,
      fmt::format("sample {}, setting {}: the budget of {} asked for fewer than the {} tokens, but every layer kept "
                  "all of them: this row measured no eviction",
                  row.sample_key(), row.setting, row.budget, tokens)};
}

}  // namespace dropkv::eval
