// Moves the kept rows of keys and values together: gathers them into other memory, or moves them to the front of their
// own lists.
//
// The rows of all lists, one list behind the other, are cut into chunks of one CTA, which holds a whole chunk in
// registers. In place, row i of a list goes to token i and comes from a token >= i. So what a chunk overwrites is read
// by itself and by earlier chunks of its list, never by later ones. CTAs take chunks in order, by a ticket, tell when
// they have loaded one, and write when the earlier chunks of the list are loaded. Those have smaller tickets: they are
// in the hands of running CTAs that tell before they wait, so the wait ends.
#include <algorithm>

#include "cuda/any/clear.cuh"
#include "cuda/any/vector.cuh"
#include "cuda/kernels.h"

namespace dropkv::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kVectorsPerThread = 8;
constexpr int32_t kChunkVectors = kThreads * kVectorsPerThread;
constexpr int32_t kMaxChunkRows = 128;
constexpr int32_t kCtasPerMultiprocessor = 8;

struct CompactPlan {
  int32_t lists = 0;
  int32_t element_bytes = 0;
  int32_t vector_bytes = 0;  // 16, or less where addresses or row sizes are no multiples of it
  int32_t key_vectors = 0;   // of a row
  int32_t row_vectors = 0;   // of a row of keys and a row of values
  int32_t chunk_rows = 0;
  int64_t max_chunks = 0;
};

struct RowMove {
  const unsigned char* from;
  unsigned char* to;
};

// The last list that begins at or before `row`. Every warp for itself: its lanes probe 32 places at once.
__device__ int32_t ListOfRow(const int64_t* offsets, int32_t lists, int64_t row) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t first = 0;
  int32_t count = lists;
  while (count > 1) {
    const int32_t step = (count + 31) / 32;
    const bool begun = lane * step < count && offsets[first + lane * step] <= row;
    const int32_t last = __popc(__ballot_sync(kAllLanes, begun)) - 1;
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

// moves[2 * i] and [2 * i + 1]: keys and values of row begin + i.
template <bool kInPlace>
__device__ void FindMoves(const CompactParams& params, const CompactPlan& plan, int64_t begin, int32_t count,
                          RowMove* moves) {
  const CacheParams& source = params.source;
  int32_t list = ListOfRow(params.offsets, plan.lists, begin);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < 2 * count; i += kThreads) {
    const int64_t row = begin + i / 2;
    while (row >= params.offsets[list + 1]) ++list;
    const bool is_key = i % 2 == 0;
    const Tensor& tensor = is_key ? source.k : source.v;
    const int32_t sequence = list / source.kv_heads;
    const int32_t head = list % source.kv_heads;
    const auto* data = static_cast<const unsigned char*>(tensor.data);
    RowMove move{};
    move.from = data + TokenOffset(source, tensor, sequence, head, params.positions[row]) * plan.element_bytes;
    if (kInPlace) {
      const auto token = static_cast<int32_t>(row - params.offsets[list]);
      move.to =
          const_cast<unsigned char*>(data) + TokenOffset(source, tensor, sequence, head, token) * plan.element_bytes;
    } else {
      const int32_t dim = is_key ? source.key_dim : source.value_dim;
      move.to = static_cast<unsigned char*>(is_key ? params.k : params.v) + row * dim * plan.element_bytes;
    }
    moves[i] = move;
  }
}

// f(i, from, to) for every vector i of this thread in a chunk of `rows` rows.
template <typename Vector, typename F>
__device__ void ForVectors(const CompactPlan& plan, int32_t rows, const RowMove* moves, F&& f) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t step_rows = kThreads / plan.row_vectors;
  const int32_t step_columns = kThreads % plan.row_vectors;
  int32_t row = thread / plan.row_vectors;
  int32_t column = thread % plan.row_vectors;
#pragma unroll
  for (int32_t i = 0; i < kVectorsPerThread; ++i) {
    if (row < rows) {
      const bool is_key = column < plan.key_vectors;
      const RowMove move = moves[2 * row + (is_key ? 0 : 1)];
      const int32_t at = is_key ? column : column - plan.key_vectors;
      f(i, reinterpret_cast<const Vector*>(move.from) + at, reinterpret_cast<Vector*>(move.to) + at);
    }
    row += step_rows;
    column += step_columns;
    if (column >= plan.row_vectors) ++row, column -= plan.row_vectors;
  }
}

// In place: the next chunk, from a counter that all CTAs share. A barrier of the CTA.
__device__ int64_t TakeTicket(int32_t* counter, int32_t* shared) {
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(counter, 1);
  __syncthreads();
  return *shared;
}

// In place, when every thread holds its vectors of `chunk`. loaded: one bit for every chunk. Returns when all chunks
// from first_chunk on are loaded, up to this one.
__device__ void AwaitEarlierLoads(uint32_t* loaded, int64_t first_chunk, int64_t chunk) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicOr(loaded + chunk / 32, 1U << (chunk % 32));
  }
  if (threadIdx.x < 32) {
    for (int64_t word = first_chunk / 32 + threadIdx.x; 32 * word < chunk; word += 32) {
      uint32_t wanted = 0xFFFFFFFFU;
      if (32 * word < first_chunk) wanted <<= first_chunk % 32;
      if (32 * (word + 1) > chunk) wanted &= (1U << (chunk % 32)) - 1U;
      while ((*const_cast<volatile uint32_t*>(loaded + word) & wanted) != wanted) __nanosleep(32);
    }
    __threadfence();
  }
  __syncthreads();
}

