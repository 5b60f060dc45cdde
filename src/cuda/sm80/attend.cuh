// Pass 1 with mma.sync: softmax state of the observation rows over one range of tokens, as in flash decoding. Rows are
// the M side, 16 of them a warp; P goes from the logits' registers into the product with V. Where the rows are few, the
// block's warps form groups that take turns at the tiles; their states are merged in a fixed order.
#pragma once

#include "cuda/kernels.h"
#include "cuda/sm80/rows.cuh"

namespace dropkv::cuda::sm80 {

inline constexpr int32_t kAttendWarps = 8;
inline constexpr int32_t kWarpRows = 16;

struct AttendLaunch {
  AttendParams params;
  Alignment aligned;
  bool exclude;
  int32_t row_blocks;  // blocks that share the rows of a head
};

// group_warps: warps of a group, each with its own rows. All groups hold the same rows.
template <int group_warps>
struct AttendShape {
  static constexpr int kGroups = kAttendWarps / group_warps;
  static constexpr int kRows = group_warps * kWarpRows;
  static constexpr int kTile = group_warps == 1 ? 16 : group_warps == 2 ? 32 : 64;  // tokens
  static constexpr int kSlots = group_warps == 8 ? 4 : 2;                           // of keys or values, of a group
};

// Registers of a lane that the groups exchange: outputs, then maximum and sum of two rows.
__host__ __device__ constexpr int32_t StateFloats(int out_tiles) { return out_tiles * 4 + 4; }

template <int group_warps, int out_tiles>
__host__ __device__ inline int32_t AttendBytes(const CacheParams& cache) {
  using Shape = AttendShape<group_warps>;
  const int32_t row = RowBytes(cache.key_dim) > RowBytes(cache.value_dim) || out_tiles == 0 ? RowBytes(cache.key_dim)
                                                                                            : RowBytes(cache.value_dim);
  const int32_t ring = Shape::kGroups * Shape::kSlots * Shape::kTile * row;
  const int32_t merge = (Shape::kGroups - 1) * group_warps * 32 * StateFloats(out_tiles) * 4;
  return Shape::kRows * RowBytes(cache.key_dim) + (ring > merge ? ring : merge);
}

// out_tiles: n-tiles of the output that a warp holds; 0: denominators alone, from the keys.
template <typename T, int group_warps, int out_tiles>
class AttendBlock {
  using Shape = AttendShape<group_warps>;
  static constexpr bool kValues = out_tiles > 0;
  static constexpr int kLogitTiles = Shape::kTile / 8;

 public:
  __device__ AttendBlock(const AttendLaunch& launch, unsigned char* shared) : launch_(launch), params_(launch.params) {
    auto block = static_cast<int32_t>(blockIdx.x);
    row0_ = block % launch.row_blocks * Shape::kRows;
    block /= launch.row_blocks;
    split_ = block % params_.partials.splits;
    list_ = block / params_.partials.splits;
    sequence_ = list_ / params_.cache.kv_heads;
    head_ = list_ % params_.cache.kv_heads;
    tokens_ = Length(params_.cache, sequence_, head_);
    rows_ = params_.rows.group * params_.rows.rows;
    const TokenRange range = SplitOf(params_.partials, tokens_, split_);
    first_ = range.begin;
    end_ = range.end;
    const int32_t key_bytes = RowBytes(params_.cache.key_dim);
    const int32_t value_bytes = kValues ? RowBytes(params_.cache.value_dim) : 0;
    slot_bytes_ = Shape::kTile * max(key_bytes, value_bytes);
    queries_ = SharedAddress(shared);
    ring_ = queries_ + Shape::kRows * key_bytes + Group() * Shape::kSlots * slot_bytes_;
    merge_ = reinterpret_cast<float*>(shared + Shape::kRows * key_bytes);
  }

