// A whole step through the public API of dropkv/cuda.h on a test's batch: what it was given, what it wrote, and what
// the reference says about that.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/decode_run.h"
#include "cuda/device_tolerance.h"
#include "cuda/select_case.h"
#include "dropkv/cuda.h"
#include "reference/reference.h"

namespace dropkv::cuda {

struct StepCase {
  DeviceCase batch;
  Policy policy;
  Budget budget;
  std::string kernel;          // force_kernel
  std::optional<DType> given;  // rows come with lse and an out of this type
};

// A preset, or "ada-o": adadropkv's with the original rule for heads.
inline Policy PolicyNamed(const std::string& name) {
  Policy policy = FindPreset(name == "ada-o" ? "adadropkv" : name).value();
  if (name == "ada-o") policy.heads = HeadRule::kAdaO;
  return policy;
}

// Sequences of one token, of some, of none and of many.
inline StepCase MakeStep(const std::string& policy, const Budget& budget, const std::string& kernel, DType dtype) {
  StepCase c{{}, PolicyNamed(policy), budget, kernel, {}};
  c.batch.lengths = {1, 700, 0, 4099};
  c.batch.dtype = dtype;
  c.batch.rows = c.policy.window;
  c.batch.odd_values = c.policy.signal == Signal::kDropKv;  // the attention signal does not look for them
  return c;
}

// What a run wrote. Nothing is hidden in `bytes`: all outputs and all that lies between them.
struct StepResult {
  std::vector<float> raw, scores, output_error, evicted_mass;
  std::vector<int64_t> offsets;
  std::vector<int32_t> positions;  // [capacity]
  std::vector<uint16_t> k, v;
  std::vector<uint64_t> counters;
  std::vector<uint8_t> bytes;

  std::span<const int32_t> list(int32_t i) const {
    return std::span(positions).subspan(offsets[i], offsets[i + 1] - offsets[i]);
  }
};

inline bool Untouched(const uint8_t* bytes, size_t count) {
  return std::all_of(bytes, bytes + count, [](uint8_t byte) { return byte == 0xFF; });
}

// The outputs in one piece of device memory, with bytes that nobody may write before, between and behind them.
class OutputMemory {
 public:
  explicit OutputMemory(const Plan& plan) {
    const int64_t tokens = int64_t{plan.shape.sequences} * plan.shape.kv_heads * plan.shape.max_tokens;
    const int64_t heads = int64_t{plan.shape.sequences} * plan.query_heads;
    const int64_t lists = int64_t{plan.shape.sequences} * plan.shape.kv_heads;
    for (const int64_t bytes :
         {4 * tokens, 4 * tokens, 8 * (lists + 1), 4 * plan.capacity, 4 * heads, 4 * heads, int64_t{24},
          2 * plan.capacity * plan.shape.key_dim, 2 * plan.capacity * plan.shape.value_dim}) {
      regions_.push_back({size_ + kGap, static_cast<size_t>(bytes)});
      size_ = (size_ + kGap + bytes + 255) / 256 * 256;
    }
    memory_ = DeviceArray<uint8_t>(size_ + kGap);
    capacity_ = plan.capacity;
  }

  Outputs outputs(Placement placement, bool certificate) const {
    Outputs outputs;
    outputs.raw_scores = At<float>(0);
    outputs.scores = At<float>(1);
    outputs.offsets = At<int64_t>(2);
    outputs.positions = At<int32_t>(3);
    outputs.capacity = capacity_;
    outputs.output_error = certificate ? At<float>(4) : nullptr;
    outputs.evicted_mass = certificate ? At<float>(5) : nullptr;
    outputs.counters = At<uint64_t>(6);
    outputs.placement = placement;
    if (placement == Placement::kOutOfPlace) outputs.k = At<void>(7), outputs.v = At<void>(8);
    return outputs;
  }

  void Clear() { Check(cudaMemset(memory_.get(), 0xFF, memory_.size()), "memset"); }

