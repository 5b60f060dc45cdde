// Writes small GGUF files through ggml's public interface: for tests that need a model of known numbers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "dropkv/status.h"

struct gguf_context;

namespace dropkv::testing {

// A float32 tensor. shape is in ggml's order: the contiguous dimension first, so a matrix that maps `in` to `out`
// numbers is {in, out}, with the weights of one output after another.
struct NamedTensor {
  std::vector<int64_t> shape;
  std::vector<float> data;
};

using TensorMap = std::map<std::string, NamedTensor>;

// Draws tensors; the same seed and the same order of calls give the same numbers on every platform that rounds float
// arithmetic alike.
class TensorSource {
 public:
  explicit TensorSource(uint32_t seed) : generator_(seed) {}

  // Normal numbers with mean 0 and standard deviation gain / sqrt(shape[0]): a unit input gives an output of about
  // `gain`.
  NamedTensor Matrix(std::vector<int64_t> shape, float gain);

  // [size] numbers around `mean`, with the given standard deviation: norm weights and biases.
  NamedTensor Vector(int64_t size, float mean, float deviation);

 private:
  float Normal();

  std::mt19937 generator_;
};

// The metadata of one file. Keys that begin with "." are put behind the architecture's name.
class GgufWriter {
 public:
  explicit GgufWriter(std::string_view architecture);
  ~GgufWriter();
  GgufWriter(const GgufWriter&) = delete;
  GgufWriter& operator=(const GgufWriter&) = delete;

  void SetU32(std::string_view key, uint32_t value);
  void SetF32(std::string_view key, float value);
  void SetString(std::string_view key, const std::string& value);
  void SetBools(std::string_view key, const std::vector<bool>& values);

  // A SentencePiece vocabulary of `size` >= kSmallestVocabulary tokens: <unk> 0, <s> 1, </s> 2, the 256 bytes from 3,
  // <|im_start|> and <|im_end|> (control tokens), single letters and the space, then a few pairs of letters and unused
  // pieces. Bytes stand in for everything else, so any text has tokens, and they give the text back.
  void SetVocabulary(int32_t size, bool add_bos);

  // Call it once: the file then points to tensors that are gone.
  Status Write(const TensorMap& tensors, const std::string& path);

 private:
  std::string Key(std::string_view key) const;

  std::string architecture_;
  gguf_context* file_;
};

inline constexpr int32_t kSmallestVocabulary = 3 + 256 + 2 + 53;

// Control tokens of SetVocabulary.
inline constexpr int32_t kBosToken = 1;
inline constexpr int32_t kEosToken = 2;
inline constexpr int32_t kFirstByteToken = 3;
inline constexpr int32_t kImStartToken = 259;
inline constexpr int32_t kImEndToken = 260;

}  // namespace dropkv::testing