  __device__ void Run() {
    if (first_ >= end_) {
      if (!launch_.exclude) WriteEmpty();
      return;
    }
    if (launch_.exclude && !HoldsTop()) return;
    LoadQueries();
    StartRows();
    for (int32_t piece = 0; piece < Shape::kSlots; ++piece) Issue(piece);
    __syncthreads();  // queries
    for (int32_t tile = 0; TokenOf(tile) < end_; ++tile) {
      const int32_t piece = kValues ? 2 * tile : tile;
      float p[kLogitTiles][4];
      WaitCopies<Shape::kSlots - 1>();
      GroupSync();
      if (HasRows())
        MultiplyRows<T, kLogitTiles>(
            p, RowsAddress(queries_ + RowInBlock() * RowBytes(params_.cache.key_dim), RowBytes(params_.cache.key_dim)),
            ColumnsAddress(Slot(piece), RowBytes(params_.cache.key_dim)), params_.cache.key_dim);
      GroupSync();
      Issue(piece + Shape::kSlots);
      if (HasRows()) Softmax(p, TokenOf(tile));
      if constexpr (kValues) {
        WaitCopies<Shape::kSlots - 1>();
        GroupSync();
        if (HasRows()) AddValues(p, Slot(piece + 1));
        GroupSync();
        Issue(piece + 1 + Shape::kSlots);
      }
    }
    WaitCopies<0>();
    Merge();
    if (Group() == 0 && HasRows()) Store();
  }

 private:
  __device__ static int32_t Lane() { return static_cast<int32_t>(threadIdx.x) % 32; }
  __device__ static int32_t WarpOfGroup() { return static_cast<int32_t>(threadIdx.x) / 32 % group_warps; }
  __device__ static int32_t Group() { return static_cast<int32_t>(threadIdx.x) / 32 / group_warps; }
  __device__ static int32_t RowInBlock() { return WarpOfGroup() * kWarpRows; }
  __device__ bool HasRows() const { return row0_ + RowInBlock() < rows_; }
  __device__ int32_t TokenOf(int32_t tile) const { return first_ + (tile * Shape::kGroups + Group()) * Shape::kTile; }
  __device__ uint32_t Slot(int32_t piece) const { return ring_ + piece % Shape::kSlots * slot_bytes_; }
  __device__ int64_t PartialRow(int32_t row) const {
    return (static_cast<int64_t>(list_) * params_.partials.splits + split_) * params_.partials.padded_rows + row;
  }
  __device__ bool IsTopRow(int32_t row) const {
    return row < rows_ && params_.top_split[static_cast<int64_t>(list_) * rows_ + row] == split_;
  }

  __device__ static void GroupSync() {
    if constexpr (group_warps == 1) {
      __syncwarp();
    } else if constexpr (group_warps == kAttendWarps) {
      __syncthreads();
    } else {
      NamedSync(1 + Group(), group_warps * 32);
    }
  }

  // Some row of the block has its top token in this range.
  __device__ bool HoldsTop() const {
    if (params_.has_tops[list_] == 0) return false;
    const bool top = static_cast<int32_t>(threadIdx.x) < Shape::kRows && IsTopRow(row0_ + threadIdx.x);
    return __syncthreads_or(top) != 0;
  }

  __device__ void LoadQueries() const {
    for (int32_t i = threadIdx.x / 8; i < Shape::kRows; i += kAttendWarps * 4) {
      const int32_t row = row0_ + i;
      const bool judges = row < rows_ && params_.row_ok[static_cast<int64_t>(list_) * rows_ + row] != 0;
      const auto* q = static_cast<const T*>(params_.rows.q);
      if (judges) q += QueryOffset(params_.rows, sequence_, head_, row);
      CopyRow(queries_ + i * RowBytes(params_.cache.key_dim), q, judges, params_.cache.key_dim, threadIdx.x % 8,
              launch_.aligned.queries);
    }
    CommitCopies();
    WaitCopies<0>();
  }

  // The lane's two rows.
  __device__ void WriteEmpty() const {
    for (auto row = static_cast<int32_t>(row0_ + threadIdx.x); row < min(row0_ + Shape::kRows, rows_);
         row += blockDim.x) {
      params_.partials.max[PartialRow(row)] = -INFINITY;
      params_.partials.sum[PartialRow(row)] = 0.0F;
    }
  }

