// Text as the public implementations of the metrics see it: Python's str, that is code points, with the properties that
// Python 3.11 (Unicode 14) gives them. Other versions differ in characters that came or changed later.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {

// Every byte that belongs to no well-formed sequence becomes U+FFFD.
std::u32string DecodeUtf8(std::string_view text);

// str.lower(): all simple mappings and the one that gives two characters. A capital sigma is final after a letter and
// before none; apostrophes and marks in between, which Python looks across, count as no letters here.
std::u32string Lower(std::u32string_view text);

bool IsSpace(char32_t c);  // what str.split() and str.strip() take for white space
bool IsDigit(char32_t c);  // what \d of a regular expression matches
bool IsWord(char32_t c);   // what \w matches

std::vector<std::u32string_view> SplitWords(std::u32string_view text);  // str.split()
std::u32string_view Strip(std::u32string_view text);                    // str.strip()

}  // namespace dropkv::eval
