#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "cpu/ragged_kernel.h"
#include "cpu/ragged_storage.h"
#include "dropkv/ragged_cache.h"

namespace dropkv {
namespace {

constexpr float kMinusInfinity = -HUGE_VALF;

// Tokens of a part: enough parts to balance a few threads, and parts long enough that their sums (g * dv floats) are
// little beside the tokens they read. A function of the lengths alone, so that the bits are.
int32_t PartTokens(int64_t total) {
  if (total >= 16384) return 1024;
  return total >= 4096 ? 512 : 128;
}

// Below this, waking a pool's threads takes longer than the work.
constexpr int64_t kMinPoolBytes = int64_t{1} << 19;

struct Piece {
  int32_t head;
  int32_t begin;  // tokens
  int32_t end;
};

// What one part leaves behind.
struct Partial {
  float* sum;      // [g, dv padded]
  float* largest;  // [g]
  float* weight;   // [g]
};

struct HeadState {
  std::atomic<int32_t> open{0};  // parts that have not finished
  int32_t first = 0;             // part
  int32_t count = 0;
};

}  // namespace

struct RaggedDecode::Impl {
  int32_t kv_heads;
  int32_t group;
  int32_t key_dim;
  int32_t value_dim;
  int64_t partial_floats;  // of one part, a multiple of a cache line

  std::vector<Piece> pieces;
  AlignedBytes partials;
  std::unique_ptr<HeadState[]> heads;
  std::atomic<int32_t> next{0};

  // Of the call under way.
  const RaggedCache::Impl* cache = nullptr;
  AttentionSpec attention;
  const float* q = nullptr;
  float* out = nullptr;

  Partial partial(int32_t piece) {
    float* sum = reinterpret_cast<float*>(partials.data()) + piece * partial_floats;
    float* largest = sum + int64_t{group} * PaddedValueDim(value_dim);
    return {sum, largest, largest + group};
  }

