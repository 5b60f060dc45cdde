// Pass 2 with mma.sync: scores of 16 tokens a warp from two products whose M side is the tokens,
//
//   X = K Q^T   -> p = 2^(scale X - lse), odds = p / (1 - p)
//   Y = V A^T   -> |a - v|^2 = |v|^2 + |a|^2 - 2 Y
//
// so that the sum over the rows runs along registers: no atomics, the same bits for any cut of the tokens. A head's
// queries and outputs lie in shared memory; every warp feeds itself, keys while it works on values and the other way
// round, and waits for nobody.
#pragma once

#include "cuda/kernels.h"
#include "cuda/sm80/rows.cuh"

namespace dropkv::cuda::sm80 {

inline constexpr int32_t kScoreWarps = 8;
inline constexpr int32_t kWarpTokens = 16;
inline constexpr int32_t kStepTokens = kScoreWarps * kWarpTokens;
inline constexpr float kSmallShare = 0x1p-12F;  // below it p (1 + p) is p / (1 - p) in float32

struct ScoreLaunch {
  ScoreParams params;
  Alignment aligned;
  int32_t range;     // tokens of a block
  int32_t resident;  // rows in shared memory at a time
};

// What a block keeps of every resident row.
struct RowTable {
  float* lse2;
  float* norm;
  float* contribution;
  int32_t* visible;
  int32_t* top;
  int32_t* least_visible;  // of all of them
  float* weight;           // where rows have weights

  __device__ RowTable(unsigned char* memory, int32_t rows)
      : lse2(reinterpret_cast<float*>(memory)),
        norm(lse2 + rows),
        contribution(norm + rows),
        visible(reinterpret_cast<int32_t*>(contribution + rows)),
        top(visible + rows),
        least_visible(top + rows),
        weight(reinterpret_cast<float*>(least_visible + 4)) {}
};

inline int32_t TableBytes(int32_t rows, bool weighted) { return rows * (weighted ? 24 : 20) + 16; }

// A lane's two tokens over some rows.
struct TokenSums {
  float sum[2] = {0.0F, 0.0F};
  float check[2] = {0.0F, 0.0F};  // NaN once a product is not finite, as it is wherever the key is not
  bool dominant[2] = {false, false};
};

// n: n-tiles of eight rows that a warp takes at a time. values: DropKV's score; without, the sum of p from the keys.
// weighted: rows have weights.
template <typename T, int n, bool values, bool weighted>
class ScoreBlock {
 public:
  __device__ ScoreBlock(const ScoreLaunch& launch, unsigned char* shared)
      : launch_(launch),
        params_(launch.params),
        rows_(params_.rows.group * params_.rows.rows),
        table_(shared + QueryBytes() + OutputBytes() + kScoreWarps * SlotBytes() * (values ? 1 : 2), launch.resident) {
    const int32_t blocks = (params_.cache.max_tokens + launch.range - 1) / launch.range;
    list_ = static_cast<int32_t>(blockIdx.x) / blocks;
    sequence_ = list_ / params_.cache.kv_heads;
    head_ = list_ % params_.cache.kv_heads;
    tokens_ = Length(params_.cache, sequence_, head_);
    first_ = static_cast<int32_t>(blockIdx.x) % blocks * launch.range;
    end_ = min(Candidates(params_.cache, sequence_, tokens_), first_ + launch.range);
    queries_ = SharedAddress(shared);
    outputs_ = queries_ + QueryBytes();
    keys_ = outputs_ + OutputBytes() + Warp() * SlotBytes() * (values ? 1 : 2);
    values_ = keys_ + kWarpTokens * RowBytes(params_.cache.key_dim);
  }

  __device__ void Run() {
    if (first_ >= end_) return;
    if constexpr (weighted && !values) weight_sum_ = RowWeightSum(params_.rows, sequence_);
    for (int32_t row = 0; row < rows_; row += launch_.resident) {
      __syncthreads();
      LoadRows(row);
      __syncthreads();
      ScoreTokens(row);
    }
  }

