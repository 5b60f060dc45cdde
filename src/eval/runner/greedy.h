// The most likely token, one after the other, until the answer ends.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "eval/sample.h"
#include "llama/model.h"

namespace dropkv::eval {

class GreedyAnswer {
 public:
  // Ends before an end-of-generation token (unless ignore_end), at sample.max_tokens, and where the sample says so at a
  // newline, which is then never the first token.
  GreedyAnswer(const llama::Model& model, const Sample& sample, bool ignore_end);

  // Tokens that the answer begins with, before the first Take; fewer than its most.
  void Begin(std::span<const llama::Token> tokens);

  // The token that the logits choose, which is the answer's next one or ends it. Not to be called behind its end.
  llama::Token Take(std::span<const float> logits);

  bool done() const { return done_; }
  const std::vector<llama::Token>& tokens() const { return tokens_; }  // the one that ended it not included
  const std::string& text() const { return text_; }

 private:
  const llama::Model* model_;
  int32_t max_tokens_;
  bool ignore_end_;
  llama::Token newline_ = -1;  // that ends it; -1: none does
  bool done_ = false;
  std::vector<llama::Token> tokens_;
  std::string text_;
};

}  // namespace dropkv::eval