template <typename Vector, bool kInPlace>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor)
    CompactKernel(const __grid_constant__ CompactParams params, const __grid_constant__ CompactPlan plan) {
  __shared__ RowMove moves[2 * kMaxChunkRows];
  __shared__ int32_t ticket;
  ChainStart();
  const int64_t total = params.offsets[plan.lists];
  int64_t chunk = kInPlace ? TakeTicket(params.workspace, &ticket) : blockIdx.x;
  while (chunk * plan.chunk_rows < total) {
    const int64_t begin = chunk * plan.chunk_rows;
    const auto rows = static_cast<int32_t>(min(total - begin, int64_t{plan.chunk_rows}));
    FindMoves<kInPlace>(params, plan, begin, rows, moves);
    __syncthreads();
    Vector vectors[kVectorsPerThread];
    ForVectors<Vector>(plan, rows, moves, [&](int32_t i, const Vector* from, const Vector* to) {
      if (!kInPlace || from != to) vectors[i] = __ldcs(from);
    });
    if (kInPlace) {
      const int64_t list_begin = params.offsets[ListOfRow(params.offsets, plan.lists, begin)];
      AwaitEarlierLoads(reinterpret_cast<uint32_t*>(params.workspace + 1), list_begin / plan.chunk_rows, chunk);
    }
    ForVectors<Vector>(plan, rows, moves, [&](int32_t i, const Vector* from, Vector* to) {
      if (!kInPlace || from != to) *to = vectors[i];
    });
    if (!kInPlace) __syncthreads();
    chunk = kInPlace ? TakeTicket(params.workspace, &ticket) : chunk + gridDim.x;
  }
}

bool InPlace(const CompactParams& params) { return params.k == nullptr; }

// The widest vector that all addresses and row sizes are multiples of.
int32_t VectorBytes(const CompactParams& params, int64_t element_bytes) {
  const CacheParams& source = params.source;
  uint64_t bits = 16;
  for (const void* address :
       {source.k.data, source.v.data, static_cast<const void*>(params.k), static_cast<const void*>(params.v)})
    bits |= reinterpret_cast<uintptr_t>(address);
  for (const Tensor& tensor : {source.k, source.v}) {
    bits |= static_cast<uint64_t>(tensor.token_stride * element_bytes);
    if (source.offsets != nullptr) continue;
    bits |= static_cast<uint64_t>(tensor.head_stride * element_bytes);
    if (source.starts == nullptr) bits |= static_cast<uint64_t>(tensor.sequence_stride * element_bytes);
  }
  bits |=
      static_cast<uint64_t>(source.key_dim * element_bytes) | static_cast<uint64_t>(source.value_dim * element_bytes);
  return static_cast<int32_t>(bits & (~bits + 1));
}

CompactPlan MakePlan(const CompactParams& params) {
  CompactPlan plan;
  plan.lists = params.source.sequences * params.source.kv_heads;
  plan.element_bytes = static_cast<int32_t>(DTypeBytes(params.source.dtype, 1));
  if (plan.element_bytes == 0) return plan;
  plan.vector_bytes = VectorBytes(params, plan.element_bytes);
  plan.key_vectors = params.source.key_dim * plan.element_bytes / plan.vector_bytes;
  plan.row_vectors = plan.key_vectors + params.source.value_dim * plan.element_bytes / plan.vector_bytes;
  plan.chunk_rows = std::min(kMaxChunkRows, kChunkVectors / std::max(1, plan.row_vectors));
  if (plan.chunk_rows > 0) plan.max_chunks = (plan.lists * params.max_list + plan.chunk_rows - 1) / plan.chunk_rows;
  return plan;
}

// A ticket counter, and a bit for every chunk.
size_t WorkspaceBytes(const CompactPlan& plan) { return sizeof(int32_t) * (1 + (plan.max_chunks + 31) / 32); }

using Kernel = void (*)(CompactParams, CompactPlan);

template <typename Vector>
Kernel KernelOf(bool in_place) {
  return in_place ? CompactKernel<Vector, true> : CompactKernel<Vector, false>;
}

Kernel KernelOf(int32_t vector_bytes, bool in_place) {
  switch (vector_bytes) {
    case 16:
      return KernelOf<uint4>(in_place);
    case 8:
      return KernelOf<uint2>(in_place);
    case 4:
      return KernelOf<uint32_t>(in_place);
    default:
      return KernelOf<unsigned short>(in_place);
  }
}

}  // namespace

// Enough for every alignment: addresses need not be known yet.
size_t CompactWorkspaceBytes(const CompactParams& params) {
  if (!InPlace(params)) return 0;
  CompactParams unaligned = params;
  unaligned.source.k.token_stride = 1;
  return WorkspaceBytes(MakePlan(unaligned));
}

cudaError_t LaunchCompact(const CompactParams& params, cudaStream_t stream) {
  const CompactPlan plan = MakePlan(params);
  if (plan.chunk_rows == 0 || plan.vector_bytes < 2) return cudaErrorInvalidValue;
  if (plan.max_chunks == 0) return cudaSuccess;
  int multiprocessors = 0;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMultiProcessorCount, &multiprocessors); error != cudaSuccess)
    return error;
  if (InPlace(params)) {
    const cudaError_t error = LaunchClear(params.workspace, WorkspaceBytes(plan), stream);
    if (error != cudaSuccess) return error;
  }
  const int64_t ctas = std::min<int64_t>(plan.max_chunks, int64_t{multiprocessors} * kCtasPerMultiprocessor);
  return LaunchChained(KernelOf(plan.vector_bytes, InPlace(params)), dim3(static_cast<uint32_t>(ctas)), kThreads, 0,
                       stream, params, plan);
}

}  // namespace dropkv::cuda