  const std::byte* keys(const Piece& piece) const;
  void Cut();
  void Attend(int32_t piece, int32_t next_piece);
  void Merge(int32_t head);
};

// Even pieces of every head, multiples of 16 tokens long.
void RaggedDecode::Impl::Cut() {
  int64_t total = 0;
  for (const RaggedHead& head : cache->heads) total += head.length;
  const int32_t most = PartTokens(total);
  pieces.clear();
  for (int32_t head = 0; head < kv_heads; ++head) {
    const int32_t length = cache->heads[head].length;
    const int32_t count = (length + most - 1) / most;
    const int32_t blocks = (length + kRaggedBlock - 1) / kRaggedBlock;
    heads[head].first = static_cast<int32_t>(pieces.size());
    heads[head].count = count;
    heads[head].open.store(count, std::memory_order_relaxed);
    for (int32_t i = 0; i < count; ++i) {
      const auto begin = static_cast<int32_t>(int64_t{blocks} * i / count) * kRaggedBlock;
      const auto end = static_cast<int32_t>(int64_t{blocks} * (i + 1) / count) * kRaggedBlock;
      pieces.push_back({head, begin, std::min(end, length)});
    }
  }
}

const std::byte* RaggedDecode::Impl::keys(const Piece& piece) const {
  return cache->heads[piece.head].k.data() + piece.begin / kRaggedBlock * cache->k_block_bytes;
}

// next_piece: what this thread computes afterwards; may be past the last one.
void RaggedDecode::Impl::Attend(int32_t piece, int32_t next_piece) {
  const auto [head, begin, end] = pieces[piece];
  const Partial to = partial(piece);
  ragged::Part part;
  part.dtype = cache->dtype;
  part.k = cache->heads[head].k.data();
  part.v = cache->heads[head].v.data();
  part.begin = begin;
  part.end = end;
  part.group = group;
  part.key_dim = key_dim;
  part.value_dim = PaddedValueDim(value_dim);
  part.q = q + int64_t{head} * group * key_dim;
  part.scale = attention.scale;
  part.soft_cap = attention.soft_cap;
  if (next_piece < static_cast<int32_t>(pieces.size())) part.next_k = keys(pieces[next_piece]);
  part.sum = to.sum;
  part.largest = to.largest;
  part.weight = to.weight;
  ragged::Attend(part);
}

// out = sum_p exp(m_p - m) a_p / (sum_p exp(m_p - m) z_p + exp(sink - m)), p in the order of the tokens; m the largest
// of all m_p and the sink.
void RaggedDecode::Impl::Merge(int32_t head) {
  const int32_t first = heads[head].first;
  const int32_t end = first + heads[head].count;
  for (int32_t g = 0; g < group; ++g) {
    const int32_t query_head = head * group + g;
    float* to = out + int64_t{query_head} * value_dim;
    std::fill_n(to, value_dim, 0.0F);
    float largest = kMinusInfinity;
    for (int32_t piece = first; piece < end; ++piece) largest = std::max(largest, partial(piece).largest[g]);
    if (largest == kMinusInfinity) continue;
    float weight = 0.0F;
    if (attention.sinks != nullptr) {
      largest = std::max(largest, attention.sinks[query_head]);
      weight = std::exp(attention.sinks[query_head] - largest);
    }
    for (int32_t piece = first; piece < end; ++piece) {
      const Partial part = partial(piece);
      const float factor = std::exp(part.largest[g] - largest);
      const float* sum = part.sum + int64_t{g} * PaddedValueDim(value_dim);
      weight += factor * part.weight[g];
      for (int32_t c = 0; c < value_dim; ++c) to[c] += factor * sum[c];
    }
    for (int32_t c = 0; c < value_dim; ++c) to[c] /= weight;
  }
}

RaggedDecode::RaggedDecode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RaggedDecode::RaggedDecode(RaggedDecode&&) noexcept = default;
RaggedDecode& RaggedDecode::operator=(RaggedDecode&&) noexcept = default;
RaggedDecode::~RaggedDecode() = default;

namespace {

Status CheckDim(const char* name, int32_t dim) {
  if (dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected a multiple of 8 from 8 to 256, got " + std::to_string(dim));
}

std::string Shape(int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
  return std::to_string(kv_heads) + " KV heads, key_dim " + std::to_string(key_dim) + ", value_dim " +
         std::to_string(value_dim);
}

}  // namespace

Result<RaggedDecode> RaggedDecode::Create(int32_t kv_heads, int32_t group, int32_t key_dim, int32_t value_dim) {
  if (kv_heads < 1) return InvalidArgument("kv_heads: expected at least 1, got " + std::to_string(kv_heads));
  if (group < 1 || group > kMaxGroup)
    return InvalidArgument("group: expected 1 to " + std::to_string(kMaxGroup) + " query heads per KV head, got " +
                           std::to_string(group));
  DROPKV_RETURN_IF_ERROR(CheckDim("key_dim", key_dim));
  DROPKV_RETURN_IF_ERROR(CheckDim("value_dim", value_dim));
  auto impl = std::make_unique<Impl>();
  impl->kv_heads = kv_heads;
  impl->group = group;
  impl->key_dim = key_dim;
  impl->value_dim = value_dim;
  impl->partial_floats = (int64_t{group} * (PaddedValueDim(value_dim) + 2) + 15) / 16 * 16;
  impl->heads = std::make_unique<HeadState[]>(kv_heads);
  return RaggedDecode(std::move(impl));
}

Status RaggedDecode::Begin(const RaggedCache& cache, const AttentionSpec& attention, const float* q, float* out,
                           int32_t workers) {
  Impl& run = *impl_;
  if (cache.kv_heads() != run.kv_heads || cache.key_dim() != run.key_dim || cache.value_dim() != run.value_dim)
    return InvalidArgument("cache: expected " + Shape(run.kv_heads, run.key_dim, run.value_dim) + ", got " +
                           Shape(cache.kv_heads(), cache.key_dim(), cache.value_dim()));
  if (q == nullptr || out == nullptr) return InvalidArgument("q, out: expected pointers, got null");
  if (workers < 1) return InvalidArgument("workers: expected at least 1, got " + std::to_string(workers));
  if (!(attention.soft_cap >= 0.0F))
    return InvalidArgument("attention.soft_cap: expected 0 (none) or above, got " + std::to_string(attention.soft_cap));
  run.cache = &cache.impl();
  run.attention = attention;
  run.q = q;
  run.out = out;
  run.Cut();
  const size_t bytes = run.pieces.size() * run.partial_floats * sizeof(float);
  if (bytes > run.partials.size()) {
    run.partials = AlignedBytes();
    run.partials = AlignedBytes(bytes + bytes / 4);
    if (run.partials.size() == 0)
      return {Code::kInternal, "ragged decode: no memory for " + std::to_string(bytes) + " bytes of partial sums"};
  }
  for (int32_t head = 0; head < run.kv_heads; ++head)
    if (run.heads[head].count == 0) run.Merge(head);
  run.next.store(workers, std::memory_order_relaxed);
  return Status::Ok();
}

void RaggedDecode::Work(int32_t worker) {
  Impl& run = *impl_;
  const auto count = static_cast<int32_t>(run.pieces.size());
  int32_t piece = worker;
  while (piece < count) {
    const int32_t next_piece = run.next.fetch_add(1, std::memory_order_relaxed);
    run.Attend(piece, next_piece);
    const int32_t head = run.pieces[piece].head;
    if (run.heads[head].open.fetch_sub(1, std::memory_order_acq_rel) == 1) run.Merge(head);
    piece = next_piece;
  }
}

Status RaggedDecode::Run(const RaggedCache& cache, const AttentionSpec& attention, const float* q, float* out,
                         ThreadPool* pool) {
  const int32_t workers = pool != nullptr && cache.used_bytes() >= kMinPoolBytes ? pool->threads() : 1;
  DROPKV_RETURN_IF_ERROR(Begin(cache, attention, q, out, workers));
  if (workers == 1) {
    Work(0);
  } else {
    pool->For(workers, [this](int64_t item, int32_t) { Work(static_cast<int32_t>(item)); });
  }
  return Status::Ok();
}

}  // namespace dropkv
