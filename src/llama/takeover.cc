#include "llama/takeover.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "llama/prefill.h"

namespace dropkv::llama {
namespace {

// Writes into `node` the parameters of a custom operation that runs `function` on all of ggml's threads. ggml keeps
// their layout to itself, so they are taken from an operation that it makes.
void MakeCustom(ggml_tensor* node, ggml_custom_op_t function, void* user_data) {
  const ggml_init_params params = {8192, nullptr, true};
  ggml_context* scratch = ggml_init(params);
  ggml_tensor* source = ggml_new_tensor_1d(scratch, GGML_TYPE_F32, 1);
  const ggml_tensor* custom =
      ggml_custom_4d(scratch, GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, function, GGML_N_TASKS_MAX, user_data);
  std::memcpy(node->op_params, custom->op_params, sizeof(node->op_params));
  node->op = GGML_OP_CUSTOM;
  ggml_free(scratch);
}

}  // namespace

Status Takeover::AddLayer(int32_t number, const LayerInfo& prefill, RaggedCache cache) {
  std::unique_ptr<Layer>& layer = layers_[number];
  if (layer == nullptr) {
    layer = std::make_unique<Layer>();
    layer->owner = this;
    layer->number = number;
    layer->sinks = prefill.sinks;
    layer->attention = {prefill.scale, prefill.soft_cap, layer->sinks.empty() ? nullptr : layer->sinks.data()};
    // Without flash attention the node that shows the value size comes after the first query that needs it.
    tap_->layers()[number].value_dim = prefill.value_dim;
  }
  layer->caches.push_back(std::move(cache));
  return Status::Ok();
}

Status Takeover::AddSequence(Prefilled* prefilled, const KeepList& keep, int32_t reserve) {
  for (size_t i = 0; i < prefilled->layers.size(); ++i) {
    const int32_t number = prefilled->layers[i];
    LayerInfo& layer = prefilled->tap->layers().at(number);
    const Result<KvView> view = layer.View(layer.cells);
    if (!view.ok()) return view.status();
    Result<RaggedCache> cache = RaggedCache::Create(view->k.dtype, layer.kv_heads, layer.key_dim, layer.value_dim);
    if (!cache.ok()) return cache.status();
    DROPKV_RETURN_IF_ERROR(cache->Assign(*view, keep, static_cast<int32_t>(i), reserve));
    DROPKV_RETURN_IF_ERROR(AddLayer(number, layer, std::move(*cache)));
  }
  return Status::Ok();
}

Status Takeover::Truncate(int32_t count, int32_t sequence) {
  for (auto& [number, layer] : layers_) DROPKV_RETURN_IF_ERROR(layer->caches[sequence].Truncate(count));
  return Status::Ok();
}

int64_t Takeover::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [number, layer] : layers_)
    for (const RaggedCache& cache : layer->caches) bytes += cache.used_bytes();
  return bytes;
}

// A node stays replaced as long as libllama reuses its graph, so it may arrive here in either form.
bool Takeover::Replace(int32_t number, ggml_tensor* node) {
  Layer& layer = *layers_.at(number);
  const bool replaced = node->op == GGML_OP_CUSTOM;
  const bool on_host =
      node->buffer != nullptr && ggml_backend_buffer_is_host(node->buffer) && tap_->layers().at(number).on_host();
  any_on_host_ = any_on_host_ || on_host;
  if (replace_ && on_host) {
    if (!replaced) {
      const auto* params = reinterpret_cast<const char*>(node->op_params);
      layer.original_params.assign(params, params + sizeof(node->op_params));
      MakeCustom(node, &Takeover::RunCustom, &layer);
    }
    return true;
  }
  if (replaced) {
    std::memcpy(node->op_params, layer.original_params.data(), layer.original_params.size());
    node->op = GGML_OP_FLASH_ATTN_EXT;
  }
  return false;
}

Status Takeover::FindCaches(size_t tokens, Layer* layer) const {
  if (!sequences_.empty() && sequences_.size() != tokens)
    return {Code::kInternal, "libllama cut a call of " + std::to_string(sequences_.size()) + " tokens: a piece has " +
                                 std::to_string(tokens)};
  layer->of_row.clear();
  for (size_t token = 0; token < tokens; ++token)
    layer->of_row.push_back(&layer->caches[sequences_.empty() ? 0 : sequences_[token]]);
  return Status::Ok();
}

void Takeover::Query(int32_t number, const ggml_tensor* q) {
  if (!status_.ok()) return;
  Layer& layer = *layers_.at(number);
  const auto tokens = static_cast<size_t>(q->ne[1]);
  layer.query.clear();
  ReadQuery(q, &layer.query);
  LayerInfo& info = tap_->layers().at(number);
  layer.output.resize(tokens * info.query_heads * info.value_dim);
  status_ = FindCaches(tokens, &layer);
  if (!status_.ok()) return;
  status_ = rows_.Run(&info, layer.attention, layer.query.data(), layer.of_row, layer.output.data(), pool_);
}

void Takeover::Output(int32_t number, ggml_tensor* out) {
  if (!status_.ok()) return;
  const Layer& layer = *layers_.at(number);
  ggml_backend_tensor_set(out, layer.output.data(), 0, layer.output.size() * sizeof(float));
}

Status Takeover::BeginLayer(Layer* layer, ggml_tensor* node, int32_t workers) {
  const ggml_tensor* q = node->src[0];
  DROPKV_RETURN_IF_ERROR(FindCaches(q->ne[1], layer));
  layer->query.clear();
  ReadQuery(q, &layer->query);
  return rows_.Begin(&tap_->layers().at(layer->number), layer->attention, layer->query.data(), layer->of_row,
                     static_cast<float*>(node->data), workers);
}

// Runs on each of ggml's threads at the same time; thread 0 prepares the work, the others wait for it.
void Takeover::RunCustom(ggml_tensor* node, int thread, int threads, void* user_data) {
  auto* layer = static_cast<Layer*>(user_data);
  Takeover* owner = layer->owner;
  if (thread == 0) {
    if (owner->status_.ok()) owner->status_ = owner->BeginLayer(layer, node, threads);
    layer->begun.store(owner->call_, std::memory_order_release);
  } else {
    for (int spins = 0; layer->begun.load(std::memory_order_acquire) != owner->call_; ++spins)
      if (spins > 1000) std::this_thread::yield();
  }
  if (owner->status_.ok()) owner->rows_.Work(thread);
}

}  // namespace dropkv::llama
