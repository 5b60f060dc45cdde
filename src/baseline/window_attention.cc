#include "baseline/window_attention.h"

#include <algorithm>

#include "core/workspace.h"

namespace dropkv::baseline {

ObservationRows LastRows(const Layer& layer, int32_t window) {
  ObservationRows rows = layer.rows;
  const int32_t skipped = std::max(0, rows.rows - std::min(window, layer.kv.tokens));
  rows.q += skipped * rows.row_stride;
  rows.visible += skipped;
  rows.rows -= skipped;
  return rows;
}

WindowAttention::WindowAttention(const KvView& kv, const ObservationRows& rows, const AttentionSpec& attention,
                                 bool outputs, ThreadPool* pool)
    : input_{kv, rows, attention, nullptr, nullptr, 0},
      pool_(pool),
      engine_kernels_(cpu::KernelTable().front()),
      kernels_(BestWindowKernels()),
      layout_(rows.query_heads / kv.kv_heads * rows.rows, engine_kernels_.vector_lanes, engine_kernels_.panel_vectors),
      flags_(static_cast<size_t>(kv.kv_heads) * kv.tokens, 0),
      workers_(pool->threads()) {
  const cpu::WaveShape shape{1, kv.kv_heads, group(), rows.rows, kv.tokens, kv.key_dim, kv.value_dim, pool->threads()};
  const auto take = [&](Workspace& workspace) {
    scorer_.emplace(engine_kernels_, pool_, shape, workspace, workspace);
    for (Worker& worker : workers_) {
      worker.packed = cpu::PackedRows::Take(workspace, layout_.lanes, kv.key_dim);
      worker.tile = cpu::TileScratch::Take(workspace, kv.key_dim, kv.value_dim);
    }
  };
  Workspace counting;
  take(counting);
  memory_.resize(counting.bytes_needed());
  Workspace workspace(memory_);
  take(workspace);
  scorer_->Attend({&input_, 1}, outputs, flags_.data());
}

WindowAttention::Range WindowAttention::Bind(int32_t kv_head, int32_t begin, int32_t end, int32_t worker) {
  const cpu::HeadTokens tokens = cpu::MakeHeadTokens(input_.kv, kv_head);
  const cpu::HeadRows rows = cpu::PackRows(engine_kernels_, input_.rows, input_.attention, kv_heads(), kv_head,
                                           {nullptr, head_rows()}, tokens, workers_[worker].packed);
  return {kv_head, begin, end, worker, tokens, rows};
}

void WindowAttention::Output(int32_t kv_head, int32_t lane, float* out) const {
  const cpu::WaveScorer::RowsFound rows = found(kv_head);
  const cpu::PanelAddress at(rows.layout, value_dim(), lane);
  for (int32_t i = 0; i < value_dim(); ++i)
    out[i] = rows.center[i] - 0.5F * rows.outputs[at.first + int64_t{i} * at.stride];
}

void WindowAttention::Weights(const Range& range, int32_t begin, int32_t count, float* weights, float* logits) const {
  const uint8_t* flags = flags_.data() + static_cast<size_t>(range.kv_head) * tokens();
  for (int32_t done = 0; done < count; done += cpu::kTile) {
    const int64_t at = int64_t{done} * lanes();
    kernels_.weights(range.tokens, range.rows, found(range.kv_head).denominators, flags, begin + done,
                     std::min(cpu::kTile, count - done), weights + at, logits != nullptr ? logits + at : nullptr,
                     workers_[range.worker].tile);
  }
}

void WindowAttention::PooledWeights(const Range& range, const Pooling& pool, int32_t domain, int32_t begin,
                                    int32_t count, float* weights) const {
  const int32_t first = std::max(0, begin - pool.after);
  const int32_t last = std::min(domain, begin + count + pool.before);
  std::vector<float> raw(static_cast<size_t>(last - first) * lanes());
  Weights(range, first, last - first, raw.data());
  const bool mean = pool.kind == PoolKind::kMean;
  const float share = 1.0F / static_cast<float>(pool.before + pool.after + 1);
  std::fill_n(weights, static_cast<size_t>(count) * lanes(), 0.0F);  // p >= 0: no maximum is below
  for (int32_t t = 0; t < count; ++t) {
    float* out = weights + static_cast<size_t>(t) * lanes();
    const int32_t from = std::max(first, begin + t - pool.after);
    const int32_t to = std::min(last - 1, begin + t + pool.before);
    for (int32_t j = from; j <= to; ++j) {
      const float* p = raw.data() + static_cast<size_t>(j - first) * lanes();
      for (int32_t lane = 0; lane < lanes(); ++lane)
        out[lane] = mean ? out[lane] + p[lane] : std::max(out[lane], p[lane]);
    }
    for (int32_t lane = 0; mean && lane < lanes(); ++lane) out[lane] *= share;
  }
}

void WindowAttention::Products(const Range& range, const float* b, int32_t begin, int32_t count, float* out,
                               float* norms) const {
  kernels_.products(range.tokens, layout_, b, begin, count, out, norms, workers_[range.worker].tile);
}

void WindowAttention::Value(const Range& range, int32_t token, float* out) const {
  engine_kernels_.load_row(range.tokens.v, range.tokens.cell(token), nullptr, out);
}

}  // namespace dropkv::baseline
