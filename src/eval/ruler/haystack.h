// Running text that needles are hidden in: sentences of any text, cut to length at a word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::eval {

// White space and control characters become single blanks; none at the ends.
std::string FoldWhiteSpace(std::string_view text);

// Index of the first byte that is not UTF-8; text.size(): none.
size_t FirstInvalidUtf8(std::string_view text);

class Haystack {
 public:
  Haystack() = default;
  explicit Haystack(std::string_view text);  // UTF-8

  size_t sentences() const { return sentences_.size(); }
  size_t pieces() const { return ends_.size(); }

  // `pieces` pieces (words; what has no blanks is cut too) from the beginning of a sentence on, as sentences, the last
  // one possibly cut. The text begins again where it ends.
  std::vector<std::string_view> Take(size_t first_sentence, int64_t pieces) const;

 private:
  struct Sentence {
    size_t begin;  // in text_
    size_t first;  // its first piece
    size_t end;    // one past its last piece
  };

  std::string text_;
  std::vector<size_t> ends_;  // where each piece ends in text_
  std::vector<Sentence> sentences_;
};

}  // namespace dropkv::eval
