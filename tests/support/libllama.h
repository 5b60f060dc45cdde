// libllama without our adapter: the few calls that tests need to compare with it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llama.h"

namespace dropkv::testing {

struct FreeLlama {
  void operator()(llama_model* model) const { llama_model_free(model); }
  void operator()(llama_context* context) const { llama_free(context); }
};

using ModelPtr = std::unique_ptr<llama_model, FreeLlama>;
using ContextPtr = std::unique_ptr<llama_context, FreeLlama>;

// On the CPU; null where libllama refuses the file. Silences libllama's log.
inline ModelPtr LoadModel(const std::string& path) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  return ModelPtr(llama_model_load_from_file(path.c_str(), params));
}

// One sequence, one thread, a cache of `cache_type`.
inline llama_context_params PlainContext(int32_t tokens, ggml_type cache_type, bool flash_attention) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = tokens;
  params.n_batch = tokens;
  params.n_ubatch = tokens;
  params.type_k = cache_type;
  params.type_v = cache_type;
  params.n_threads = 1;
  params.n_threads_batch = 1;
  params.flash_attn_type = flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  return params;
}

// Decodes the tokens behind what sequence 0 holds; the logits of the last one, empty where libllama fails.
inline std::vector<float> DecodeTokens(llama_context* context, std::span<const int32_t> tokens) {
  std::vector<llama_token> copy(tokens.begin(), tokens.end());
  if (llama_decode(context, llama_batch_get_one(copy.data(), static_cast<int32_t>(copy.size()))) != 0) return {};
  const float* logits = llama_get_logits_ith(context, -1);
  return {logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))};
}

}  // namespace dropkv::testing
