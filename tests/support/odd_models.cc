#include "support/odd_models.h"

#include <fstream>
#include <iterator>

#include "support/gguf_writer.h"

namespace dropkv::testing {
namespace {

constexpr int32_t kLayers = 2;
constexpr int32_t kEmbedding = 64;
constexpr int32_t kHeads = 4;
constexpr int32_t kFfn = 96;
constexpr int32_t kVocabulary = kSmallestVocabulary;

// Keys that every architecture has, and the two ends of the model.
void AddFrame(GgufWriter& file, TensorSource& source, TensorMap& tensors) {
  file.SetU32(".context_length", 4096);
  file.SetU32(".embedding_length", kEmbedding);
  file.SetU32(".block_count", kLayers);
  file.SetU32(".feed_forward_length", kFfn);
  file.SetVocabulary(kVocabulary, false);
  tensors["token_embd.weight"] = source.Matrix({kEmbedding, kVocabulary}, 8);
}

void AddRecurrent(GgufWriter& file, TensorSource& source, TensorMap& tensors) {
  constexpr int32_t kInner = 2 * kEmbedding;
  constexpr int32_t kState = 8;
  constexpr int32_t kConv = 4;
  constexpr int32_t kRank = 4;
  file.SetU32(".attention.head_count", 0);
  file.SetF32(".attention.layer_norm_rms_epsilon", 1e-5F);
  file.SetU32(".ssm.conv_kernel", kConv);
  file.SetU32(".ssm.inner_size", kInner);
  file.SetU32(".ssm.state_size", kState);
  file.SetU32(".ssm.time_step_rank", kRank);
  tensors["output_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    tensors[prefix + "attn_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
    tensors[prefix + "ssm_in.weight"] = source.Matrix({kEmbedding, 2 * kInner}, 1);
    tensors[prefix + "ssm_conv1d.weight"] = source.Matrix({kConv, kInner}, 1);
    tensors[prefix + "ssm_conv1d.bias"] = source.Vector(kInner, 0, 0.1F);
    tensors[prefix + "ssm_x.weight"] = source.Matrix({kInner, kRank + 2 * kState}, 1);
    tensors[prefix + "ssm_dt.weight"] = source.Matrix({kRank, kInner}, 1);
    tensors[prefix + "ssm_dt.bias"] = source.Vector(kInner, 0, 0.1F);
    tensors[prefix + "ssm_a"] = source.Matrix({kState, kInner}, -1);
    tensors[prefix + "ssm_d"] = source.Vector(kInner, 1, 0.1F);
    tensors[prefix + "ssm_out.weight"] = source.Matrix({kInner, kEmbedding}, 1);
  }
}

// One attention block of t5: `stem` is "enc.blk.0.attn", "dec.blk.1.cross_attn", ...
void AddT5Attention(const std::string& stem, TensorSource& source, TensorMap& tensors) {
  tensors[stem + "_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
  for (const char* part : {"_q", "_k", "_v", "_o"}) {
    tensors[stem + part + ".weight"] = source.Matrix({kEmbedding, kEmbedding}, 1);
  }
}

void AddEncoderDecoder(GgufWriter& file, TensorSource& source, TensorMap& tensors) {
  constexpr int32_t kBuckets = 32;
  file.SetU32(".attention.head_count", kHeads);
  file.SetF32(".attention.layer_norm_rms_epsilon", 1e-5F);
  file.SetU32(".attention.relative_buckets_count", kBuckets);
  file.SetU32(".decoder_start_token_id", kBosToken);
  for (const std::string side : {"enc", "dec"}) {
    tensors[side + ".output_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = side + ".blk." + std::to_string(layer) + ".";
      AddT5Attention(prefix + "attn", source, tensors);
      tensors[prefix + "attn_rel_b.weight"] = source.Matrix({kHeads, kBuckets}, 1);
      if (side == "dec") AddT5Attention(prefix + "cross_attn", source, tensors);
      tensors[prefix + "ffn_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
      tensors[prefix + "ffn_up.weight"] = source.Matrix({kEmbedding, kFfn}, 1);
      tensors[prefix + "ffn_down.weight"] = source.Matrix({kFfn, kEmbedding}, 1);
    }
  }
}

void AddLatent(GgufWriter& file, TensorSource& source, TensorMap& tensors) {
  constexpr int32_t kQRank = 24;
  constexpr int32_t kKvRank = 32;
  constexpr int32_t kRope = 8;
  constexpr int32_t kNope = 16;
  constexpr int32_t kValue = 16;
  file.SetU32(".attention.head_count", kHeads);
  file.SetU32(".attention.head_count_kv", 1);
  file.SetF32(".attention.layer_norm_rms_epsilon", 1e-5F);
  file.SetU32(".attention.q_lora_rank", kQRank);
  file.SetU32(".attention.kv_lora_rank", kKvRank);
  file.SetU32(".attention.key_length", kKvRank + kRope);
  file.SetU32(".attention.value_length", kKvRank);
  file.SetU32(".attention.key_length_mla", kNope + kRope);
  file.SetU32(".attention.value_length_mla", kValue);
  file.SetU32(".rope.dimension_count", kRope);
  file.SetU32(".leading_dense_block_count", kLayers);
  file.SetU32(".expert_feed_forward_length", kFfn);
  file.SetU32(".expert_shared_count", 1);
  tensors["output_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    tensors[prefix + "attn_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
    tensors[prefix + "attn_q_a_norm.weight"] = source.Vector(kQRank, 1, 0.1F);
    tensors[prefix + "attn_kv_a_norm.weight"] = source.Vector(kKvRank, 1, 0.1F);
    tensors[prefix + "attn_q_a.weight"] = source.Matrix({kEmbedding, kQRank}, 1);
    tensors[prefix + "attn_q_b.weight"] = source.Matrix({kQRank, kHeads * (kNope + kRope)}, 1);
    tensors[prefix + "attn_kv_a_mqa.weight"] = source.Matrix({kEmbedding, kKvRank + kRope}, 1);
    tensors[prefix + "attn_k_b.weight"] = source.Matrix({kNope, kKvRank, kHeads}, 1);
    tensors[prefix + "attn_v_b.weight"] = source.Matrix({kKvRank, kValue, kHeads}, 1);
    tensors[prefix + "attn_output.weight"] = source.Matrix({kHeads * kValue, kEmbedding}, 1);
    tensors[prefix + "ffn_norm.weight"] = source.Vector(kEmbedding, 1, 0.1F);
    tensors[prefix + "ffn_gate.weight"] = source.Matrix({kEmbedding, kFfn}, 1);
    tensors[prefix + "ffn_up.weight"] = source.Matrix({kEmbedding, kFfn}, 1);
    tensors[prefix + "ffn_down.weight"] = source.Matrix({kFfn, kEmbedding}, 1);
  }
}

// A weight matrix with a bias, and a layer norm with one.
void AddLinear(const std::string& name, int64_t in, int64_t out, TensorSource& source, TensorMap& tensors) {
  tensors[name + ".weight"] = source.Matrix({in, out}, 1);
  tensors[name + ".bias"] = source.Vector(out, 0, 0.1F);
}

void AddNorm(const std::string& name, TensorSource& source, TensorMap& tensors) {
  tensors[name + ".weight"] = source.Vector(kEmbedding, 1, 0.1F);
  tensors[name + ".bias"] = source.Vector(kEmbedding, 0, 0.1F);
}

void AddAlibi(GgufWriter& file, TensorSource& source, TensorMap& tensors) {
  file.SetU32(".attention.head_count", kHeads);
  file.SetF32(".attention.layer_norm_epsilon", 1e-5F);
  AddNorm("token_embd_norm", source, tensors);
  AddNorm("output_norm", source, tensors);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    AddNorm(prefix + "attn_norm", source, tensors);
    AddLinear(prefix + "attn_qkv", kEmbedding, 3 * kEmbedding, source, tensors);
    AddLinear(prefix + "attn_output", kEmbedding, kEmbedding, source, tensors);
    AddNorm(prefix + "ffn_norm", source, tensors);
    AddLinear(prefix + "ffn_up", kEmbedding, kFfn, source, tensors);
    AddLinear(prefix + "ffn_down", kFfn, kEmbedding, source, tensors);
  }
}

struct Recipe {
  const char* architecture;
  void (*add)(GgufWriter&, TensorSource&, TensorMap&);
};

Recipe RecipeOf(OddModel kind) {
  switch (kind) {
    case OddModel::kRecurrent:
      return {"mamba", AddRecurrent};
    case OddModel::kEncoderDecoder:
      return {"t5", AddEncoderDecoder};
    case OddModel::kLatent:
      return {"deepseek2", AddLatent};
    case OddModel::kAlibi:
      break;
  }
  return {"bloom", AddAlibi};
}

Status WriteBytes(const std::string& bytes, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  return out ? Status::Ok() : Status(Code::kIo, "cannot write " + path);
}

}  // namespace

Status WriteOddModel(OddModel kind, const std::string& path) {
  const Recipe recipe = RecipeOf(kind);
  GgufWriter file(recipe.architecture);
  TensorSource source(1);
  TensorMap tensors;
  AddFrame(file, source, tensors);
  recipe.add(file, source, tensors);
  return file.Write(tensors, path);
}

Status WriteTruncated(const std::string& source, double share, const std::string& path) {
  std::ifstream in(source, std::ios::binary);
  if (!in) return {Code::kIo, "cannot read " + source};
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  bytes.resize(static_cast<size_t>(share * static_cast<double>(bytes.size())));
  return WriteBytes(bytes, path);
}

Status WriteNotGguf(const std::string& path) { return WriteBytes("This is a text, not a model.\n", path); }

}  // namespace dropkv::testing
