// From a document and questions to tokens: the user's turn is the document, a blank line, the question.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/run_options.h"
#include "dropkv/status.h"
#include "llama/model.h"

namespace dropkv::cli {

class PromptBuilder {
 public:
  // Whether the chat template is used is settled here: --raw, or a model without one, turns it off.
  static Result<PromptBuilder> Create(const llama::Model& model, const RunOptions& options);

  bool uses_template() const { return templated_; }

  // seen: document, blank line, question, up to where the assistant speaks (with --prefix).
  std::vector<llama::Token> FirstTurn(std::string_view question) const;

  // hidden: the document with its blank line, the user's turn still open; then the rest of that turn.
  std::vector<llama::Token> DocumentOnly() const;
  std::vector<llama::Token> AfterDocument(std::string_view question) const;

  // A further turn, from the end of the answer on: the end-of-turn token that the model sampled is part of it.
  std::vector<llama::Token> NextTurn(std::string_view question) const;

 private:
  PromptBuilder(const llama::Model& model, const RunOptions& options) : model_(&model), options_(&options) {}
  std::string AssistantBegin(const llama::TurnTemplate& turn) const;
  std::vector<llama::Token> Join(std::string_view before, bool first, std::string_view text,
                                 std::string_view after) const;

  const llama::Model* model_;
  const RunOptions* options_;
  bool templated_ = false;
  llama::TurnTemplate first_;
  llama::TurnTemplate next_;
};

}  // namespace dropkv::cli
