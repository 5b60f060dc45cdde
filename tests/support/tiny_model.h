// Tiny models with random weights, as GGUF files that libllama loads: small enough that a float64 reference computes
// them in milliseconds (reference_model.h), large enough to have groups, layers, windows and heads that differ.
#pragma once

#include <cstdint>
#include <string>

#include "dropkv/status.h"
#include "support/gguf_writer.h"

namespace dropkv::testing {

enum class TinyArch {
  kLlama,   // RoPE on neighbouring pairs
  kQwen2,   // biases on q, k, v; RoPE on halves, as the two below
  kQwen3,   // norms on the heads of q and k
  kGemma3,  // sliding layers with their own RoPE base, norms after attention and feed-forward, scaled embeddings
};

struct TinyConfig {
  TinyArch arch = TinyArch::kLlama;
  int32_t layers = 2;
  int32_t heads = 4;
  int32_t kv_heads = 2;
  int32_t head_dim = 32;    // even
  int32_t embedding = 128;  // qwen2: heads * head_dim
  int32_t ffn = 192;
  int32_t vocabulary = 330;  // >= kSmallestVocabulary
  int32_t context = 32768;
  float rope_base = 10000.0F;
  int32_t sliding_window = 0;      // gemma3: tokens that a sliding layer sees; 0: every layer sees all
  int32_t sliding_period = 2;      // of so many layers the last one sees all, the others slide
  float sliding_rope_base = 1000;  // of the sliding layers
  bool add_bos = false;
  std::string chat_template = {};  // Jinja, tokenizer.chat_template; empty: none
  uint32_t seed = 1;

  bool Slides(int32_t layer) const { return sliding_window > 0 && layer % sliding_period != sliding_period - 1; }
};

inline constexpr float kTinyNormEpsilon = 1e-5F;

// <|im_start|>role\n...<|im_end|>\n, as SmolLM2 and Qwen write their turns.
extern const char* const kChatMlTemplate;

struct TinyModel {
  TinyConfig config;
  TensorMap tensors;  // by GGUF name
};

// Draws the weights. The gains of q and k put the standard deviation of the attention logits near 3, so that rows are
// neither uniform nor one-hot.
TinyModel MakeTinyModel(const TinyConfig& config);

Status WriteTinyModel(const TinyModel& model, const std::string& path);

}  // namespace dropkv::testing
