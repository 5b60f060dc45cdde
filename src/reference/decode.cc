#include "reference/reference.h"
#include "reference/row.h"

namespace dropkv::reference {

// algorithm.md section 1 for one query row per head, over the kept tokens only.
std::vector<double> RaggedDecode(const KvView& kv, const KeepList& keep, int32_t layer, const AttentionSpec& spec,
                                 const float* q, int32_t query_heads) {
  const Layer data = LoadLayer(kv);
  const int32_t group = query_heads / kv.kv_heads;
  std::vector<double> out;
  out.reserve(static_cast<size_t>(query_heads) * kv.value_dim);
  for (int32_t h = 0; h < query_heads; ++h) {
    std::vector<uint8_t> kept(kv.tokens, 0);
    for (const int32_t token : keep.head(layer, h / group)) kept[token] = 1;
    const float* query = q + static_cast<size_t>(h) * kv.key_dim;
    const Row row = SoftmaxRow(data, query, h, h / group, kv.tokens, spec, kept.data());
    out.insert(out.end(), row.out.begin(), row.out.end());
  }
  return out;
}

}  // namespace dropkv::reference
