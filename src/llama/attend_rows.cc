#include "llama/attend_rows.h"

#include <string>

#include "core/parallel.h"

namespace dropkv::llama {
namespace {

// Below this, waking a pool's threads takes longer than the work.
constexpr int64_t kMinPoolBytes = int64_t{1} << 19;

}  // namespace

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

// A token's parts are cut when it has been appended: those that follow make its cache longer, not its parts.
Status RowAttention::Begin(LayerInfo* layer, const AttentionSpec& attention, const float* q,
                           std::span<RaggedCache* const> caches, float* out, int32_t workers) {
  const Result<KvView> view = layer->View(layer->pending);
  if (!view.ok()) return view.status();
  if (caches.size() != layer->pending.size())
    return {Code::kInternal, "a layer's call has " + std::to_string(layer->pending.size()) + " tokens, expected " +
                                 std::to_string(caches.size())};
  while (decodes_.size() < caches.size()) {
    Result<RaggedDecode> decode =
        RaggedDecode::Create(layer->kv_heads, layer->query_heads / layer->kv_heads, layer->key_dim, layer->value_dim);
    if (!decode.ok()) return decode.status();
    decodes_.push_back(std::move(*decode));
  }
  tokens_ = static_cast<int32_t>(caches.size());
  workers_ = workers;
  const int64_t q_size = int64_t{layer->query_heads} * layer->key_dim;
  const int64_t out_size = int64_t{layer->query_heads} * layer->value_dim;
  for (int32_t token = 0; token < tokens_; ++token) {
    DROPKV_RETURN_IF_ERROR(caches[token]->Append(*view, token));
    DROPKV_RETURN_IF_ERROR(
        decodes_[token].Begin(*caches[token], attention, q + token * q_size, out + token * out_size, workers));
  }
  return Status::Ok();
}

// A short cache has fewer parts than there are threads, and they go to those of the lowest numbers: the numbers turn,
// so that no thread is always left out.
void RowAttention::Work(int32_t worker) {
  for (int32_t token = 0; token < tokens_; ++token) decodes_[token].Work((worker + token) % workers_);
}

Status RowAttention::Run(LayerInfo* layer, const AttentionSpec& attention, const float* q,
                         std::span<RaggedCache* const> caches, float* out, ThreadPool* pool) {
  int64_t bytes = 0;
  for (const RaggedCache* cache : caches) bytes += cache->used_bytes();
  const int32_t workers = pool != nullptr && bytes >= kMinPoolBytes ? pool->threads() : 1;
  DROPKV_RETURN_IF_ERROR(Begin(layer, attention, q, caches, out, workers));
  if (workers == 1) {
    Work(0);
  } else {
    pool->For(workers, [this](int64_t item, int32_t) { Work(static_cast<int32_t>(item)); });
  }
  return Status::Ok();
}

}  // namespace dropkv::llama
