#include "eval/ruler/tasks.h"

#include <algorithm>
#include <array>
#include <span>

#include "eval/ruler/ruler.h"

namespace dropkv::eval {
namespace {

constexpr Metric kAll = Metric::kStringMatchAll;
constexpr Metric kPart = Metric::kStringMatchPart;

constexpr std::array<RulerTask, 13> kTasks = {{
    {"niah_single_1", RulerKind::kNeedles, kAll, 128, {Hay::kNoise, Item::kWord, Item::kNumber, 1, 1, 1}},
    {"niah_single_2", RulerKind::kNeedles, kAll, 128, {Hay::kEssay, Item::kWord, Item::kNumber, 1, 1, 1}},
    {"niah_single_3", RulerKind::kNeedles, kAll, 128, {Hay::kEssay, Item::kWord, Item::kUuid, 1, 1, 1}},
    {"niah_multikey_1", RulerKind::kNeedles, kAll, 128, {Hay::kEssay, Item::kWord, Item::kNumber, 4, 1, 1}},
    {"niah_multikey_2", RulerKind::kNeedles, kAll, 128, {Hay::kNeedles, Item::kWord, Item::kNumber, 1, 1, 1}},
    {"niah_multikey_3", RulerKind::kNeedles, kAll, 128, {Hay::kNeedles, Item::kUuid, Item::kUuid, 1, 1, 1}},
    {"niah_multivalue", RulerKind::kNeedles, kAll, 128, {Hay::kEssay, Item::kWord, Item::kNumber, 1, 4, 1}},
    {"niah_multiquery", RulerKind::kNeedles, kAll, 128, {Hay::kEssay, Item::kWord, Item::kNumber, 4, 1, 4}},
    {"vt", RulerKind::kVariables, kAll, 30},
    {"cwe", RulerKind::kCommonWords, kAll, 120},
    {"fwe", RulerKind::kFrequentWords, kAll, 50},
    {"qa_1", RulerKind::kQuestions, kPart, 32},
    {"qa_2", RulerKind::kQuestions, kPart, 32},
}};

constexpr auto kNames = [] {
  std::array<std::string_view, kTasks.size()> names;
  std::transform(kTasks.begin(), kTasks.end(), names.begin(), [](const RulerTask& task) { return task.name; });
  return names;
}();

}  // namespace

std::span<const std::string_view> RulerTasks() { return kNames; }

const RulerTask* FindRulerTask(std::string_view name) {
  const auto* const task =
      std::find_if(kTasks.begin(), kTasks.end(), [&](const RulerTask& each) { return each.name == name; });
  return task == kTasks.end() ? nullptr : task;
}

std::string RulerTaskList() {
  std::string list;
  for (const std::string_view name : kNames) {
    if (!list.empty()) list += ", ";
    list += name;
  }
  return list;
}

}  // namespace dropkv::eval
