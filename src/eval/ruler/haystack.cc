#include "eval/ruler/haystack.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace dropkv::eval {
namespace {

constexpr size_t kLongestPiece = 32;        // bytes: text without blanks is cut as well
constexpr size_t kLongestSentence = 128;    // pieces: tables and lists have no full stops
constexpr size_t kLongestAbbreviation = 4;  // a longer word with a full stop ends its sentence

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Bytes of the character that `lead` begins, or 0.
size_t CharacterBytes(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// Overlong forms, surrogates and what lies past U+10FFFF show in the second byte.
bool SecondByteFits(unsigned char lead, unsigned char second) {
  if (lead == 0xE0) return second >= 0xA0;
  if (lead == 0xED) return second <= 0x9F;
  if (lead == 0xF0) return second >= 0x90;
  if (lead == 0xF4) return second <= 0x8F;
  return true;
}

void StripClosers(std::string_view& word) {
  static constexpr std::array<std::string_view, 6> kClosers = {"\"", "'", ")", "]", "\xE2\x80\x9D", "\xE2\x80\x99"};
  for (bool found = true; found;) {
    found = false;
    for (const std::string_view closer : kClosers) {
      if (word.size() > closer.size() && word.ends_with(closer)) {
        word.remove_suffix(closer.size());
        found = true;
      }
    }
  }
}

bool IsAbbreviation(std::string_view word) {
  static constexpr std::array<std::string_view, 18> kAbbreviations = {"Mr",  "Mrs", "Ms",   "Dr",   "St",  "Jr",
                                                                      "Sr",  "No",  "vs",   "Vol",  "Rev", "Hon",
                                                                      "Col", "Gen", "Capt", "Prof", "e.g", "i.e"};
  word.remove_suffix(1);
  if (word.size() == 1) return std::isupper(static_cast<unsigned char>(word[0])) != 0;
  return word.size() <= kLongestAbbreviation &&
         std::find(kAbbreviations.begin(), kAbbreviations.end(), word) != kAbbreviations.end();
}

bool EndsSentence(std::string_view word) {
  StripClosers(word);
  if (word.ends_with('!') || word.ends_with('?')) return true;
  if (!word.ends_with('.') || word.size() == 1) return false;
  while (!word.empty() && std::ispunct(static_cast<unsigned char>(word[0])) != 0) word.remove_prefix(1);
  return !word.empty() && !IsAbbreviation(word);
}

bool BeginsSentence(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x80 || std::isupper(byte) != 0 || std::isdigit(byte) != 0 || std::ispunct(byte) != 0;
}

// Where the piece of a word ends that begins at `begin`; between characters.
size_t PieceEnd(std::string_view text, size_t begin, size_t word_end) {
  if (word_end - begin <= kLongestPiece) return word_end;
  size_t end = begin + kLongestPiece;
  while (IsContinuation(text[end])) --end;
  return end;
}

}  // namespace

std::string FoldWhiteSpace(std::string_view text) {
  std::string folded;
  folded.reserve(text.size());
  for (const char c : text) {
    if (static_cast<unsigned char>(c) > 0x20 && c != 0x7F) {
      folded += c;
    } else if (!folded.empty() && folded.back() != ' ') {
      folded += ' ';
    }
  }
  if (!folded.empty() && folded.back() == ' ') folded.pop_back();
  return folded;
}

size_t FirstInvalidUtf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const size_t bytes = CharacterBytes(lead);
    if (bytes == 0 || at + bytes > text.size()) return at;
    for (size_t i = 1; i < bytes; ++i) {
      if (!IsContinuation(text[at + i])) return at;
    }
    if (bytes > 1 && !SecondByteFits(lead, static_cast<unsigned char>(text[at + 1]))) return at;
    at += bytes;
  }
  return text.size();
}

Haystack::Haystack(std::string_view text) : text_(FoldWhiteSpace(text)) {
  size_t begin = 0;
  size_t sentence_begin = 0;
  size_t sentence_first = 0;
  while (begin < text_.size()) {
    const size_t word_begin = begin;
    const size_t word_end = std::min(text_.find(' ', begin), text_.size());
    while (begin < word_end) {
      const size_t end = PieceEnd(text_, begin, word_end);
      ends_.push_back(end);
      begin = end == word_end ? end + 1 : end;
      const bool last = begin >= text_.size();
      const bool full = ends_.size() - sentence_first >= kLongestSentence;
      const auto word = std::string_view(text_).substr(word_begin, word_end - word_begin);
      if (last || full || (end == word_end && EndsSentence(word) && BeginsSentence(text_[begin]))) {
        sentences_.push_back({sentence_begin, sentence_first, ends_.size()});
        sentence_begin = begin;
        sentence_first = ends_.size();
      }
    }
  }
}

std::vector<std::string_view> Haystack::Take(size_t first_sentence, int64_t pieces) const {
  std::vector<std::string_view> taken;
  const std::string_view text = text_;
  for (size_t i = first_sentence; pieces > 0; ++i) {
    const Sentence& sentence = sentences_[i % sentences_.size()];
    const int64_t count = std::min<int64_t>(pieces, static_cast<int64_t>(sentence.end - sentence.first));
    const size_t end = ends_[sentence.first + static_cast<size_t>(count) - 1];
    taken.push_back(text.substr(sentence.begin, end - sentence.begin));
    pieces -= count;
  }
  return taken;
}

}  // namespace dropkv::eval
