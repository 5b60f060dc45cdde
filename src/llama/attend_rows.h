// Attention of the tokens of one call over ragged caches: each token is appended, then attends; so a call of several
// tokens of one sequence is causal among them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dropkv/ragged_cache.h"
#include "llama/tap.h"

namespace dropkv::llama {

// q [tokens, Hq, d] as ReadQuery gives it; the tokens are layer.pending, whose keys and values lie in their cells by
// now. out [tokens, Hq, dv]. `decode` was made for the cache's shape; pool may be null.
Status AttendRows(LayerInfo* layer, const AttentionSpec& attention, const std::vector<float>& q, RaggedCache* cache,
                  RaggedDecode* decode, ThreadPool* pool, std::vector<float>* out);

// The same where each token has a cache of its own choice, and all tokens are computed at once: the threads walk from
// token to token without waiting for each other.
class RowAttention {
 public:
  // By one thread, before the others start. q [tokens, Hq, d], out [tokens, Hq, dv], heads contiguous; caches: of every
  // token. All of them must stay until the last Work has returned.
  Status Begin(LayerInfo* layer, const AttentionSpec& attention, const float* q, std::span<RaggedCache* const> caches,
               float* out, int32_t workers);
  // From each of `workers` threads with its own number, 0 to workers-1.
  void Work(int32_t worker);

  // Both, on the pool's threads where there is enough work for them; null: this thread alone.
  Status Run(LayerInfo* layer, const AttentionSpec& attention, const float* q, std::span<RaggedCache* const> caches,
             float* out, ThreadPool* pool);

 private:
  std::vector<RaggedDecode> decodes_;  // one a token, more than the call has where an earlier one had more
  int32_t tokens_ = 0;
  int32_t workers_ = 1;
};

}  // namespace dropkv::llama
