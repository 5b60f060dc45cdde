#include "baseline/window_attention.h"

#include <algorithm>

#include "core/workspace.h"
#include "reference/reference.h"

namespace dropkv::baseline {

int32_t JudgingCount(const Recipe& recipe, const Layer& layer) {
  const Scorer reads = recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer;
  if (reads == Scorer::kLastRow) return 1;
  return layer.row_count > 0 ? layer.row_count : std::min(recipe.policy.window, layer.kv.tokens - layer.generated);
}

ObservationRows JudgingRows(const Recipe& recipe, const Layer& layer) {
  ObservationRows rows = layer.rows;
  const int32_t skipped = std::max(0, rows.rows - JudgingCount(recipe, layer));
  rows.q += skipped * rows.row_stride;
  rows.visible += skipped;
  if (rows.weights != nullptr) rows.weights += skipped;
  rows.rows -= skipped;
  return rows;
}

WindowAttention::WindowAttention(const Recipe& recipe, const Layer& layer, bool outputs, ThreadPool* pool)
    : input_{layer.kv, JudgingRows(recipe, layer), layer.attention, nullptr, nullptr, 0},
      generated_(layer.generated),
      pool_(pool),
      engine_kernels_(cpu::KernelTable().front()),
      kernels_(BestWindowKernels()),
      layout_(head_rows(), engine_kernels_.vector_lanes, engine_kernels_.panel_vectors),
      flags_(static_cast<size_t>(kv_heads()) * tokens(), 0),
      workers_(pool->threads()) {
  const KvView& kv = input_.kv;
  const cpu::WaveShape shape{1,          kv.kv_heads,  group(),         rows(),    kv.tokens,
                             kv.key_dim, kv.value_dim, pool->threads(), generated_};
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
  if (generated_ > 0) FindNonFinite();
}

// The kernels of the weights look tokens up in flags, of which Attend keeps the candidates'.
void WindowAttention::FindNonFinite() {
  const int32_t n = tokens();
  std::vector<float> row(std::max(kv().key_dim, kv().value_dim));
  for (int32_t head = 0; head < kv_heads(); ++head) {
    const uint8_t* const flags = flags_.data() + static_cast<size_t>(head) * n;
    flags_of_all_.insert(flags_of_all_.end(), flags, flags + n);
    const cpu::HeadTokens all = cpu::MakeHeadTokens(kv(), head);
    for (int32_t j = n; j < kv().tokens; ++j) {
      const bool finite = engine_kernels_.load_row(all.k, all.cell(j), nullptr, row.data()) &&
                          engine_kernels_.load_row(all.v, all.cell(j), nullptr, row.data());
      flags_of_all_.push_back(finite ? uint8_t{0} : static_cast<uint8_t>(reference::kNonFinite));
    }
  }
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
  const std::vector<uint8_t>& of_all = generated_ > 0 ? flags_of_all_ : flags_;
  const uint8_t* flags = of_all.data() + static_cast<size_t>(range.kv_head) * kv().tokens;
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
