// What prompts are made of: the texts, words and questions of a data folder, or the project's own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dropkv/status.h"
#include "eval/ruler/haystack.h"
#include "eval/ruler/word_lists.h"

namespace dropkv::eval {

struct QaQuestion {
  std::string text;
  std::vector<std::string> answers;
  std::vector<uint32_t> gold;  // documents that hold the answer
  uint32_t group = 0;          // documents to take distractors from first
};

struct QaSet {
  std::vector<std::string> documents;  // each once
  std::vector<std::vector<uint32_t>> groups;
  std::vector<QaQuestion> questions;
};

struct CorpusParts {
  bool essay = false;
  bool words = false;
  bool qa_1 = false;
  bool qa_2 = false;
};

struct Corpus {
  Haystack essay;
  std::string essay_name;  // which text it is
  WordLists words;
  QaSet qa_1;
  QaSet qa_2;
  std::string files;  // that were read: "name sha256 bytes", one a line
};

// folder: docs/eval.md has its layout; empty: none. Errors: kNotFound where the folder does not exist or questions are
// asked for and missing; kInvalidArgument, with the file, where one is not in its form.
Result<Corpus> LoadCorpus(const std::string& folder, const CorpusParts& parts);

// Adds the questions of one file, in SQuAD's form (1.1 and 2.0, answerable questions only) or HotpotQA's. `name` is for
// errors.
Status AddSquad(const std::string& name, const std::string& json, QaSet& set);
Status AddHotpotQa(const std::string& name, const std::string& json, QaSet& set);

}  // namespace dropkv::eval
