// From a template and a sample's fields to a prompt, and where its context ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "dropkv/status.h"
#include "eval/longbench/longbench.h"

namespace dropkv::eval {

struct Prompt {
  std::string text;
  size_t context_end = 0;     // bytes of `text` up to the end of the filled {context}; from there on the question
  bool cut = false;           // its middle was cut out
  bool question_cut = false;  // and the cut reached into the question
};

// A template as Python's str.format reads it, of the fields {context} (at least once) and {input}; "{{" and "}}" are
// braces. Braces in the fields' values are text. Errors say what of the template is wrong.
Result<Prompt> FillTemplate(std::string_view pattern, std::string_view context, std::string_view input);

// `prompt` itself where it has at most `max_length` tokens. Else the cut text; its context ends where the whole one's
// did, if that place is still there, and otherwise where the rest of the question begins.
Prompt CutMiddle(Prompt prompt, int32_t max_length, const TokenCounter& count, const MiddleCutter& cut);

}  // namespace dropkv::eval
