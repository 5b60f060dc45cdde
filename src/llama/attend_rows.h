// Attention of the tokens of one call over a ragged cache: each token is appended, then attends; so a call of several
// tokens is causal among them.
#pragma once

#include <vector>

#include "dropkv/ragged_cache.h"
#include "llama/tap.h"

namespace dropkv::llama {

// q [tokens, Hq, d] as ReadQuery gives it; the tokens are layer.pending, whose keys and values lie in their cells by
// now. out [tokens, Hq, dv]. `decode` was made for the cache's shape; pool may be null.
Status AttendRows(LayerInfo* layer, const AttentionSpec& attention, const std::vector<float>& q, RaggedCache* cache,
                  RaggedDecode* decode, ThreadPool* pool, std::vector<float>* out);

}  // namespace dropkv::llama
