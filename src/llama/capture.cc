#include "llama/capture.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>

#include "llama/attend_rows.h"

namespace dropkv::llama {

Status ShadowCheck::Fill() {
  for (const auto& [number, layer] : tap_->layers()) {
    const Result<KvView> view = layer.View(layer.cells);
    if (!view.ok()) return view.status();
    Result<RaggedCache> cache = RaggedCache::Create(view->k.dtype, layer.kv_heads, layer.key_dim, layer.value_dim);
    if (!cache.ok()) return cache.status();
    const KeepList all = KeepList::All(1, layer.kv_heads, view->tokens);
    DROPKV_RETURN_IF_ERROR(cache->Assign(*view, all, 0, 16));
    caches_.insert_or_assign(number, std::move(*cache));
    Result<RaggedDecode> decode =
        RaggedDecode::Create(layer.kv_heads, layer.query_heads / layer.kv_heads, layer.key_dim, layer.value_dim);
    if (!decode.ok()) return decode.status();
    decodes_.insert_or_assign(number, std::move(*decode));
  }
  return Status::Ok();
}

void ShadowCheck::Query(int32_t layer, const ggml_tensor* q) {
  if (!status_.ok() || !caches_.contains(layer)) return;
  query_.clear();
  ReadQuery(q, &query_);
  const LayerInfo& info = tap_->layers().at(layer);
  status_ = AttendRows(info, info.Attention(), query_, &caches_.at(layer), &decodes_.at(layer), nullptr, &ours_[layer]);
}

void ShadowCheck::Output(int32_t layer, ggml_tensor* out) {
  if (!status_.ok() || !caches_.contains(layer)) return;
  if (tap_->layers().at(layer).last_row_sees < caches_.at(layer).length(0)) return;
  const std::vector<float>& ours = ours_[layer];
  std::vector<float> theirs(ours.size());
  ggml_backend_tensor_get(out, theirs.data(), 0, theirs.size() * sizeof(float));
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const double difference = static_cast<double>(theirs[i]) - ours[i];
    error += difference * difference;
    norm += static_cast<double>(theirs[i]) * theirs[i];
  }
  error_ += error;
  norm_ += norm;
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (!(relative <= worst_)) worst_ = relative;  // also when it is NaN
  ++nodes_;
}

double ShadowCheck::overall() const { return norm_ > 0 ? std::sqrt(error_ / norm_) : 0; }

}  // namespace dropkv::llama
