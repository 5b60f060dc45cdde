// A test's batch on the device in any layout, and the chains of launches that make scores of it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/device_case.h"
#include "cuda/device_memory.h"
#include "cuda/kernels.h"

namespace dropkv::cuda {

// Places of tokens: the arrays of CacheParams.
struct Places {
  std::vector<int64_t> first_rows;  // packed: of every sequence; ragged: of every list, and the end
  std::vector<int32_t> blocks;      // paged: shuffled; the places behind a sequence's end name a block of NaN
  int32_t blocks_stride = 0;
  int64_t pool_rows = 0;
  int64_t pool_blocks = 0;

  explicit Places(const HostBatch& batch) {
    const DeviceCase& c = batch.shape();
    if (c.layout == Layout::kPacked)
      for (const int32_t n : c.lengths) {
        first_rows.push_back(pool_rows);
        pool_rows += n + 3;
      }
    if (c.layout == Layout::kRagged) {
      first_rows.push_back(0);
      for (const HostList& list : batch.lists()) first_rows.push_back(pool_rows += list.tokens);
    }
    if (c.layout != Layout::kPaged) return;
    blocks_stride = (c.max_tokens() + c.block_size - 1) / c.block_size + 1;
    std::vector<int32_t> free(static_cast<size_t>(blocks_stride) * c.sequences());
    std::iota(free.begin(), free.end(), 0);
    for (size_t i = free.size() - 1; i > 0; --i) std::swap(free[i], free[i * 7919 % (i + 1)]);
    pool_blocks = static_cast<int64_t>(free.size()) + 1;
    for (int32_t b = 0; b < c.sequences(); ++b)
      for (int32_t i = 0; i < blocks_stride; ++i) {
        const bool used = i * c.block_size < c.lengths[b];
        blocks.push_back(used ? free[b * blocks_stride + i] : static_cast<int32_t>(free.size()));
      }
  }
};

// Elements of NaN behind every row: 16 bytes, or one element that puts all rows but some off their alignment.
inline int64_t RowGap(const DeviceCase& c) { return c.misaligned ? 1 : 8; }

// The keys or the values of a batch on the device; everything that no token owns is NaN.
class DeviceTensor {
 public:
  DeviceTensor(const HostBatch& batch, const Places& places, int32_t dim, std::vector<uint16_t> HostList::*part)
      : case_(batch.shape()), row_(dim + RowGap(case_)) {
    const int64_t capacity = case_.max_tokens() + 5;
    int64_t elements = 0;
    switch (case_.layout) {
      case Layout::kHeadMajor:
        tensor_ = {nullptr, case_.kv_heads * capacity * row_, capacity * row_, row_};
        elements = case_.sequences() * tensor_.sequence_stride;
        break;
      case Layout::kTokenMajor:
        tensor_ = {nullptr, case_.kv_heads * capacity * row_, row_, case_.kv_heads * row_};
        elements = case_.sequences() * tensor_.sequence_stride;
        break;
      case Layout::kPacked:
        tensor_ = {nullptr, 0, row_, case_.kv_heads * row_};
        elements = places.pool_rows * tensor_.token_stride;
        break;
      case Layout::kPaged:
        tensor_ = {nullptr, case_.kv_heads * case_.block_size * row_, case_.block_size * row_, row_};
        elements = places.pool_blocks * tensor_.sequence_stride;
        break;
      case Layout::kRagged:
        tensor_ = {nullptr, 0, 0, row_};
        elements = places.pool_rows * row_;
        break;
    }
    std::vector<uint16_t> host(elements + 1, 0xFFFF);
    const int64_t start = case_.misaligned ? 1 : 0;
    for (int32_t list = 0; list < case_.lists(); ++list)
      for (int32_t j = 0; j < batch.lists()[list].tokens; ++j)
        std::copy_n((batch.lists()[list].*part).begin() + int64_t{j} * dim, dim,
                    host.begin() + start + Offset(places, list, j));
    data_ = DeviceArray<uint16_t>(host);
    tensor_.data = data_.get() + start;
  }

  const Tensor& tensor() const { return tensor_; }

 private:
  int64_t Offset(const Places& places, int32_t list, int32_t token) const {
    const int64_t sequence = list / case_.kv_heads;
    const int64_t head = list % case_.kv_heads * tensor_.head_stride;
    switch (case_.layout) {
      case Layout::kPacked:
        return head + (places.first_rows[sequence] + token) * tensor_.token_stride;
      case Layout::kPaged:
        return head + token % case_.block_size * row_ +
               places.blocks[sequence * places.blocks_stride + token / case_.block_size] * tensor_.sequence_stride;
      case Layout::kRagged:
        return (places.first_rows[list] + token) * row_;
      default:
        return head + sequence * tensor_.sequence_stride + token * tensor_.token_stride;
    }
  }

