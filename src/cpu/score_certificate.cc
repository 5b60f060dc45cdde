// What an eviction did to the rows' outputs: the certificate of docs/algorithm.md section 6.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/score.h"

namespace dropkv::cpu {

void WaveScorer::Certify(std::span<const LayerInput> layers, std::span<const std::span<const int32_t>> lists,
                         float* error, float* mass) {
  pool_->For(active_heads_, [&](int64_t index, int32_t worker) {
    const int64_t first = index * shape_.group;
    CertifyHead(Item(layers, index), lists[index], error != nullptr ? error + first : nullptr,
                mass != nullptr ? mass + first : nullptr, threads_[worker]);
  });
}

void WaveScorer::CertifyHead(const HeadItem& item, std::span<const int32_t> list, float* error, float* mass,
                             Thread& thread) {
  const Head& head = item.head;
  if (error != nullptr) std::fill_n(error, shape_.group, 0.0F);
  if (mass != nullptr) std::fill_n(mass, shape_.group, 0.0F);
  if (static_cast<int32_t>(list.size()) == shape_.tokens) return;
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head, list.data(), static_cast<int32_t>(list.size()));
  const HeadRows rows = PackRows(kernels_, item.layer.rows, item.layer.attention, shape_.kv_heads, item.kv_head,
                                 AllRows(), tokens, thread.packed);
  ResetState(layout_.lanes, shape_.value_dim, true, thread.state);
  kernels_.attend(tokens, rows, head.center, 0, tokens.count, thread.state, nullptr, thread.tile);
  for (int32_t h = 0; h < shape_.group; ++h) {
    double squared = 0.0;
    double evicted = 0.0;
    int32_t judged = 0;
    for (int32_t id = h * shape_.rows; id < (h + 1) * shape_.rows; ++id) {
      if (head.skipped[id] != 0) continue;
      ++judged;
      if (head.denominators.base[id] == std::numeric_limits<float>::infinity())
        continue;  // sees nothing, before and after
      const RowResult after =
          FinishRow(kernels_, tokens, layout_, head.center, SinkOf(item, id), thread.state, id, thread.out, thread.row);
      const double lse = (double{head.denominators.base[id]} - head.denominators.share[id]) * kLn2;
      evicted += std::clamp(-std::expm1(after.lse - lse), 0.0, 1.0);
      const int64_t row = int64_t{item.kv_head} * shape_.head_rows() + id;
      const float* given = head.given ? item.layer.out + row * shape_.value_dim : nullptr;
      const PanelAddress at(layout_, shape_.value_dim, id);
      double moved = 0.0;
      double norm = 0.0;
      for (int32_t i = 0; i < shape_.value_dim; ++i) {
        const double a = head.given ? double{given[i]} - head.center[i]
                                    : -0.5 * head.states[0].sums[at.first + int64_t{i} * at.stride];
        moved += (a - thread.out[i]) * (a - thread.out[i]);
        norm += (a + head.center[i]) * (a + head.center[i]);
      }
      if (moved > 0.0) squared += moved / norm;
    }
    if (judged == 0) continue;
    if (error != nullptr) error[h] = static_cast<float>(std::sqrt(squared / judged));
    if (mass != nullptr) mass[h] = static_cast<float>(evicted / judged);
  }
}

}  // namespace dropkv::cpu
