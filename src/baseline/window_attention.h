// Softmax weights p of a layer's observation rows, streamed tile by tile: nothing of the size rows times tokens exists.
// Log-sum-exps and outputs come from the engine's attend kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "baseline/aligned.h"
#include "baseline/input.h"
#include "baseline/recipe.h"
#include "baseline/window_kernel.h"
#include "core/parallel.h"
#include "cpu/score.h"
#include "dropkv/policy.h"

namespace dropkv::baseline {

// How many of the layer's rows judge, and those: its row_count, or where that is 0 the recipe's window (min(window,
// n)); one for a score of the last row.
int32_t JudgingCount(const Recipe& recipe, const Layer& layer);
ObservationRows JudgingRows(const Recipe& recipe, const Layer& layer);

class WindowAttention {
 public:
  // Over the rows that judge. outputs: the rows' outputs a too. The layer must outlive this; it has been checked.
  WindowAttention(const Recipe& recipe, const Layer& layer, bool outputs, ThreadPool* pool);

  int32_t kv_heads() const { return kv().kv_heads; }
  // The candidates; generated tokens behind them are in every softmax and output, but get no score.
  int32_t tokens() const { return kv().tokens - generated_; }
  int32_t generated() const { return generated_; }
  int32_t value_dim() const { return kv().value_dim; }
  int32_t rows() const { return input_.rows.rows; }
  int32_t group() const { return input_.rows.query_heads / kv_heads(); }
  // Rows of a KV head lie along lanes: row i of its query head h in lane h * rows() + i. The last ones are padding.
  int32_t lanes() const { return layout_.lanes; }
  int32_t head_rows() const { return group() * rows(); }

  // [Hkv, n] reference::kNonFinite: a NaN or Inf in the token's key or value.
  const std::vector<uint8_t>& flags() const { return flags_; }
  // False for rows whose query has a NaN or Inf: all their p are 0.
  bool judges(int32_t kv_head, int32_t lane) const { return found(kv_head).skipped[lane] == 0; }
  // a [dv] of one row.
  void Output(int32_t kv_head, int32_t lane, float* out) const;

  // Some tokens of one KV head in the hands of one thread.
  struct Range {
    int32_t kv_head;
    int32_t begin;
    int32_t end;
    int32_t worker;
    cpu::HeadTokens tokens;
    cpu::HeadRows rows;
  };

  static constexpr int32_t kRange = 11 * cpu::kTile;

  // Calls f(range) for all tokens of all heads, cut into ranges of at most `length` (0: one range per head); the cut
  // depends on nothing else.
  template <typename F>
  void ForEachRange(int32_t length, F&& f) {
    const int32_t step = length > 0 ? length : tokens();
    const int32_t ranges = (tokens() + step - 1) / step;
    pool_->For(int64_t{ranges} * kv_heads(), [&](int64_t index, int32_t worker) {
      const auto kv_head = static_cast<int32_t>(index % kv_heads());
      const auto begin = static_cast<int32_t>(index / kv_heads()) * step;
      f(Bind(kv_head, begin, std::min(tokens(), begin + step), worker));
    });
  }

  // The same, one tile at a time: f(range, begin, count).
  template <typename F>
  void ForEachTile(F&& f) {
    ForEachRange(kRange, [&](const Range& range) {
      for (int32_t begin = range.begin; begin < range.end; begin += cpu::kTile)
        f(range, begin, std::min(cpu::kTile, range.end - begin));
    });
  }

  // p [count, lanes] of tokens begin .. begin + count - 1, any number of them, generated ones too; logits optional.
  void Weights(const Range& range, int32_t begin, int32_t count, float* weights, float* logits = nullptr) const;

  // The same, every row pooled along the tokens 0 .. domain - 1 (algorithm.md section 4.1); those lie in the domain.
  void PooledWeights(const Range& range, const Pooling& pool, int32_t domain, int32_t begin, int32_t count,
                     float* weights) const;

  // <v_j, B_lane> [count, lanes] for B [dv, lanes] in panels (PackLanes); count <= kTile. norms [count] optional.
  void Products(const Range& range, const float* b, int32_t begin, int32_t count, float* out,
                float* norms = nullptr) const;

  // False for tokens with a NaN or Inf.
  bool TakesPart(const Range& range, int32_t token) const {
    return flags_[static_cast<size_t>(range.kv_head) * tokens() + token] == 0;
  }

  // One token's value [dv]; zeros where it is not finite.
  void Value(const Range& range, int32_t token, float* out) const;

  // B [dv, lanes] in panels of one KV head from fill(lane, column [dv]), called for every row, zeros beforehand.
  template <typename F>
  AlignedFloats PackLanes(F&& fill) const {
    AlignedFloats packed(static_cast<size_t>(lanes()) * value_dim(), 0.0F);
    std::vector<float> column(value_dim());
    for (int32_t lane = 0; lane < head_rows(); ++lane) {
      std::fill(column.begin(), column.end(), 0.0F);
      fill(lane, column.data());
      const cpu::PanelAddress at(layout_, value_dim(), lane);
      for (int32_t i = 0; i < value_dim(); ++i) packed[at.first + int64_t{i} * at.stride] = column[i];
    }
    return packed;
  }

  const WindowKernels& kernels() const { return kernels_; }
  int32_t threads() const { return pool_->threads(); }

 private:
  struct Worker {
    cpu::PackedRows packed;
    cpu::TileScratch tile;
  };

  const KvView& kv() const { return input_.kv; }
  cpu::WaveScorer::RowsFound found(int32_t kv_head) const { return scorer_->Found(kv_head); }
  Range Bind(int32_t kv_head, int32_t begin, int32_t end, int32_t worker);

  void FindNonFinite();

  LayerInput input_;
  int32_t generated_;
  ThreadPool* pool_;
  const cpu::Kernels& engine_kernels_;
  const WindowKernels& kernels_;
  cpu::LaneLayout layout_;
  std::vector<std::byte> memory_;
  std::vector<uint8_t> flags_;
  std::vector<uint8_t> flags_of_all_;  // [Hkv, n + generated]; empty where nothing was generated
  std::optional<cpu::WaveScorer> scorer_;
  std::vector<Worker> workers_;
};

}  // namespace dropkv::baseline
