// The samples of a run, from a suite's generator or reader, or windows of a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dropkv/status.h"
#include "eval/runner/prompt.h"
#include "eval/sample.h"
#include "llama/model.h"

namespace dropkv::eval {

struct SuiteOptions {
  std::string suite;               // "ruler", "longbench", a .jsonl file of RULER's form, or a text
  std::vector<std::string> tasks;  // empty: all
  std::vector<int32_t> lengths;    // ruler and texts
  int32_t samples = 0;             // of each task (and length); 0: all that there are
  uint32_t seed = 42;
  std::string data;        // folder; empty: none
  int32_t max_length = 0;  // longbench: tokens of a filled prompt
  int32_t forced = 64;     // texts: tokens of the continuation
  int32_t template_tokens = 0;
};

struct Item {
  Sample sample;
  Prompt window;  // of a text; else empty: the prompt is built from the sample

  bool is_text() const { return !window.forced.empty(); }
};

struct Suite {
  std::vector<Item> items;
  std::string haystack;
  std::string data;  // files read, "name sha256 bytes", one a line
  std::vector<std::string> remarks;
};

Result<Suite> LoadSuite(const SuiteOptions& options, const llama::Model& model);

// The first sample of every task and length, then the second ones, ...: what is done at any time is spread evenly.
void Interleave(std::vector<Item>* items);

}  // namespace dropkv::eval
