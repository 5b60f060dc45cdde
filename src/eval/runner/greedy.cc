#include "eval/runner/greedy.h"

#include <algorithm>
#include <limits>

namespace dropkv::eval {

using llama::Token;

namespace {

Token Best(std::span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The best one that neither ends the generation nor is a newline: what such answers begin with.
Token BestBeginning(const llama::Model& model, Token newline, std::span<const float> logits) {
  std::vector<float> allowed(logits.begin(), logits.end());
  for (;;) {
    const Token best = Best(allowed);
    const bool none_left = allowed[best] == -std::numeric_limits<float>::infinity();
    if (none_left || (best != newline && !model.IsEndOfGeneration(best))) return best;
    allowed[best] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

Result<Answer> DecodeGreedily(const llama::Model& model, const Sample& sample, bool ignore_end,
                              std::span<const float> logits, int32_t position, llama::Decoder* decoder,
                              const StepListener& listener) {
  Answer answer;
  Token newline = -1;
  if (sample.stop_at_newline) {
    const std::vector<Token> tokens = model.Tokenize("\n", false, false);
    if (!tokens.empty()) newline = tokens.back();
  }
  for (;;) {
    const bool first = answer.tokens.empty();
    const Token token = first && newline >= 0 ? BestBeginning(model, newline, logits) : Best(logits);
    if (listener) listener(answer.tokens.size(), logits, token);
    if (token == newline || (model.IsEndOfGeneration(token) && !ignore_end)) return answer;
    answer.tokens.push_back(token);
    answer.text += model.Piece(token);
    if (static_cast<int32_t>(answer.tokens.size()) >= sample.max_tokens) return answer;
    DROPKV_RETURN_IF_ERROR(decoder->Feed(std::span(&token, 1), position));
    ++position;
    logits = decoder->logits();
  }
}

}  // namespace dropkv::eval