  StepResult Download() const {
    StepResult result;
    result.bytes = memory_.Download();
    size_t end = 0;
    for (const Region& region : regions_) {
      EXPECT_TRUE(Untouched(result.bytes.data() + end, region.at - end)) << "written before byte " << region.at;
      end = region.at + region.bytes;
    }
    EXPECT_TRUE(Untouched(result.bytes.data() + end, result.bytes.size() - end)) << "written behind the outputs";
    Read(result, 0, &result.raw);
    Read(result, 1, &result.scores);
    Read(result, 2, &result.offsets);
    Read(result, 3, &result.positions);
    Read(result, 4, &result.output_error);
    Read(result, 5, &result.evicted_mass);
    Read(result, 6, &result.counters);
    Read(result, 7, &result.k);
    Read(result, 8, &result.v);
    return result;
  }

 private:
  static constexpr size_t kGap = 256;
  struct Region {
    size_t at;
    size_t bytes;
  };

  template <typename T>
  T* At(int region) const {
    return static_cast<T*>(static_cast<void*>(memory_.get() + regions_[region].at));
  }
  template <typename T>
  void Read(const StepResult& from, int region, std::vector<T>* to) const {
    to->resize(regions_[region].bytes / sizeof(T));
    std::memcpy(to->data(), from.bytes.data() + regions_[region].at, regions_[region].bytes);
  }

  std::vector<Region> regions_;
  size_t size_ = 0;
  int64_t capacity_ = 0;
  DeviceArray<uint8_t> memory_;
};

class StepRun {
 public:
  StepRun(const StepCase& c, const HostBatch& batch) : device_(batch) {
    const AttendParams params = device_.attend();
    cache = params.cache;
    rows.q = params.rows.q;
    rows.sequence_stride = params.rows.q_sequence_stride;
    rows.head_stride = params.rows.q_head_stride;
    rows.row_stride = params.rows.q_row_stride;
    rows.query_heads = cache.kv_heads * params.rows.group;
    rows.rows = params.rows.rows;
    rows.visible = params.rows.visible;
    rows.weights = params.rows.weights;
    rows.scale = params.rows.scale;
    rows.soft_cap = params.rows.soft_cap;
    rows.sinks = params.rows.sinks;
    if (c.given.has_value()) HandIn(batch, *c.given);
    auto made = MakePlan(cache, rows.query_heads, rows.rows, c.given.has_value(), c.policy, c.budget,
                         std::string_view(c.kernel));
    EXPECT_TRUE(made.ok()) << made.status().message();
    plan = std::move(made).value();
    memory_ = std::make_unique<OutputMemory>(plan);
    workspace_ = DeviceArray<uint8_t>(plan.workspace_bytes + kBehind);
  }

  Outputs outputs(Placement placement) const {
    return memory_->outputs(placement, plan.policy.signal == Signal::kDropKv && placement == Placement::kOutOfPlace);
  }
  void* workspace() const { return workspace_.get(); }
  cudaStream_t stream() const { return stream_.get(); }

  // Outputs and workspace as nothing that computes would leave them.
  void Clear() {
    Check(cudaDeviceSynchronize(), "before");
    memory_->Clear();
    Check(cudaMemset(workspace_.get(), 0xFF, workspace_.size()), "memset");
    Check(cudaDeviceSynchronize(), "clear");
  }
  Status Launch(Placement placement, Ran* ran = nullptr) const {
    return cuda::Run(plan, cache, rows, outputs(placement), workspace(), stream(), ran);
  }
  StepResult Download() const {
    const std::vector<uint8_t> workspace = workspace_.Download();
    EXPECT_TRUE(Untouched(workspace.data() + plan.workspace_bytes, kBehind)) << "written behind the workspace";
    return memory_->Download();
  }
  StepResult Run(Placement placement, Ran* ran = nullptr) {
    Clear();
    const Status status = Launch(placement, ran);
    EXPECT_TRUE(status.ok()) << status.message();
    return Download();
  }

  Cache cache;
  Rows rows;
  Plan plan;

 private:
  static constexpr size_t kBehind = 256;

