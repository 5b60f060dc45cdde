// The prompt, decoded once, with what an eviction needs to know of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/keep_list.h"
#include "llama/capture.h"
#include "llama/context.h"
#include "llama/tap.h"
#include "llama/weights.h"

namespace dropkv {
class ThreadPool;
}

namespace dropkv::llama {

struct PrefillOptions {
  int32_t threads = 0;  // 0: one per core
  bool flash_attention = true;
  DType kv_type = DType::kF16;
  int32_t ubatch = 512;  // tokens that libllama computes at a time
  int32_t window = 8;    // rows of queries to keep, 0..128: the last ones of the prompt
  // Policies that are to be applied: their windows widen `window`, and what else they read is captured too.
  std::vector<baseline::Recipe> recipes;
  // Reads the cache through copies in host memory, as a device's is, even where it is in host memory itself.
  bool copy_cache = false;
  int32_t reserve = 0;         // cells for tokens decoded over the full cache, those of `recipes` not counted
  ThreadPool* pool = nullptr;  // for attention over ragged caches; null: the calling thread
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(int32_t)> progress;  // tokens done
};

// Rows that the certificate is measured over at least, however few a policy itself reads.
inline constexpr int32_t kCertificateRows = 8;

// Everything of one prompt. Layers with a sliding window are listed apart: they are bounded already and left alone.
struct Prefilled {
  const Model* model = nullptr;
  PrefillOptions options;
  std::unique_ptr<Tap> tap;
  std::optional<Context> context;  // of the full cache; may be reset once the compacted ones exist
  std::unique_ptr<WindowCapture> capture;
  std::unique_ptr<StatisticsCapture> statistics;  // null: no policy reads statistics of all queries
  std::optional<OutputWeights> weights;           // where a policy reads W_O
  std::vector<Token> tokens;
  std::vector<float> logits;     // of the last prompt token
  int32_t generated = 0;         // tokens behind the prompt whose queries are captured too (look_ahead.h)
  std::vector<int32_t> layers;   // numbers of the layers that see the whole prompt, ascending
  std::vector<int32_t> sliding;  // numbers of the others
  // Of the sliding-window cache at end(), and at the prompt's end while something is generated behind it; empty where
  // the model has none.
  std::vector<uint8_t> window_state;
  std::vector<uint8_t> prompt_window_state;
  double seconds = 0;  // of the decode calls, statistics not counted
  double statistics_seconds = 0;
  double copy_seconds = 0;  // of bringing a device's cache to host memory, once for all policies

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t end() const { return size() + generated; }  // position of the next token
  int32_t rows() const;                               // captured, of the prompt

  // Lists of prompt tokens, each with all tokens generated behind the prompt at its end; and back.
  KeepList WithGenerated(const KeepList& keep) const;
  KeepList WithoutGenerated(const KeepList& keep) const;

  // Bytes of the keys and values of all layers, for `kept` tokens in sum over (layer, head) of the layers that see the
  // whole prompt. The sliding layers add their own cells.
  int64_t KvBytes(int64_t kept) const;
  int64_t KvBytesFull() const;
};

// Decodes [0, n-w) and then the window [n-w, n) with its queries captured. Errors: libllama's, kCancelled, a cache that
// the kernels cannot read, layers of different shapes, what a policy needs and the model does not show, by its name.
Result<Prefilled> Prefill(const Model& model, std::vector<Token> tokens, const PrefillOptions& options);

// The start-up self-test: a few tokens in a small context of the same settings, our attention against every node's own
// output. Refuses where it is off by more than the limits, or where the graph or the model file lacks what a policy of
// options.recipes needs.
struct SelfTest {
  double overall = 0;  // relative L2
  double worst = 0;    // of the worst node
  int64_t nodes = 0;
};
Result<SelfTest> RunSelfTest(const Model& model, std::span<const Token> tokens, const PrefillOptions& options);

// Largest relative L2 of the worst node that the self-test accepts: two to three times what correct routes were seen to
// differ by (the native kernels round queries and weights to float16; with flash attention also the sums). On an
// H200 the worst nodes were like the CPU's or, where its kernels add up in float32, far below them.
double SelfTestLimit(bool flash_attention, DType kv_type);

}  // namespace dropkv::llama
