// RULER's 13 tasks, generated ("RULER-like": the same structures, parameters, metrics and length fitting), and a reader
// of files that the official generator wrote.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"
#include "eval/sample.h"

namespace dropkv::eval {

// The 13 names in the official order.
std::span<const std::string_view> RulerTasks();

struct RulerOptions {
  std::vector<std::string> tasks;  // of RulerTasks()
  std::vector<int32_t> lengths;    // tokens, answer included
  int32_t samples = 10;            // of each (task, length)
  uint64_t seed = 42;
  std::string data;  // folder with haystack texts, word lists and QA files (docs/eval.md); empty: the built-in haystack
  int32_t template_tokens = 0;  // taken from the length for the chat template
};

struct RulerSet {
  std::vector<Sample> samples;
  std::string haystack;  // for the run record: the files, or that the haystack is the built-in one
  std::string data;      // files that were read, "name sha-or-hash bytes", one a line
};

// Deterministic: same options and tokenizer, same bytes. Errors name the task, the folder or file, what was expected.
Result<RulerSet> GenerateRuler(const RulerOptions& options, const TokenCounter& count);

// One sample a line: index, input, outputs, length, optional answer_prefix, task, context, question, max_tokens. The
// task (for metric and answer length) comes from the field or else from the path. Errors name file and line.
Result<std::vector<Sample>> ReadRulerFile(const std::string& path);

}  // namespace dropkv::eval
