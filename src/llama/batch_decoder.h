// Continuing many sequences that follow one prefill, each over its own kept rows, with one pass through the weights for
// all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "dropkv/keep_list.h"
#include "llama/context.h"
#include "llama/takeover.h"
#include "llama/tap.h"

namespace dropkv::llama {

struct Prefilled;

class BatchDecoder {
 public:
  // How many sequences libllama has room for.
  static int32_t MaxSequences(const Model& model);

  // Sequence i begins behind the prompt over the rows of lists[i]: any keep lists, which are not read afterwards.
  // reserve: most tokens that a sequence is fed before it is rewound; of models with a sliding window the cells are
  // made for them. Does not need `prefilled` afterwards. Errors: no list or more than MaxSequences, a prompt inside the
  // sliding window.
  static Result<std::unique_ptr<BatchDecoder>> Create(Prefilled* prefilled, std::span<const KeepList* const> lists,
                                                      int32_t reserve);

  // Not movable: the context knows the tap.
  BatchDecoder(const BatchDecoder&) = delete;
  BatchDecoder& operator=(const BatchDecoder&) = delete;

  // Decodes items of any sequences, in pieces of at least as many rows as there are sequences. Those of one sequence
  // stand in the order of their positions, which go on where it ends; they see each other and none of the other
  // sequences. Items whose logits are not wanted spare the output layer. After an error of libllama's or of a stop
  // (kCancelled) the decoder is of no use any more; what is refused as kInvalidArgument changes nothing.
  using Item = BatchRow;
  Status Step(std::span<const Item> items);

  // [vocab_size] of item `item` of the last Step, whose logits were wanted; valid until the next one.
  std::span<const float> logits(size_t item) const;

  // Forgets every token that the sequence was fed.
  Status Rewind(int32_t sequence);

  int32_t sequences() const { return static_cast<int32_t>(fed_.size()); }
  int64_t used_bytes() const { return takeover_.used_bytes(); }  // of all ragged caches
  std::string_view name() const { return "ragged batch"; }

 private:
  explicit BatchDecoder(ThreadPool* pool) : takeover_(&tap_, pool) {}

  Status MakeContext(const Prefilled& prefilled, int32_t reserve);
  Status Check(std::span<const Item> items) const;
  Status DecodePiece(std::span<const Item> items, size_t first);
  Status DropOldCells();
  Status ChooseWay(Token token);

  Tap tap_;
  Takeover takeover_;
  std::optional<Context> context_;
  int32_t vocab_size_ = 0;
  int32_t sliding_window_ = 0;  // 0: none
  int32_t rows_ = 0;            // most rows of a piece
  int32_t end_ = 0;             // position of the first token behind the prompt
  std::vector<int32_t> fed_;    // tokens, by sequence
  std::vector<int32_t> of_row_;
  std::vector<float> logits_;      // of the items that want them, side by side
  std::vector<int32_t> logit_at_;  // by item: which of them; -1: none
  Status failed_;
};

}  // namespace dropkv::llama
