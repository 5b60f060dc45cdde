// Pass 2 on Hopper (docs/kernels/score.md): scores of 64 tokens at a time from two products whose M side is the tokens,
//
//   X = K Q^T   -> p = 2^(scale X - lse), odds = p / (1 - p)
//   Y = V A^T   -> |a - v|^2 = |v|^2 + |a|^2 - 2 Y
//
// so that the sum over the rows runs along registers and a token's score needs no other block: no atomics, no
// reduction, the same bits for any cut of the tokens. One warp feeds a ring of tiles by the copy engine; the other
// warpgroups take turns at the tiles, and work through the rows in panels of N.
#pragma once

#include "cuda/kernels.h"
#include "cuda/sm90/score_pairs.cuh"

namespace dropkv::cuda {

struct ScoreLaunch {
  ScoreParams params;
  int32_t first_row = 0;    // of the r rows
  int32_t count = 0;        // rows of this launch
  bool accumulate = false;  // raw holds the sum over earlier rows
};

// Rows of a launch: kPanels panels of N, whose outputs are multiplied kOutputs at a time; kGroups warpgroups that
// compute. kWeighted: rows have weights.
template <int kBoxes_, int N_, int kPanels_, int kGroups_, int kOutputs_, bool kWeighted_>
struct ScoreShape {
  static constexpr int kBoxes = kBoxes_;
  static constexpr int N = N_;
  static constexpr int kPanels = kPanels_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kOutputs = kOutputs_;
  static constexpr bool kWeighted = kWeighted_;
  static constexpr int32_t kComputing = kGroups * 128;
  static constexpr int32_t kThreads = kComputing + 128;
  // A block shares out what it got at its start, 65536 / kThreads each, rounded down to 8.
  static constexpr int32_t kRegisters = kGroups == 2 ? 232 : 160;
  static constexpr int32_t kProducerRegisters = kGroups == 2 ? 40 : 32;
  static_assert(kRegisters * kComputing + kProducerRegisters * 128 <= 65536 / kThreads / 8 * 8 * kThreads);

  // Shared memory of a block, from a 1024-byte boundary: queries, outputs, ring, tables.
  static constexpr int32_t kRows = N * kPanels;
  static constexpr int32_t kRowBoxBytes = kRows * kRowBytes;
  static constexpr int32_t kRowTileBytes = kBoxes * kRowBoxBytes;
  static constexpr int32_t kSlotBytes = kBoxes * kBoxBytes;
  struct Tables {
    RowTable<kRows, kWeighted> rows;
    uint64_t full[16];
    uint64_t empty[16];
    uint64_t rows_full;
    uint64_t rows_empty;
    int32_t issued;
  };
  static constexpr int32_t kFit =
      (kSharedLimit - 2 * kRowTileBytes - static_cast<int32_t>(sizeof(Tables))) / kSlotBytes;
  static constexpr int32_t kSlots = kFit > 16 ? 16 : kFit;
  static constexpr int32_t kBytes = 2 * kRowTileBytes + kSlots * kSlotBytes + sizeof(Tables) + 1024;
  // Every group can hold a tile, whatever the others wait for.
  static_assert(kSlots >= 2 * kGroups);
};

// kValues: DropKV's score; without: the sum of p alone, from the keys.
template <typename T, typename Shape, bool kValues>
class ScoreBlock {
  static constexpr int N = Shape::N;
  static constexpr int M = Shape::kOutputs;
  static constexpr int kBoxes = Shape::kBoxes;
  static constexpr bool kWeighted = Shape::kWeighted;

 public:
  __device__ ScoreBlock(const ScoreLaunch& launch, unsigned char* shared)
      : launch_(launch),
        params_(launch.params),
        queries_(shared),
        outputs_(shared + Shape::kRowTileBytes),
        tables_(reinterpret_cast<typename Shape::Tables*>(shared + 2 * Shape::kRowTileBytes +
                                                          Shape::kSlots * Shape::kSlotBytes)),
        ring_{shared + 2 * Shape::kRowTileBytes,
              tables_->full,
              tables_->empty,
              Shape::kSlots,
              Shape::kSlotBytes,
              &tables_->issued} {}

