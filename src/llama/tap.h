// The graph callback: what libllama computes, seen from outside. It records where every layer keeps its keys and values
// and which cell each token went to, and hands the attention of chosen layers to a listener.
//
// Nodes are told by their operation and sources, not by names: the query of a layer is whatever its attention operation
// reads. Only the layer's number comes from a name, that of the cache tensor ("cache_k_l<number>").
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "baseline/input.h"
#include "dropkv/cache_view.h"
#include "dropkv/status.h"
#include "llama/host_copy.h"

struct ggml_tensor;

namespace dropkv::llama {

struct LayerInfo {
  ggml_tensor* k_root = nullptr;  // [kv_heads * key_dim, cells]
  ggml_tensor* v_root =
      nullptr;                // the same, or transposed: element (head, dim, cell) at (head * dv + dim) * cells + cell
  bool v_transposed = false;  // without flash attention
  int32_t query_heads = 0;
  int32_t kv_heads = 0;
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  float scale = 0;
  float soft_cap = 0;
  float max_bias = 0;            // ALiBi
  std::vector<float> sinks;      // [query_heads], or empty
  baseline::Rope rope;           // of the queries; dims 0: not to be had, rope_error says why
  std::string rope_error;        // "the graph's operation MUL lies between ..."
  bool rotated = false;          // keys and values in the cache are rotated against the model's own (quantised caches)
  int32_t last_row_sees = -1;    // cells that the last row of the last watched call may attend to
  std::vector<int32_t> cells;    // of every token since Reset
  std::vector<int32_t> pending;  // of the tokens of the present call

  HostCopy copy;             // of a cache that is not in host memory
  bool always_copy = false;  // reads host memory through `copy` too

  bool on_host() const;

  // The cache of this layer as a view of the tokens in these cells: `cells`, or `pending`. Where it lies on a device
  // the view is of host memory, and cells that were written since they were last viewed are copied now; not before the
  // graph has run as far as their writing. Error: a type that is not f32, f16, bf16 or q8_0.
  Result<KvView> View(std::span<const int32_t> token_cells);

  // After a write through a view's pointers: takes the cells to the device, where there is one.
  void WriteBack(std::span<const int32_t> token_cells) const;

  AttentionSpec Attention() const { return {scale, soft_cap, sinks.empty() ? nullptr : sinks.data()}; }
};

// What to do with the attention of a layer. Called between graph pieces, on the thread that runs the decode.
class AttentionListener {
 public:
  virtual ~AttentionListener() = default;

  // Whether Query and Output are to be called for this layer; asked before the graph runs it.
  virtual bool Wants(int32_t layer) = 0;

  // Offered the node itself before it runs (flash attention only); true: the listener changed it, and neither Query nor
  // Output follows.
  virtual bool Replace(int32_t layer, ggml_tensor* node) {
    (void)layer;
    (void)node;
    return false;
  }

  // q [d, tokens, heads] float32 as the attention operation reads it.
  virtual void Query(int32_t layer, const ggml_tensor* q) = 0;

  // out [dv, heads, tokens] float32, contiguous; writable.
  virtual void Output(int32_t layer, ggml_tensor* out) = 0;
};

class Tap {
 public:
  // What ggml calls; user_data is the Tap.
  static bool Callback(ggml_tensor* node, bool ask, void* user_data);

  void set_listener(AttentionListener* listener) { listener_ = listener; }
  // Off: no recording either.
  void set_recording(bool recording) { recording_ = recording; }
  // Every cache is read the way a device's is.
  void set_always_copy(bool always_copy) { always_copy_ = always_copy; }

  // By layer number, in order.
  const std::map<int32_t, LayerInfo>& layers() const { return layers_; }
  std::map<int32_t, LayerInfo>& layers() { return layers_; }

  void ForgetTokens();

 private:
  bool Ask(ggml_tensor* node);
  void Done(ggml_tensor* node);
  void RecordSetRows(const ggml_tensor* node);
  void RecordAttention(const ggml_tensor* node);
  static void RecordRope(const ggml_tensor* q, LayerInfo* layer);
  void CountVisible(const ggml_tensor* mask);
  bool ListenerWants() const;

  std::map<int32_t, LayerInfo> layers_;
  int32_t current_ = -1;  // layer of the last cache write: its attention comes next
  bool recording_ = true;
  bool always_copy_ = false;
  AttentionListener* listener_ = nullptr;
};

// Copies q into [tokens, heads, d] order, appended to `out`.
void ReadQuery(const ggml_tensor* q, std::vector<float>* out);

}  // namespace dropkv::llama
