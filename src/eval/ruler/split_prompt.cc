#include "eval/ruler/split_prompt.h"

#include <algorithm>

#include "eval/ruler/tasks.h"

namespace dropkv::eval {
namespace {

constexpr size_t kNone = std::string::npos;
constexpr size_t kLongestPrefix = 2048;  // bytes

std::string CutFrom(size_t at, std::string& text) {
  std::string cut = text.substr(at);
  text.resize(at);
  return cut;
}

std::string_view StripBlanks(std::string_view text) {
  const size_t end = text.find_last_not_of(" \n");
  return end == kNone ? text.substr(0, 0) : text.substr(0, end + 1);
}

// "Answer:", alone or with the beginning of a sentence that ends in a colon.
bool IsAnswerPrefix(std::string_view text) { return text.ends_with(':') && text.find('\n') == kNone; }

bool IsValuePrefix(std::string_view text) {
  for (const std::string_view verb : {" is", " are"}) {
    if (text.ends_with(verb) && text.substr(0, text.size() - verb.size()).ends_with(shape::kMentioned)) return true;
  }
  return false;
}

size_t FindQuestion(std::string_view task, std::string_view input) {
  const RulerTask* known = FindRulerTask(task);
  if (known != nullptr && known->kind == RulerKind::kQuestions) {
    const size_t at = input.rfind(shape::kDocumentQuestion);
    if (at != kNone && at > 0) return at;  // at 0 it is the instruction before the documents
  }
  size_t latest = kNone;
  for (const std::string_view form : {shape::kQuestion, shape::kValueQuestion, shape::kValuesQuestion}) {
    const size_t at = input.rfind(form);
    if (at != kNone && (latest == kNone || at > latest)) latest = at;
  }
  if (latest != kNone) return latest;
  const std::string_view text = StripBlanks(input);
  const size_t newline = text.rfind('\n');
  return text.ends_with('?') && newline != kNone ? newline + 1 : kNone;
}

}  // namespace

std::string CutAnswerPrefix(std::string& input) {
  const size_t tail_begin = input.size() - std::min(input.size(), kLongestPrefix);
  const std::string_view tail = std::string_view(input).substr(tail_begin);
  size_t at = tail.rfind(shape::kAnswer);
  if (at == kNone || !IsAnswerPrefix(StripBlanks(tail.substr(at)))) {
    at = tail.rfind(shape::kValue);
    if (at == kNone || !IsValuePrefix(StripBlanks(tail.substr(at)))) return {};
  }
  at += tail_begin;
  while (at > 0 && input[at - 1] == ' ') --at;
  return CutFrom(at, input);
}

std::string CutQuestion(std::string_view task, std::string& input) {
  const size_t at = FindQuestion(task, input);
  return at == kNone ? std::string() : CutFrom(at, input);
}

}  // namespace dropkv::eval
