// The specification in code: float64, one thread, no SIMD, written to be read beside docs/algorithm.md. Every kernel is
// tested against these functions. They allocate; they are not for production use.
#pragma once

#include <cstdint>
#include <vector>

#include "dropkv/cache_view.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"

namespace dropkv::reference {

// Why a token is kept whatever its pooled score (algorithm.md section 3). Bits.
enum TokenFlag : uint8_t {
  kDominant = 1,   // p >= 1 - 1e-6 in some row; DropKV scores only
  kNonFinite = 2,  // NaN or Inf in its key, value or raw score (as float32); scores that read queries only
};

// Outputs of the observation rows over all visible tokens. Tokens with a non-finite key or value take no part.
struct Attention {
  std::vector<double> out;   // [Hq, w, dv]
  std::vector<double> lse;   // [Hq, w]; where a row sees nothing: -inf, with a sink its logit
  int64_t skipped_rows = 0;  // query rows with NaN or Inf; their out is 0 and their lse NaN
};

Attention Attend(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec);

struct Scores {
  std::vector<double> raw;     // [Hkv, n]; NaN for tokens with a non-finite key or value, Inf beyond float32
  std::vector<uint8_t> flags;  // [Hkv, n] TokenFlag bits
};

// Raw scores of one layer, exact mode. `rows` is read where the policy needs queries. layer_index: random policy only.
// generated: that many last tokens of `kv` are no candidates; n is the number of the others.
Scores Score(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec, const Policy& policy,
             int32_t layer_index, int32_t generated = 0);

// The authors' published float32 arithmetic (algorithm.md section 3, `compat`): W = (p / (1 - p + 1e-6))^2, expanded
// form. [Hkv, n]; may be negative. Every row counts 1: weights are not part of what was published.
std::vector<float> CompatScore(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec);

// Pools one head's n raw scores (algorithm.md section 4.1); non-finite ones count 0. window: used by past_only, which
// leaves the window's own places 0. For scores that read queries: recency and random scores are not pooled.
std::vector<double> Pool(const double* raw, int32_t n, const Pooling& pool, int32_t window);

// Keep lists of one layer (algorithm.md sections 4.2 to 4.5 and "Adaptive head budgets"). raw, pooled, flags [Hkv, n].
// Protected by index: the last `window` tokens and the first policy.sink. Flagged tokens stay inside the budget:
// non-finite first, then dominant ones by raw score. Behind its budget every list ends with n .. n+generated-1.
KeepList Select(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n, const double* raw,
                const double* pooled, const uint8_t* flags, int32_t generated = 0);

// What the eviction did, over the rows without NaN or Inf (algorithm.md section 6), list `layer` of `keep`, which names
// all tokens of `kv` that stay. Weights play no part. A sink logit stays in both denominators. Where |a_i| is 0 the
// error is 0 if a'_i is too, else infinite.
struct Certificate {
  std::vector<double> output_error;  // [Hq] sqrt(mean_i (|a_i - a'_i| / |a_i|)^2)
  std::vector<double> evicted_mass;  // [Hq] mean_i sum of evicted p
};

Certificate Certify(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec, const KeepList& keep,
                    int32_t layer);

// softmax(scale * q K^T) V of one token's heads over ragged lists: q [Hq, d], out [Hq, dv]; 0 for an empty list.
std::vector<double> RaggedDecode(const KvView& kv, const KeepList& keep, int32_t layer, const AttentionSpec& spec,
                                 const float* q, int32_t query_heads);

}  // namespace dropkv::reference