  DeviceCase case_;
  int64_t row_;
  DeviceArray<uint16_t> data_;
  Tensor tensor_;
};

// A batch on the device, with all that the launches write.
class DeviceBatch {
 public:
  explicit DeviceBatch(const HostBatch& batch)
      : case_(batch.shape()),
        places_(batch),
        k_(batch, places_, case_.key_dim, &HostList::k),
        v_(batch, places_, case_.value_dim, &HostList::v) {
    const int64_t row = case_.key_dim + RowGap(case_);
    const int64_t rows = int64_t{case_.lists()} * case_.head_rows();
    std::vector<uint16_t> q(rows * row + 1, 0xFFFF);
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(batch.q().begin() + i * case_.key_dim, case_.key_dim,
                  q.begin() + i * row + (case_.misaligned ? 1 : 0));
    q_ = DeviceArray<uint16_t>(q);
    const int32_t tokens = std::max(1, case_.max_tokens());
    split_tokens_ = SplitTokens(tokens, case_.splits);
    padded_rows_ = (case_.head_rows() + 63) / 64 * 64;
    const int64_t partials = int64_t{case_.lists()} * case_.splits * padded_rows_;
    raw = DeviceArray<float>(int64_t{case_.lists()} * tokens);
    lse2 = DeviceArray<float>(rows);
    out = DeviceArray<float>(rows * case_.value_dim);
    out16 = DeviceArray<uint16_t>(rows * case_.value_dim);
    q16 = DeviceArray<uint16_t>(rows * case_.key_dim);
    norm = DeviceArray<float>(rows);
    top = DeviceArray<int32_t>(rows);
    contribution = DeviceArray<float>(rows);
    partial_max_ = DeviceArray<float>(partials);
    partial_sum_ = DeviceArray<float>(partials);
    partial_out_ = DeviceArray<float>(partials * case_.value_dim);
    row_ok_ = DeviceArray<uint8_t>(rows);
    redo_ = DeviceArray<int32_t>(case_.lists());
    top_split_ = DeviceArray<int32_t>(rows);
    has_tops_ = DeviceArray<int32_t>(case_.lists());
    counters = DeviceArray<Counters>(std::vector<Counters>(1));
    lengths_ = DeviceArray<int32_t>(case_.lengths);
    visible_ = DeviceArray<int32_t>(batch.visible());
    sinks_ = DeviceArray<float>(batch.sinks());
    weights_ = DeviceArray<float>(batch.weights());
    std::vector<int32_t> generated(case_.sequences());
    for (int32_t b = 0; b < case_.sequences(); ++b) generated[b] = case_.generated_of(b);
    generated_ = DeviceArray<int32_t>(generated);
    first_rows_ = DeviceArray<int64_t>(places_.first_rows);
    blocks_ = DeviceArray<int32_t>(places_.blocks);
  }

  AttendParams attend() const {
    AttendParams params;
    params.cache = Cache();
    params.rows = Rows();
    params.state = {lse2.get(), out.get(), out16.get(), q16.get(), norm.get(), top.get(), contribution.get()};
    params.partials = {partial_max_.get(), partial_sum_.get(), partial_out_.get(),
                       case_.splits,       split_tokens_,      padded_rows_};
    params.row_ok = row_ok_.get();
    params.redo = redo_.get();
    params.top_split = top_split_.get();
    params.has_tops = has_tops_.get();
    params.counters = counters.get();
    return params;
  }

  ScoreParams score(Signal signal) const {
    ScoreParams params;
    params.cache = Cache();
    params.rows = Rows();
    params.state = attend().state;
    params.signal = signal;
    params.row_ok = row_ok_.get();
    params.has_tops = has_tops_.get();
    params.raw = raw.get();
    return params;
  }

  DeviceArray<float> raw;  // [B, Hkv, max_tokens]
  DeviceArray<float> lse2;
  DeviceArray<float> out;
  DeviceArray<uint16_t> out16;
  DeviceArray<uint16_t> q16;
  DeviceArray<float> norm;
  DeviceArray<int32_t> top;
  DeviceArray<float> contribution;
  DeviceArray<Counters> counters;

