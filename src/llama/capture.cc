#include "llama/capture.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>

#include "core/clock.h"
#include "llama/attend_rows.h"

namespace dropkv::llama {

bool StatisticsCapture::Wants(int32_t layer) {
  return !sliding_.contains(layer) || (next_ != nullptr && next_->Wants(layer));
}

void StatisticsCapture::Query(int32_t layer, const ggml_tensor* q) {
  if (next_ != nullptr && next_->Wants(layer)) next_->Query(layer, q);
  query_.clear();
  if (status_.ok() && !sliding_.contains(layer)) ReadQuery(q, &query_);
}

// By now the layer's scale and sizes are known on either attention route.
void StatisticsCapture::Output(int32_t layer, ggml_tensor* out) {
  if (next_ != nullptr && next_->Wants(layer)) next_->Output(layer, out);
  if (query_.empty()) return;
  const LayerInfo& info = tap_->layers().at(layer);
  if (info.last_row_sees < static_cast<int32_t>(info.cells.size())) {
    sliding_.insert(layer);
    statistics_.erase(layer);
    return;
  }
  const auto start = Clock::now();
  status_ = Add(layer);
  seconds_ += SecondsSince(start);
}

Status StatisticsCapture::Add(int32_t layer) {
  LayerInfo& info = tap_->layers().at(layer);
  const Result<KvView> view = info.View(info.cells);
  if (!view.ok()) return view.status();
  const auto count = static_cast<int32_t>(info.pending.size());
  if (query_.size() != static_cast<size_t>(count) * info.query_heads * info.key_dim)
    return {Code::kInternal, "the query of layer " + std::to_string(layer) + " has " + std::to_string(query_.size()) +
                                 " elements, which " + std::to_string(count) + " tokens do not explain"};
  const auto [found, added] =
      statistics_.try_emplace(layer, plan_, info.query_heads, info.kv_heads, tokens_, info.key_dim);
  return found->second.Add(*view, info.Attention(), info.rope, query_.data(), nullptr, view->tokens - count, count,
                           pool_);
}

const baseline::PromptStatistics* StatisticsCapture::find(int32_t layer) const {
  const auto found = statistics_.find(layer);
  return found == statistics_.end() ? nullptr : &found->second;
}

Status ShadowCheck::Fill() {
  for (auto& [number, layer] : tap_->layers()) {
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
  LayerInfo& info = tap_->layers().at(layer);
  status_ =
      AttendRows(&info, info.Attention(), query_, &caches_.at(layer), &decodes_.at(layer), nullptr, &ours_[layer]);
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
