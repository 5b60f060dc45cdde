// Eviction on an NVIDIA GPU: attend -> score -> pool -> select -> compact -> certificate, and decode attention over
// what is left. Launches go into the caller's stream; nothing allocates, synchronises or comes back to the host, so
// that a whole step may be captured in a CUDA graph. Library dropkv_cuda.
//
// Letters (docs/algorithm.md): B sequences, Hq query heads, Hkv KV heads, g = Hq / Hkv, w observation rows, n tokens.
// Every pointer inside the structures is to device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "dropkv/dtype.h"
#include "dropkv/export.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

struct CUstream_st;

namespace dropkv::cuda {

using Stream = CUstream_st*;  // cudaStream_t

// Keys or values. Element (sequence b, head h, token t, dim i), dims contiguous, strides in elements:
//   padded   b * sequence_stride + h * head_stride + t * token_stride + i
//   packed   h * head_stride + (starts[b] + t) * token_stride + i
//   paged    blocks[b * blocks_stride + t / block_size] * sequence_stride + h * head_stride
//              + (t % block_size) * token_stride + i
//   ragged   (offsets[b * Hkv + h] + t) * token_stride + i: every head its own list and its own length
struct Tensor {
  const void* data = nullptr;
  int64_t sequence_stride = 0;  // paged: from block to block
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

// One layer of B sequences. Keys are stored after RoPE.
struct Cache {
  DType dtype = DType::kBF16;  // kF16 or kBF16
  int32_t sequences = 0;       // B
  int32_t kv_heads = 0;        // Hkv
  int32_t key_dim = 0;         // d: a multiple of 8 up to 256
  int32_t value_dim = 0;       // dv: likewise
  int32_t max_tokens = 0;      // of the longest sequence (or ragged list)
  Tensor k;
  Tensor v;
  const int32_t* lengths = nullptr;  // [B] tokens of every sequence, at most max_tokens; null: max_tokens
  const int64_t* starts = nullptr;   // packed: [B], first token
  const int32_t* blocks = nullptr;   // paged: [B, blocks_stride]
  int32_t blocks_stride = 0;
  int32_t block_size = 0;            // paged: tokens of a block
  const int64_t* offsets = nullptr;  // ragged: [B * Hkv + 1], list (b, h) is rows offsets[i] .. offsets[i+1]-1
  int64_t blocks_in_pool = 0;        // paged: blocks of the pool
  int64_t rows_in_pool = 0;          // packed, ragged: token rows of the pool
  // The last tokens of a sequence may have been generated behind its prompt (algorithm.md, "Observation rows"). Only
  // the n before them are candidates: scored, and counted for the budget. All are in the rows' softmax, and every list
  // ends with the generated ones.
  const int32_t* generated = nullptr;  // [B] 0 to max_generated, at most the sequence's length; null: max_generated
  int32_t max_generated = 0;           // of any sequence; 0: none, and `generated` is not read
};

// The queries that judge the tokens, any set in any order, and how a logit is made: l = scale * <q, k>, then soft_cap *
// tanh(l / soft_cap) where soft_cap > 0; a sink is one more logit of its query head in the denominator, without a
// value.
struct Rows {
  const void* q = nullptr;  // [B, Hq, w, d] in the cache's dtype, after RoPE; dims contiguous, strides in elements
  int64_t sequence_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int32_t query_heads = 0;  // Hq
  int32_t rows = 0;         // w
  // [B, w]: row i attends to tokens 0 .. visible[i]-1, generated ones among them; null: rows of the last w tokens
  const int32_t* visible = nullptr;
  float scale = 1.0F;  // > 0
  float soft_cap = 0.0F;
  const float* sinks = nullptr;  // [Hq] or null
  // What the engine's prefill attention computed for these rows: one pass over K and V instead of two. Both or none.
  const float* lse = nullptr;     // [B, Hq, w] natural logarithm
  const void* out = nullptr;      // [B, Hq, w, dv] contiguous
  DType out_dtype = DType::kF32;  // kF32, or the cache's
  // [B, w] how much row i counts in the scores: finite, 0 or more, in no sequence all 0 (nobody checks that on the
  // device); null: 1 each. The certificate takes all rows alike.
  const float* weights = nullptr;
};

enum class Placement : int {
  kNone = 0,        // lists only
  kOutOfPlace = 1,  // kept rows to Outputs::k and v, list behind list
  kInPlace = 2,     // row i of list (b, h) becomes token i of (b, h)
};

struct Outputs {
  // [B, Hkv, max_tokens], of a sequence's candidates, or null
  float* raw_scores = nullptr;    // NaN: token not finite; sign bit: dominant
  float* scores = nullptr;        // pooled
  int64_t* offsets = nullptr;     // [B * Hkv + 1] where every list begins in positions
  int32_t* positions = nullptr;   // [capacity] ascending in every list
  int64_t capacity = 0;           // at least Plan::capacity
  float* output_error = nullptr;  // [B, Hq] and evicted_mass: algorithm.md section 6; need kOutOfPlace
  float* evicted_mass = nullptr;
  Placement placement = Placement::kNone;
  void* k = nullptr;  // [capacity, d] and v [capacity, dv], cache dtype: kOutOfPlace
  void* v = nullptr;
  // Of Run, [3] or null: non-finite tokens, dominant tokens, query rows with NaN or Inf.
  uint64_t* counters = nullptr;
};

// Host decisions for one shape, policy and budget. The device that was current when it was made runs it.
struct Plan {
  Cache shape;  // sizes; pointers are not looked at
  int32_t query_heads = 0;
  int32_t rows = 0;
  bool rows_given = false;
  Policy policy;
  Budget budget;
  std::string force_kernel;
  int32_t multiprocessors = 0;
  int32_t compute_capability = 0;  // 90 for 9.0
  int32_t splits = 1;              // of the tokens in pass 1; no result depends on B
  int32_t split_tokens = 0;
  int64_t capacity = 0;        // upper bound of the kept tokens of all lists
  size_t workspace_bytes = 0;  // aligned to 256 bytes
};

// The kernels that ran, and why faster ones of the table did not (empty: there is none).
struct Ran {
  std::string_view attend;
  std::string_view score;
  std::string_view refused;
};

// cache, query_heads and rows give the sizes; rows_given: lse and out will be handed in. Signals kDropKv and
// kAttention. kAttention reads keys only: non-finite values are not looked for. force_kernel: "sm90", "sm80", "any" or
// empty. Errors name the field: kInvalidArgument, kUnsupported, kNotFound (no such kernel on this device).
DROPKV_API Result<Plan> MakePlan(const Cache& cache, int32_t query_heads, int32_t rows, bool rows_given,
                                 const Policy& policy, const Budget& budget, std::string_view force_kernel = {});

// Pass 1 and 2: raw_scores. workspace: plan.workspace_bytes at a multiple of 256.
DROPKV_API Status Score(const Plan& plan, const Cache& cache, const Rows& rows, const Outputs& outputs, void* workspace,
                        Stream stream, Ran* ran = nullptr);
// raw_scores to offsets, positions (and scores).
DROPKV_API Status Select(const Plan& plan, const Cache& cache, const Outputs& outputs, void* workspace, Stream stream);
// offsets and positions to kept rows.
DROPKV_API Status Compact(const Plan& plan, const Cache& cache, const Outputs& outputs, void* workspace, Stream stream);
// All of it, the certificate too.
DROPKV_API Status Run(const Plan& plan, const Cache& cache, const Rows& rows, const Outputs& outputs, void* workspace,
                      Stream stream, Ran* ran = nullptr);

// The cache that out-of-place compaction left: pools of `capacity` rows cut by `offsets`.
DROPKV_API Cache KeptCache(const Plan& plan, const Outputs& outputs);

// Decode attention of one token's query heads: out = softmax(scale * q K^T) V over a ragged, padded, packed or paged
// cache; 0 for an empty list and for a query with NaN or Inf.
struct DecodeInput {
  const void* q = nullptr;  // [B, Hq, d] contiguous, cache dtype
  void* out = nullptr;      // [B, Hq, dv] contiguous, cache dtype
  int32_t query_heads = 0;
  float scale = 1.0F;
  float soft_cap = 0.0F;
  const float* sinks = nullptr;  // [Hq] or null
};
// workspace: DecodeWorkspaceBytes bytes at a multiple of 256, one call at a time. It must have been prepared once, by
// PrepareDecode or by zeroing all of it, before its first use; every Decode leaves it prepared, for other shapes too.
DROPKV_API size_t DecodeWorkspaceBytes(const Cache& cache, int32_t query_heads);
DROPKV_API Status PrepareDecode(void* workspace, Stream stream);
DROPKV_API Status Decode(const Cache& cache, const DecodeInput& input, void* workspace, Stream stream);

}  // namespace dropkv::cuda
