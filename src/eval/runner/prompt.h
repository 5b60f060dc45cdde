// From a sample to tokens: what is prefilled and evicted, and what follows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dropkv/status.h"
#include "eval/sample.h"
#include "llama/model.h"

namespace dropkv::eval {

struct Prompt {
  std::vector<llama::Token> tokens;  // prefilled; the eviction happens at their end
  std::vector<llama::Token> after;   // fed before the answer: of a hidden question, with the end of the user's turn
  std::vector<llama::Token> forced;  // of a text: its continuation; then there is no answer
};

class PromptBuilder {
 public:
  // raw: no chat template for any sample. A model without one, and samples that ask for none, go without too.
  static Result<PromptBuilder> Create(const llama::Model& model, bool raw);

  bool templated() const { return templated_; }
  int32_t template_tokens() const;  // that a prompt has beside its sample's text

  // Context and question as one text, without control tokens; hidden: `tokens` hold the context alone, the user's turn
  // still open.
  Prompt Build(const Sample& sample, bool hidden) const;

 private:
  explicit PromptBuilder(const llama::Model& model) : model_(&model) {}

  const llama::Model* model_;
  bool templated_ = false;
  llama::TurnTemplate turn_;
};

// The tokens that every raw text begins with: the model's beginning-of-sequence token, or nothing.
std::vector<llama::Token> BeginOfText(const llama::Model& model);

// 64-bit FNV-1a of all tokens, 16 hexadecimal digits.
std::string PromptHash(const Prompt& prompt);

}  // namespace dropkv::eval
