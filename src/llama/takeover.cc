#include "llama/takeover.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cstring>
#include <thread>

#include "llama/attend_rows.h"

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
  Result<RaggedDecode> decode = RaggedDecode::Create(prefill.kv_heads, prefill.query_heads / prefill.kv_heads,
                                                     prefill.key_dim, prefill.value_dim);
  if (!decode.ok()) return decode.status();
  auto layer = std::make_unique<Layer>(std::move(cache), std::move(*decode));
  layer->owner = this;
  layer->number = number;
  layer->sinks = prefill.sinks;
  layer->attention = {prefill.scale, prefill.soft_cap, layer->sinks.empty() ? nullptr : layer->sinks.data()};
  // Without flash attention the node that shows the value size comes after the first query that needs it.
  tap_->layers()[number].value_dim = prefill.value_dim;
  layers_[number] = std::move(layer);
  return Status::Ok();
}

Status Takeover::Truncate(int32_t count) {
  for (auto& [number, layer] : layers_) DROPKV_RETURN_IF_ERROR(layer->cache.Truncate(count));
  return Status::Ok();
}

int64_t Takeover::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [number, layer] : layers_) bytes += layer->cache.used_bytes();
  return bytes;
}

// A node stays replaced as long as libllama reuses its graph, so it may arrive here in either form.
bool Takeover::Replace(int32_t number, ggml_tensor* node) {
  Layer& layer = *layers_.at(number);
  const bool replaced = node->op == GGML_OP_CUSTOM;
  const bool one_token = node->ne[2] == 1;
  const bool on_host =
      node->buffer != nullptr && ggml_backend_buffer_is_host(node->buffer) && tap_->layers().at(number).on_host();
  any_on_host_ = any_on_host_ || on_host;
  if (replace_ && one_token && on_host) {
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

void Takeover::Query(int32_t number, const ggml_tensor* q) {
  if (!status_.ok()) return;
  Layer& layer = *layers_.at(number);
  layer.query.clear();
  ReadQuery(q, &layer.query);
  status_ = AttendRows(&tap_->layers().at(number), layer.attention, layer.query, &layer.cache, &layer.decode, pool_,
                       &layer.output);
}

void Takeover::Output(int32_t number, ggml_tensor* out) {
  if (!status_.ok()) return;
  const Layer& layer = *layers_.at(number);
  ggml_backend_tensor_set(out, layer.output.data(), 0, layer.output.size() * sizeof(float));
}

Status Takeover::BeginLayer(Layer* layer, ggml_tensor* node, int32_t workers) {
  LayerInfo& info = tap_->layers().at(layer->number);
  const Result<KvView> view = info.View(info.pending);
  if (!view.ok()) return view.status();
  DROPKV_RETURN_IF_ERROR(layer->cache.Append(*view, 0));
  const ggml_tensor* q = node->src[0];
  layer->query.resize(q->ne[0] * q->ne[2]);
  for (int64_t head = 0; head < q->ne[2]; ++head)
    std::memcpy(layer->query.data() + head * q->ne[0], static_cast<const char*>(q->data) + head * q->nb[2],
                q->ne[0] * sizeof(float));
  return layer->decode.Begin(layer->cache, layer->attention, layer->query.data(), static_cast<float*>(node->data),
                             workers);
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
  if (owner->status_.ok()) layer->decode.Work(thread);
}

}  // namespace dropkv::llama
