// From scores to kept tokens: the budget of one layer shared by its KV heads (docs/algorithm.md section 4 and "Adaptive
// head budgets").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv::cpu {

// One layer. The first policy->sink and the last policy->window tokens are kept by index. The other tokens stand in
// this order: flagged reference::kNonFinite, lower index first; then flagged kDominant, higher raw score first; then
// higher pooled score first; ties to the lower index (over the layer: the lower head, then the lower index).
struct SelectInput {
  int32_t kv_heads = 0;            // Hkv
  int32_t n = 0;                   // candidates
  const Policy* policy = nullptr;  // window, sink, heads, alpha, and whether it is the full policy
  KeepCount budget;                // as ResolveBudget gives it for n
  const float* raw = nullptr;      // [Hkv, n]; read for dominant tokens only
  const float* pooled = nullptr;   // [Hkv, n]; not read where everything is kept. NaN ranks below every number
  const uint8_t* flags = nullptr;  // [Hkv, n] bits of reference::TokenFlag; null: no token is flagged
  int32_t generated = 0;           // every list ends with n .. n+generated-1, outside the budget
};

// Bytes of workspace for one call of Select, for any alignment of its start.
size_t SelectWorkspaceBytes(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n);

// Upper bound of the positions that one call of Select writes. Exact but for HeadRule::kAdaO, whose total drifts by the
// rounding of every head's share.
int64_t MaxSelected(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n, int32_t generated = 0);

// Writes the kept positions, ascending in every head, one head behind the other, to `positions` [MaxSelected()], and
// every head's number to `counts` [Hkv]. Allocates nothing; takes the same tokens on every machine.
// Errors: kInvalidArgument (a null pointer, a shape out of range), kUnsupported (Hkv * n above 2^30),
// kWorkspaceTooSmall.
Status Select(const SelectInput& input, std::span<std::byte> workspace, int32_t* counts, int32_t* positions);

}  // namespace dropkv::cpu
