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

GreedyAnswer::GreedyAnswer(const llama::Model& model, const Sample& sample, bool ignore_end)
    : model_(&model), max_tokens_(sample.max_tokens), ignore_end_(ignore_end) {
  if (!sample.stop_at_newline) return;
  const std::vector<Token> tokens = model.Tokenize("\n", false, false);
  if (!tokens.empty()) newline_ = tokens.back();
}

void GreedyAnswer::Begin(std::span<const Token> tokens) {
  tokens_.assign(tokens.begin(), tokens.end());
  for (const Token token : tokens) text_ += model_->Piece(token);
}

Token GreedyAnswer::Take(std::span<const float> logits) {
  const bool beginning = tokens_.empty() && newline_ >= 0;
  const Token token = beginning ? BestBeginning(*model_, newline_, logits) : Best(logits);
  done_ = token == newline_ || (model_->IsEndOfGeneration(token) && !ignore_end_);
  if (done_) return token;
  tokens_.push_back(token);
  text_ += model_->Piece(token);
  done_ = static_cast<int32_t>(tokens_.size()) >= max_tokens_;
  return token;
}

}  // namespace dropkv::eval
