// The most likely token, one after the other, until the answer ends.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eval/sample.h"
#include "llama/decoder.h"
#include "llama/model.h"

namespace dropkv::eval {

struct Answer {
  std::vector<llama::Token> tokens;  // the one that ended it not included
  std::string text;
};

// Called with the number of tokens so far, the logits that choose the next one, and that one.
using StepListener = std::function<void(size_t step, std::span<const float> logits, llama::Token next)>;

// `logits` [vocab] give the first token, at `position`. Ends before an end-of-generation token (unless ignore_end), at
// sample.max_tokens, and where the sample says so at a newline, which is then never the first token.
Result<Answer> DecodeGreedily(const llama::Model& model, const Sample& sample, bool ignore_end,
                              std::span<const float> logits, int32_t position, llama::Decoder* decoder,
                              const StepListener& listener);

}  // namespace dropkv::eval
