// One answer: tokens sampled one after the other from a decoder, handed on as text while they come.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/run_options.h"
#include "llama/decoder.h"
#include "llama/model.h"
#include "llama/sampler.h"

namespace dropkv::cli {

struct Answer {
  std::vector<llama::Token> tokens;  // the end-of-turn token not included
  std::string text;
  bool ended = false;  // by the model; else by --max-tokens or a full context
  int32_t steps = 0;   // decode calls: the first token comes from the logits that were there
  double seconds = 0;  // of these calls
};

// `logits` give the first token, at `*position`; `*position` moves behind the last token that was fed. `stream` gets
// the text in whole UTF-8 characters.
Result<Answer> Generate(const llama::Model& model, const RunOptions& options, int32_t limit, std::vector<float> logits,
                        llama::Decoder* decoder, llama::Sampler* sampler, int32_t* position,
                        const std::function<void(std::string_view)>& stream);

// How many bytes of `text` are whole UTF-8 characters (an unfinished one at the end waits for its rest).
size_t CompleteUtf8(std::string_view text);

}  // namespace dropkv::cli