  __device__ void StartRows() {
    least_visible_ = INT32_MAX;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_[h] = row0_ + RowInBlock() + Lane() / 4 + 8 * h;
      visible_[h] = row_[h] < rows_ ? VisibleTokens(params_.rows, sequence_, head_, row_[h], tokens_) : 0;
      least_visible_ = min(least_visible_, visible_[h]);
      max_[h] = -INFINITY;
      sum_[h] = 0.0F;
      excluded_[h] = launch_.exclude && IsTopRow(row_[h]) ? params_.partials.max[PartialRow(row_[h])] : NAN;
    }
    least_visible_ = __reduce_min_sync(0xFFFFFFFF, least_visible_);
#pragma unroll
    for (int i = 0; i < out_tiles; ++i)
#pragma unroll
      for (float& x : out_[i]) x = 0.0F;
  }

  // Piece i of the group's stream: keys and values in turn, or keys alone.
  __device__ void Issue(int32_t piece) const {
    const int32_t token = TokenOf(kValues ? piece / 2 : piece);
    if (token < end_) {
      const CacheParams& cache = params_.cache;
      const bool keys = !kValues || piece % 2 == 0;
      const TokenRows<T> rows{cache,
                              keys ? cache.k : cache.v,
                              keys ? cache.key_dim : cache.value_dim,
                              sequence_,
                              head_,
                              tokens_,
                              keys ? launch_.aligned.keys : launch_.aligned.values};
      rows.Load(Slot(piece), token, Shape::kTile, static_cast<int32_t>(threadIdx.x) % (group_warps * 32),
                group_warps * 32);
    }
    CommitCopies();
  }

  // Products to logits in units of log2.
  __device__ void Logits(float (&s)[kLogitTiles][4], int32_t token) {
    const float scale2 = params_.rows.scale * kLog2E;
    const bool capped = params_.rows.soft_cap > 0.0F;
#pragma unroll
    for (int i = 0; i < kLogitTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // A cap would make a number of an infinite product: x - x is then NaN.
        s[i][e] = capped ? Logit2(params_.rows, s[i][e]) + (s[i][e] - s[i][e]) : s[i][e] * scale2;
      }
    if (token + Shape::kTile > least_visible_) {
#pragma unroll
      for (int i = 0; i < kLogitTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (token + i * 8 + Lane() % 4 * 2 + e % 2 >= visible_[e / 2]) s[i][e] = -INFINITY;
    }
    if (!launch_.exclude) return;
#pragma unroll
    for (int i = 0; i < kLogitTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (s[i][e] != excluded_[e / 2]) continue;
        s[i][e] = -INFINITY;
        params_.state.top[static_cast<int64_t>(list_) * rows_ + row_[e / 2]] = token + i * 8 + Lane() % 4 * 2 + e % 2;
      }
  }

  // Products to weights relative to the running maximum; rescales what was summed before.
  __device__ void Softmax(float (&s)[kLogitTiles][4], int32_t token) {
    Logits(s, token);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = max_[h];
#pragma unroll
      for (int i = 0; i < kLogitTiles; ++i) largest = fmaxf(largest, fmaxf(s[i][2 * h], s[i][2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      const float base = largest == -INFINITY ? 0.0F : largest;
      const float factor = Exp2(max_[h] - base);
      max_[h] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kLogitTiles; ++i)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[i][e] = Exp2(s[i][e] - base);
          sum += s[i][e];
        }
      sum_[h] = fmaf(sum_[h], factor, sum);
#pragma unroll
      for (int i = 0; i < out_tiles; ++i) {
        out_[i][2 * h] *= factor;
        out_[i][2 * h + 1] *= factor;
      }
    }
  }

  // out += P V, 16 tokens at a time.
  __device__ void AddValues(const float (&p)[kLogitTiles][4], uint32_t values) {
    const int32_t row_bytes = RowBytes(params_.cache.value_dim);
    const int32_t dim = PaddedDim(params_.cache.value_dim);
    // Rows 0..15 of V are the product's k: two matrices of 8 tokens, then the same for the next 8 dims.
    const uint32_t address = RowsAddress(values, row_bytes);
#pragma unroll
    for (int i = 0; i < kLogitTiles; i += 2) {
      const uint32_t left[4] = {Pack<T>(p[i][0], p[i][1]), Pack<T>(p[i][2], p[i][3]), Pack<T>(p[i + 1][0], p[i + 1][1]),
                                Pack<T>(p[i + 1][2], p[i + 1][3])};
#pragma unroll
      for (int n = 0; n < out_tiles; n += 2) {
        if (n * 8 >= dim) break;
        uint32_t right[4];
        LoadMatricesTransposed(right, address + i * 8 * row_bytes + n * 16);
        MultiplyAdd<T>(out_[n], left, right[0], right[1]);
        MultiplyAdd<T>(out_[n + 1], left, right[2], right[3]);
      }
    }
  }

  // The first group's warps take over the states of the same rows, group by group.
  __device__ void Merge() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum_[h] += __shfl_xor_sync(0xFFFFFFFF, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xFFFFFFFF, sum_[h], 2);
    }
    if constexpr (Shape::kGroups == 1) return;
    constexpr int32_t kFloats = StateFloats(out_tiles);
    __syncthreads();  // the ring's memory is free
    if (Group() > 0) {
      float* state = merge_ + ((Group() - 1) * group_warps + WarpOfGroup()) * kFloats * 32 + Lane();
#pragma unroll
      for (int i = 0; i < out_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[(i * 4 + e) * 32] = out_[i][e];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state[(out_tiles * 4 + h) * 32] = max_[h];
        state[(out_tiles * 4 + 2 + h) * 32] = sum_[h];
      }
    }
    __syncthreads();
    if (Group() > 0) return;
    for (int32_t group = 1; group < Shape::kGroups; ++group)
      AddState(merge_ + ((group - 1) * group_warps + WarpOfGroup()) * kFloats * 32 + Lane());
  }

  __device__ void AddState(const float* state) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float other = state[(out_tiles * 4 + h) * 32];
      const float largest = fmaxf(max_[h], other);
      const float base = largest == -INFINITY ? 0.0F : largest;
      const float own_factor = Exp2(max_[h] - base);
      const float factor = Exp2(other - base);
      max_[h] = largest;
      sum_[h] = sum_[h] * own_factor + state[(out_tiles * 4 + 2 + h) * 32] * factor;
