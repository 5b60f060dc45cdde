// Pass 1 on Hopper (docs/kernels/attend.md): softmax state of the observation rows over one range of keys, as in flash
// decoding: rows are the M side, S = Q K^T, P stays in registers as the A operand of O += P V. One warp feeds the ring;
// two warpgroups compute. Up to 64 rows: both hold the same rows and take turns at the tiles, their states are merged
// in a fixed order. More rows: each holds its own 64.
#pragma once

#include "cuda/kernels.h"
#include "cuda/sm90/values.cuh"

namespace dropkv::cuda {

inline constexpr int32_t kConsumers = 256;             // threads of the two computing warpgroups
inline constexpr int32_t kThreads = kConsumers + 128;  // and one that feeds them
inline constexpr int32_t kProducerRegisters = 40;
inline constexpr int32_t kConsumerRegisters = 232;

struct AttendLaunch {
  AttendParams params;
  int32_t row_blocks = 1;  // blocks that share the rows of a head
  int32_t kept_tiles = 0;  // of every split: the last ones, left in L2 for the score pass
};

// Shared memory of a block, from a 1024-byte boundary: queries, ring, barriers.
template <int kBoxes, bool kPair>
struct AttendLayout {
  static constexpr int32_t kRows = kPair ? 128 : 64;
  static constexpr int32_t kRowBoxBytes = kRows * kRowBytes;
  static constexpr int32_t kQueryBytes = kBoxes * kRowBoxBytes;
  static constexpr int32_t kSlotBytes = kBoxes * kBoxBytes;
  struct Tables {
    uint64_t full[12];
    uint64_t empty[12];
    uint64_t rows_full;
    int32_t issued;
    float max[64];
    float sum[64];
  };
  static constexpr int32_t kFit = (kSharedLimit - kQueryBytes - static_cast<int32_t>(sizeof(Tables))) / kSlotBytes;
  static constexpr int32_t kSlots = kFit > 12 ? 12 : kFit;
  static constexpr int32_t kBytes = kQueryBytes + kSlots * kSlotBytes + sizeof(Tables) + 1024;
  static_assert(kSlots >= 4);
};

// kExclude: the pass after the first, for rows whose top token has p > 1/2: the same sums without that token.
// kValues: outputs too; without, the denominators alone, from the keys.
template <typename T, int kBoxes, bool kPair, bool kExclude, bool kValues>
class AttendBlock {
  using Layout = AttendLayout<kBoxes, kPair>;

 public:
  __device__ AttendBlock(const AttendLaunch& launch, unsigned char* shared)
      : launch_(launch),
        params_(launch.params),
        queries_(shared),
        tables_(reinterpret_cast<typename Layout::Tables*>(shared + Layout::kQueryBytes +
                                                           Layout::kSlots * Layout::kSlotBytes)),
        ring_{shared + Layout::kQueryBytes, tables_->full,   tables_->empty, Layout::kSlots,
              Layout::kSlotBytes,           &tables_->issued} {
    const int32_t splits = params_.partials.splits;
    int32_t block = static_cast<int32_t>(blockIdx.x);
    row0_ = block % launch.row_blocks * Layout::kRows;
    block /= launch.row_blocks;
    split_ = block % splits;
    list_ = block / splits;
    sequence_ = list_ / params_.cache.kv_heads;
    head_ = list_ % params_.cache.kv_heads;
    tokens_ = Length(params_.cache, sequence_, head_);
    rows_ = params_.rows.group * params_.rows.rows;
    const TokenRange range = SplitOf(params_.partials, tokens_, split_);
    first_tile_ = range.begin / kTileTokens;
    tiles_ = range.end > range.begin ? (range.end + kTileTokens - 1) / kTileTokens - first_tile_ : 0;
  }

  // By all threads; false: the block has nothing to do.
  __device__ bool Start() {
    if (tiles_ == 0) {
      if constexpr (!kExclude) WriteEmpty();
      return false;
    }
    if constexpr (kExclude) {
      bool top = false;
      if (params_.has_tops[list_] != 0) {
        for (int32_t row = row0_ + threadIdx.x; row < min(rows_, row0_ + Layout::kRows); row += kThreads)
          top = top || params_.top_split[static_cast<int64_t>(list_) * rows_ + row] == split_;
      }
      if (__syncthreads_or(top) == 0) return false;
    }
    if (threadIdx.x == 0) {
      for (int32_t i = 0; i < Layout::kSlots; ++i) {
        BarrierInit(tables_->full + i, 1);
        BarrierInit(tables_->empty + i, kPair ? 8 : 4);
      }
      tables_->issued = 0;
      BarrierInit(&tables_->rows_full, 1);
      FenceBarrierInit();
    }
    __syncthreads();
    return true;
  }

