#include "llama/model.h"

#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <utility>

namespace dropkv::llama {
namespace {

std::mutex log_mutex;
std::string log_error;

// The first error after a clear says why; those behind it only say that something failed.
void KeepFirstError(ggml_log_level level, const char* text, void* /*user*/) {
  if (level != GGML_LOG_LEVEL_ERROR) return;
  const std::lock_guard lock(log_mutex);
  if (!log_error.empty()) return;
  log_error = text;
  while (!log_error.empty() && log_error.back() == '\n') log_error.pop_back();
}

// Reads the magic, so that a wrong file gets a plain message.
Status CheckFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {Code::kNotFound, "--model: no such file: " + path};
  if (std::filesystem::is_directory(path, error))
    return InvalidArgument("--model: expected a GGUF file, got a directory: " + path);
  std::ifstream file(path, std::ios::binary);
  if (!file) return {Code::kIo, "--model: cannot read " + path};
  std::array<char, 4> magic{};
  file.read(magic.data(), magic.size());
  if (file.gcount() != 4 || std::memcmp(magic.data(), "GGUF", 4) != 0)
    return InvalidArgument("--model: expected a GGUF file (it begins with \"GGUF\"), got something else: " + path);
  return Status::Ok();
}

// Null where no back end of libllama finds one.
ggml_backend_dev_t FindGpu() {
  const ggml_backend_dev_t gpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
  return gpu != nullptr ? gpu : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU);
}

}  // namespace

void InstallLog() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(KeepFirstError, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
  });
}

std::string TakeLogError() {
  const std::lock_guard lock(log_mutex);
  return std::exchange(log_error, {});
}

void Model::Deleter::operator()(llama_model* model) const { llama_model_free(model); }

Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

Result<Model> Model::Load(const std::string& path, const ModelOptions& options) {
  InstallLog();
  DROPKV_RETURN_IF_ERROR(CheckFile(path));
  TakeLogError();
  llama_model_params params = llama_model_default_params();
  const ggml_backend_dev_t gpu = FindGpu();
  if (options.gpu_layers > 0 && gpu == nullptr)
    return Unsupported("--gpu-layers: expected 0, as libllama finds no GPU here, got " +
                       std::to_string(options.gpu_layers));
  const bool on_gpu = gpu != nullptr && options.gpu_layers != 0;
  params.n_gpu_layers = on_gpu ? options.gpu_layers : 0;
  // An empty list: without it large products would go to a GPU even with no layer there.
  std::array<ggml_backend_dev_t, 1> none = {nullptr};
  if (!on_gpu) params.devices = none.data();
  Model model;
  model.path_ = path;
  model.device_ = on_gpu ? ggml_backend_dev_description(gpu) : "CPU";
  model.model_.reset(llama_model_load_from_file(path.c_str(), params));
  if (model.model_ == nullptr) {
    const std::string reason = TakeLogError();
    return InvalidArgument("--model: libllama cannot load " + path + (reason.empty() ? "" : ": " + reason));
  }
  model.vocab_ = llama_model_get_vocab(model.get());
  model.architecture_ = model.MetaValue("general.architecture");
  model.name_ = model.MetaValue("general.name");
  if (model.name_.empty()) model.name_ = std::filesystem::path(path).filename().string();
  if (const char* text = llama_model_chat_template(model.get(), nullptr)) model.chat_template_ = text;
  DROPKV_RETURN_IF_ERROR(model.CheckSupported());
  return model;
}

std::string Model::MetaValue(const std::string& key) const {
  std::array<char, 512> buffer{};
  const int32_t length = llama_model_meta_val_str(get(), key.c_str(), buffer.data(), buffer.size());
  return length < 0 ? std::string() : std::string(buffer.data());
}

