// FINCH renumbers what it keeps: keys turn from their old position to their rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "baseline/input.h"
#include "core/element.h"

namespace dropkv::baseline {

// Keys [kept, d] of the ascending positions `kept` of KV head `head`, as if the i-th had stood at position i (kvpress,
// finch_press). Decoding then goes on at position kept.size(). One rotation by the difference: rope's magnitude, which
// the cached keys hold already, stays as it is.
inline std::vector<float> RenumberedKeys(const KvView& kv, const Rope& rope, int32_t head,
                                         std::span<const int32_t> kept) {
  Rope turn = rope;
  turn.magnitude = 1.0;
  std::vector<float> keys(kept.size() * kv.key_dim);
  for (size_t rank = 0; rank < kept.size(); ++rank) {
    float* key = keys.data() + rank * kv.key_dim;
    for (int32_t i = 0; i < kv.key_dim; ++i) key[i] = LoadElement(kv.k, kv.cells, head, kept[rank], i);
    turn.Rotate(static_cast<double>(rank) - kept[rank], false, key);
  }
  return keys;
}

}  // namespace dropkv::baseline