  __device__ void Produce(const CUtensorMap* k, const CUtensorMap* v, const CUtensorMap* queries) const {
    // Ahead of the tiles, behind which they would queue.
    BarrierExpect(&tables_->rows_full, Layout::kQueryBytes);
    FetchRows<kBoxes, Layout::kRows>(queries_, queries, &tables_->rows_full, EvictLast(), list_, row0_);
    int32_t slot = 0;
    for (int32_t tile = first_tile_; tile < first_tile_ + tiles_; ++tile) {
      // The last tiles stay in L2, where the score pass finds them.
      const uint64_t policy = tile >= first_tile_ + tiles_ - launch_.kept_tiles ? EvictLast() : EvictFirst();
      FetchTile(ring_, slot++, params_.cache, k, kBoxes, policy, sequence_, head_, tile);
      if constexpr (kValues) FetchTile(ring_, slot++, params_.cache, v, kBoxes, policy, sequence_, head_, tile);
    }
  }

  __device__ void Consume() {
    const int32_t group = __shfl_sync(0xFFFFFFFF, static_cast<int32_t>(threadIdx.x) / 128, 0);  // known to be uniform
    StartRows(group);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (float& x : out_[box]) x = 0.0F;
    BarrierWait(&tables_->rows_full, 0);
    for (int32_t i = kPair ? 0 : group; i < tiles_; i += kPair ? 1 : 2) {
      const int32_t slot = kValues ? 2 * i : i;
      float s[32];
      ring_.WaitFull(slot);
      WgmmaFence();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint64_t a = TileDescriptor(queries_ + box * Layout::kRowBoxBytes + (kPair ? group * kBoxBytes : 0));
        const uint64_t b = TileDescriptor(ring_.tile(slot) + box * kBoxBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) WgmmaShared<T, 64>::Run(s, a + 2 * k, b + 2 * k, box + k);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      KeepRegisters(s);
      ring_.Release(slot);
      uint32_t p[16];
      Softmax(s, p, (first_tile_ + i) * kTileTokens);
      if constexpr (kValues) {
        ring_.WaitFull(slot + 1);
        AddValues(p, slot + 1, group, (first_tile_ + i) * kTileTokens);
        ring_.Release(slot + 1);
      }
    }
    Finish(group);
  }

 private:
  __device__ void WriteEmpty() {
    for (int32_t row = row0_ + threadIdx.x; row < min(row0_ + Layout::kRows, params_.partials.padded_rows);
         row += kThreads) {
      params_.partials.max[PartialRow(row)] = -INFINITY;
      params_.partials.sum[PartialRow(row)] = 0.0F;
    }
  }

  // The thread's two rows.
  __device__ void StartRows(int32_t group) {
    least_visible_ = INT32_MAX;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_[h] = row0_ + (kPair ? group * 64 : 0) + static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 +
                static_cast<int32_t>(threadIdx.x) % 32 / 4 + 8 * h;
      visible_[h] = row_[h] < rows_ ? VisibleTokens(params_.rows, sequence_, head_, row_[h], tokens_) : 0;
      max_[h] = -INFINITY;
      sum_[h] = 0.0F;
      excluded_[h] = NAN;
      if constexpr (kExclude) {
        if (row_[h] < rows_ && params_.top_split[static_cast<int64_t>(list_) * rows_ + row_[h]] == split_)
          excluded_[h] = params_.partials.max[PartialRow(row_[h])];
      }
      least_visible_ = min(least_visible_, visible_[h]);
    }
    least_visible_ = __reduce_min_sync(0xFFFFFFFF, least_visible_);
  }

  __device__ int64_t PartialRow(int32_t row) const {
    return (static_cast<int64_t>(list_) * params_.partials.splits + split_) * params_.partials.padded_rows + row;
  }

