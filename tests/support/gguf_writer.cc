#include "support/gguf_writer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numbers>

#include "ggml.h"
#include "gguf.h"

namespace dropkv::testing {
namespace {

// Values of tokenizer.ggml.token_type.
enum TokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };

struct Vocabulary {
  std::vector<std::string> pieces;
  std::vector<float> scores;
  std::vector<int32_t> types;

  void Add(std::string piece, TokenType type, float score) {
    pieces.push_back(std::move(piece));
    types.push_back(type);
    scores.push_back(score);
  }
};

Vocabulary MakeVocabulary(int32_t size) {
  Vocabulary out;
  out.Add("<unk>", kUnknown, 0);
  out.Add("<s>", kControl, 0);
  out.Add("</s>", kControl, 0);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    out.Add(name, kByte, 0);
  }
  out.Add("<|im_start|>", kControl, 0);
  out.Add("<|im_end|>", kControl, 0);
  out.Add("\xE2\x96\x81", kNormal, -1);  // U+2581, SentencePiece's sign for a space
  for (const char first : {'a', 'A'}) {
    for (int i = 0; i < 26; ++i) out.Add(std::string(1, static_cast<char>(first + i)), kNormal, -1);
  }
  for (const char* pair : {"th", "he", "in", "er", "an", "re", "on", "at"}) {
    if (static_cast<int32_t>(out.pieces.size()) < size) out.Add(pair, kNormal, -0.5F);
  }
  while (static_cast<int32_t>(out.pieces.size()) < size) {
    // Texts never reach these, random token ids and sampled tokens do.
    std::string piece = std::to_string(out.pieces.size());
    out.Add(piece.append("~"), kNormal, -1000);
  }
  return out;
}

}  // namespace

float TensorSource::Normal() {
  // Box-Muller by hand: std::normal_distribution differs between standard libraries.
  const double u = (generator_() + 1.0) / 4294967297.0;
  const double angle = 2 * std::numbers::pi * (generator_() / 4294967296.0);
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(angle));
}

NamedTensor TensorSource::Matrix(std::vector<int64_t> shape, float gain) {
  int64_t elements = 1;
  for (const int64_t n : shape) elements *= n;
  const float deviation = gain / std::sqrt(static_cast<float>(shape[0]));
  NamedTensor out{std::move(shape), std::vector<float>(elements)};
  for (float& x : out.data) x = deviation * Normal();
  return out;
}

NamedTensor TensorSource::Vector(int64_t size, float mean, float deviation) {
  NamedTensor out{{size}, std::vector<float>(size)};
  for (float& x : out.data) x = mean + deviation * Normal();
  return out;
}

GgufWriter::GgufWriter(std::string_view architecture) : architecture_(architecture), file_(gguf_init_empty()) {
  gguf_set_val_str(file_, "general.architecture", architecture_.c_str());
  gguf_set_val_str(file_, "general.name", ("tiny random " + architecture_).c_str());
}

GgufWriter::~GgufWriter() { gguf_free(file_); }

std::string GgufWriter::Key(std::string_view key) const {
  return key.starts_with('.') ? architecture_ + std::string(key) : std::string(key);
}

void GgufWriter::SetU32(std::string_view key, uint32_t value) { gguf_set_val_u32(file_, Key(key).c_str(), value); }

void GgufWriter::SetF32(std::string_view key, float value) { gguf_set_val_f32(file_, Key(key).c_str(), value); }

void GgufWriter::SetString(std::string_view key, const std::string& value) {
  gguf_set_val_str(file_, Key(key).c_str(), value.c_str());
}

void GgufWriter::SetBools(std::string_view key, const std::vector<bool>& values) {
  const std::vector<int8_t> bytes(values.begin(), values.end());
  gguf_set_arr_data(file_, Key(key).c_str(), GGUF_TYPE_BOOL, bytes.data(), bytes.size());
}

void GgufWriter::SetVocabulary(int32_t size, bool add_bos) {
  const Vocabulary vocabulary = MakeVocabulary(size);
  std::vector<const char*> pieces;
  for (const std::string& piece : vocabulary.pieces) pieces.push_back(piece.c_str());
  gguf_set_val_str(file_, "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(file_, "tokenizer.ggml.tokens", pieces.data(), pieces.size());
  gguf_set_arr_data(file_, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, vocabulary.scores.data(), pieces.size());
  gguf_set_arr_data(file_, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, vocabulary.types.data(), pieces.size());
  gguf_set_val_u32(file_, "tokenizer.ggml.unknown_token_id", 0);
  gguf_set_val_u32(file_, "tokenizer.ggml.bos_token_id", kBosToken);
  gguf_set_val_u32(file_, "tokenizer.ggml.eos_token_id", kEosToken);
  gguf_set_val_bool(file_, "tokenizer.ggml.add_bos_token", add_bos);
  gguf_set_val_bool(file_, "tokenizer.ggml.add_eos_token", false);
  gguf_set_val_bool(file_, "tokenizer.ggml.add_space_prefix", false);
}

Status GgufWriter::Write(const TensorMap& tensors, const std::string& path) {
  size_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.data.size() * sizeof(float) + ggml_tensor_overhead() + 64;
  const std::unique_ptr<ggml_context, void (*)(ggml_context*)> context(
      ggml_init({.mem_size = bytes + 4096, .mem_buffer = nullptr, .no_alloc = false}), ggml_free);
  if (context == nullptr) return {Code::kInternal, "ggml_init failed"};
  for (const auto& [name, tensor] : tensors) {
    ggml_tensor* out =
        ggml_new_tensor(context.get(), GGML_TYPE_F32, static_cast<int>(tensor.shape.size()), tensor.shape.data());
    if (ggml_nbytes(out) != tensor.data.size() * sizeof(float)) {
      return InvalidArgument("tensor " + name + ": the shape does not fit the data");
    }
    std::memcpy(out->data, tensor.data.data(), ggml_nbytes(out));
    ggml_set_name(out, name.c_str());
    gguf_add_tensor(file_, out);
  }
  if (!gguf_write_to_file(file_, path.c_str(), false)) return {Code::kIo, "cannot write " + path};
  return {};
}

}  // namespace dropkv::testing
