#include "support/tiny_model.h"

#include <cmath>
#include <vector>

namespace dropkv::testing {
namespace {

const char* ArchName(TinyArch arch) {
  switch (arch) {
    case TinyArch::kLlama:
      return "llama";
    case TinyArch::kQwen2:
      return "qwen2";
    case TinyArch::kQwen3:
      return "qwen3";
    case TinyArch::kGemma3:
      return "gemma3";
  }
  return "";
}

void AddLayer(const TinyConfig& c, const std::string& prefix, TensorSource& source, TensorMap& tensors) {
  const int64_t q_size = int64_t{c.heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.kv_heads} * c.head_dim;
  const bool head_norms = c.arch == TinyArch::kQwen3 || c.arch == TinyArch::kGemma3;
  constexpr float kLogitGain = 1.7F;  // of q and of k each
  tensors[prefix + "attn_norm.weight"] = source.Vector(c.embedding, 1, 0.1F);
  tensors[prefix + "attn_q.weight"] = source.Matrix({c.embedding, q_size}, kLogitGain);
  tensors[prefix + "attn_k.weight"] = source.Matrix({c.embedding, kv_size}, kLogitGain);
  tensors[prefix + "attn_v.weight"] = source.Matrix({c.embedding, kv_size}, 1);
  tensors[prefix + "attn_output.weight"] = source.Matrix({q_size, c.embedding}, 1);
  tensors[prefix + "ffn_norm.weight"] = source.Vector(c.embedding, 1, 0.1F);
  tensors[prefix + "ffn_gate.weight"] = source.Matrix({c.embedding, c.ffn}, 1);
  tensors[prefix + "ffn_up.weight"] = source.Matrix({c.embedding, c.ffn}, 1);
  tensors[prefix + "ffn_down.weight"] = source.Matrix({c.ffn, c.embedding}, 1);
  if (c.arch == TinyArch::kQwen2) {
    tensors[prefix + "attn_q.bias"] = source.Vector(q_size, 0, 0.3F);
    tensors[prefix + "attn_k.bias"] = source.Vector(kv_size, 0, 0.3F);
    tensors[prefix + "attn_v.bias"] = source.Vector(kv_size, 0, 0.3F);
  }
  if (head_norms) {
    tensors[prefix + "attn_q_norm.weight"] = source.Vector(c.head_dim, kLogitGain, 0.1F);
    tensors[prefix + "attn_k_norm.weight"] = source.Vector(c.head_dim, kLogitGain, 0.1F);
  }
  if (c.arch == TinyArch::kGemma3) {
    tensors[prefix + "post_attention_norm.weight"] = source.Vector(c.embedding, 1, 0.1F);
    tensors[prefix + "post_ffw_norm.weight"] = source.Vector(c.embedding, 1, 0.1F);
  }
}

}  // namespace

const char* const kChatMlTemplate =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

TinyModel MakeTinyModel(const TinyConfig& config) {
  TinyModel model{config, {}};
  TensorSource source(config.seed);
  // gemma3 multiplies the embeddings by sqrt(embedding); the others are drawn that large.
  const float gain = config.arch == TinyArch::kGemma3 ? 1.0F : std::sqrt(static_cast<float>(config.embedding));
  model.tensors["token_embd.weight"] = source.Matrix({config.embedding, config.vocabulary}, gain);
  model.tensors["output_norm.weight"] = source.Vector(config.embedding, 1, 0.1F);
  model.tensors["output.weight"] = source.Matrix({config.embedding, config.vocabulary}, 1);
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    AddLayer(config, "blk." + std::to_string(layer) + ".", source, model.tensors);
  }
  return model;
}

Status WriteTinyModel(const TinyModel& model, const std::string& path) {
  const TinyConfig& c = model.config;
  GgufWriter file(ArchName(c.arch));
  file.SetU32(".context_length", c.context);
  file.SetU32(".embedding_length", c.embedding);
  file.SetU32(".block_count", c.layers);
  file.SetU32(".feed_forward_length", c.ffn);
  file.SetU32(".attention.head_count", c.heads);
  file.SetU32(".attention.head_count_kv", c.kv_heads);
  file.SetU32(".attention.key_length", c.head_dim);
  file.SetU32(".attention.value_length", c.head_dim);
  file.SetF32(".attention.layer_norm_rms_epsilon", kTinyNormEpsilon);
  file.SetU32(".rope.dimension_count", c.head_dim);
  file.SetF32(".rope.freq_base", c.rope_base);
  file.SetU32(".vocab_size", c.vocabulary);
  if (c.sliding_window > 0) {
    std::vector<bool> slides(c.layers);
    for (int32_t layer = 0; layer < c.layers; ++layer) slides[layer] = c.Slides(layer);
    file.SetU32(".attention.sliding_window", c.sliding_window);
    file.SetBools(".attention.sliding_window_pattern", slides);
    file.SetF32(".rope.freq_base_swa", c.sliding_rope_base);
  }
  file.SetVocabulary(c.vocabulary, c.add_bos);
  if (!c.chat_template.empty()) file.SetString("tokenizer.chat_template", c.chat_template);
  return file.Write(model.tensors, path);
}

}  // namespace dropkv::testing
