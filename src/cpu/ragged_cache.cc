#include "dropkv/ragged_cache.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cpu/ragged_storage.h"

namespace dropkv {
namespace {

constexpr uint16_t kHalfNan = 0x7E00;  // of q8_0's scales too

template <typename T>
bool IsFinite(T bits, T exponent_mask) {
  return (bits & exponent_mask) != exponent_mask;
}

// One row of a source: `dim` elements, `stride` elements apart.
template <typename T>
struct SourceRow {
  const T* data;
  int64_t stride;
  int32_t dim;
};

// Copies one token of one head into lane 0 of `block_lane` and into `row`. kSideBySide: both strides are 1, known to
// the compiler, which then vectorizes.
template <typename T, bool kSideBySide>
void StoreToken(const SourceRow<T>& key, const SourceRow<T>& value, T exponent_mask, T nan, T* block_lane, T* row) {
  const int64_t key_stride = kSideBySide ? 1 : key.stride;
  const int64_t value_stride = kSideBySide ? 1 : value.stride;
  unsigned bad = 0;
  for (int32_t c = 0; c < key.dim; ++c) bad |= IsFinite(key.data[c * key_stride], exponent_mask) ? 0U : 1U;
  for (int32_t c = 0; c < value.dim; ++c) bad |= IsFinite(value.data[c * value_stride], exponent_mask) ? 0U : 1U;
  for (int32_t c = 0; c < key.dim; ++c) block_lane[c * kRaggedBlock] = key.data[c * key_stride];
  for (int32_t c = 0; c < value.dim; ++c) row[c] = value.data[c * value_stride];
  if (bad == 0) return;
  block_lane[0] = nan;
  std::fill_n(row, value.dim, T{0});
}

// The same for rows of q8_0 blocks.
void StoreTokenQ8(const std::byte* key, const std::byte* value, int32_t d, int32_t dv, int32_t lane, std::byte* block,
                  std::byte* row) {
  bool finite = true;
  const auto check = [&](const std::byte* source) {
    uint16_t scale;
    std::memcpy(&scale, source, sizeof scale);
    finite &= IsFinite<uint16_t>(scale, 0x7C00);
  };
  for (int32_t group = 0; group < d / kQ8BlockElements; ++group) {
    const std::byte* source = key + group * kQ8BlockBytes;
    std::byte* target = block + group * kQ8BlockBytes * kRaggedBlock;
    check(source);
    std::memcpy(target + 2 * lane, source, 2);
    for (int32_t c = 0; c < kQ8BlockElements; ++c) target[(2 + c) * kRaggedBlock + lane] = source[2 + c];
  }
  for (int32_t group = 0; group < dv / kQ8BlockElements; ++group) check(value + group * kQ8BlockBytes);
  const auto row_bytes = static_cast<size_t>(DTypeBytes(DType::kQ8_0, dv));
  std::memcpy(row, value, row_bytes);
  if (finite) return;
  std::memcpy(block + 2 * lane, &kHalfNan, sizeof kHalfNan);
  std::memset(row, 0, row_bytes);
}

// Writes token `token` of `source` behind the tokens that the head holds; there is room.
void Store(const RaggedCache::Impl& cache, const KvView& source, int32_t head, int32_t token, RaggedHead& to) {
  const int64_t cell = source.cells != nullptr ? source.cells[token] : token;
  const int64_t key_at = head * source.k.head_stride + cell * source.k.token_stride;
  const int64_t value_at = head * source.v.head_stride + cell * source.v.token_stride;
  const int32_t lane = to.length % kRaggedBlock;
  std::byte* block = to.k.data() + to.length / kRaggedBlock * cache.k_block_bytes;
  std::byte* row = to.v.data() + to.length * cache.v_row_bytes;
  if (lane == 0) std::memset(block, 0, static_cast<size_t>(cache.k_block_bytes));  // kernels read whole blocks
  const int64_t value_bytes = DTypeBytes(cache.dtype, cache.value_dim);
  std::memset(row + value_bytes, 0, static_cast<size_t>(cache.v_row_bytes - value_bytes));
  const auto store = [&]<typename T>(T exponent_mask, T nan) {
    const SourceRow<T> key{static_cast<const T*>(source.k.data) + key_at, source.k.dim_stride, cache.key_dim};
    const SourceRow<T> value{static_cast<const T*>(source.v.data) + value_at, source.v.dim_stride, cache.value_dim};
    const bool side_by_side = key.stride == 1 && value.stride == 1;
    (side_by_side ? StoreToken<T, true> : StoreToken<T, false>)(key, value, exponent_mask, nan,
                                                                reinterpret_cast<T*>(block) + lane,
                                                                reinterpret_cast<T*>(row));
  };
  switch (cache.dtype) {
    case DType::kF32:
      store(uint32_t{0x7F800000}, uint32_t{0x7FC00000});
      break;
    case DType::kF16:
      store(uint16_t{0x7C00}, kHalfNan);
      break;
    case DType::kBF16:
      store(uint16_t{0x7F80}, uint16_t{0x7FC0});
      break;
    case DType::kQ8_0:
      StoreTokenQ8(static_cast<const std::byte*>(source.k.data) + DTypeBytes(DType::kQ8_0, key_at),
                   static_cast<const std::byte*>(source.v.data) + DTypeBytes(DType::kQ8_0, value_at), cache.key_dim,
                   cache.value_dim, lane, block, row);
      break;
  }
  ++to.length;
}

// Gives `head` room for at least `tokens`; what it holds stays. False: no memory, nothing changed.
bool Reserve(const RaggedCache::Impl& cache, int32_t tokens, RaggedHead& head) {
  if (tokens <= head.capacity) return true;
  const int32_t capacity = (tokens + kRaggedBlock - 1) / kRaggedBlock * kRaggedBlock;
  AlignedBytes k(static_cast<size_t>(capacity / kRaggedBlock * cache.k_block_bytes));
  AlignedBytes v(static_cast<size_t>(capacity * cache.v_row_bytes));
  if (k.size() == 0 || v.size() == 0) return false;
  if (head.length > 0) {
    const int64_t blocks = (head.length + kRaggedBlock - 1) / kRaggedBlock;
    std::memcpy(k.data(), head.k.data(), static_cast<size_t>(blocks * cache.k_block_bytes));
    std::memcpy(v.data(), head.v.data(), static_cast<size_t>(head.length * cache.v_row_bytes));
  }
  head.k = std::move(k);
  head.v = std::move(v);
  head.capacity = capacity;
  return true;
}

// Appending grows by an eighth, at least by 64 tokens: few moves, little slack.
int32_t Grown(int32_t length) { return length + std::max(64, length / 8); }

Status OutOfMemory(int32_t tokens) {
  return {Code::kInternal, "ragged cache: no memory for " + std::to_string(tokens) + " tokens of a head"};
}

Status CheckSource(const RaggedCache::Impl& cache, const KvView& source) {
  DROPKV_RETURN_IF_ERROR(CheckKvView(source));
  if (source.kv_heads != static_cast<int32_t>(cache.heads.size()) || source.key_dim != cache.key_dim ||
      source.value_dim != cache.value_dim)
    return InvalidArgument("source: expected " + std::to_string(cache.heads.size()) + " KV heads of key_dim " +
                           std::to_string(cache.key_dim) + ", value_dim " + std::to_string(cache.value_dim) + ", got " +
                           std::to_string(source.kv_heads) + ", " + std::to_string(source.key_dim) + ", " +
                           std::to_string(source.value_dim));
  if (source.k.dtype != cache.dtype || source.v.dtype != cache.dtype)
    return InvalidArgument("source: expected keys and values of " + std::string(DTypeName(cache.dtype)) + ", got " +
                           std::string(DTypeName(source.k.dtype)) + " and " + std::string(DTypeName(source.v.dtype)));
  return Status::Ok();
}

Status CheckDim(const char* name, int32_t dim, DType dtype) {
  const int32_t step = dtype == DType::kQ8_0 ? static_cast<int32_t>(kQ8BlockElements) : 8;
  if (dim >= step && dim <= kMaxHeadDim && dim % step == 0) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected a multiple of " + std::to_string(step) + " up to " +
                         std::to_string(kMaxHeadDim) + " for " + std::string(DTypeName(dtype)) + ", got " +
                         std::to_string(dim));
}

}  // namespace

