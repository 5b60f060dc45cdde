// How long a token's value is behind the output projection, in the L1 norm (CriticalKV, DefensiveKV).
#pragma once

#include <vector>

#include "baseline/input.h"
#include "core/parallel.h"

namespace dropkv::baseline {

// [Hkv, n] mean over the query heads of the group of |v_j W_O^h|_1; 0 for values with NaN or Inf. wo: [hidden, Hq *
// dv]; a block of its rows is held at a time. Float32 products, summed in double over blocks. kvpress,
// criticalkv_press.
std::vector<double> ProjectedNorms(const KvView& kv, const OutputProjection& wo, ThreadPool* pool);

}  // namespace dropkv::baseline
