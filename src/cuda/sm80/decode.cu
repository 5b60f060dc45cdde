// Decode attention with the tensor cores of sm_80 and later: the query heads of a KV head are the rows of m16n8k16
// products, so that keys and values are read once. A token costs g (d + dv) multiply-adds for 2 (d + dv) bytes: memory
// bounds it, and everything here serves to keep enough bytes on their way. Blocks stay resident and take items, the
// splits of decode_plan.cuh, from a counter. A warp has its own ring of tiles of 16 tokens, keys and values, and its
// own softmax state; it asks for the next item's tiles while it still works on this one's, and meets the block's other
// warps only where an item ends. The last block to finish a list merges its splits, in their order.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/kernels.h"
#include "cuda/sm80/decode_merge.cuh"
#include "cuda/sm80/decode_rows.cuh"

namespace dropkv::cuda {
namespace decode {
namespace {

// Where a warp's loads have got to.
template <typename T>
struct Cursor {
  const T* keys;  // token 0 of the list; paged: of the pool
  const T* values;
  int32_t list;
  int32_t token;
  int32_t end;

  __device__ void Start(const CacheParams& cache, const Item& item) {
    keys = static_cast<const T*>(cache.k.data);
    values = static_cast<const T*>(cache.v.data);
    list = item.list;
    token = item.begin + static_cast<int32_t>(threadIdx.x / 32) * kTileTokens;
    end = item.end;
    if (cache.blocks != nullptr) return;
    keys += TokenOffset(cache, cache.k, list / cache.kv_heads, list % cache.kv_heads, 0);
    values += TokenOffset(cache, cache.v, list / cache.kv_heads, list % cache.kv_heads, 0);
  }
};

// Rows of a tile from `from`; zeros behind the last token and behind the last dim. A lane keeps its chunk of the rows.
template <typename T, int kDim>
__device__ void CopyRows(uint32_t to, const T* from, int64_t stride, int32_t tokens, int32_t dim, uint64_t policy) {
  constexpr int32_t kChunks = Tile<kDim>::kChunks;
  constexpr int32_t kRows = 32 / kChunks;  // of one instruction
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t row = lane / kChunks;
  const int32_t chunk = lane % kChunks;
  if (row >= kRows) return;
  const T* at = from + row * stride + chunk * 8;
  to += row * Tile<kDim>::kPitch + chunk * 16;
#pragma unroll
  for (int32_t i = 0; i < kTileTokens; i += kRows) {
    const bool exists = row + i < tokens && chunk * 8 < dim;
    sm80::CopyAsync16(to + i * Tile<kDim>::kPitch, exists ? at : from, exists ? 16 : 0, policy);
    at += kRows * stride;
  }
}

template <typename T, int kDim>
__device__ void CopyTile(uint32_t to, const CacheParams& cache, const Cursor<T>& cursor, uint64_t policy) {
  int64_t key = cursor.token * cache.k.token_stride;
  int64_t value = cursor.token * cache.v.token_stride;
  if (cache.blocks != nullptr) {  // a tile lies in one block
    const int32_t sequence = cursor.list / cache.kv_heads;
    const int32_t head = cursor.list % cache.kv_heads;
    key = TokenOffset(cache, cache.k, sequence, head, cursor.token);
    value = TokenOffset(cache, cache.v, sequence, head, cursor.token);
  }
  const int32_t tokens = cursor.end - cursor.token;
  CopyRows<T, kDim>(to, cursor.keys + key, cache.k.token_stride, tokens, cache.key_dim, policy);
  CopyRows<T, kDim>(to + Tile<kDim>::kValues, cursor.values + value, cache.v.token_stride, tokens, cache.value_dim,
                    policy);
  sm80::CommitCopies();
}

// The oldest of `pending` groups has arrived, for this lane's copies.
__device__ inline void WaitForOldest(int32_t pending) {
  if (pending >= 3) {
    sm80::WaitCopies<2>();
  } else if (pending == 2) {
    sm80::WaitCopies<1>();
  } else {
    sm80::WaitCopies<0>();
  }
}

// Blocks on a multiprocessor that the registers must allow; shared memory allows no more.
template <int kDim>
inline constexpr int32_t kBlocksPerProcessor = kDim <= 64    ? 3
                                               : kDim <= 128 ? 2
                                                             : 1;

template <typename T, int kDim, int kHalves>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<kDim>)
    DecodeKernel(const __grid_constant__ DecodeArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  ChainStart();
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const CacheParams& cache = args.params.cache;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const uint64_t policy = EvictFirst();

  if (threadIdx.x == 0) shared.bad_rows = 0;
  const int32_t items = CountItems(args, shared);
  const auto item_at = [&](int32_t id) { return id < items ? FindItem(args, shared, id) : Item{}; };
  // Two items from the block's place, the others from the counter: at every moment a warp knows this item and the next.
  Item next = item_at(static_cast<int32_t>(blockIdx.x));
  int32_t next_id = static_cast<int32_t>(blockIdx.x) + blocks;

  const int32_t ring = static_cast<int32_t>(sizeof(Shared)) + warp * args.stages * Tile<kDim>::kBytes;
  const uint32_t ring_address = SharedAddress(memory) + ring;
  int32_t pending = 0;  // tiles asked for and not yet used
  int32_t load_slot = 0;
  int32_t use_slot = 0;
  Cursor<T> cursor;
  bool ahead = false;  // the cursor is in `next`
  const auto load_tiles = [&] {
    while (pending < args.stages) {
      if (cursor.token >= cursor.end) {
        if (ahead || next.id < 0) return;
        cursor.Start(cache, next);
        ahead = true;
        continue;
      }
      CopyTile<T, kDim>(ring_address + load_slot * Tile<kDim>::kBytes, cache, cursor, policy);
      cursor.token += kStepTokens;
      load_slot = load_slot + 1 == args.stages ? 0 : load_slot + 1;
      ++pending;
    }
  };

  WarpRows<T, kDim, kHalves> rows;
  while (next.id >= 0) {
    const Item item = next;
    if (!ahead) cursor.Start(cache, item);
    ahead = false;
    next = {};
    load_tiles();  // before anything else that waits
    next = item_at(next_id);
    int32_t ticket = items;
    if (threadIdx.x == 0 && next.id >= 0) ticket = 2 * blocks + atomicAdd(args.tickets, 1);
    rows.LoadQuery(args.params, item.list);
    rows.Reset();
    int32_t used = -1;
    for (int32_t token = item.begin + warp * kTileTokens; token < item.end; token += kStepTokens) {
      __syncwarp();  // all lanes are done with the tile before: its place is free
      load_tiles();
      WaitForOldest(pending);
      __syncwarp();
      used = ring + use_slot * Tile<kDim>::kBytes;
      rows.Attend(args, ring_address + use_slot * Tile<kDim>::kBytes, item.end - token);
      use_slot = use_slot + 1 == args.stages ? 0 : use_slot + 1;
      --pending;
    }
    __syncwarp();
    // The place of the tile just used takes the sums: nothing is loaded there before the item is finished.
    if (used >= 0) rows.Leave(args.params.group, reinterpret_cast<float*>(memory + used), shared.state[warp]);
    if (threadIdx.x % 32 == 0) shared.sums[warp] = used;
    if (threadIdx.x == 0) shared.ticket = ticket;
    __syncthreads();
    next_id = shared.ticket;
    FinishItem<T, (kDim == 128 ? 16 : 8)>(args, item, memory, Tile<kDim>::kSumPitch, shared);
  }

  if (threadIdx.x != 0 || atomicAdd(args.tickets + 1, 1) != blocks - 1) return;
  args.tickets[0] = 0;
  args.tickets[1] = 0;
}

template <typename T, int kDim, int kHalves>
cudaError_t Launch(DecodeArgs args, cudaStream_t stream) {
  constexpr int32_t kMaxStages = 3;
  constexpr int32_t kStageBytes = kWarps * Tile<kDim>::kBytes;
  const auto kernel = DecodeKernel<T, kDim, kHalves>;
  int32_t processors = 0;
  int32_t limit = 0;
  int32_t resident = 0;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMultiProcessorCount, &processors); error != cudaSuccess)
    return error;
  if (const cudaError_t error = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &limit); error != cudaSuccess)
    return error;
  args.stages = std::min(kMaxStages, (limit - static_cast<int32_t>(sizeof(Shared))) / kStageBytes);
  if (args.stages < 1) return cudaErrorInvalidConfiguration;
  const int32_t bytes = static_cast<int32_t>(sizeof(Shared)) + args.stages * kStageBytes;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      error != cudaSuccess)
    return error;
  if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, bytes);
      error != cudaSuccess)
    return error;
  const auto blocks = std::clamp<int64_t>(MaxItems(args.params), 1, int64_t{processors} * std::max(resident, 1));
  return LaunchChained(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes, stream, args);
}

