#include "baseline/local_attention.h"

#include <algorithm>
#include <cmath>

#include "baseline/column_sums.h"

namespace dropkv::baseline {
namespace {

constexpr double kPaddedLogit = -1e-9;  // meant as -1e9

// Tokens begin .. end-1 of `kv` as a view of their own.
KvView Slice(const KvView& kv, int32_t begin, int32_t end) {
  KvView slice = kv;
  slice.tokens = end - begin;
  if (kv.cells != nullptr) {
    slice.cells = kv.cells + begin;
    return slice;
  }
  for (KvTensor* tensor : {&slice.k, &slice.v})
    tensor->data =
        static_cast<const std::byte*>(tensor->data) + DTypeBytes(tensor->dtype, begin * tensor->token_stride);
  return slice;
}

}  // namespace

LocalAttention::LocalAttention(const LocalSpan& span, int32_t query_heads, int32_t kv_heads, int32_t tokens,
                               int32_t key_dim)
    : span_(span),
      query_heads_(query_heads),
      kv_heads_(kv_heads),
      begin_(span.begin(tokens)),
      end_(span.end(tokens)),
      row_size_(query_heads * key_dim),
      sums_(static_cast<size_t>(kv_heads) * (end_ - begin_), 0.0) {}

Status LocalAttention::Add(const KvView& kv, const float* q, int32_t first, int32_t count, ThreadPool* pool) {
  int32_t position = std::max(first, begin_);
  const int32_t last = std::min(first + count, end_);
  while (position < last) {
    const int32_t chunk_begin = begin_ + (position - begin_) / span_.chunk * span_.chunk;
    const int32_t chunk_end = std::min(chunk_begin + span_.chunk, end_);
    const int32_t until = std::min(chunk_end, last);
    const float* from = q + static_cast<int64_t>(position - first) * row_size_;
    queries_.insert(queries_.end(), from, from + static_cast<int64_t>(until - position) * row_size_);
    position = until;
    if (until < chunk_end) break;
    DROPKV_RETURN_IF_ERROR(AddChunk(kv, chunk_begin, chunk_end, pool));
    queries_.clear();
  }
  if (position >= end_) queries_.shrink_to_fit();
  return Status::Ok();
}

Status LocalAttention::AddChunk(const KvView& kv, int32_t chunk_begin, int32_t chunk_end, ThreadPool* pool) {
  const int32_t rows = chunk_end - chunk_begin;
  const int32_t padding = span_.chunk - rows;
  // All padded keys together are one more logit in the denominator.
  std::vector<float> sinks(query_heads_, static_cast<float>(std::log(static_cast<double>(padding)) + kPaddedLogit));
  const AttentionSpec plain{1.0F, 0.0F, padding > 0 ? sinks.data() : nullptr};
  const int64_t stride = end_ - begin_;
  double* sums = sums_.data() + (chunk_begin - begin_);
  const QueryChunk chunk{queries_.data(), query_heads_, 0, rows};
  DROPKV_RETURN_IF_ERROR(AddColumnSums(Slice(kv, chunk_begin, chunk_end), plain, chunk, false, pool, stride, sums));
  const double uniform = static_cast<double>(padding) / span_.chunk;
  for (int32_t u = 0; u < kv_heads_; ++u)
    for (int32_t j = 0; j < rows; ++j) sums[u * stride + j] += uniform;
  return Status::Ok();
}

}  // namespace dropkv::baseline
