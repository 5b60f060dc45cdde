#include "cli/prompt.h"

namespace dropkv::cli {

using llama::Token;

Result<PromptBuilder> PromptBuilder::Create(const llama::Model& model, const RunOptions& options) {
  PromptBuilder builder(model, options);
  builder.templated_ = !options.raw && model.has_chat_template();
  if (!builder.templated_) {
    builder.next_.before = "\n";
    return builder;
  }
  Result<llama::TurnTemplate> first = model.Turn(true);
  if (!first.ok()) return first.status();
  Result<llama::TurnTemplate> next = model.Turn(false);
  if (!next.ok()) return next.status();
  builder.first_ = std::move(*first);
  builder.next_ = std::move(*next);
  return builder;
}

// The template's parts may hold control tokens, the user's text may not.
std::vector<Token> PromptBuilder::Join(std::string_view before, bool first, std::string_view text,
                                       std::string_view after) const {
  std::vector<Token> tokens = model_->Tokenize(before, first, true);
  const auto append = [&](std::string_view part, bool special) {
    if (part.empty()) return;
    const std::vector<Token> more = model_->Tokenize(part, false, special);
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  append(text, false);
  append(after, true);
  return tokens;
}

std::string PromptBuilder::AssistantBegin(const llama::TurnTemplate& turn) const {
  const bool new_line = !templated_ && !options_->prefix.empty();
  return turn.after + (new_line ? "\n" : "") + options_->prefix;
}

std::vector<Token> PromptBuilder::FirstTurn(std::string_view question) const {
  std::string text = options_->document;
  if (!text.empty() && !question.empty()) text += "\n\n";
  text += question;
  return Join(first_.before, true, text, AssistantBegin(first_));
}

std::vector<Token> PromptBuilder::DocumentOnly() const {
  return Join(first_.before, true, options_->document + "\n\n", "");
}

std::vector<Token> PromptBuilder::AfterDocument(std::string_view question) const {
  return Join("", false, question, AssistantBegin(first_));
}

std::vector<Token> PromptBuilder::NextTurn(std::string_view question) const {
  return Join(next_.before, false, question, AssistantBegin(next_));
}

}  // namespace dropkv::cli
