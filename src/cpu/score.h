// Raw scores of a wave of layers: attend, finish, score, and the pairs with p > 1/2 by exact differences. Plans the
// work items of every step; the kernels do the arithmetic.
#pragma once

#include <cstdint>
#include <span>

#include "core/parallel.h"
#include "core/workspace.h"
#include "cpu/attend.h"
#include "cpu/kernels.h"
#include "dropkv/engine.h"

namespace dropkv::cpu {

// Sizes of a wave. All layers share them.
struct WaveShape {
  int32_t layers = 1;  // at most, in one wave
  int32_t kv_heads = 0;
  int32_t group = 0;  // g
  int32_t rows = 0;   // w
  int32_t tokens = 0;
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  int32_t threads = 1;
  int32_t generated = 0;  // of the tokens, the last ones: in every softmax, but without score and flags

  int32_t candidates() const { return tokens - generated; }  // n
  int32_t heads() const { return layers * kv_heads; }
  int32_t head_rows() const { return group * rows; }
};

// Tokens of one attend item: fixed by the shape of a layer, never by threads or by the number of layers, so that
// results do not depend on them.
int32_t SplitTokens(int32_t kv_heads, int32_t tokens);

// Layers that give every thread some items; no result depends on it.
int32_t LayersPerWave(const EvictShape& shape, int32_t threads);

class WaveScorer {
 public:
  // Takes its memory from the two workspaces; counting ones give the sizes. What lies in `passing` may be overwritten
  // between Score and Certify.
  WaveScorer(const Kernels& kernels, ThreadPool* pool, const WaveShape& shape, Workspace& lasting, Workspace& passing);

  // Softmax state of every row over all visible tokens, or what the layer's out and lse say. with_values: outputs too
  // (not needed for Signal::kAttention alone). flags [layers, Hkv, n]: non-finite tokens.
  void Attend(std::span<const LayerInput> layers, bool with_values, uint8_t* flags);

  // raw, flags [layers, Hkv, n] of the candidates, after Attend. signal: kDropKv or kAttention. Returns the dominant
  // pairs' tokens and non-finite raw scores in flags.
  void Score(std::span<const LayerInput> layers, Signal signal, float* raw, uint8_t* flags);

  // Certificate of algorithm.md section 6, after Attend with values. lists: the kept positions of every (layer, head),
  // generated ones too, [heads] spans in order. error, mass [layers, Hq]; either may be null.
  void Certify(std::span<const LayerInput> layers, std::span<const std::span<const int32_t>> lists, float* error,
               float* mass);

  // Query rows with NaN or Inf in the layers of the last Attend, counted once per query head and row.
  int64_t skipped_rows() const;

  // What Attend found of the rows of head `index` (layer * Hkv + KV head), until the next Attend.
  struct RowsFound {
    LaneLayout layout;
    Denominators denominators;  // [r]
    const float* outputs;       // [dv, r] in panels: -2 (a - center); with_values only
    const float* center;        // [dv]
    const uint8_t* skipped;     // [r] 1: the query has a NaN or Inf
  };
  RowsFound Found(int64_t index) const {
    const Head& head = heads_[index];
    return {layout_, head.denominators, head.states[0].sums, head.center, head.skipped};
  }

 private:
  // One KV head of one layer.
  struct Head {
    SoftmaxState* states = nullptr;  // [splits]; states[0].sums becomes -2 (a - center) after Attend
    float* center = nullptr;         // [dv]
    Denominators denominators;       // [r]
    float* norms = nullptr;          // [r] |a - center|^2
    double* contribution = nullptr;  // [r] of the pair (row, tops[row])
    int32_t* tops = nullptr;         // [r] the token with p > 1/2, or -1
    int32_t* exact = nullptr;        // [r] rows of a handed-in head that need their own softmax
    int32_t exact_count = 0;
    uint8_t* dominant = nullptr;  // [r]
    uint8_t* skipped = nullptr;   // [r]
    bool given = false;
  };
  struct Thread {
    PackedRows packed;
    TileScratch tile;
    float* row = nullptr;      // [dv]
    float* out = nullptr;      // [dv]
    float* weights = nullptr;  // [r]
    SoftmaxState state;        // certificate
  };

  struct HeadItem {
    const LayerInput& layer;
    int32_t kv_head;
    Head& head;
    int64_t first;  // of the head's candidates in raw and flags
  };
  HeadItem Item(std::span<const LayerInput> layers, int64_t index);
  double SinkOf(const HeadItem& item, int32_t id) const;
  // Of row `id` (h * w + row): how much it counts.
  double WeightOf(const HeadItem& item, int32_t id) const {
    const float* weights = item.layer.rows.weights;
    return weights != nullptr ? weights[id % shape_.rows] : 1.0;
  }
  RowChoice AllRows() const { return {nullptr, shape_.head_rows()}; }

  void PrepareHead(const HeadItem& item, bool with_values, Thread& thread);
  void ReadGiven(const HeadItem& item, bool with_values, Thread& thread);
  template <class F>
  void AttendSplits(std::span<const LayerInput> layers, bool with_values, uint8_t* flags, F&& choice);
  void AttendRange(const HeadItem& item, const RowChoice& choice, int32_t split, int32_t begin, int32_t end,
                   bool with_values, uint8_t* flags, Thread& thread);
  void FinishHead(const HeadItem& item, bool with_values, Thread& thread);
  void StoreOutput(Head& head, int32_t lane, const float* out);
  void ScoreRange(const HeadItem& item, bool values, int32_t begin, int32_t end, float* raw, uint8_t* flags,
                  Thread& thread);
  const float* LaneWeights(const HeadItem& item, Thread& thread) const;
  float MassShare(const HeadItem& item) const;
  void ScoreGivenTops(std::span<const LayerInput> layers);
  void ResolveGiven(const HeadItem& item, Thread& thread);
  void FinishExact(const HeadItem& item, Thread& thread);
  void AddTops(const HeadItem& item, float* raw, uint8_t* flags);
  void CertifyHead(const HeadItem& item, std::span<const int32_t> list, float* error, float* mass, Thread& thread);
  void MergeSplits(const HeadItem& item, const LaneLayout& layout, bool with_values, Thread& thread);

  const Kernels& kernels_;
  ThreadPool* pool_;
  WaveShape shape_;
  LaneLayout layout_;
  int32_t split_tokens_;
  int32_t splits_;
  Head* heads_ = nullptr;      // [layers * Hkv]
  Thread* threads_ = nullptr;  // [threads]
  int64_t active_heads_ = 0;
};

// pooled [n] from one head's raw [n] (algorithm.md section 4.1); non-finite scores count 0. window: for past_only.
void PoolScores(const float* raw, int32_t n, const Pooling& pool, int32_t window, float* pooled);

}  // namespace dropkv::cpu
