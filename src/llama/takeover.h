// Attention takeover: a context whose chosen layers attend to ragged caches of ours instead of libllama's own cells.
//
// The context may hold several sequences, each with a cache of its own in every layer.
//
// Two ways with the same bits. Stop: the graph stops at the attention node and its output is overwritten. Replace: the
// node is turned into a custom operation that runs our kernel on ggml's threads, without a stop; it edits a graph that
// is not ours, so it is used only where a start-up test gave the bits of the first way.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "dropkv/keep_list.h"
#include "dropkv/ragged_cache.h"
#include "llama/attend_rows.h"
#include "llama/tap.h"

namespace dropkv::llama {

struct Prefilled;

class Takeover : public AttentionListener {
 public:
  // `tap` watches the context that is taken over; pool (may be null) serves the stops.
  Takeover(Tap* tap, ThreadPool* pool) : tap_(tap), pool_(pool) {}

  // From now on the next sequence (0, 1, ...) attends, in every layer of `prefilled` that sees the whole prompt, to the
  // rows that `keep` names. reserve: room for so many tokens more before the caches grow.
  Status AddSequence(Prefilled* prefilled, const KeepList& keep, int32_t reserve);

  // To be called before every decode of the context. sequences: of its tokens in their order, all in one piece; empty:
  // all are sequence 0's.
  void BeginCall(std::span<const int32_t> sequences = {}) {
    ++call_;
    sequences_ = sequences;
  }
  void set_replace(bool replace) { replace_ = replace; }
  bool replace() const { return replace_; }
  // Whether any layer's attention was computed in host memory so far: only there a node can be replaced.
  bool any_on_host() const { return any_on_host_; }

  // Removes the last `count` tokens of a sequence in every layer.
  Status Truncate(int32_t count, int32_t sequence = 0);
  int64_t used_bytes() const;
  // The first error of a callback since the start; callbacks cannot return one.
  const Status& status() const { return status_; }

  bool Wants(int32_t layer) override { return layers_.contains(layer); }
  bool Replace(int32_t layer, ggml_tensor* node) override;
  void Query(int32_t layer, const ggml_tensor* q) override;
  void Output(int32_t layer, ggml_tensor* out) override;

 private:
  struct Layer {
    Takeover* owner = nullptr;
    int32_t number = 0;
    AttentionSpec attention;
    std::vector<float> sinks;
    std::vector<RaggedCache> caches;   // by sequence
    std::vector<RaggedCache*> of_row;  // of the tokens of the present call
    std::vector<float> query;
    std::vector<float> output;
    std::vector<char> original_params;  // op_params of the node that was replaced
    std::atomic<uint64_t> begun{0};     // last call whose work list is ready
  };

  // The cache of a layer's next sequence. `prefill` says how the layer's logits are made.
  Status AddLayer(int32_t number, const LayerInfo& prefill, RaggedCache cache);
  static void RunCustom(ggml_tensor* node, int thread, int threads, void* layer);
  Status BeginLayer(Layer* layer, ggml_tensor* node, int32_t workers);
  Status FindCaches(size_t tokens, Layer* layer) const;

  Tap* tap_;
  ThreadPool* pool_;
  std::map<int32_t, std::unique_ptr<Layer>> layers_;
  RowAttention rows_;  // of whichever layer is being computed
  std::span<const int32_t> sequences_;
  uint64_t call_ = 0;
  bool replace_ = false;
  bool any_on_host_ = false;
  Status status_;
};

}  // namespace dropkv::llama