#pragma unroll
      for (int i = 0; i < out_tiles; ++i)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) out_[i][e] = out_[i][e] * own_factor + state[(i * 4 + e) * 32] * factor;
    }
  }

  __device__ void Store() const {
    const int32_t dim = params_.cache.value_dim;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] >= rows_ || (launch_.exclude && !IsTopRow(row_[h]))) continue;
      const int64_t row = PartialRow(row_[h]);
      if (Lane() % 4 == 0) {
        params_.partials.max[row] = max_[h];
        params_.partials.sum[row] = sum_[h];
      }
#pragma unroll
      for (int i = 0; i < out_tiles; ++i) {
        const int32_t at = i * 8 + Lane() % 4 * 2;
        if (at < dim)
          *reinterpret_cast<float2*>(params_.partials.out + row * dim + at) =
              make_float2(out_[i][2 * h], out_[i][2 * h + 1]);
      }
    }
  }

  const AttendLaunch& launch_;
  const AttendParams& params_;
  int32_t row0_;  // of the block
  int32_t split_;
  int32_t list_;
  int32_t sequence_;
  int32_t head_;
  int32_t tokens_;
  int32_t rows_;
  int32_t first_;  // of the split's tokens
  int32_t end_;
  int32_t slot_bytes_;
  uint32_t queries_;
  uint32_t ring_;  // of the group
  float* merge_;
  int32_t row_[2];
  int32_t visible_[2];
  int32_t least_visible_;  // of the warp's rows
  float max_[2];
  float sum_[2];  // of the lane's columns
  float excluded_[2];
  float out_[out_tiles > 0 ? out_tiles : 1][4];
};

}  // namespace dropkv::cuda::sm80
