// Decode attention on Hopper: the query heads of a KV head are rows of m64n64k16 products, so that keys and values are
// read once. A token costs g (d + dv) multiply-adds for 2 (d + dv) bytes: memory bounds it, and what the products waste
// on 64 - g rows is never waited for. Blocks stay resident, and share the tiles of all lists evenly (decode_share.cuh).
// One warp of a block feeds the ring, from piece to piece without a pause; four warps compute, and the first of them
// holds all rows that count. All four wait for every tile, in order. Nothing waits for the device's memory before the
// block's end, where lists that several blocks share are completed (decode_merge.cuh).
#pragma once

#include "cuda/device/launch.cuh"
#include "cuda/kernels.h"
#include "cuda/sm90/decode_merge.cuh"
#include "cuda/sm90/values.cuh"

namespace dropkv::cuda::sm90 {

inline constexpr int32_t kDecodeThreads = kConsumers + 32;
inline constexpr int32_t kPieceSlots = 3;  // pieces between the warp that feeds and those that compute

// Blocks on a multiprocessor: where the registers allow it, one computes while the other waits.
template <int kBoxes>
inline constexpr int32_t kBlocksPerProcessor = kBoxes <= 2 ? 2 : 1;

// Shared memory of a block, from a 1024-byte boundary: queries of every piece slot, ring, tables. The products take 64
// rows of queries; those behind kRows are whatever lies there, and nothing is made of them.
template <int kBoxes, int kHalves>
struct DecodeLayout {
  static constexpr int32_t kRows = 8 * kHalves;
  static constexpr int32_t kRowBoxBytes = kRows * kRowBytes;
  static constexpr int32_t kQueryBytes = kBoxes * kRowBoxBytes;
  static constexpr int32_t kSlotBytes = kBoxes * kBoxBytes;
  static constexpr int32_t kMaxSlots = 12;
  struct Tables {
    uint64_t full[kMaxSlots];
    uint64_t empty[kMaxSlots];
    uint64_t piece_full[kPieceSlots];
    uint64_t piece_empty[kPieceSlots];
    Piece pieces[kPieceSlots];
    MergeTables merge;
  };
  // 228 KB of a multiprocessor; 1 KB of every block is the system's, 1 KB the way to the boundary.
  static constexpr int32_t kLimit = 228 * 1024 / kBlocksPerProcessor<kBoxes> / 1024 * 1024 - 2048;
  static constexpr int32_t kRing = kPieceSlots * kQueryBytes;  // where it begins
  static constexpr int32_t kFit = (kLimit - kRing - static_cast<int32_t>(sizeof(Tables))) / kSlotBytes;
  static constexpr int32_t kSlots = kFit > kMaxSlots ? kMaxSlots : kFit;
  static constexpr int32_t kTables = kRing + kSlots * kSlotBytes;
  static constexpr int32_t kBytes = kTables + static_cast<int32_t>(sizeof(Tables)) + 1024;
  static_assert(kSlots >= 6);
};

template <typename T, int kBoxes, int kHalves>
class DecodeBlock {
  using Layout = DecodeLayout<kBoxes, kHalves>;

 public:
  __device__ DecodeBlock(const decode::DecodeArgs& args, unsigned char* shared)
      : args_(args),
        queries_(shared),
        tables_(reinterpret_cast<typename Layout::Tables*>(shared + Layout::kTables)),
        ring_{shared + Layout::kRing, tables_->full, tables_->empty, Layout::kSlots, Layout::kSlotBytes},
        merge_(args, tables_->merge) {}

  // By one thread, before anything of the device's memory is read.
  __device__ void Start() {
    for (int32_t i = 0; i < Layout::kSlots; ++i) {
      BarrierInit(tables_->full + i, 1);
      BarrierInit(tables_->empty + i, kConsumers / 32);
    }
    for (int32_t i = 0; i < kPieceSlots; ++i) {
      BarrierInit(tables_->piece_full + i, 1);
      BarrierInit(tables_->piece_empty + i, kConsumers);
    }
    merge_.Start();
    FenceBarrierInit();
  }

  // By a whole warp.
  __device__ void Produce(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v) const {
    const bool leads = threadIdx.x % 32 == 0;
    ShareWalk walk(args_.params.cache, args_.lists);
    int32_t count = 0;
    int32_t tile = 0;
    Piece piece = walk.Next();
    for (; piece.list >= 0; piece = walk.Next(), ++count) {
      if (leads) FetchPiece(piece, count, &tile, q, k, v);
      __syncwarp();
    }
    if (!leads) return;
    Publish(piece, count);
    BarrierArrive(tables_->piece_full + count % kPieceSlots);
  }

