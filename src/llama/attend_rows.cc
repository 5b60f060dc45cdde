#include "llama/attend_rows.h"

namespace dropkv::llama {

Status AttendRows(LayerInfo* layer, const AttentionSpec& attention, const std::vector<float>& q, RaggedCache* cache,
                  RaggedDecode* decode, ThreadPool* pool, std::vector<float>* out) {
  const Result<KvView> view = layer->View(layer->pending);
  if (!view.ok()) return view.status();
  const size_t tokens = layer->pending.size();
  const size_t q_size = static_cast<size_t>(layer->query_heads) * layer->key_dim;
  const size_t out_size = static_cast<size_t>(layer->query_heads) * layer->value_dim;
  if (q.size() != tokens * q_size)
    return {Code::kInternal, "the query of a layer has " + std::to_string(q.size()) + " elements, expected " +
                                 std::to_string(tokens * q_size)};
  out->resize(tokens * out_size);
  for (size_t token = 0; token < tokens; ++token) {
    DROPKV_RETURN_IF_ERROR(cache->Append(*view, static_cast<int32_t>(token)));
    DROPKV_RETURN_IF_ERROR(
        decode->Run(*cache, attention, q.data() + token * q_size, out->data() + token * out_size, pool));
  }
  return Status::Ok();
}

}  // namespace dropkv::llama