AlignedBytes::AlignedBytes(size_t size) {
  constexpr size_t kLine = 64;
  const size_t rounded = (size + kLine - 1) / kLine * kLine;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kLine, rounded)));
  size_ = memory_ != nullptr ? rounded : 0;
}

RaggedCache::RaggedCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RaggedCache::RaggedCache(RaggedCache&&) noexcept = default;
RaggedCache& RaggedCache::operator=(RaggedCache&&) noexcept = default;
RaggedCache::~RaggedCache() = default;

Result<RaggedCache> RaggedCache::Create(DType dtype, int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
  if (DTypeName(dtype) == "?")
    return InvalidArgument("dtype: expected f32, f16, bf16 or q8_0, got " + std::to_string(static_cast<int>(dtype)));
  if (kv_heads < 1) return InvalidArgument("kv_heads: expected at least 1, got " + std::to_string(kv_heads));
  DROPKV_RETURN_IF_ERROR(CheckDim("key_dim", key_dim, dtype));
  DROPKV_RETURN_IF_ERROR(CheckDim("value_dim", value_dim, dtype));
  auto impl = std::make_unique<Impl>();
  impl->dtype = dtype;
  impl->key_dim = key_dim;
  impl->value_dim = value_dim;
  impl->k_block_bytes = kRaggedBlock * DTypeBytes(dtype, key_dim);
  impl->v_row_bytes = DTypeBytes(dtype, PaddedValueDim(value_dim));
  impl->heads.resize(kv_heads);
  return RaggedCache(std::move(impl));
}