template <typename T, int kHalves>
cudaError_t LaunchForDim(const DecodeArgs& args, cudaStream_t stream) {
  const int32_t dim = std::max(args.params.cache.key_dim, args.params.cache.value_dim);
  if (dim <= 64) return Launch<T, 64, kHalves>(args, stream);
  if (dim <= 96) return Launch<T, 96, kHalves>(args, stream);
  if (dim <= 128) return Launch<T, 128, kHalves>(args, stream);
  return Launch<T, 256, kHalves>(args, stream);
}

template <typename T>
cudaError_t LaunchForRows(const DecodeArgs& args, cudaStream_t stream) {
  return args.params.group <= 8 ? LaunchForDim<T, 1>(args, stream) : LaunchForDim<T, 2>(args, stream);
}

bool Aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

bool RowsAligned(const Tensor& tensor) {
  return Aligned(tensor.data, 16) && tensor.sequence_stride % 8 == 0 && tensor.head_stride % 8 == 0 &&
         tensor.token_stride % 8 == 0;
}

}  // namespace
}  // namespace decode

size_t DecodeWorkspaceBytes(const DecodeParams& params) {
  const int64_t floats = decode::MaxPartials(params) * params.group * (params.cache.value_dim + 2);
  return kDecodeCounterBytes + static_cast<size_t>(floats) * sizeof(float);
}