 private:
  __device__ static int32_t Warp() { return static_cast<int32_t>(threadIdx.x) / 32; }
  __device__ static int32_t Lane() { return static_cast<int32_t>(threadIdx.x) % 32; }
  __device__ int32_t QueryBytes() const { return launch_.resident * RowBytes(params_.cache.key_dim); }
  __device__ int32_t OutputBytes() const { return values ? launch_.resident * RowBytes(params_.cache.value_dim) : 0; }
  // Of a warp's keys and values, or of one of its two tiles of keys.
  __device__ int32_t SlotBytes() const {
    return kWarpTokens * (RowBytes(params_.cache.key_dim) + (values ? RowBytes(params_.cache.value_dim) : 0));
  }

  __device__ void LoadRows(int32_t first_row) {
    const int64_t base = static_cast<int64_t>(list_) * rows_;
    if (threadIdx.x == 0) *table_.least_visible = INT32_MAX;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < launch_.resident; i += kScoreWarps * 32) {
      const int32_t row = first_row + i;
      const bool real = row < rows_;
      const bool apart = values && real && !params_.find_tops;
      table_.lse2[i] = real ? params_.state.lse2[base + row] : INFINITY;
      table_.norm[i] = values && real ? params_.state.norm[base + row] : 0.0F;
      table_.contribution[i] = apart ? params_.state.contribution[base + row] : 0.0F;
      table_.top[i] = apart ? params_.state.top[base + row] : -1;
      table_.visible[i] = real ? VisibleTokens(params_.rows, sequence_, head_, row, tokens_) : INT32_MAX;
      if constexpr (weighted) ApplyWeight(i, real ? RowWeight(params_.rows, sequence_, row) : 0.0F);
      atomicMin(table_.least_visible, table_.visible[i]);
    }
    for (int32_t i = threadIdx.x / 8; i < launch_.resident; i += kScoreWarps * 4) {
      const int32_t row = first_row + i;
      const bool real = row < rows_ && params_.row_ok[base + row] != 0;
      const auto* q = static_cast<const T*>(params_.rows.q);
      if (real) q += QueryOffset(params_.rows, sequence_, head_, row);
      CopyRow(queries_ + i * RowBytes(params_.cache.key_dim), q, real, params_.cache.key_dim, threadIdx.x % 8,
              launch_.aligned.queries);
      if constexpr (!values) continue;
      const auto* a = static_cast<const T*>(params_.state.out16);
      if (real) a += (base + row) * params_.cache.value_dim;
      CopyRow(outputs_ + i * RowBytes(params_.cache.value_dim), a, real, params_.cache.value_dim, threadIdx.x % 8,
              launch_.aligned.outputs);
    }
    CommitCopies();
    WaitCopies<0>();
  }

  // What the row's table says of it, times its weight: at 0 the row judges nothing.
  __device__ void ApplyWeight(int32_t i, float weight) {
    table_.weight[i] = weight;
    table_.contribution[i] *= weight;
    if (weight > 0.0F) return;
    table_.lse2[i] = INFINITY;
    table_.top[i] = -1;
  }

  __device__ int32_t TokenOf(int32_t tile) const { return first_ + tile * kStepTokens + Warp() * kWarpTokens; }

  // Keys alone take turns in two slots.
  __device__ uint32_t KeySlot(int32_t piece) const { return values || piece % 2 == 0 ? keys_ : values_; }

  // Piece i of the warp's stream, into the slot that its number gives: keys and values in turn, or keys alone.
  __device__ void Issue(int32_t piece) const {
    const int32_t token = TokenOf(values ? piece / 2 : piece);
    if (token < end_) {
      const CacheParams& cache = params_.cache;
      if (values && piece % 2 == 1) {
        const TokenRows<T> rows{cache, cache.v, cache.value_dim, sequence_, head_, tokens_, launch_.aligned.values};
        rows.Load(values_, token, kWarpTokens, Lane(), 32);
      } else {
        const TokenRows<T> rows{cache, cache.k, cache.key_dim, sequence_, head_, tokens_, launch_.aligned.keys};
        rows.Load(KeySlot(piece), token, kWarpTokens, Lane(), 32);
      }
    }
    CommitCopies();
  }