  __device__ void Start() {
    if (threadIdx.x == 0) {
      for (int32_t i = 0; i < Shape::kSlots; ++i) {
        BarrierInit(tables_->full + i, 1);
        BarrierInit(tables_->empty + i, 4);
      }
      tables_->issued = 0;
      BarrierInit(&tables_->rows_full, 1);
      BarrierInit(&tables_->rows_empty, 4 * Shape::kGroups);
      FenceBarrierInit();
    }
    __syncthreads();
  }

  __device__ void Produce(const CUtensorMap* k, const CUtensorMap* v, const CUtensorMap* queries,
                          const CUtensorMap* outputs) const {
    const uint64_t policy = EvictFirst();
    int32_t slot = 0;
    uint32_t lists = 0;
    for (TileWalk walk(params_.cache); !walk.done(); walk.Next(), ++lists) {
      // Ahead of the tiles, behind which they would queue.
      BarrierWait(&tables_->rows_empty, (lists & 1) ^ 1);
      BarrierExpect(&tables_->rows_full, (kValues ? 2 : 1) * Shape::kRowTileBytes);
      FetchRows<kBoxes, Shape::kRows>(queries_, queries, &tables_->rows_full, EvictLast(), walk.list(),
                                      launch_.first_row);
      if constexpr (kValues)
        FetchRows<kBoxes, Shape::kRows>(outputs_, outputs, &tables_->rows_full, EvictLast(), walk.list(),
                                        launch_.first_row);
      for (int32_t i = 0; i < walk.count(); ++i) {
        const int32_t tile = walk.tile(i);
        FetchTile(ring_, slot++, params_.cache, k, kBoxes, policy, walk.sequence(), walk.head(), tile);
        if constexpr (kValues)
          FetchTile(ring_, slot++, params_.cache, v, kBoxes, policy, walk.sequence(), walk.head(), tile);
      }
    }
  }

  __device__ void Consume() {
    const int32_t group = __shfl_sync(0xFFFFFFFF, static_cast<int32_t>(threadIdx.x) / 128, 0);  // known to be uniform
    int32_t turn = 0;  // tiles of this block so far
    uint32_t lists = 0;
    for (TileWalk walk(params_.cache); !walk.done(); walk.Next(), ++lists) {
      const int32_t tokens = Length(params_.cache, walk.sequence(), walk.head());
      const int32_t candidates = Candidates(params_.cache, walk.sequence(), tokens);
      LoadTable(walk.sequence(), walk.list(), tokens);
      BarrierWait(&tables_->rows_full, lists & 1);
      for (int32_t i = 0; i < walk.count(); ++i, ++turn)
        if (turn % Shape::kGroups == group) ScoreTile(walk.list(), candidates, turn, walk.tile(i));
      __syncwarp();
      if (threadIdx.x % 32 == 0) BarrierArrive(&tables_->rows_empty);
    }
  }

