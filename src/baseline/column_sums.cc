#include "baseline/column_sums.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/score.h"

namespace dropkv::baseline {
namespace {

// The engine's attention score of some rows: attend for the denominators, then the mass of every token.
class MassScorer {
 public:
  MassScorer(const cpu::WaveShape& shape, ThreadPool* pool)
      : raw_(static_cast<size_t>(shape.kv_heads) * shape.tokens), flags_(raw_.size()) {
    const cpu::Kernels& kernels = cpu::KernelTable().front();
    Workspace lasting_size;
    Workspace passing_size;
    const cpu::WaveScorer counted(kernels, pool, shape, lasting_size, passing_size);
    const size_t lasting_bytes = lasting_size.bytes_needed();
    const size_t passing_bytes = passing_size.bytes_needed();
    memory_ = std::make_unique_for_overwrite<std::byte[]>(lasting_bytes + passing_bytes);
    Workspace lasting({memory_.get(), lasting_bytes});
    Workspace passing({memory_.get() + lasting_bytes, passing_bytes});
    scorer_.emplace(kernels, pool, shape, lasting, passing);
  }

  // [Hkv, n] mean over rows and group of p; NaN where a token takes no part.
  const std::vector<float>& Run(const LayerInput& input) {
    scorer_->Attend({&input, 1}, false, flags_.data());
    scorer_->Score({&input, 1}, Signal::kAttention, raw_.data(), flags_.data());
    return raw_;
  }

 private:
  std::vector<float> raw_;
  std::vector<uint8_t> flags_;
  std::unique_ptr<std::byte[]> memory_;
  std::optional<cpu::WaveScorer> scorer_;
};

// At most kMaxRows rows.
Status AddRows(const KvView& kv, const AttentionSpec& attention, const ObservationRows& rows, ThreadPool* pool,
               int64_t stride, double* sums) {
  LayerInput input{kv, rows, attention};
  input.kv.tokens = *std::max_element(rows.visible, rows.visible + rows.rows);
  DROPKV_RETURN_IF_ERROR(CheckKvView(input.kv));
  DROPKV_RETURN_IF_ERROR(CheckRows(rows, input.kv));
  const int32_t n = input.kv.tokens;
  MassScorer scorer(
      {1, kv.kv_heads, rows.query_heads / kv.kv_heads, rows.rows, n, kv.key_dim, kv.value_dim, pool->threads()}, pool);
  const std::vector<float>& mass = scorer.Run(input);
  for (int32_t u = 0; u < kv.kv_heads; ++u) {
    const float* from = mass.data() + static_cast<int64_t>(u) * n;
    double* to = sums + u * stride;
    for (int32_t j = 0; j < n; ++j)
      if (std::isfinite(from[j])) to[j] += static_cast<double>(from[j]) * rows.rows;
  }
  return Status::Ok();
}

}  // namespace

Status AddColumnSums(const KvView& kv, const AttentionSpec& attention, const QueryChunk& chunk, bool causal,
                     ThreadPool* pool, int64_t stride, double* sums) {
  std::optional<ThreadPool> own;
  if (pool == nullptr) pool = &own.emplace(1);
  const int64_t row_stride = int64_t{chunk.query_heads} * kv.key_dim;
  std::vector<int32_t> visible(kMaxRows);
  for (int32_t done = 0; done < chunk.count; done += kMaxRows) {
    const int32_t rows = std::min(kMaxRows, chunk.count - done);
    std::iota(visible.begin(), visible.begin() + rows, chunk.first + done + 1);
    if (!causal) std::fill_n(visible.begin(), rows, kv.tokens);
    const ObservationRows view{chunk.q + done * row_stride, kv.key_dim, row_stride,
                               chunk.query_heads,           rows,       visible.data()};
    DROPKV_RETURN_IF_ERROR(AddRows(kv, attention, view, pool, stride, sums));
  }
  return Status::Ok();
}

}  // namespace dropkv::baseline