Status RaggedCache::Assign(const KvView& source, const KeepList& keep, int32_t layer, int32_t reserve) {
  DROPKV_RETURN_IF_ERROR(CheckSource(*impl_, source));
  if (keep.kv_heads() != kv_heads())
    return InvalidArgument("keep: expected lists of " + std::to_string(kv_heads()) + " KV heads, got " +
                           std::to_string(keep.kv_heads()));
  if (layer < 0 || layer >= keep.layers())
    return InvalidArgument("layer: expected 0 to " + std::to_string(keep.layers() - 1) + ", got " +
                           std::to_string(layer));
  if (reserve < 0) return InvalidArgument("reserve: expected at least 0, got " + std::to_string(reserve));
  for (int32_t head = 0; head < kv_heads(); ++head) {
    const auto list = keep.head(layer, head);
    if (!list.empty() && (list.front() < 0 || list.back() >= source.tokens))
      return InvalidArgument("keep: expected positions below " + std::to_string(source.tokens) + ", got " +
                             std::to_string(list.front()) + " to " + std::to_string(list.back()) + " in head " +
                             std::to_string(head));
  }
  for (RaggedHead& head : impl_->heads) head = RaggedHead();  // first: both contents need never be held at once
  for (int32_t head = 0; head < kv_heads(); ++head) {
    const auto list = keep.head(layer, head);
    const auto room = static_cast<int32_t>(list.size()) + reserve;
    RaggedHead& to = impl_->heads[head];
    if (!Reserve(*impl_, room, to)) {
      for (RaggedHead& other : impl_->heads) other = RaggedHead();
      return OutOfMemory(room);
    }
    for (const int32_t token : list) Store(*impl_, source, head, token, to);
  }
  return Status::Ok();
}

Status RaggedCache::Append(const KvView& source, int32_t token) {
  DROPKV_RETURN_IF_ERROR(CheckSource(*impl_, source));
  if (token < 0 || token >= source.tokens)
    return InvalidArgument("token: expected 0 to " + std::to_string(source.tokens - 1) + ", got " +
                           std::to_string(token));
  for (RaggedHead& head : impl_->heads)
    if (head.length == head.capacity && !Reserve(*impl_, Grown(head.length), head))
      return OutOfMemory(Grown(head.length));
  for (int32_t head = 0; head < kv_heads(); ++head) Store(*impl_, source, head, token, impl_->heads[head]);
  return Status::Ok();
}

Status RaggedCache::Truncate(int32_t count) {
  int32_t shortest = impl_->heads[0].length;
  for (const RaggedHead& head : impl_->heads) shortest = std::min(shortest, head.length);
  if (count < 0 || count > shortest)
    return InvalidArgument("count: expected 0 to the shortest head's " + std::to_string(shortest) + " tokens, got " +
                           std::to_string(count));
  for (RaggedHead& head : impl_->heads) head.length -= count;
  return Status::Ok();
}

int32_t RaggedCache::kv_heads() const { return static_cast<int32_t>(impl_->heads.size()); }
int32_t RaggedCache::key_dim() const { return impl_->key_dim; }
int32_t RaggedCache::value_dim() const { return impl_->value_dim; }
DType RaggedCache::dtype() const { return impl_->dtype; }
int32_t RaggedCache::length(int32_t head) const { return impl_->heads[head].length; }

int64_t RaggedCache::capacity_bytes() const {
  int64_t bytes = 0;
  for (const RaggedHead& head : impl_->heads) bytes += static_cast<int64_t>(head.k.size() + head.v.size());
  return bytes;
}

int64_t RaggedCache::used_bytes() const {
  int64_t tokens = 0;
  for (const RaggedHead& head : impl_->heads) tokens += head.length;
  return tokens * (DTypeBytes(impl_->dtype, impl_->key_dim) + DTypeBytes(impl_->dtype, impl_->value_dim));
}

}  // namespace dropkv