 private:
  // All loads of a thread are in flight together.
  __device__ void LoadTable(int32_t sequence, int32_t list, int32_t tokens) {
    auto& table = tables_->rows;
    const bool tops = kValues && !params_.find_tops;
    const int64_t first = static_cast<int64_t>(list) * params_.rows.group * params_.rows.rows + launch_.first_row;
    NamedSync(kAllGroups, Shape::kComputing);
    if (threadIdx.x == 0) {
      table.least_visible = INT32_MAX;
      table.has_top = 0;
    }
    if constexpr (kWeighted && !kValues) {
      const float sum = threadIdx.x < 32 ? RowWeightSum(params_.rows, sequence) : 0.0F;
      if (threadIdx.x == 0) table.weight_sum = sum;
    }
    NamedSync(kAllGroups, Shape::kComputing);
    for (int32_t row = threadIdx.x; row < Shape::kRows; row += Shape::kComputing) {
      const bool real = row < launch_.count;
      float lse2 = real ? params_.state.lse2[first + row] : INFINITY;
      const float norm = real && kValues ? params_.state.norm[first + row] : 0.0F;
      float contribution = real && tops ? params_.state.contribution[first + row] : 0.0F;
      int32_t top = real && tops ? params_.state.top[first + row] : -1;
      const int32_t visible =
          real ? VisibleTokens(params_.rows, sequence, list % params_.cache.kv_heads, launch_.first_row + row, tokens)
               : INT32_MAX;
      if constexpr (kWeighted) {
        const float weight = real ? RowWeight(params_.rows, sequence, launch_.first_row + row) : 0.0F;
        table.weight[row] = weight;
        contribution *= weight;
        if (!(weight > 0.0F)) lse2 = INFINITY, top = -1;  // it judges nothing
      }
      table.negative_lse2[row] = lse2 < INFINITY ? -lse2 : -kJudgesNothing;
      table.norm[row] = norm;
      table.contribution[row] = contribution;
      table.top[row] = top;
      table.visible[row] = visible;
      atomicMin(&table.least_visible, visible);
      if (top >= 0) table.has_top = 1;
    }
    NamedSync(kAllGroups, Shape::kComputing);
  }

  // The group's turn `turn`: its tile's scores.
  __device__ void ScoreTile(int32_t list, int32_t candidates, int32_t turn, int32_t tile) {
    const int32_t slot = kValues ? 2 * turn : turn;
    const int32_t first = tile * kTileTokens;
    const int32_t in_tile =
        static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + static_cast<int32_t>(threadIdx.x) % 32 / 4;
    const int32_t token[2] = {first + in_tile, first + in_tile + 8};
    TokenSums sums;
    bool finite[2] = {true, true};
    float value_norm[2] = {0.0F, 0.0F};
    const bool careful = IsCareful(first);
    ring_.WaitFull(slot);
#pragma unroll
    for (int32_t panel = 0; panel < Shape::kPanels; ++panel) {
      float x[N / 2];
      float y[M / 2];
      WgmmaFence();
      TileTimesRows<T, N, kBoxes>(x, ring_.tile(slot), queries_ + panel * N * kRowBytes, Shape::kRowBoxBytes);
      WgmmaCommit();
      if constexpr (kValues) {
        if (panel == 0) ring_.WaitFull(slot + 1);
        ValueProduct(y, slot, panel * N);
        if (panel == 0) ValueNorms<T, kBoxes>(ring_.tile(slot + 1), value_norm);
      }
      WgmmaWait<kValues ? 1 : 0>();
      KeepRegisters(x);
      // A key that is not finite shows in every row.
      finite[0] = fabsf(x[0]) < INFINITY;
      finite[1] = fabsf(x[2]) < INFINITY;
      if (panel == Shape::kPanels - 1) ring_.Release(slot);
      const bool small = ToShares(x, list, panel * N, careful, token, sums);
      if constexpr (kValues) {
#pragma unroll
        for (int part = 0; part < N / M; ++part) {
          if (part > 0) ValueProduct(y, slot, panel * N + part * M);
          WgmmaWait<0>();
          KeepRegisters(y);
          if (panel == Shape::kPanels - 1 && part == N / M - 1) ring_.Release(slot + 1);
          const float* norm = tables_->rows.norm + panel * N + part * M;
          const float* weights = RowWeightsFrom(panel * N + part * M);
          if (small) {
            AddPairs<M, true, kWeighted>(x + part * M / 2, y, norm, weights, sums);
          } else {
            AddPairs<M, false, kWeighted>(x + part * M / 2, y, norm, weights, sums);
          }
        }
      } else {
        AddShares<N, kWeighted>(x, RowWeightsFrom(panel * N), sums);
      }
    }
    Store(list, candidates, token, value_norm, finite, sums);
  }

  __device__ const float* RowWeightsFrom(int32_t row) const {
    if constexpr (kWeighted) {
      return tables_->rows.weight + row;
    } else {
      return nullptr;
    }
  }