 private:
  CacheParams Cache() const {
    CacheParams cache;
    cache.dtype = case_.dtype;
    cache.sequences = case_.sequences();
    cache.kv_heads = case_.kv_heads;
    cache.key_dim = case_.key_dim;
    cache.value_dim = case_.value_dim;
    cache.max_tokens = case_.max_tokens();
    cache.k = k_.tensor();
    cache.v = v_.tensor();
    if (case_.layout != Layout::kRagged && case_.sequences() > 1) cache.lengths = lengths_.get();
    if (case_.layout == Layout::kRagged) cache.offsets = first_rows_.get();
    if (case_.layout == Layout::kPacked) cache.starts = first_rows_.get();
    if (case_.layout == Layout::kPaged) {
      cache.blocks = blocks_.get();
      cache.blocks_stride = places_.blocks_stride;
      cache.block_size = case_.block_size;
    }
    cache.blocks_in_pool = places_.pool_blocks;
    cache.rows_in_pool = places_.pool_rows;
    cache.max_generated = case_.generated;
    if (case_.generated_each) cache.generated = generated_.get();
    return cache;
  }

  RowParams Rows() const {
    const int64_t row = case_.key_dim + RowGap(case_);
    RowParams rows;
    rows.q = q_.get() + (case_.misaligned ? 1 : 0);
    rows.q_sequence_stride = case_.kv_heads * case_.head_rows() * row;
    rows.q_head_stride = case_.rows * row;
    rows.q_row_stride = row;
    rows.group = case_.group;
    rows.rows = case_.rows;
    rows.visible = case_.any_visible ? visible_.get() : nullptr;
    rows.scale = 1.0F / std::sqrt(static_cast<float>(case_.key_dim));
    rows.soft_cap = case_.soft_cap;
    rows.sinks = case_.sinks ? sinks_.get() : nullptr;
    rows.weights = case_.weights ? weights_.get() : nullptr;
    return rows;
  }

  DeviceCase case_;
  Places places_;
  DeviceTensor k_;
  DeviceTensor v_;
  int32_t split_tokens_ = 0;
  int32_t padded_rows_ = 0;
  DeviceArray<uint16_t> q_;
  DeviceArray<float> partial_max_;
  DeviceArray<float> partial_sum_;
  DeviceArray<float> partial_out_;
  DeviceArray<uint8_t> row_ok_;
  DeviceArray<int32_t> redo_;
  DeviceArray<int32_t> top_split_;
  DeviceArray<int32_t> has_tops_;
  DeviceArray<int32_t> lengths_;
  DeviceArray<int32_t> visible_;
  DeviceArray<float> sinks_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> generated_;
  DeviceArray<int64_t> first_rows_;
  DeviceArray<int32_t> blocks_;
};

// "any", "sm80" or "sm90": why its kernels cannot take the batch on this machine; empty where they can.
inline std::string Refusal(const std::string& kernel, const AttendParams& attend, const ScoreParams& score) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return "there is no CUDA device";
  if (kernel == "any") return "";
  if (kernel == "sm80") return SupportsAttendSm80(attend) && SupportsScoreSm80(score) ? "" : "sm80 refuses the shape";
  int major = 0;
  Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "attribute");
  if (major != 9) return "the device is no Hopper";
  const char* attend_reason = RefusesAttendSm90(attend);
  const char* score_reason = RefusesScoreSm90(score);
  if (attend_reason != nullptr) return attend_reason;
  return score_reason != nullptr ? score_reason : "";
}

inline void LaunchRows(const std::string& kernel, const AttendParams& attend, bool tops, cudaStream_t stream) {
  Check(LaunchPrepare(attend, stream), "prepare");
  const bool given = attend.given_lse != nullptr;
  if (given || kernel == "any") return Check(LaunchAttendAny(attend, given, stream), "attend any");
  const auto pass = kernel == "sm80" ? LaunchAttendSm80 : LaunchAttendSm90;
  Check(pass(attend, false, stream), "attend");
  Check(LaunchCombine(attend, stream), "combine");
  Check(LaunchAttendAny(attend, true, stream), "attend again");
  if (!tops) return;
  Check(pass(attend, true, stream), "attend without the tops");
  Check(LaunchFinishTops(attend, stream), "finish tops");
}

// Everything from queries to raw scores.
inline void LaunchChain(const std::string& kernel, const AttendParams& attend, const ScoreParams& score,
                        cudaStream_t stream) {
  LaunchRows(kernel, attend, score.signal == Signal::kDropKv, stream);
  const auto pass = kernel == "any" ? LaunchScoreAny : kernel == "sm80" ? LaunchScoreSm80 : LaunchScoreSm90;
  Check(pass(score, stream), "score");
  if (score.find_tops) Check(LaunchResolveGiven(attend, score, stream), "resolve");
}

class OwnedStream {
 public:
  OwnedStream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace dropkv::cuda
