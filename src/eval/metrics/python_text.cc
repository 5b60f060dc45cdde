#include "eval/metrics/python_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "eval/metrics/unicode_tables.h"

namespace dropkv::eval {
namespace {

constexpr char32_t kReplacement = 0xfffd;
constexpr char32_t kCapitalSigma = 0x3a3;
constexpr char32_t kFinalSigma = 0x3c2;
constexpr char32_t kCapitalDottedI = 0x130;
constexpr char32_t kCombiningDot = 0x307;

// The range of a sorted table that begins at or before c; null: none.
template <typename Range, size_t kSize>
const Range* FindRange(const Range (&ranges)[kSize], char32_t c) {
  const auto* after =
      std::upper_bound(std::begin(ranges), std::end(ranges), c, [](char32_t x, const Range& r) { return x < r.first; });
  return after == std::begin(ranges) ? nullptr : after - 1;
}

char32_t LowerOne(char32_t c) {
  if (c < 0x80) return c >= U'A' && c <= U'Z' ? c + 32 : c;
  const LowerRange* range = FindRange(kLowerRanges, c);
  if (range == nullptr || c > range->last || (c - range->first) % static_cast<char32_t>(range->step) != 0) return c;
  return static_cast<char32_t>(static_cast<int32_t>(c) + range->offset);
}

bool IsLetter(char32_t c) { return IsWord(c) && !IsDigit(c) && c != U'_'; }

// Length of the well-formed sequence at the start of `text`, its code point in `c`; 0: there is none.
size_t Sequence(std::string_view text, char32_t* c) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  *c = length == 1 ? lead : lead & (0x7fU >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    *c = *c << 6 | (byte(i) & 0x3fU);
  }
  const bool overlong = (length == 3 && *c < 0x800) || (length == 4 && *c < 0x10000);
  const bool surrogate = *c >= 0xd800 && *c < 0xe000;
  return overlong || surrogate || *c > 0x10ffff ? 0 : length;
}

}  // namespace

std::u32string DecodeUtf8(std::string_view text) {
  std::u32string decoded;
  decoded.reserve(text.size());
  while (!text.empty()) {
    char32_t c = kReplacement;
    size_t length = Sequence(text, &c);
    if (length == 0) {
      c = kReplacement;
      length = 1;
    }
    decoded.push_back(c);
    text.remove_prefix(length);
  }
  return decoded;
}

std::u32string Lower(std::u32string_view text) {
  std::u32string lower;
  lower.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == kCapitalDottedI) {
      lower.push_back(U'i');
      lower.push_back(kCombiningDot);
    } else if (text[i] == kCapitalSigma && i > 0 && IsLetter(text[i - 1]) &&
               (i + 1 == text.size() || !IsLetter(text[i + 1]))) {
      lower.push_back(kFinalSigma);
    } else {
      lower.push_back(LowerOne(text[i]));
    }
  }
  return lower;
}

bool IsSpace(char32_t c) {
  if (c < 0x80) return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

bool IsDigit(char32_t c) {
  if (c < 0x80) return c >= U'0' && c <= U'9';
  const auto* after = std::upper_bound(std::begin(kDecimalZeros), std::end(kDecimalZeros), c);
  return after != std::begin(kDecimalZeros) && c - after[-1] < 10;
}

bool IsWord(char32_t c) {
  if (c < 0x80) return IsDigit(c) || (c >= U'a' && c <= U'z') || (c >= U'A' && c <= U'Z') || c == U'_';
  const CodeRange* range = FindRange(kNonWordRanges, c);
  return range == nullptr || c > range->last;
}

std::vector<std::u32string_view> SplitWords(std::u32string_view text) {
  std::vector<std::u32string_view> words;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && !IsSpace(text[end])) ++end;
    if (end > begin) words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::u32string_view Strip(std::u32string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace dropkv::eval
