// What tells the 13 tasks apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "eval/sample.h"

namespace dropkv::eval {

enum class RulerKind : int { kNeedles, kVariables, kCommonWords, kFrequentWords, kQuestions };
enum class Hay : int { kNoise, kEssay, kNeedles };
enum class Item : int { kWord, kNumber, kUuid };

struct NeedleShape {
  Hay hay = Hay::kEssay;
  Item key = Item::kWord;
  Item value = Item::kNumber;
  int32_t keys = 1;
  int32_t values = 1;   // of each key
  int32_t queries = 1;  // keys that are asked for
};

struct RulerTask {
  std::string_view name;
  RulerKind kind;
  Metric metric;
  int32_t max_tokens;  // of the answer
  NeedleShape needles = {};
};

// nullptr: there is no such task.
const RulerTask* FindRulerTask(std::string_view name);

// "niah_single_1, niah_single_2, ..."
std::string RulerTaskList();

// Forms of the official prompts that files are taken apart by; generated prompts have them too.
namespace shape {
inline constexpr std::string_view kValue = "The special magic ";
inline constexpr std::string_view kValueQuestion = "What is the special magic ";
inline constexpr std::string_view kValuesQuestion = "What are all the special magic ";
inline constexpr std::string_view kMentioned = " mentioned in the provided text";
inline constexpr std::string_view kQuestion = "Question: ";
inline constexpr std::string_view kAnswer = "Answer:";
inline constexpr std::string_view kDocumentQuestion = "Answer the question ";
}  // namespace shape

}  // namespace dropkv::eval
