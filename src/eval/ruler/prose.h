// Prose that the project makes itself, for prompts without anybody else's text.
#pragma once

#include <cstdint>
#include <string>

namespace dropkv::eval {

inline constexpr int32_t kProseSentences = 32768;  // about 743,000 words

// The first `sentences` sentences of the one text that this function knows; no sentence comes twice.
std::string BuiltInProse(int32_t sentences);

}  // namespace dropkv::eval
