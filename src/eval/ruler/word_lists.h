// Words to make keys and word lists of.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {

struct WordLists {
  std::vector<std::string> nouns;
  std::vector<std::string> adjectives;
  std::vector<std::string> common;   // nouns, adjectives and verbs, each once: cwe takes its words from these
  std::vector<std::string> further;  // what cwe goes on with when these run out
};

// Words of ASCII letters and hyphens, one a line, lower and upper case taken as one word; the rest is left out.
std::vector<std::string> ReadWords(std::string_view text);

// Own lists. `further` are compounds, so that there are enough for any length.
WordLists BuiltInWords();

// Fills `common` from the three lists, and takes what it holds out of `further`.
void MergeWords(const std::vector<std::string>& verbs, WordLists& lists);

}  // namespace dropkv::eval