bool SupportsDecodeSm80(const DecodeParams& params) {
  const CacheParams& cache = params.cache;
  if (cache.dtype != DType::kF16 && cache.dtype != DType::kBF16) return false;
  if (cache.key_dim % 8 != 0 || cache.value_dim % 8 != 0) return false;
  if (std::max(cache.key_dim, cache.value_dim) > kMaxHeadDim) return false;
  if (params.group < 1 || params.group > decode::kMaxRows) return false;
  if (int64_t{cache.sequences} * cache.kv_heads > kMaxDecodeLists) return false;
  if (cache.blocks != nullptr && cache.block_size % decode::kTileTokens != 0) return false;
  return decode::RowsAligned(cache.k) && decode::RowsAligned(cache.v) && decode::Aligned(params.q, 4) &&
         decode::Aligned(params.workspace, 256);
}

cudaError_t LaunchDecodeSm80(const DecodeParams& params, cudaStream_t stream) {
  if (params.cache.sequences == 0 || params.cache.kv_heads == 0) return cudaSuccess;
  const decode::DecodeArgs args = decode::MakeArgs(params);
  return params.cache.dtype == DType::kF16 ? decode::LaunchForRows<__half>(args, stream)
                                           : decode::LaunchForRows<__nv_bfloat16>(args, stream);
}

}  // namespace dropkv::cuda
