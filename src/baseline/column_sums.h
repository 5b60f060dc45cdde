// Column sums of softmax rows, on the engine's SIMD kernels: two passes over tiles of keys, no matrix stored.
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "dropkv/cache_view.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// The prompt's rows from position `first`, token by token.
struct QueryChunk {
  const float* q = nullptr;  // [count, Hq, d] after RoPE
  int32_t query_heads = 0;
  int32_t first = 0;
  int32_t count = 0;
};

// sums [Hkv, stride] += the sum over the rows, mean over the group, of p; token j of the view at column j. Row i sees
// the tokens 0 .. first + i, or all of the view where not `causal`. Rows with NaN or Inf, and tokens with NaN or Inf in
// key or value, take no part. pool may be null. The result does not depend on its threads.
Status AddColumnSums(const KvView& kv, const AttentionSpec& attention, const QueryChunk& chunk, bool causal,
                     ThreadPool* pool, int64_t stride, double* sums);

}  // namespace dropkv::baseline