  __device__ void ScoreTokens(int32_t first_row) {
    const int32_t parts = (min(launch_.resident, rows_ - first_row) + 8 * n - 1) / (8 * n);
    Issue(0);
    Issue(1);
    for (int32_t tile = 0; TokenOf(tile) < end_; ++tile) {
      const int32_t piece = values ? 2 * tile : tile;
      const uint32_t keys = KeySlot(piece);
      TokenSums sums;
      float value_norm[2] = {0.0F, 0.0F};
      WaitCopies<1>();
      __syncwarp();
      for (int32_t part = 0; part < parts; ++part) {
        float p[n][4];
        MultiplyRows<T, n>(
            p, RowsAddress(keys, RowBytes(params_.cache.key_dim)),
            ColumnsAddress(queries_ + part * 8 * n * RowBytes(params_.cache.key_dim), RowBytes(params_.cache.key_dim)),
            params_.cache.key_dim);
        if (part == parts - 1) {
          __syncwarp();
          Issue(piece + 2);
        }
        const float largest = Shares(p, part * 8 * n, first_row, TokenOf(tile), sums);
        if constexpr (values) {
          if (part == 0) {
            if (parts == 1) {
              WaitCopies<1>();  // the next keys are on their way
            } else {
              WaitCopies<0>();
            }
            __syncwarp();
            LoadNorms(value_norm);
          }
          float y[n][4];
          MultiplyRows<T, n>(y, RowsAddress(values_, RowBytes(params_.cache.value_dim)),
                             ColumnsAddress(outputs_ + part * 8 * n * RowBytes(params_.cache.value_dim),
                                            RowBytes(params_.cache.value_dim)),
                             params_.cache.value_dim);
          if (part == parts - 1) {
            __syncwarp();
            Issue(piece + 3);
          }
          AddPairs(p, y, part * 8 * n, value_norm, __all_sync(0xFFFFFFFF, largest < kSmallShare), sums);
        } else {
#pragma unroll
          for (int i = 0; i < n; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if constexpr (weighted) p[i][e] *= table_.weight[part * 8 * n + i * 8 + Lane() % 4 * 2 + e % 2];
              sums.sum[e / 2] += p[i][e];
            }
        }
      }
      Store(TokenOf(tile), value_norm, first_row, sums);
    }
    WaitCopies<0>();
  }