  __device__ void Consume() {
    const int32_t warp = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0);  // known to be uniform
    int32_t tile = 0;
    for (int32_t count = 0;; ++count) {
      const int32_t slot = count % kPieceSlots;
      BarrierWait(tables_->piece_full + slot, count / kPieceSlots & 1);
      const Piece piece = tables_->pieces[slot];
      if (piece.list < 0) break;
      Reset();
      for (int32_t token = piece.begin; token < piece.end; token += kTileTokens)
        Attend(queries_ + slot * Layout::kQueryBytes, tile++, piece.end - token, warp);
      BarrierArrive(tables_->piece_empty + slot);
      if (warp == 0) Store(piece);
    }
    merge_.Finish();
  }

 private:
  // Waits for a free place, and writes the piece there.
  __device__ void Publish(const Piece& piece, int32_t count) const {
    const int32_t slot = count % kPieceSlots;
    BarrierWait(tables_->piece_empty + slot, (count / kPieceSlots & 1) ^ 1);
    tables_->pieces[slot] = piece;
  }

  // The piece, its queries and all its tiles, by one thread.
  __device__ void FetchPiece(const Piece& piece, int32_t count, int32_t* tile, const CUtensorMap* q,
                             const CUtensorMap* k, const CUtensorMap* v) const {
    const uint64_t policy = EvictFirst();
    const CacheParams& cache = args_.params.cache;
    const int32_t slot = count % kPieceSlots;
    const int32_t sequence = piece.list / cache.kv_heads;
    const int32_t head = piece.list % cache.kv_heads;
    Publish(piece, count);
    BarrierExpect(tables_->piece_full + slot, Layout::kQueryBytes);
    FetchRows<kBoxes, Layout::kRows>(queries_ + slot * Layout::kQueryBytes, q, tables_->piece_full + slot, policy,
                                     piece.list, 0);
    for (int32_t token = piece.begin; token < piece.end; token += kTileTokens) {
      FetchTile(ring_, (*tile)++, cache, k, kBoxes, policy, sequence, head, token / kTileTokens);
      FetchTile(ring_, (*tile)++, cache, v, kBoxes, policy, sequence, head, token / kTileTokens);
    }
  }

