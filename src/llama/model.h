// A GGUF model through libllama: loading with the reasons for a refusal, text to tokens and back, chat template.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

struct llama_model;
struct llama_vocab;

namespace dropkv::llama {

using Token = int32_t;

// One user turn rendered by the model's chat template, split around the user's text: the text is tokenised without
// special tokens, so that a document cannot end its own turn.
struct TurnTemplate {
  std::string before;  // from the end of the previous turn to the user's text
  std::string after;   // to the point where the assistant speaks
};

struct ModelOptions {
  // Layers whose weights and cache go to a GPU. Negative: all where libllama finds one, else none. 0: the CPU alone.
  int32_t gpu_layers = -1;
};

class Model {
 public:
  // Errors: no such file, not a GGUF, truncated, or a kind of model whose cache cannot be evicted per head (recurrent,
  // hybrid, encoder-decoder, diffusion, MLA, ALiBi), by name; GPU layers where there is no GPU.
  static Result<Model> Load(const std::string& path, const ModelOptions& options = {});

  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  llama_model* get() const { return model_.get(); }
  const std::string& path() const { return path_; }                  // of the file it came from
  const std::string& name() const { return name_; }                  // general.name, else the file's name
  const std::string& architecture() const { return architecture_; }  // general.architecture
  const std::string& device() const { return device_; }              // "CPU", or the GPU's name
  int32_t layers() const;
  int32_t kv_heads() const;  // of the first layer
  int32_t vocab_size() const;
  int32_t context_train() const;   // tokens
  int32_t sliding_window() const;  // tokens; 0: none
  bool has_chat_template() const { return !chat_template_.empty(); }

  // `add_special`: the model's own beginning-of-sequence token. `parse_special`: control tokens in the text count as
  // such.
  std::vector<Token> Tokenize(std::string_view text, bool add_special, bool parse_special) const;

  // Bytes of a token; control tokens give nothing. The bytes of one token need not be whole UTF-8 characters.
  std::string Piece(Token token) const;
  bool IsEndOfGeneration(Token token) const;

  // The template of a user turn; `first`: of the conversation. Errors: a template that libllama does not know.
  Result<TurnTemplate> Turn(bool first) const;

 private:
  struct Deleter {
    void operator()(llama_model* model) const;
  };
  Model() = default;

  Status CheckSupported() const;
  std::string MetaValue(const std::string& key) const;  // empty: not there
  Result<std::string> ApplyTemplate(std::span<const std::pair<const char*, const char*>> messages,
                                    bool add_assistant) const;

  std::unique_ptr<llama_model, Deleter> model_;
  const llama_vocab* vocab_ = nullptr;
  std::string path_;
  std::string name_;
  std::string architecture_;
  std::string device_;
  std::string chat_template_;
};

// Routes libllama's log to nowhere but for the first error since the last TakeLogError, which messages quote.
void InstallLog();
std::string TakeLogError();

}  // namespace dropkv::llama
