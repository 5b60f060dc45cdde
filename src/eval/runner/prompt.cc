#include "eval/runner/prompt.h"

#include <fmt/format.h>

#include <array>

#include "core/fnv.h"

namespace dropkv::eval {

using llama::Token;

namespace {

void Append(const std::vector<Token>& more, std::vector<Token>* tokens) {
  tokens->insert(tokens->end(), more.begin(), more.end());
}

}  // namespace

std::vector<Token> BeginOfText(const llama::Model& model) {
  std::vector<Token> tokens = model.Tokenize("", true, false);
  // Some models ask for an end-of-sequence token as well, which a text that goes on must not have.
  while (tokens.size() > 1) tokens.pop_back();
  return tokens;
}

Result<PromptBuilder> PromptBuilder::Create(const llama::Model& model, bool raw) {
  PromptBuilder builder(model);
  builder.templated_ = !raw && model.has_chat_template();
  if (!builder.templated_) return builder;
  Result<llama::TurnTemplate> turn = model.Turn(true);
  if (!turn.ok()) return turn.status();
  builder.turn_ = std::move(*turn);
  return builder;
}

int32_t PromptBuilder::template_tokens() const {
  Sample empty;
  const Prompt prompt = Build(empty, false);
  return static_cast<int32_t>(prompt.tokens.size());
}

Prompt PromptBuilder::Build(const Sample& sample, bool hidden) const {
  const bool templated = templated_ && sample.chat_template;
  Prompt prompt;
  prompt.tokens = templated ? model_->Tokenize(turn_.before, true, true) : BeginOfText(*model_);
  std::vector<Token>* rest = hidden ? &prompt.after : &prompt.tokens;
  // The prefix is tokenised with the header in front of it, where its first token depends on the header's end.
  if (!templated) {
    if (hidden) Append(model_->Tokenize(sample.context, false, false), &prompt.tokens);
    const std::string text = (hidden ? "" : sample.context) + sample.question + sample.prefix;
    if (!text.empty()) Append(model_->Tokenize(text, false, false), rest);
    return prompt;
  }
  if (hidden) Append(model_->Tokenize(sample.context, false, false), &prompt.tokens);
  const std::string text = (hidden ? "" : sample.context) + sample.question;
  if (!text.empty()) Append(model_->Tokenize(text, false, false), rest);
  Append(model_->Tokenize(turn_.after + sample.prefix, false, true), rest);
  return prompt;
}

std::string PromptHash(const Prompt& prompt) {
  uint64_t hash = Fnv1a64("");
  for (const std::vector<Token>* part : {&prompt.tokens, &prompt.after, &prompt.forced}) {
    for (const Token token : *part) {
      std::array<char, 4> bytes;  // the least first, on any machine
      for (size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<char>(static_cast<uint32_t>(token) >> 8 * i & 0xFFU);
      hash = Fnv1a64({bytes.data(), bytes.size()}, hash);
    }
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace dropkv::eval
