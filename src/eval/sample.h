// One question of an evaluation: what the model reads, what it should answer, and how the answer is judged.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace dropkv::eval {

enum class Metric : int {
  kStringMatchAll,   // RULER: share of the references found in the answer, upper and lower case alike
  kStringMatchPart,  // RULER's qa: 1 where any reference is found
  kF1,               // LongBench's, as all below
  kRougeL,
  kClassification,
  kRetrieval,
  kCount,
  kEditSimilarity,
};

// The user's turn is context + question, without anything between; the assistant's turn begins with `prefix`.
struct Sample {
  std::string suite;     // "ruler", "longbench", or the name of a file
  std::string task;      // "niah_single_1", "qasper", ...
  std::string id;        // unique within (suite, task, length)
  std::string category;  // LongBench's group of tasks; empty: none
  int32_t length = 0;    // tokens that the prompt was fitted to, answer included; 0: as long as it is
  std::string context;   // what is compressed when the question is hidden
  std::string question;  // may be empty: then the whole prompt is context
  std::string prefix;
  std::vector<std::string> references;
  std::vector<std::string> classes;  // kClassification: all class names
  std::vector<double> depths;        // where each reference's needle lies, percent of the haystack; empty: no needles
  Metric metric = Metric::kStringMatchAll;
  int32_t max_tokens = 128;
  bool chat_template = true;     // false: LongBench's few-shot and code tasks
  bool first_line = false;       // the answer is its first line, leading newlines stripped
  bool stop_at_newline = false;  // samsum: a newline ends the answer
};

// Number of tokens of a text, without special tokens; from the model's own tokenizer.
using TokenCounter = std::function<int32_t(std::string_view)>;

}  // namespace dropkv::eval