  // Logits to weights relative to the running maximum; rescales what was summed before.
  __device__ void Softmax(float (&s)[32], uint32_t (&p)[16], int32_t first) {
    float factor = params_.rows.scale * kLog2E;
    if (params_.rows.soft_cap > 0.0F) {
#pragma unroll
      for (float& x : s) x = Logit2(params_.rows, x);
      factor = 1.0F;
    }
    if (first + kTileTokens > least_visible_) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int32_t token = first + i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2;
        if (token >= visible_[i % 4 / 2]) s[i] = -INFINITY;
      }
    }
    if constexpr (kExclude) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int h = i % 4 / 2;
        if (s[i] * factor != excluded_[h]) continue;
        s[i] = -INFINITY;
        params_.state.top[static_cast<int64_t>(list_) * rows_ + row_[h]] =
            first + i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2;
      }
    }
    float shift[2];
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = s[2 * h];
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      const float max = fmaxf(max_[h], largest * factor);
      shift[h] = max == -INFINITY ? 0.0F : max;  // nothing seen so far: all weights are 0
      rescale[h] = Exp2(max_[h] - shift[h]);
      max_[h] = max;
      sum_[h] *= rescale[h];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = Exp2(fmaf(s[i], factor, -shift[i % 4 / 2]));
      sum_[i % 4 / 2] += s[i];
    }
    if constexpr (kValues) Rescale(s, p, rescale);
  }

  __device__ void Rescale(const float (&s)[32], uint32_t (&p)[16], const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = Pack<T>(s[2 * i], s[2 * i + 1]);
    if (__all_sync(0xFFFFFFFF, rescale[0] == 1.0F && rescale[1] == 1.0F)) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int i = 0; i < 32; ++i) out_[box][i] *= rescale[i % 4 / 2];
  }

  __device__ void AddValues(const uint32_t (&p)[16], int32_t slot, int32_t group, int32_t first) {
    unsigned char* values = ring_.tile(slot);
    if (first + kTileTokens > tokens_) {
      const int32_t threads = kPair ? kConsumers : 128;
      ZeroTail<kBoxes>(values, tokens_ - first, static_cast<int32_t>(threadIdx.x) % threads, threads);
      NamedSync(kPair ? kAllGroups : kOneGroup + group, threads);
    }
    AddProduct<T, kBoxes>(out_, p, values);
  }

  __device__ void Finish(int32_t group) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xFFFFFFFF, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xFFFFFFFF, sum_[h], 2);
    }
    if constexpr (!kPair) {
      // The ring's tiles are done with: the second group's state passes through them.
      NamedSync(kAllGroups, kConsumers);
      float* out = reinterpret_cast<float*>(ring_.tiles);
      const int32_t local[2] = {row_[0] - row0_, row_[1] - row0_};
      if (group == 1) {
        for (int h = 0; h < 2; ++h) {
          tables_->max[local[h]] = max_[h];
          tables_->sum[local[h]] = sum_[h];
        }
        ForOutputs([&](int h, int32_t column, float x, float y) {
          *reinterpret_cast<float2*>(out + local[h] * kBoxes * kBoxDims + column) = make_float2(x, y);
        });
      }
      NamedSync(kAllGroups, kConsumers);
      if (group == 1) return;
      float mine[2];
      float other[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float max = fmaxf(max_[h], tables_->max[local[h]]);
        const float shift = max == -INFINITY ? 0.0F : max;
        mine[h] = Exp2(max_[h] - shift);
        other[h] = Exp2(tables_->max[local[h]] - shift);
        sum_[h] = sum_[h] * mine[h] + tables_->sum[local[h]] * other[h];
        max_[h] = max;
      }
      if constexpr (kValues) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            const int h = i % 4 / 2;
            const int32_t column = box * kBoxDims + i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2;
            out_[box][i] = out_[box][i] * mine[h] + out[local[h] * kBoxes * kBoxDims + column] * other[h];
          }
      }
    }
    WritePartial();
  }

  // body(h, column, x, y): outputs of row h at column and column + 1.
  template <typename F>
  __device__ void ForOutputs(F&& body) {
    if constexpr (kValues) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
#pragma unroll
        for (int i = 0; i < 32; i += 2)
          body(i % 4 / 2, box * kBoxDims + i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2, out_[box][i],
               out_[box][i + 1]);
    }
  }

  __device__ void WritePartial() {
    bool writes[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      writes[h] = row_[h] < params_.partials.padded_rows;
      if constexpr (kExclude) writes[h] = excluded_[h] == excluded_[h];  // a number: this row's top was here
      if (!writes[h] || threadIdx.x % 4 != 0) continue;
      params_.partials.max[PartialRow(row_[h])] = max_[h];
      params_.partials.sum[PartialRow(row_[h])] = sum_[h];
    }
    const int32_t dim = params_.cache.value_dim;
    ForOutputs([&](int h, int32_t column, float x, float y) {
      if (!writes[h] || column >= dim) return;
      *reinterpret_cast<float2*>(params_.partials.out + PartialRow(row_[h]) * dim + column) = make_float2(x, y);
    });
  }

  const AttendLaunch& launch_;
  const AttendParams& params_;
  unsigned char* queries_;
  typename Layout::Tables* tables_;
  Ring ring_;
  int32_t row0_;
  int32_t split_;
  int32_t list_;
  int32_t sequence_;
  int32_t head_;
  int32_t tokens_;
  int32_t rows_;
  int32_t first_tile_;
  int32_t tiles_;
  int32_t row_[2];
  int32_t visible_[2];
  int32_t least_visible_;
  float max_[2];
  float sum_[2];
  float excluded_[2];
  float out_[kBoxes][32];
};

}  // namespace dropkv::cuda