  // What the scores' sums over the rows are divided by.
  __device__ float Divisor() const {
    if constexpr (kWeighted && !kValues) {
      return static_cast<float>(params_.rows.group) * tables_->rows.weight_sum;
    } else {
      return static_cast<float>(kValues ? params_.rows.group : params_.rows.group * params_.rows.rows);
    }
  }

  // Y of M rows.
  __device__ void ValueProduct(float (&y)[M / 2], int32_t slot, int32_t row0) {
    WgmmaFence();
    TileTimesRows<T, M, kBoxes>(y, ring_.tile(slot + 1), outputs_ + row0 * kRowBytes, Shape::kRowBoxBytes);
    WgmmaCommit();
  }

  // Logits to shares, less the pairs that are counted otherwise. True: all of the warp's are small.
  __device__ bool ToShares(float (&x)[N / 2], int32_t list, int32_t row0, bool careful, const int32_t (&token)[2],
                           TokenSums& sums) {
    if (careful) {
      CarefulShares<N>(x, tables_->rows, row0, params_.rows, token, sums);
      if (params_.find_tops) FindTops(x, list, row0, token);
      return false;
    }
    const float largest = Shares<N>(x, tables_->rows.negative_lse2 + row0, params_.rows.scale * kLog2E);
    if (__all_sync(0xFFFFFFFF, largest < kSmallShare2)) return true;
    if (params_.find_tops && __any_sync(0xFFFFFFFF, largest > kFoundShare2)) FindTops(x, list, row0, token);
    return false;
  }

  __device__ void FindTops(float (&p)[N / 2], int32_t list, int32_t row0, const int32_t (&token)[2]) {
    TakeFound<N>(p, params_,
                 static_cast<int64_t>(list) * params_.rows.group * params_.rows.rows + launch_.first_row + row0, list,
                 token);
  }

  // Whether some pair of the tile is hidden or counted otherwise; the same in all threads of a warp.
  __device__ bool IsCareful(int32_t first) const {
    const auto& table = tables_->rows;
    if (first + kTileTokens > table.least_visible || params_.rows.soft_cap > 0.0F) return true;
    if (table.has_top == 0) return false;
    bool here = false;
    for (int32_t row = static_cast<int32_t>(threadIdx.x) % 32; row < Shape::kRows; row += 32)
      here = here || static_cast<uint32_t>(table.top[row] - first) < kTileTokens;
    return __any_sync(0xFFFFFFFF, here);
  }

  // Sums over the quad that shares two tokens, then over launches.
  __device__ void Store(int32_t list, int32_t candidates, const int32_t (&token)[2], const float (&value_norm)[2],
                        const bool (&finite)[2], const TokenSums& sums) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = sums.sum[h];
      if constexpr (kValues) sum = fmaf(value_norm[h], sums.weight[h], sum) + sums.top[h];
      if (!finite[h]) sum = NAN;
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      uint32_t mark = sums.dominant >> h & 1;
      mark |= __shfl_xor_sync(0xFFFFFFFF, mark, 1);
      mark |= __shfl_xor_sync(0xFFFFFFFF, mark, 2);
      if (threadIdx.x % 4 != 0 || token[h] >= candidates) continue;
      float* raw = params_.raw + static_cast<int64_t>(list) * params_.cache.max_tokens + token[h];
      float score = sum / Divisor();
      bool dominant = mark != 0;
      if (launch_.accumulate) {
        dominant = dominant || signbit(*raw);
        score += fabsf(*raw);
      }
      // Rounding may leave a token whose value is every row's output below 0.
      score = score < INFINITY ? fmaxf(score, 0.0F) : NAN;
      *raw = dominant ? -score : score;
    }
  }

  const ScoreLaunch& launch_;
  const ScoreParams& params_;
  unsigned char* queries_;
  unsigned char* outputs_;
  typename Shape::Tables* tables_;
  Ring ring_;
};

}  // namespace dropkv::cuda
