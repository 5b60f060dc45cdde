// One sample of a task.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"
#include "eval/ruler/corpus.h"
#include "eval/ruler/fit.h"
#include "eval/ruler/tasks.h"
#include "eval/sample.h"

namespace dropkv::eval {

struct SampleRequest {
  const RulerTask& task;
  const Corpus& corpus;
  const TokenCounter& count;
  int32_t length = 0;
  int32_t reserved = 0;  // tokens of it for answer and chat template
  int32_t index = 0;
  uint64_t task_key = 0;  // of (seed, task): the same for every length
  uint64_t key = 0;       // of (seed, task, length, index): what is drawn for this sample follows from it
};

Result<Sample> MakeNeedles(const SampleRequest& request);
Result<Sample> MakeVariables(const SampleRequest& request);
Result<Sample> MakeCommonWords(const SampleRequest& request);
Result<Sample> MakeFrequentWords(const SampleRequest& request);
Result<Sample> MakeQuestion(const SampleRequest& request);

// What all tasks share: everything but texts, references and depths.
Sample StartSample(const SampleRequest& request);
FitLimits StartLimits(const SampleRequest& request);

// A line of noise, five short sentences.
inline constexpr std::string_view kNoiseLine =
    "The hills are high. The lake is deep. The moon is bright. On we walk. Out and home again.";

}  // namespace dropkv::eval
