// The end of a block of decode attention: lists that several blocks share are completed by the last of them to arrive,
// and rows that are not finite are done again with a look at every token.
#pragma once

#include "cuda/sm90/decode_share.cuh"

namespace dropkv::cuda::sm90 {

inline constexpr int32_t kConsumers = 128;  // threads that compute: as many as AttendRow takes
static_assert(kConsumers == decode::kThreads);

struct MergeTables {
  Piece shared[2];      // the block's pieces of lists that others work on too; list -1: none
  int32_t complete[2];  // this block was the last one at the list
  uint32_t bad_rows;    // of a list: not finite
  int32_t redo;         // some list has such
  uint32_t redo_rows[kConsumers];
  decode::RowScratch scratch;
};

// Counts one more part of a list; true for the last one, behind which the sums of all parts are seen. Releases what its
// thread has seen of this part's sums.
__device__ inline bool CountPart(int32_t* counter, int32_t parts) {
  int32_t before;
  asm volatile("atom.release.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  if (before != parts - 1) return false;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return true;
}

// What a complete row's sums become the output by; 0 where there are none.
__device__ inline float RowNormaliser(const DecodeParams& params, int32_t list, int32_t row, float max, float sum) {
  return decode::Normaliser(max, sum, decode::Sink2(params, list % params.cache.kv_heads * params.group + row));
}

// 0, or NaN where x is not finite: a row's columns are added up.
__device__ inline float NotFinite(float x, float before) { return fmaf(x, 0.0F, before); }

// By the threads that compute.
template <typename T>
class BlockMerge {
  // A list's counter, once it is complete and some rows must be redone: by which block, which rows.
  static constexpr uint32_t kRedo = uint32_t{1} << 31;
  static constexpr int32_t kBatch = 24;   // parts whose sums a thread loads together
  static constexpr int32_t kColumns = 4;  // of a lane

 public:
  __device__ BlockMerge(const decode::DecodeArgs& args, MergeTables& tables) : args_(args), tables_(tables) {}

  // By one thread.
  __device__ void Start() {
    tables_.shared[0] = tables_.shared[1] = Piece{};
    tables_.complete[0] = tables_.complete[1] = 0;
    tables_.bad_rows = 0;
    tables_.redo = 0;
  }

  // By one thread: the piece's sums are in its slot.
  __device__ void Share(const Piece& piece) { tables_.shared[piece.begin == 0 ? 1 : 0] = piece; }

  // By one thread: rows of a complete list that must be redone at the block's end. The list's counter keeps them.
  __device__ void NoteBad(int32_t list, uint32_t rows) {
    args_.arrived[list] = static_cast<int32_t>(kRedo | blockIdx.x << 16 | rows);
    tables_.redo = 1;
  }

  // When the block's last piece is done. The first warp has stored all sums.
  __device__ void Finish() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    __syncwarp();
    if (thread < 2 && tables_.shared[thread].list >= 0)
      tables_.complete[thread] =
          static_cast<int32_t>(CountPart(args_.arrived + tables_.shared[thread].list, tables_.shared[thread].pieces));
    NamedSync(kAllGroups, kConsumers);
    for (int32_t i = 0; i < 2; ++i)
      if (tables_.complete[i] != 0) Merge(tables_.shared[i]);
    if (tables_.redo != 0) RedoRows();
  }

 private:
  __device__ void Merge(const Piece& piece) {
    const int32_t spans = decode::DivideUp(args_.params.cache.value_dim, 32 * kColumns);
    for (int32_t i = static_cast<int32_t>(threadIdx.x) / 32; i < args_.params.group * spans; i += kConsumers / 32) {
      const int32_t row = i / spans;
      if (!MergeRow(piece, row, i % spans * 32 * kColumns + static_cast<int32_t>(threadIdx.x % 32) * kColumns))
        atomicOr(&tables_.bad_rows, 1U << row);
    }
    NamedSync(kAllGroups, kConsumers);
    if (threadIdx.x == 0) {
      args_.arrived[piece.list] = 0;
      if (tables_.bad_rows != 0) NoteBad(piece.list, tables_.bad_rows);
      tables_.bad_rows = 0;
    }
    NamedSync(kAllGroups, kConsumers);
  }

  // Four columns of a row a lane; false where one is not finite. Parts in their order, kBatch at a time: their loads
  // are on their way together, and each lane weighs one of them. Past the first level of cache: other multiprocessors
  // wrote.
  __device__ bool MergeRow(const Piece& piece, int32_t row, int32_t column) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t dim = args_.params.cache.value_dim;
    const int64_t group = args_.params.group;
    float max = -INFINITY;
    float sum = 0.0F;
    float out[kColumns] = {};
    for (int32_t first = 0; first < piece.pieces; first += kBatch) {
      const int32_t count = min(piece.pieces - first, kBatch);
      float2 state = {-INFINITY, 0.0F};
      float4 part[kBatch];
      if (lane < count) state = __ldcg(args_.states + PartSlot(piece.first_block, first + lane) * group + row);
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i)
        if (i < count)
          part[i] = __ldcg(reinterpret_cast<const float4*>(
              args_.sums + (PartSlot(piece.first_block, first + i) * group + row) * dim + min(column, dim - kColumns)));
      const float largest = WarpMax(fmaxf(max, state.x));
      const float base = largest == -INFINITY ? 0.0F : largest;  // no difference of infinities
      const float keep = Exp2(max - base);
      const float take = Exp2(state.x - base);
      max = largest;
      sum = sum * keep + LaneSum<32>(state.y * take);
#pragma unroll
      for (float& x : out) x *= keep;
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const float weight = __shfl_sync(kAllLanes, take, i);
        if (i >= count) continue;
        out[0] = fmaf(part[i].x, weight, out[0]);
        out[1] = fmaf(part[i].y, weight, out[1]);
        out[2] = fmaf(part[i].z, weight, out[2]);
        out[3] = fmaf(part[i].w, weight, out[3]);
      }
    }
    if (column >= dim) return true;
    const float normaliser = RowNormaliser(args_.params, piece.list, row, max, sum);
    const int64_t at = (static_cast<int64_t>(piece.list) * group + row) * dim + column;
    float check = 0.0F;
