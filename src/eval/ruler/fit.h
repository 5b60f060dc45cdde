// A prompt as long as its limit allows, with few counts of the whole text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "dropkv/status.h"
#include "eval/sample.h"

namespace dropkv::eval {

struct FitLimits {
  int64_t smallest = 0;  // size with which everything that the task needs is there
  int64_t largest = 0;
  int32_t length = 0;    // tokens of prompt, answer and chat template together
  int32_t reserved = 0;  // of them for answer and chat template
};

struct Fitted {
  Sample sample;
  int64_t size = 0;
  int32_t tokens = 0;  // of context + question + prefix, counted on the joined text
};

// The sample of a size; the larger, the longer.
using RenderSample = std::function<Sample(int64_t size)>;

Result<int32_t> CountTokens(const Sample& sample, const TokenCounter& count);

// The largest size that was found to fit: none larger fits, or less than 1/256 of the room is left. Errors: length too
// short for the smallest size, with the task and the least length.
Result<Fitted> FitToLength(const FitLimits& limits, const RenderSample& render, const TokenCounter& count);

// Prompt tokens below which a sample does not count as filled: 95% of the length, less what is reserved.
int32_t LeastTokens(const FitLimits& limits);

}  // namespace dropkv::eval
