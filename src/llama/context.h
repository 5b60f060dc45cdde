// A llama_context: decode, logits, sequence state. Most have one sequence, number 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "dropkv/dtype.h"
#include "dropkv/status.h"
#include "llama/model.h"

struct llama_context;

namespace dropkv::llama {

class Tap;

struct ContextOptions {
  int32_t cells = 256;  // n_ctx; libllama rounds it up to a multiple of 256
  int32_t ubatch = 512;
  int32_t threads = 0;  // 0: one per core
  bool flash_attention = true;
  DType kv_type = DType::kF16;
  int32_t sequences = 1;                      // over the same cells
  Tap* tap = nullptr;                         // watches every graph; must outlive the context
  const std::atomic<bool>* cancel = nullptr;  // set to true: the running decode stops with kCancelled
};

// A token of one of several sequences.
struct BatchRow {
  int32_t sequence = 0;
  Token token = 0;
  int32_t position = 0;
  bool logits = true;  // wanted
};

class Context {
 public:
  // libllama's limit on sequences of a context.
  static int32_t MaxSequences();

  static Result<Context> Create(const Model& model, const ContextOptions& options);

  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();

  // Decodes tokens at positions position, position + 1, ... in pieces of at most `ubatch`. `progress` (may be empty)
  // gets the number of tokens done. The logits of the last token are kept.
  Status Decode(std::span<const Token> tokens, int32_t position, const std::function<void(int32_t)>& progress = {});

  // Decodes rows of any sequences, at most `ubatch`, in one piece that keeps their order. Those of one sequence have
  // ascending positions and go on where it ends; one without cells may begin anywhere.
  Status DecodeRows(std::span<const BatchRow> rows);

  // [vocab_size] of the last token decoded; valid until the next Decode.
  std::span<const float> logits() const;
  // The same of row `row` of the last DecodeRows, whose logits were wanted.
  std::span<const float> logits(int32_t row) const;

  // Removes positions [from, to) of a sequence; to < 0: all from `from` on.
  Status Remove(int32_t from, int32_t to, int32_t sequence = 0);
  // Removes everything.
  void Clear();
  // Sequence `to` gets the cells of sequence `from`: both share them.
  void Share(int32_t from, int32_t to);

  // The state of positions [from, end) of sequence 0 as bytes; `window_only`: that of the sliding-window cache alone.
  Result<std::vector<uint8_t>> State(int32_t from, int32_t end, bool window_only);
  Status SetState(std::span<const uint8_t> state, bool window_only, int32_t sequence = 0);

  int32_t cells() const;
  llama_context* get() const { return context_.get(); }

 private:
  struct Deleter {
    void operator()(llama_context* context) const;
  };
  Context() = default;

  std::unique_ptr<llama_context, Deleter> context_;
  ContextOptions options_;
  int32_t vocab_size_ = 0;
};

}  // namespace dropkv::llama
