// A key-value cache in which every KV head holds its own number of tokens, and decode attention over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "dropkv/cache_view.h"
#include "dropkv/dtype.h"
#include "dropkv/export.h"
#include "dropkv/keep_list.h"
#include "dropkv/status.h"

namespace dropkv {

class ThreadPool;

// One layer of one sequence. Owns its memory: it grows by appends, and holds only what was kept.
class DROPKV_API RaggedCache {
 public:
  // d, dv: multiples of 8 up to 256 (q8_0: multiples of 32).
  static Result<RaggedCache> Create(DType dtype, int32_t kv_heads, int32_t key_dim, int32_t value_dim);

  RaggedCache(RaggedCache&&) noexcept;
  RaggedCache& operator=(RaggedCache&&) noexcept;
  ~RaggedCache();

  // Replaces the content by the tokens of `keep` (list `layer`), room for `reserve` more per head. The dtypes of
  // `source` must be this cache's: rows are copied, never converted. A token with a NaN or Inf component keeps its
  // place and takes no part in any softmax.
  Status Assign(const KvView& source, const KeepList& keep, int32_t layer, int32_t reserve);

  // Appends token `token` of `source` to every head.
  Status Append(const KvView& source, int32_t token);

  // Removes the last `count` tokens of every head (a draft, a rejected token).
  Status Truncate(int32_t count);

  int32_t kv_heads() const;
  int32_t key_dim() const;
  int32_t value_dim() const;
  DType dtype() const;
  int32_t length(int32_t head) const;
  int64_t capacity_bytes() const;  // allocated
  int64_t used_bytes() const;      // of the tokens held: sum of lengths * (d + dv) elements

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit RaggedCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Attention of one token's query heads over the ragged cache: out = softmax(scale * q K^T) V per head, with the soft
// cap and sinks of `attention`; 0 for a head without tokens and for a query with NaN or Inf. Work is cut into (head,
// key range) parts by the lengths alone, which any number of threads may compute; parts are merged in order, so the
// bits do not depend on the thread count. One call at a time. Allocates only where a call has more parts than any
// before it.
class DROPKV_API RaggedDecode {
 public:
  // g = query heads per KV head, 1..16.
  static Result<RaggedDecode> Create(int32_t kv_heads, int32_t group, int32_t key_dim, int32_t value_dim);

  RaggedDecode(RaggedDecode&&) noexcept;
  RaggedDecode& operator=(RaggedDecode&&) noexcept;
  ~RaggedDecode();

  // q [Hq, d] and out [Hq, dv], float32, heads contiguous. Uses the pool's threads where there is enough work for them;
  // null: this thread alone.
  Status Run(const RaggedCache& cache, const AttentionSpec& attention, const float* q, float* out, ThreadPool* pool);

  // The same in pieces, for callers that bring their own threads: Begin by one thread, before the others start; then
  // Work from each of `workers` threads with its own number, 0 to workers-1. Whoever finishes a head's last part writes
  // that head's `out`: all of it is there when every Work has returned. cache, q, out and the sinks must stay until
  // then.
  Status Begin(const RaggedCache& cache, const AttentionSpec& attention, const float* q, float* out, int32_t workers);
  void Work(int32_t worker);

 private:
  struct Impl;
  explicit RaggedDecode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dropkv
