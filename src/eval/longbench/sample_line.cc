#include "eval/longbench/sample_line.h"

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace dropkv::eval {
namespace {

using Json = nlohmann::json;

Status WrongField(std::string_view field, std::string_view expected, std::string_view came) {
  return InvalidArgument(fmt::format("field \"{}\": expected {}, got {}", field, expected, came));
}

// Null where the field is missing.
const Json* Find(const Json& object, const char* field) {
  const auto found = object.find(field);
  return found == object.end() ? nullptr : &*found;
}

Result<std::string> TextField(const Json& object, const char* field) {
  const Json* value = Find(object, field);
  if (value == nullptr) return WrongField(field, "a string", "nothing");
  if (!value->is_string()) return WrongField(field, "a string", value->type_name());
  return value->get<std::string>();
}

Result<std::vector<std::string>> ListField(const Json& object, const char* field) {
  constexpr std::string_view kExpected = "a list of at least one string";
  const Json* value = Find(object, field);
  if (value == nullptr) return WrongField(field, kExpected, "nothing");
  if (!value->is_array()) return WrongField(field, kExpected, value->type_name());
  if (value->empty()) return WrongField(field, kExpected, "an empty list");
  std::vector<std::string> texts;
  for (size_t i = 0; i < value->size(); ++i) {
    const Json& text = (*value)[i];
    if (!text.is_string()) return WrongField(field, kExpected, fmt::format("{} as element {}", text.type_name(), i));
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

Result<Json> ParseObject(std::string_view line) {
  try {
    Json object = Json::parse(line);
    if (!object.is_object()) return InvalidArgument(fmt::format("expected a JSON object, got {}", object.type_name()));
    return object;
  } catch (const Json::parse_error& error) {
    return InvalidArgument(fmt::format("no JSON (or text that is not UTF-8) at byte {}", error.byte));
  } catch (const Json::exception&) {
    return InvalidArgument("a number beyond the range of double");
  }
}

}  // namespace

Result<LongBenchLine> ParseLongBenchLine(std::string_view line, const LongBenchTask& task) {
  const Result<Json> object = ParseObject(line);
  if (!object.ok()) return object.status();
  LongBenchLine sample;
  const std::pair<const char*, std::string*> texts[] = {
      {"input", &sample.input}, {"context", &sample.context}, {"_id", &sample.id}};
  for (const auto& [field, target] : texts) {
    Result<std::string> text = TextField(*object, field);
    if (!text.ok()) return text.status();
    *target = std::move(*text);
  }
  Result<std::vector<std::string>> answers = ListField(*object, "answers");
  if (!answers.ok()) return answers.status();
  sample.answers = std::move(*answers);

  const Json* classes = Find(*object, "all_classes");
  if (task.metric == Metric::kClassification || (classes != nullptr && !classes->is_null())) {
    Result<std::vector<std::string>> names = ListField(*object, "all_classes");
    if (!names.ok()) return names.status();
    sample.classes = std::move(*names);
  }
  if (Find(*object, "dataset") != nullptr) {
    const Result<std::string> dataset = TextField(*object, "dataset");
    if (!dataset.ok()) return dataset.status();
    const std::string name(task.name);
    if (*dataset != name && *dataset != name + "_e")
      return WrongField("dataset", name, fmt::format("\"{:.40}\"", *dataset));
  }
  return sample;
}

}  // namespace dropkv::eval