  __device__ void Reset() {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (float& x : out_[box]) x = 0.0F;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      max_[h] = -INFINITY;
      sum_[h] = 0.0F;
    }
  }

  // Tile `tile` of the block, keys and values, of which the first `tokens` exist.
  __device__ void Attend(const unsigned char* queries, int32_t tile, int32_t tokens, int32_t warp) {
    float s[32];
    ring_.WaitFull(2 * tile);
    WgmmaFence();
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint64_t a = TileDescriptor(queries + box * Layout::kRowBoxBytes);
      const uint64_t b = TileDescriptor(ring_.tile(2 * tile) + box * kBoxBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) WgmmaShared<T, 64>::Run(s, a + 2 * k, b + 2 * k, box + k);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepRegisters(s);
    ring_.Release(2 * tile);
    uint32_t p[16] = {};
    if (warp == 0) Weigh(s, p, tokens);
    ring_.WaitFull(2 * tile + 1);
    AddValues(p, ring_.tile(2 * tile + 1), tokens);
    ring_.Release(2 * tile + 1);
  }

  // Products to logits in units of log2(e). One that is not finite must stay so: the row is then redone.
  __device__ void ToLogits(float (&s)[32], int32_t tokens) const {
    if (args_.params.soft_cap > 0.0F) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i % 4 / 2 < kHalves) s[i] = fmaf(s[i], 0.0F, args_.cap2 * tanhf(s[i] * args_.logit_scale));
    } else {
#pragma unroll
      for (float& x : s) x *= args_.logit_scale;
    }
    if (tokens >= kTileTokens) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2 + i % 2 >= tokens) s[i] = -INFINITY;
  }

  // Products to weights relative to the running maximum; rescales what was summed before. By the warp of the rows.
  __device__ void Weigh(float (&s)[32], uint32_t (&p)[16], int32_t tokens) {
    ToLogits(s, tokens);
    float rescale[2] = {1.0F, 1.0F};
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float largest = max_[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
      rescale[h] = Exp2(max_[h] - base);
      max_[h] = largest;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float low = Exp2(s[4 * n + 2 * h] - base);
        const float high = Exp2(s[4 * n + 2 * h + 1] - base);
        sum += low + high;
        p[2 * n + h] = Pack<T>(low, high);
      }
      sum_[h] = fmaf(sum_[h], rescale[h], sum);
    }
    if (__all_sync(kAllLanes, rescale[0] == 1.0F && rescale[1] == 1.0F)) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i % 4 / 2 < kHalves) out_[box][i] *= rescale[i % 4 / 2];
  }

  __device__ void AddValues(const uint32_t (&p)[16], unsigned char* values, int32_t tokens) {
    if (tokens < kTileTokens) {
      ZeroTail<kBoxes>(values, tokens, static_cast<int32_t>(threadIdx.x), kConsumers);
      NamedSync(kAllGroups, kConsumers);
    }
    AddProduct<T, kBoxes>(out_, p, values);
  }

  // The first warp's: a whole list to the output, part of one to the device's memory; waits for nothing.
  __device__ void Store(const Piece& piece) {
    const auto lane = static_cast<int32_t>(threadIdx.x);
    uint32_t bad_rows = 0;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float sum = sum_[h];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int32_t row = lane / 4 + 8 * h;
      if (row >= args_.params.group) continue;
      if (piece.pieces > 1) {
        StorePart(piece, h, row, sum);
      } else if (!StoreRow(piece, h, row, sum)) {
        bad_rows |= 1U << row;
      }
    }
    if (piece.pieces > 1) {
      if (lane == 0) merge_.Share(piece);
      return;
    }
    bad_rows = __reduce_or_sync(kAllLanes, bad_rows);
    if (bad_rows != 0 && lane == 0) merge_.NoteBad(piece.list, bad_rows);
  }

  __device__ void StorePart(const Piece& piece, int h, int32_t row, float sum) const {
    const int32_t dim = args_.params.cache.value_dim;
    const int64_t at = static_cast<int64_t>(piece.slot()) * args_.params.group + row;
    if (threadIdx.x % 4 == 0) args_.states[at] = {max_[h], sum};
    ForEachTwo(h, [&](int32_t column, const float2& two) {
      if (column < dim) *reinterpret_cast<float2*>(args_.sums + at * dim + column) = two;
    });
  }

  // False where the row is not finite. Short code: a block's first list meets it cold, a miss of the instruction cache
  // every few instructions.
  __device__ bool StoreRow(const Piece& piece, int h, int32_t row, float sum) const {
    const DecodeParams& params = args_.params;
    const int32_t dim = params.cache.value_dim;
    const float normaliser = RowNormaliser(params, piece.list, row, max_[h], sum);
    const int64_t first = (static_cast<int64_t>(piece.list) * params.group + row) * dim;
    if (params.out != nullptr) {
      T* to = static_cast<T*>(params.out) + first;
      ForEachTwo(h, [&](int32_t column, const float2& two) {
        if (column < dim) *reinterpret_cast<uint32_t*>(to + column) = Pack<T>(two.x * normaliser, two.y * normaliser);
      });
    }
    if (params.out32 != nullptr) {
      float* to = params.out32 + first;
      ForEachTwo(h, [&](int32_t column, const float2& two) {
        if (column < dim) *reinterpret_cast<float2*>(to + column) = {two.x * normaliser, two.y * normaliser};
      });
    }
    float check = 0.0F;
    ForEachTwo(h, [&](int32_t column, const float2& two) {
      if (column < dim) check = NotFinite(two.y * normaliser, NotFinite(two.x * normaliser, check));
    });
    return check == 0.0F;
  }

  // f(column, two columns) for the lane's columns of one half's row.
  template <typename F>
  __device__ void ForEachTwo(int h, F&& f) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int n = 0; n < 8; ++n)
        f(box * kBoxDims + n * 8 + static_cast<int32_t>(threadIdx.x) % 4 * 2,
          float2{out_[box][4 * n + 2 * h], out_[box][4 * n + 2 * h + 1]});
  }

  const decode::DecodeArgs& args_;
  unsigned char* queries_;
  typename Layout::Tables* tables_;
  Ring ring_;
  BlockMerge<T> merge_;
  float out_[kBoxes][32];
  float max_[kHalves];
  float sum_[kHalves];  // of this lane's tokens
};

}  // namespace dropkv::cuda::sm90
