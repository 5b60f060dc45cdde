#include "baseline/projection_norm.h"

#include <algorithm>
#include <cstddef>

#include "baseline/aligned.h"
#include "baseline/window_kernel.h"
#include "core/workspace.h"
#include "cpu/attend.h"

namespace dropkv::baseline {
namespace {

constexpr int32_t kBlock = 256;  // rows of W_O at a time: every tile of values is converted once per block
constexpr int32_t kRange = 11 * cpu::kTile;

class Projector {
 public:
  Projector(const KvView& kv, const OutputProjection& wo, ThreadPool* pool)
      : kv_(kv),
        wo_(wo),
        pool_(pool),
        heads_(wo.columns / kv.value_dim),
        layout_(kBlock, cpu::KernelTable().front().vector_lanes, cpu::KernelTable().front().panel_vectors),
        block_(static_cast<size_t>(kBlock) * wo.columns),
        packed_(static_cast<size_t>(heads_) * layout_.lanes * kv.value_dim) {
    Workspace counting;
    for (int32_t i = 0; i < pool->threads(); ++i) cpu::TileScratch::Take(counting, kv.key_dim, kv.value_dim);
    memory_.resize(counting.bytes_needed());
    Workspace workspace(memory_);
    for (int32_t i = 0; i < pool->threads(); ++i)
      scratch_.push_back(cpu::TileScratch::Take(workspace, kv.key_dim, kv.value_dim));
  }

  // Adds the part of rows first .. first + kBlock - 1 of W_O to norms [Hkv, n].
  void Add(int32_t first, double* norms) {
    pool_->For(kBlock, [&](int64_t r, int32_t) {
      float* row = block_.data() + r * wo_.columns;
      if (first + r < wo_.hidden) return wo_.read_row(first + static_cast<int32_t>(r), row);
      std::fill_n(row, wo_.columns, 0.0F);
    });
    pool_->For(heads_, [&](int64_t head, int32_t) { Pack(static_cast<int32_t>(head)); });
    const int32_t ranges = (kv_.tokens + kRange - 1) / kRange;
    pool_->For(int64_t{ranges} * kv_.kv_heads, [&](int64_t index, int32_t worker) {
      const auto begin = static_cast<int32_t>(index / kv_.kv_heads) * kRange;
      AddRange(static_cast<int32_t>(index % kv_.kv_heads), begin, std::min(kv_.tokens, begin + kRange), worker, norms);
    });
  }

 private:
  float* Packed(int32_t head) { return packed_.data() + static_cast<size_t>(head) * layout_.lanes * kv_.value_dim; }

  // The block's columns of one query head as [dv, lanes] in panels.
  void Pack(int32_t head) {
    const int32_t dim = kv_.value_dim;
    for (int32_t lane = 0; lane < kBlock; ++lane) {
      const float* row = block_.data() + static_cast<size_t>(lane) * wo_.columns + static_cast<size_t>(head) * dim;
      const cpu::PanelAddress at(layout_, dim, lane);
      for (int32_t i = 0; i < dim; ++i) Packed(head)[at.first + int64_t{i} * at.stride] = row[i];
    }
  }

  void AddRange(int32_t kv_head, int32_t begin, int32_t end, int32_t worker, double* norms) {
    const int32_t group = heads_ / kv_.kv_heads;
    const cpu::HeadTokens tokens = cpu::MakeHeadTokens(kv_, kv_head);
    for (int32_t first = begin; first < end; first += cpu::kTile) {
      const int32_t count = std::min(cpu::kTile, end - first);
      float sums[cpu::kTile] = {};
      for (int32_t h = 0; h < group; ++h)
        BestWindowKernels().add_magnitudes(tokens, layout_, Packed(kv_head * group + h), first, count, sums,
                                           scratch_[worker]);
      double* out = norms + static_cast<size_t>(kv_head) * kv_.tokens + first;
      for (int32_t t = 0; t < count; ++t) out[t] += double{sums[t]} / group;
    }
  }

  const KvView& kv_;
  const OutputProjection& wo_;
  ThreadPool* pool_;
  int32_t heads_;
  cpu::LaneLayout layout_;
  std::vector<float> block_;  // [kBlock, columns]
  AlignedFloats packed_;      // [Hq] of [dv, kBlock lanes] in panels
  std::vector<std::byte> memory_;
  std::vector<cpu::TileScratch> scratch_;
};

}  // namespace

std::vector<double> ProjectedNorms(const KvView& kv, const OutputProjection& wo, ThreadPool* pool) {
  std::vector<double> norms(static_cast<size_t>(kv.kv_heads) * kv.tokens, 0.0);
  Projector projector(kv, wo, pool);
  for (int32_t first = 0; first < wo.hidden; first += kBlock) projector.Add(first, norms.data());
  return norms;
}

}  // namespace dropkv::baseline