  // Products to shares of the rows, 0 for pairs that count otherwise; the largest of them.
  __device__ float Shares(float (&x)[n][4], int32_t first, int32_t first_row, int32_t token, TokenSums& sums) const {
    const float scale2 = params_.rows.scale * kLog2E;
    const bool capped = params_.rows.soft_cap > 0.0F;
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums.check[e / 2] = fmaf(x[i][e], 0.0F, sums.check[e / 2]);
        const float lse2 = table_.lse2[first + i * 8 + Lane() % 4 * 2 + e % 2];
        x[i][e] = Exp2(capped ? Logit2(params_.rows, x[i][e]) - lse2 : fmaf(x[i][e], scale2, -lse2));
        largest = fmaxf(largest, x[i][e]);
      }
    if constexpr (values) {
      bool top = false;
      for (int32_t i = Lane(); i < 8 * n; i += 32)
        top = top || static_cast<uint32_t>(table_.top[first + i] - token) < kWarpTokens;
      if (__any_sync(0xFFFFFFFF, top)) TakeTops(x, first, token, sums);
    }
    if (token + kWarpTokens > *table_.least_visible) Mask(x, first, token);
    if (params_.find_tops && largest > kFoundShare) TakeFound(x, first, first_row, token);
    return largest;
  }

  __device__ void Mask(float (&p)[n][4], int32_t first, int32_t token) const {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (token + Lane() / 4 + e / 2 * 8 >= table_.visible[first + i * 8 + Lane() % 4 * 2 + e % 2]) p[i][e] = 0.0F;
  }

  // Pairs (row, its top token): their contributions are known.
  __device__ void TakeTops(float (&p)[n][4], int32_t first, int32_t token, TokenSums& sums) const {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t row = first + i * 8 + Lane() % 4 * 2 + e % 2;
        if (token + Lane() / 4 + e / 2 * 8 != table_.top[row]) continue;
        p[i][e] = 0.0F;
        sums.sum[e / 2] += fabsf(table_.contribution[row]);
        sums.dominant[e / 2] = sums.dominant[e / 2] || signbit(table_.contribution[row]);
      }
  }

  // Rows were handed in: pairs with a large share are noted, the lowest token of several, and count later.
  __device__ void TakeFound(float (&p)[n][4], int32_t first, int32_t first_row, int32_t token) const {
    const int64_t base = static_cast<int64_t>(list_) * rows_ + first_row + first;
    auto* tops = reinterpret_cast<unsigned*>(params_.state.top);
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(p[i][e] > kFoundShare)) continue;
        p[i][e] = 0.0F;
        atomicMin(tops + base + i * 8 + Lane() % 4 * 2 + e % 2, static_cast<unsigned>(token + Lane() / 4 + e / 2 * 8));
        params_.has_tops[list_] = 1;
      }
  }

  // |v|^2 of the lane's two tokens. A lane sums half the dims of one token.
  __device__ void LoadNorms(float (&norm)[2]) const {
    const int32_t half = RowBytes(params_.cache.value_dim) / 32;  // chunks; the one behind the row is not among them
    const uint32_t row = values_ + Lane() % 16 * RowBytes(params_.cache.value_dim) + Lane() / 16 * half * 16;
    float sum = 0.0F;
    for (int32_t c = 0; c < half; ++c) {
      const uint4 chunk = Load16(row + c * 16);
      T x[kChunk];
      memcpy(x, &chunk, sizeof(chunk));
#pragma unroll
      for (int e = 0; e < kChunk; ++e) sum = fmaf(ToFloat(x[e]), ToFloat(x[e]), sum);
    }
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 16);
    norm[0] = __shfl_sync(0xFFFFFFFF, sum, Lane() / 4);
    norm[1] = __shfl_sync(0xFFFFFFFF, sum, Lane() / 4 + 8);
  }

  // Adds (p / (1 - p))^2 |a - v|^2, times the row's weight.
  __device__ void AddPairs(const float (&p)[n][4], const float (&y)[n][4], int32_t first, const float (&value_norm)[2],
                           bool small, TokenSums& sums) const {
#pragma unroll
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float share = p[i][e];
        const float odds = small ? fmaf(share, share, share) : __fdividef(share, 1.0F - share);
        const int32_t row = first + i * 8 + Lane() % 4 * 2 + e % 2;
        const float base = value_norm[e / 2] + table_.norm[row];
        const float distance = fmaxf(fmaf(-2.0F, y[i][e], base), 0.0F);
        if constexpr (weighted) {
          sums.sum[e / 2] = fmaf(table_.weight[row] * (odds * odds), distance, sums.sum[e / 2]);
        } else {
          sums.sum[e / 2] = fmaf(odds * odds, distance, sums.sum[e / 2]);
        }
      }
  }

  // Sums over the four lanes that share two tokens, then over the passes. Until the last one raw holds the sum so far:
  // NaN and the sign stay.
  __device__ void Store(int32_t token, const float (&value_norm)[2], int32_t first_row, TokenSums& sums) const {
    const bool last = first_row + launch_.resident >= rows_;
    auto pairs = static_cast<float>(values ? params_.rows.group : rows_);
    if constexpr (weighted && !values) pairs = static_cast<float>(params_.rows.group) * weight_sum_;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = isfinite(value_norm[h]) ? sums.sum[h] + sums.check[h] : NAN;
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      const unsigned quad = __ballot_sync(0xFFFFFFFF, sums.dominant[h]) >> (Lane() / 4 * 4) & 0xFU;
      const int32_t at = token + Lane() / 4 + h * 8;
      if (Lane() % 4 != 0 || at >= end_) continue;
      float* raw = params_.raw + static_cast<int64_t>(list_) * params_.cache.max_tokens + at;
      bool dominant = quad != 0;
      if (first_row > 0) {
        dominant = dominant || signbit(*raw);
        sum += fabsf(*raw);
      }
      if (last) sum /= pairs;
      if (!isfinite(sum)) sum = NAN;
      *raw = dominant && !isnan(sum) ? -sum : sum;
    }
  }

  const ScoreLaunch& launch_;
  const ScoreParams& params_;
  int32_t rows_;
  RowTable table_;
  int32_t list_;
  int32_t sequence_;
  int32_t head_;
  int32_t tokens_;
  int32_t first_;  // of the block's tokens
  int32_t end_;
  uint32_t queries_;
  uint32_t outputs_;
  uint32_t keys_;
  uint32_t values_;
  float weight_sum_;  // of a query head's rows; where the score is their weighted mean
};

}  // namespace dropkv::cuda::sm80