#pragma unroll
    for (int32_t i = 0; i < kColumns; ++i) {
      // 0 times a NaN must not become a result, but nor must the absence of tokens.
      const float x = sum == 0.0F ? 0.0F : out[i] * normaliser;
      decode::StoreOut<T>(args_.params, at + i, x);
      check = NotFinite(x, check);
    }
    return check == 0.0F;
  }

  // Rows that came out as NaN or Inf, again with a look at every token. By the threads that compute; the warp that
  // feeds has left or is about to: the barriers wait for it where it has not.
  __device__ void RedoRows() {
    for (int32_t list = 0; list < args_.lists; ++list) {
      if (list % kConsumers == 0) FindRedo(list + static_cast<int32_t>(threadIdx.x));
      for (int32_t row = 0; row < args_.params.group; ++row)
        if ((tables_.redo_rows[list % kConsumers] >> row & 1) != 0)
          decode::AttendRow<T>(args_.params, list / args_.params.cache.kv_heads, list % args_.params.cache.kv_heads,
                               row, tables_.scratch);
    }
  }

  // Which rows of the next lists, one a thread, are this block's.
  __device__ void FindRedo(int32_t list) {
    const auto note = list < args_.lists ? static_cast<uint32_t>(__ldcg(args_.arrived + list)) : 0U;
    const bool mine = note >> 16 == (kRedo >> 16 | blockIdx.x);
    if (mine) args_.arrived[list] = 0;
    __syncthreads();
    tables_.redo_rows[threadIdx.x] = mine ? note & 0xFFFF : 0;
    __syncthreads();
  }

  const decode::DecodeArgs& args_;
  MergeTables& tables_;
};

}  // namespace dropkv::cuda::sm90
