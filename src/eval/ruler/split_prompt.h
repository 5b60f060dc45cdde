// Takes a whole prompt apart: context, question, answer prefix.
#pragma once

#include <string>
#include <string_view>

namespace dropkv::eval {

// Cuts a known answer prefix off the end of `input` and returns it, the blanks before it included; empty: none there.
std::string CutAnswerPrefix(std::string& input);

// Cuts the final question off and returns it; empty: none found.
std::string CutQuestion(std::string_view task, std::string& input);

}  // namespace dropkv::eval
