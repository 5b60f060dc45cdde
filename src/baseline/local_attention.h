// Attention without causal mask inside chunks of the prompt: every query of a chunk looks at every key of it
// (Compactor, Chari and Van Durme 2025; kvpress's "non-causal" press). Queries are kept until their chunk is complete,
// no longer.
#pragma once

#include <cstdint>
#include <vector>

#include "core/parallel.h"
#include "dropkv/cache_view.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Chunks of the tokens skip_first .. n - skip_last - 1; the first skip comes before the last where both do not fit.
struct LocalSpan {
  int32_t chunk = 256;
  int32_t skip_first = 0;
  int32_t skip_last = 0;
  bool operator==(const LocalSpan&) const = default;

  int32_t begin(int32_t tokens) const { return skip_first < tokens ? skip_first : tokens; }
  int32_t end(int32_t tokens) const { return tokens - skip_last > begin(tokens) ? tokens - skip_last : begin(tokens); }
};

class LocalAttention {
 public:
  // tokens: length of the whole prompt.
  LocalAttention(const LocalSpan& span, int32_t query_heads, int32_t kv_heads, int32_t tokens, int32_t key_dim);

  // The prompt's next queries [count, Hq, d] after RoPE, from position `first`; kv: all tokens up to first + count.
  // Logits are plain <q, k>: no 1/sqrt(d), no soft cap, no sinks.
  //
  // A last chunk that is not full is treated as kvpress 0.5.5 treats its zero padding: padded keys have logit -1e-9
  // instead of a mask, hence a share of every row; padded queries have logit 0 everywhere, hence add 1/chunk to every
  // key, each.
  Status Add(const KvView& kv, const float* q, int32_t first, int32_t count, ThreadPool* pool);

  // Sum over the chunk's queries of p, mean over the group: [Hkv, end - begin].
  const std::vector<double>& sums() const { return sums_; }

 private:
  Status AddChunk(const KvView& kv, int32_t chunk_begin, int32_t chunk_end, ThreadPool* pool);

  LocalSpan span_;
  int32_t query_heads_;
  int32_t kv_heads_;
  int32_t begin_;
  int32_t end_;
  int32_t row_size_;            // Hq * d
  std::vector<float> queries_;  // of the chunk under way, [rows, Hq, d]
  std::vector<double> sums_;
};

}  // namespace dropkv::baseline