Status Model::CheckSupported() const {
  const auto refuse = [&](const std::string& reason) {
    return Unsupported("model '" + name_ + "' (architecture " + architecture_ + "): " + reason);
  };
  if (llama_model_has_encoder(get())) return refuse("encoder-decoder models have no single cache to evict from");
  if (llama_model_is_recurrent(get())) return refuse("recurrent models keep a state, not a KV cache");
  if (llama_model_is_hybrid(get()))
    return refuse("hybrid models (recurrent layers beside attention) are not supported");
  if (llama_model_is_diffusion(get())) return refuse("diffusion models do not decode from a KV cache");
  if (!MetaValue(architecture_ + ".attention.kv_lora_rank").empty())
    return refuse("multi-head latent attention (MLA) has one latent row for all heads");
  const std::string bias = MetaValue(architecture_ + ".attention.max_alibi_bias");
  static constexpr std::array<std::string_view, 5> kAlibi = {"bloom", "mpt", "refact", "jais", "falcon-alibi"};
  if ((!bias.empty() && std::stof(bias) > 0) || std::find(kAlibi.begin(), kAlibi.end(), architecture_) != kAlibi.end())
    return refuse("ALiBi takes its bias from a token's place in the cache");
  if (llama_model_rope_type(get()) == LLAMA_ROPE_TYPE_MROPE) return refuse("M-RoPE positions are not supported");
  return Status::Ok();
}

int32_t Model::layers() const { return llama_model_n_layer(get()); }
int32_t Model::kv_heads() const { return llama_model_n_head_kv(get()); }
int32_t Model::vocab_size() const { return llama_vocab_n_tokens(vocab_); }
int32_t Model::context_train() const { return llama_model_n_ctx_train(get()); }
int32_t Model::sliding_window() const { return std::max(0, llama_model_n_swa(get())); }

std::vector<Token> Model::Tokenize(std::string_view text, bool add_special, bool parse_special) const {
  std::vector<Token> tokens(text.size() + 8);
  const auto size = static_cast<int32_t>(text.size());
  int32_t count = llama_tokenize(vocab_, text.data(), size, tokens.data(), static_cast<int32_t>(tokens.size()),
                                 add_special, parse_special);
  if (count < 0) {
    tokens.resize(-count);
    count = llama_tokenize(vocab_, text.data(), size, tokens.data(), -count, add_special, parse_special);
  }
  tokens.resize(std::max(0, count));
  return tokens;
}

std::string Model::Piece(Token token) const {
  std::string piece(64, '\0');
  int32_t length = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, false);
  if (length < 0) {
    piece.resize(-length);
    length = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, false);
  }
  piece.resize(std::max(0, length));
  return piece;
}

bool Model::IsEndOfGeneration(Token token) const { return llama_vocab_is_eog(vocab_, token); }

Result<std::string> Model::ApplyTemplate(std::span<const std::pair<const char*, const char*>> messages,
                                         bool add_assistant) const {
  std::vector<llama_chat_message> chat;
  for (const auto& [role, content] : messages) chat.push_back({role, content});
  std::string text(1024, '\0');
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int32_t length = llama_chat_apply_template(chat_template_.c_str(), chat.data(), chat.size(), add_assistant,
                                                     text.data(), static_cast<int32_t>(text.size()));
    if (length < 0)
      return Unsupported("model '" + name_ +
                         "': libllama does not know its chat template; --raw sends the text as it is");
    const bool fits = static_cast<size_t>(length) <= text.size();
    text.resize(length);
    if (fits) return text;
  }
  return Status(Code::kInternal, "the chat template changed its length between two calls");
}

Result<TurnTemplate> Model::Turn(bool first) const {
  // Words that no template contains, without spaces that a template could trim.
  static constexpr const char* kUser = "user-text-goes-here-5b1c";
  static constexpr const char* kAssistant = "assistant-text-goes-here-5b1c";
  using Message = std::pair<const char*, const char*>;
  std::vector<Message> messages;
  if (!first) messages = {{"user", kAssistant}, {"assistant", kAssistant}};
  messages.emplace_back("user", kUser);
  Result<std::string> text = ApplyTemplate(messages, true);
  if (!text.ok()) return text.status();
  size_t begin = 0;
  if (!first) begin = text->rfind(kAssistant) + std::strlen(kAssistant);
  const size_t user = text->find(kUser, begin);
  if (user == std::string::npos)
    return Unsupported("model '" + name_ + "': its chat template changes the user's text; --raw sends it as it is");
  return TurnTemplate{text->substr(begin, user - begin), text->substr(user + std::strlen(kUser))};
}

}  // namespace dropkv::llama