  // The reference's, as a prefill would have them.
  void HandIn(const HostBatch& batch, DType dtype) {
    std::vector<float> lse, out;
    for (int32_t list = 0; list < batch.shape().lists(); ++list) {
      const reference::Attention attention = reference::Attend(batch.kv(list), batch.rows(list), batch.attention(list));
      lse.insert(lse.end(), attention.lse.begin(), attention.lse.end());
      out.insert(out.end(), attention.out.begin(), attention.out.end());
    }
    std::vector<uint16_t> out16;
    if (dtype != DType::kF32)
      for (const float x : out) out16.push_back(Round(dtype, x));
    lse_ = DeviceArray<float>(lse);
    out_ = DeviceArray<float>(out);
    out16_ = DeviceArray<uint16_t>(out16);
    rows.lse = lse_.get();
    rows.out = dtype == DType::kF32 ? static_cast<const void*>(out_.get()) : out16_.get();
    rows.out_dtype = dtype;
  }

  DeviceBatch device_;
  DeviceArray<float> lse_, out_;
  DeviceArray<uint16_t> out16_;
  std::unique_ptr<OutputMemory> memory_;
  DeviceArray<uint8_t> workspace_;
  OwnedStream stream_;
};

// Of one sequence, [Hkv, n] each.
struct SequenceScores {
  int32_t tokens = 0;  // n
  int32_t generated = 0;
  std::vector<double> raw, pooled, tolerance;
  std::vector<uint8_t> flags;
};

inline SequenceScores SizesOf(const StepCase& c, int32_t sequence) {
  const int32_t generated = c.batch.generated_of(sequence);
  return {c.batch.lengths[sequence] - generated, generated, {}, {}, {}, {}};
}

// From the raw scores that a run wrote. Pooled in float, in a kernel's order: the bits that it must have.
inline SequenceScores ScoresOfRun(const StepCase& c, const StepResult& result, int32_t sequence) {
  SequenceScores scores = SizesOf(c, sequence);
  for (int32_t h = 0; h < c.batch.kv_heads; ++h) {
    const float* from = result.raw.data() + (int64_t{sequence} * c.batch.kv_heads + h) * c.batch.max_tokens();
    std::vector<float> sizes(from, from + scores.tokens);
    for (float& x : sizes) {
      scores.flags.push_back(std::isnan(x) ? reference::kNonFinite : std::signbit(x) ? reference::kDominant : 0);
      x = std::abs(x);
    }
    const std::vector<float> pooled = PoolInOrder(sizes, c.policy.pool, c.policy.window);
    scores.raw.insert(scores.raw.end(), sizes.begin(), sizes.end());
    scores.pooled.insert(scores.pooled.end(), pooled.begin(), pooled.end());
  }
  return scores;
}

// Of the reference, with what a kernel's pooled scores may differ by.
inline SequenceScores ScoresOfReference(const StepCase& c, const HostBatch& batch, int32_t sequence,
                                        const Precision& precision) {
  SequenceScores scores = SizesOf(c, sequence);
  const double sums = reference::Gamma(c.policy.pool.before + c.policy.pool.after + 2.0);
  for (int32_t h = 0; h < c.batch.kv_heads; ++h) {
    const int32_t list = sequence * c.batch.kv_heads + h;
    const reference::Scores own =
        reference::Score(batch.kv(list), batch.rows(list), batch.attention(list), c.policy, 0, scores.generated);
    const RowBounds bounds = BoundsOf(batch.kv(list), batch.rows(list), batch.attention(list), precision);
    const auto pool = [&](const std::vector<double>& x) {
      return reference::Pool(x.data(), scores.tokens, c.policy.pool, c.policy.window);
    };
    const std::vector<double> pooled = pool(own.raw);
    const std::vector<double> bound = pool(c.policy.signal == Signal::kDropKv ? bounds.loss : bounds.share);
    for (int32_t j = 0; j < scores.tokens; ++j) scores.tolerance.push_back(bound[j] + sums * (pooled[j] + bound[j]));
    scores.raw.insert(scores.raw.end(), own.raw.begin(), own.raw.end());
    scores.pooled.insert(scores.pooled.end(), pooled.begin(), pooled.end());
    scores.flags.insert(scores.flags.end(), own.flags.begin(), own.flags.end());
  }
  return scores;
}

inline KeepList ListsOf(const StepCase& c, const SequenceScores& scores) {
  const auto keep = ResolveBudget(c.budget, c.policy, scores.tokens);
  EXPECT_TRUE(keep.ok()) << keep.status().message();
  return reference::Select(c.policy, keep.value(), c.batch.kv_heads, scores.tokens, scores.raw.data(),
                           scores.pooled.data(), scores.flags.data(), scores.generated);
}

// How far a device's certificate may be from the reference's, per query head of one list.
//   a       Weights are rounded to 16 bits before they meet V: u16 of each, so that a moves by u16 sum p |v| at most.
//           Rounding errors being as good as independent, also by kLambda u16 sqrt(sum p^2 |v|^2) at most (the bound
//           behind reference::Gamma). All else of a is float32: device_tolerance.h.
//   error   x = |a - a'| / |a| is off by (da + da' + x da) / (|a| - da). The root of the mean square is a norm: it is
//           off by that of these at most.
//   mass    1 - exp(lse' - lse): by the errors of both lse. Sums of weights are never rounded to 16 bits.
struct CertificateBounds {
  std::vector<double> error, mass;
};

inline double OutError(const reference::Layer& layer, const reference::Row& row, const reference::Magnitudes& m,
                       const Precision& precision) {
  double sum = 0.0;
  double squares = 0.0;
  for (int32_t j = 0; j < layer.tokens; ++j) {
    if (row.weight[j] == 0.0) continue;
    const double part = row.weight[j] * reference::Norm(layer.value(0, j), layer.value_dim);
    sum += part;
    squares += part * part;
  }
  const double rounding = precision.weight * std::min(sum, reference::kLambda * std::sqrt(squares));
  return (ErrorsOf(m, precision).out - precision.weight) * m.value_norm + rounding;
}

inline CertificateBounds BoundsOfCertificate(const KvView& kv, const ObservationRows& rows, const AttentionSpec& spec,
                                             std::span<const int32_t> list, const Precision& precision) {
  const reference::Layer layer = reference::LoadLayer(kv);
  std::vector<uint8_t> kept(kv.tokens, 0);
  for (const int32_t j : list) kept[j] = 1;
  CertificateBounds bounds;
  for (int32_t h = 0; h < rows.query_heads; ++h) {
    double squares = 0.0;
    double mass = 0.0;
    int32_t judged = 0;
    for (int32_t i = 0; i < rows.rows; ++i) {
      const reference::Row full = reference::SoftmaxRow(layer, rows, spec, h, i);
      if (full.skipped) continue;
      const float* q = rows.q + h * rows.head_stride + i * rows.row_stride;
      const reference::Row after = reference::SoftmaxRow(layer, q, h, 0, rows.visible[i], spec, kept.data());
      const reference::Magnitudes m = MagnitudesOf(layer, rows, spec, h, i);
      const double moved = OutError(layer, full, m, precision);
      const double moved_after = OutError(layer, after, m, precision);
      const double norm = reference::Norm(full.out.data(), kv.value_dim);
      const double distance = reference::Distance(full.out.data(), after.out.data(), kv.value_dim);
      ++judged;
      if (norm == 0.0) continue;
      EXPECT_LT(moved, norm);
      const double off = (moved + moved_after + distance / norm * moved) / (norm - moved);
      const double sums = reference::Gamma(2.0 * kv.value_dim + rows.rows + 4.0) * (distance / norm + off);
      squares += (off + sums) * (off + sums);
      mass += 2 * (reference::LseTolerance(m) + ErrorsOf(m, precision).logit) +
              reference::kUnitRoundoff * (rows.rows + 2 * reference::kExpUlps);
    }
    bounds.error.push_back(std::sqrt(squares / std::max(1, judged)));
    bounds.mass.push_back(mass / std::max(1, judged));
  }
  return bounds;
}

}  // namespace dropkv::cuda
