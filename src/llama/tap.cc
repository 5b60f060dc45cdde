#include "llama/tap.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/element.h"
#include "llama/rope.h"

namespace dropkv::llama {
namespace {

const ggml_tensor* Root(const ggml_tensor* tensor) {
  while (tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

// Number behind `prefix` in the tensor's name, -1 where there is none. A back end may put a prefix of its own in front.
int32_t NumberAfter(const ggml_tensor* tensor, const char* prefix) {
  const char* found = std::strstr(tensor->name, prefix);
  return found == nullptr ? -1 : std::atoi(found + std::strlen(prefix));
}

bool IsFlash(const ggml_tensor* node) { return node->op == GGML_OP_FLASH_ATTN_EXT; }
bool IsLogits(const ggml_tensor* node) {
  return node->op == GGML_OP_MUL_MAT && std::strncmp(node->name, "kq-", 3) == 0;
}
bool IsSoftMax(const ggml_tensor* node) {
  return node->op == GGML_OP_SOFT_MAX && std::strncmp(node->name, "kq_soft_max-", 12) == 0;
}
bool IsMerged(const ggml_tensor* node) {
  return node->op == GGML_OP_CONT && std::strncmp(node->name, "kqv_out-", 8) == 0;
}

Result<DType> ToDType(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return DType::kF32;
    case GGML_TYPE_F16:
      return DType::kF16;
    case GGML_TYPE_BF16:
      return DType::kBF16;
    case GGML_TYPE_Q8_0:
      return DType::kQ8_0;
    default:
      return Unsupported(std::string("KV cache type: expected f32, f16, bf16 or q8_0, got ") + ggml_type_name(type));
  }
}

std::vector<float> ReadFloats(const ggml_tensor* tensor) {
  std::vector<float> values(ggml_nelements(tensor));
  ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
  return values;
}

}  // namespace

bool LayerInfo::on_host() const {
  return ggml_backend_buffer_is_host(k_root->buffer) && ggml_backend_buffer_is_host(v_root->buffer);
}

Result<KvView> LayerInfo::View(std::span<const int32_t> token_cells) {
  if (k_root == nullptr || v_root == nullptr) return Unsupported("a layer's KV cache was not found in the graph");
  const Result<DType> k_type = ToDType(k_root->type);
  if (!k_type.ok()) return k_type.status();
  const Result<DType> v_type = ToDType(v_root->type);
  if (!v_type.ok()) return v_type.status();
  const bool direct = on_host() && !always_copy;
  if (!direct) copy.Read({k_root, v_root, v_transposed}, token_cells);
  const void* const k = direct ? k_root->data : copy.k();
  const void* const v = direct ? v_root->data : copy.v();
  KvView view;
  view.kv_heads = kv_heads;
  view.tokens = static_cast<int32_t>(token_cells.size());
  view.key_dim = key_dim;
  view.value_dim = value_dim;
  view.k = {k, *k_type, key_dim, k_root->ne[0], 1};
  const int64_t cells_in_cache = v_root->ne[1];
  view.v = v_transposed ? KvTensor{v, *v_type, value_dim * cells_in_cache, 1, cells_in_cache}
                        : KvTensor{v, *v_type, value_dim, v_root->ne[0], 1};
  view.cells = token_cells.data();
  return view;
}

void LayerInfo::WriteBack(std::span<const int32_t> token_cells) const {
  if (copy.k() != nullptr) copy.Write({k_root, v_root, v_transposed}, token_cells);
}

bool Tap::Callback(ggml_tensor* node, bool ask, void* user_data) {
  auto* tap = static_cast<Tap*>(user_data);
  if (ask) return tap->Ask(node);
  tap->Done(node);
  return true;  // false would skip the rest of the graph piece
}

void Tap::ForgetTokens() {
  for (auto& [number, layer] : layers_) layer.cells.clear();
}

bool Tap::ListenerWants() const { return listener_ != nullptr && current_ >= 0 && listener_->Wants(current_); }

// Before `node` runs: its sources' shapes and parameters are known, graph inputs (cell indices, mask) are filled.
bool Tap::Ask(ggml_tensor* node) {
  if (!recording_) return false;
  if (node->op == GGML_OP_SET_ROWS) {
    RecordSetRows(node);
    return false;
  }
  if (current_ < 0) return false;
  if (IsFlash(node) || IsLogits(node)) {
    RecordAttention(node);
    if (!ListenerWants()) return false;
    return !(IsFlash(node) && listener_->Replace(current_, node));
  }
  if (IsSoftMax(node)) {
    RecordAttention(node);
    return false;
  }
  if (IsMerged(node)) {
    LayerInfo& layer = layers_[current_];
    layer.value_dim = static_cast<int32_t>(node->ne[0]) / layer.query_heads;
    return ListenerWants();
  }
  // A flash node that the listener replaced in an earlier call of the same graph comes back as what it was made into.
  if (node->op == GGML_OP_CUSTOM && ListenerWants()) return !listener_->Replace(current_, node);
  return false;
}

void Tap::Done(ggml_tensor* node) {
  if (listener_ == nullptr || current_ < 0) return;
  if (IsFlash(node)) {
    listener_->Query(current_, node->src[0]);
    listener_->Output(current_, node);
  } else if (IsLogits(node)) {
    listener_->Query(current_, node->src[1]);
  } else if (IsMerged(node)) {
    listener_->Output(current_, node);
  }
}

void Tap::RecordSetRows(const ggml_tensor* node) {
  const ggml_tensor* root = Root(node);
  const int32_t k_layer = NumberAfter(root, "cache_k_l");
  const int32_t v_layer = NumberAfter(root, "cache_v_l");
  if (k_layer >= 0) {
    current_ = k_layer;
    LayerInfo& layer = layers_[k_layer];
    layer.k_root = const_cast<ggml_tensor*>(root);
    std::vector<int64_t> cells(node->src[1]->ne[0]);
    ggml_backend_tensor_get(node->src[1], cells.data(), 0, cells.size() * sizeof(int64_t));
    layer.pending.assign(cells.begin(), cells.end());
    layer.copy.Forget(layer.pending);
    layer.always_copy = always_copy_;
    layer.cells.insert(layer.cells.end(), layer.pending.begin(), layer.pending.end());
  } else if (v_layer >= 0) {
    LayerInfo& layer = layers_[v_layer];
    layer.v_root = const_cast<ggml_tensor*>(root);
    layer.v_transposed = node->ne[0] == 1;
  }
}

void Tap::RecordAttention(const ggml_tensor* node) {
  LayerInfo& layer = layers_[current_];
  if (IsSoftMax(node)) {
    std::memcpy(&layer.scale, node->op_params, sizeof(float));
    std::memcpy(&layer.max_bias, reinterpret_cast<const char*>(node->op_params) + sizeof(float), sizeof(float));
    layer.sinks = node->src[2] != nullptr ? ReadFloats(node->src[2]) : std::vector<float>();
    CountVisible(node->src[1]);
    return;
  }
  const ggml_tensor* q = IsFlash(node) ? node->src[0] : node->src[1];
  const ggml_tensor* k = IsFlash(node) ? node->src[1] : node->src[0];
  layer.key_dim = static_cast<int32_t>(q->ne[0]);
  layer.query_heads = static_cast<int32_t>(q->ne[2]);
  layer.kv_heads = static_cast<int32_t>(k->ne[2]);
  if (layer.rope.dims == 0 && layer.rope_error.empty()) RecordRope(q, &layer);
  if (!IsFlash(node)) return;
  float params[3];
  std::memcpy(params, node->op_params, sizeof(params));
  layer.scale = params[0];
  layer.max_bias = params[1];
  layer.soft_cap = params[2];
  layer.value_dim = static_cast<int32_t>(node->ne[0]);
  layer.sinks = node->src[4] != nullptr ? ReadFloats(node->src[4]) : std::vector<float>();
  CountVisible(node->src[3]);
}

void Tap::RecordRope(const ggml_tensor* q, LayerInfo* layer) {
  const QuerySource source = FindQuerySource(q);
  layer->rotated = source.rotated;
  if (source.rotated) {
    layer->rope_error = "libllama rotates queries and keys again before it quantises the cache";
  } else if (source.rope == nullptr && (source.other == nullptr || source.other->op == GGML_OP_MUL_MAT)) {
    layer->rope_error = "no rotary embedding of the queries was found in the graph";
  } else if (source.rope == nullptr && source.other->op == GGML_OP_NONE) {
    layer->rope_error =
        "libllama computes the attention on another device than the rotary embedding of its queries (--gpu-layers 0 "
        "does not)";
  } else if (source.rope == nullptr) {
    layer->rope_error = std::string("the operation ") + ggml_op_name(source.other->op) +
                        " lies between the rotary embedding of the queries and the attention";
  } else {
    Result<baseline::Rope> rope = ReadRope(source.rope);
    if (rope.ok())
      layer->rope = std::move(*rope);
    else
      layer->rope_error = rope.status().message();
  }
}

// Sliding-window layers are told by how many cells the last row may see; neither names nor cache sizes tell.
void Tap::CountVisible(const ggml_tensor* mask) {
  if (mask == nullptr || !ListenerWants()) return;
  std::vector<unsigned char> row(mask->nb[1]);
  ggml_backend_tensor_get(mask, row.data(), (mask->ne[1] - 1) * mask->nb[1], row.size());
  int32_t visible = 0;
  for (int64_t cell = 0; cell < mask->ne[0]; ++cell) {
    const DType type = mask->type == GGML_TYPE_F16 ? DType::kF16 : DType::kF32;
    if (LoadElement(row.data(), type, cell) > -INFINITY) ++visible;
  }
  layers_[current_].last_row_sees = visible;
}

void ReadQuery(const ggml_tensor* q, std::vector<float>* out) {
  const size_t span = (q->ne[0] - 1) * q->nb[0] + (q->ne[1] - 1) * q->nb[1] + (q->ne[2] - 1) * q->nb[2] + sizeof(float);
  std::vector<unsigned char> bytes(span);
  const ggml_tensor* owner = q->view_src != nullptr ? q->view_src : q;
  ggml_backend_tensor_get(owner, bytes.data(), q->view_src != nullptr ? q->view_offs : 0, span);
  const size_t begin = out->size();
  out->resize(begin + q->ne[0] * q->ne[1] * q->ne[2]);
  float* target = out->data() + begin;
  for (int64_t token = 0; token < q->ne[1]; ++token)
    for (int64_t head = 0; head < q->ne[2]; ++head, target += q->ne[0])
      std::memcpy(target, bytes.data() + token * q->nb[1] + head * q->nb[2], q->ne[0] * sizeof(float));
}

}  // namespace dropkv::llama
