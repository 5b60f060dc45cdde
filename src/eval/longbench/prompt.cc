#include "eval/longbench/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace dropkv::eval {
namespace {

bool IsContinuation(char c) { return (static_cast<uint8_t>(c) & 0xc0) == 0x80; }

size_t CommonPrefix(std::string_view a, std::string_view b) {
  const auto [end, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<size_t>(end - a.begin());
}

size_t CommonSuffix(std::string_view a, std::string_view b) {
  const auto [end, other] = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend());
  return static_cast<size_t>(end - a.rbegin());
}

}  // namespace

Result<Prompt> FillTemplate(std::string_view pattern, std::string_view context, std::string_view input) {
  Prompt prompt;
  bool has_context = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '{' && c != '}') {
      prompt.text += c;
    } else if (i + 1 < pattern.size() && pattern[i + 1] == c) {
      prompt.text += c;
      ++i;
    } else if (c == '}') {
      return InvalidArgument(fmt::format("a single \"}}\" at byte {}, expected \"}}}}\"", i));
    } else {
      const size_t end = pattern.find('}', i);
      if (end == std::string_view::npos) return InvalidArgument(fmt::format("no \"}}\" to the \"{{\" at byte {}", i));
      const std::string_view field = pattern.substr(i + 1, end - i - 1);
      if (field == "context") {
        prompt.text += context;
        prompt.context_end = prompt.text.size();
        has_context = true;
      } else if (field == "input") {
        prompt.text += input;
      } else {
        return InvalidArgument(fmt::format("the field \"{}\", expected context or input", field));
      }
      i = end;
    }
  }
  if (!has_context) return InvalidArgument("no field {context}");
  return prompt;
}

Prompt CutMiddle(Prompt prompt, int32_t max_length, const TokenCounter& count, const MiddleCutter& cut) {
  if (count(prompt.text) <= max_length) return prompt;
  const std::string& whole = prompt.text;
  Prompt result;
  result.cut = true;
  result.text = cut(whole, max_length);

  // The cut text is a beginning and an end of the whole one; where they meet is only seen by comparing.
  const size_t question = whole.size() - prompt.context_end;
  const size_t tail = CommonSuffix(result.text, whole);
  if (tail >= question) {
    result.context_end = result.text.size() - question;
    return result;
  }
  result.question_cut = true;
  const size_t head = CommonPrefix(result.text, whole);
  if (prompt.context_end <= head) {
    result.context_end = prompt.context_end;
    return result;
  }
  result.context_end = result.text.size() - tail;
  while (result.context_end < result.text.size() && IsContinuation(result.text[result.context_end]))
    ++result.context_end;
  return result;
}

}  // namespace dropkv::eval
