// What a step must have written: lists, kept rows and the certificate beside the reference.
#pragma once

#include <bit>

#include "cuda/step_case.h"

namespace dropkv::cuda {

inline bool Untouched(const std::vector<float>& x, size_t first, size_t end) {
  return std::all_of(x.begin() + first, x.begin() + end, [](float y) { return std::bit_cast<uint32_t>(y) == ~0U; });
}

inline Precision PrecisionOf(const StepCase& c) { return cuda::PrecisionOf(c.kernel != "any", c.batch.dtype); }

// What a step writes beside the reference's answer to the raw scores that it wrote.
class StepChecker {
 public:
  StepChecker(const StepCase& c, const HostBatch& batch, const StepResult& result)
      : case_(c), batch_(batch), result_(result) {}

  void CheckLists() {
    const int32_t heads = case_.batch.kv_heads;
    int64_t total = 0;
    uint64_t counts[2] = {0, 0};
    ASSERT_EQ(result_.offsets[0], 0);
    for (int32_t b = 0; b < case_.batch.sequences(); ++b) {
      const SequenceScores scores = ScoresOfRun(case_, result_, b);
      const KeepList want = ListsOf(case_, scores);
      for (int32_t h = 0; h < heads; ++h) {
        SCOPED_TRACE("sequence " + std::to_string(b) + " head " + std::to_string(h));
        total += static_cast<int64_t>(want.head(0, h).size());
        ASSERT_EQ(result_.offsets[b * heads + h + 1], total);
        ASSERT_TRUE(std::ranges::equal(result_.list(b * heads + h), want.head(0, h)));
        CheckPooled(b, h, scores);
        CheckDominant(b, h, scores);
      }
      for (const uint8_t flag : scores.flags) {
        counts[0] += flag == reference::kNonFinite ? 1 : 0;
        counts[1] += flag == reference::kDominant ? 1 : 0;
      }
    }
    ASSERT_LE(total, static_cast<int64_t>(result_.positions.size()));
    for (size_t i = total; i < result_.positions.size(); ++i) ASSERT_EQ(result_.positions[i], -1) << "behind the lists";
    const uint64_t skipped = case_.batch.content == Content::kNonFinite ? 2 : 0;
    EXPECT_EQ(result_.counters, (std::vector<uint64_t>{counts[0], counts[1], skipped}));
    if (case_.batch.content == Content::kNonFinite) EXPECT_GT(counts[0], 0U);
    if (case_.batch.content == Content::kDominant && case_.policy.signal == Signal::kDropKv) EXPECT_GT(counts[1], 4U);
  }

  void CheckKeptRows() const {
    for (int32_t list = 0; list < case_.batch.lists(); ++list) {
      const HostList& source = batch_.lists()[list];
      for (size_t i = 0; i < result_.list(list).size(); ++i) {
        const int64_t token = result_.list(list)[i];
        const int64_t row = result_.offsets[list] + static_cast<int64_t>(i);
        ASSERT_TRUE(EqualRows(result_.k, row, source.k, token, case_.batch.key_dim)) << "key " << list << " " << i;
        ASSERT_TRUE(EqualRows(result_.v, row, source.v, token, case_.batch.value_dim)) << "value " << list << " " << i;
      }
    }
    const auto unwritten = [](uint16_t x) { return x == 0xFFFF; };
    const int64_t total = result_.offsets.back();
    EXPECT_TRUE(std::all_of(result_.k.begin() + total * case_.batch.key_dim, result_.k.end(), unwritten));
    EXPECT_TRUE(std::all_of(result_.v.begin() + total * case_.batch.value_dim, result_.v.end(), unwritten));
  }

  void CheckCertificate() const {
    for (int32_t i = 0; i < case_.batch.lists(); ++i) {
      const auto list = result_.list(i);
      const KeepList keep(1, 1, {0, static_cast<int64_t>(list.size())}, {list.begin(), list.end()});
      const reference::Certificate want =
          reference::Certify(batch_.kv(i), batch_.rows(i), batch_.attention(i), keep, 0);
      const CertificateBounds bounds =
          BoundsOfCertificate(batch_.kv(i), batch_.rows(i), batch_.attention(i), list, PrecisionOf(case_));
      for (int32_t g = 0; g < case_.batch.group; ++g) {
        const int32_t at = i * case_.batch.group + g;
        EXPECT_NEAR(result_.output_error[at], want.output_error[g], bounds.error[g]) << "query head " << at;
        EXPECT_NEAR(result_.evicted_mass[at], want.evicted_mass[g], bounds.mass[g]) << "query head " << at;
      }
    }
  }

 private:
  // The bits of the sum in a kernel's order, which is near the reference's; behind the sequence's end nothing.
  void CheckPooled(int32_t b, int32_t h, const SequenceScores& scores) const {
    const int32_t n = scores.tokens;
    const size_t first = (size_t{1} * b * case_.batch.kv_heads + h) * case_.batch.max_tokens();
    const Pooling& pool = case_.policy.pool;
    const std::vector<double> want = reference::Pool(scores.raw.data() + int64_t{h} * n, n, pool, case_.policy.window);
    for (int32_t j = 0; j < n; ++j) {
      const double in_order = scores.pooled[int64_t{h} * n + j];
      ASSERT_EQ(result_.scores[first + j], in_order) << "token " << j;
      ASSERT_NEAR(in_order, want[j],
                  reference::Gamma(pool.before + pool.after + 2.0) * want[j] + reference::kSmallestNormal);
    }
    EXPECT_TRUE(Untouched(result_.scores, first + n, first + case_.batch.max_tokens()));
    EXPECT_TRUE(Untouched(result_.raw, first + n, first + case_.batch.max_tokens()));
  }

  void CheckDominant(int32_t b, int32_t h, const SequenceScores& scores) const {
    const auto list = result_.list(b * case_.batch.kv_heads + h);
    for (int32_t j = 0; j < scores.tokens; ++j)
      if (scores.flags[int64_t{h} * scores.tokens + j] == reference::kDominant)
        EXPECT_TRUE(std::ranges::binary_search(list, j)) << "dominant token " << j << " is gone";
  }

  static bool EqualRows(const std::vector<uint16_t>& a, int64_t i, const std::vector<uint16_t>& b, int64_t j, int dim) {
    return std::memcmp(&a[i * dim], &b[j * dim], dim * sizeof(uint16_t)) == 0;
  }

  const StepCase& case_;
  const HostBatch& batch_;
  const StepResult& result_;
};

// The whole memory of keys or values; blocks, where there are any, on the host.
struct WholeCache {
  std::vector<int32_t> blocks;
  std::vector<uint16_t> k, v;

  explicit WholeCache(const Cache& cache) : k(Memory(cache, cache.k)), v(Memory(cache, cache.v)) {
    if (cache.blocks == nullptr) return;
    blocks.resize(int64_t{cache.sequences} * cache.blocks_stride);
    Check(cudaMemcpy(blocks.data(), cache.blocks, blocks.size() * sizeof(int32_t), cudaMemcpyDeviceToHost), "blocks");
  }

  uint16_t* Row(const Cache& cache, const Tensor& tensor, std::vector<uint16_t>& data, int32_t list, int32_t j) const {
    const int64_t b = list / cache.kv_heads;
    uint16_t* head = data.data() + list % cache.kv_heads * tensor.head_stride;
    if (blocks.empty()) return head + b * tensor.sequence_stride + j * tensor.token_stride;
    return head + blocks[b * cache.blocks_stride + j / cache.block_size] * tensor.sequence_stride +
           j % cache.block_size * tensor.token_stride;
  }

 private:
  static std::vector<uint16_t> Memory(const Cache& cache, const Tensor& tensor) {
    const int64_t parts = cache.blocks != nullptr ? cache.blocks_in_pool : cache.sequences;
    std::vector<uint16_t> host(parts * tensor.sequence_stride);
    Check(cudaMemcpy(host.data(), tensor.data, host.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost), "cache");
    return host;
  }
};

// In place: the rows of the run out of place at the front of every list, and no other element has changed.
inline void CheckInPlace(StepRun& run, const StepResult& apart) {
  WholeCache want(run.cache);
  const StepResult result = run.Run(Placement::kInPlace);
  ASSERT_EQ(result.offsets, apart.offsets);
  ASSERT_EQ(result.positions, apart.positions);
  EXPECT_TRUE(Untouched(result.output_error, 0, result.output_error.size()));
  const int32_t key_dim = run.cache.key_dim;
  const int32_t value_dim = run.cache.value_dim;
  for (int32_t list = 0; list < run.cache.sequences * run.cache.kv_heads; ++list)
    for (int64_t row = apart.offsets[list]; row < apart.offsets[list + 1]; ++row) {
      const auto token = static_cast<int32_t>(row - apart.offsets[list]);
      std::copy_n(&apart.k[row * key_dim], key_dim, want.Row(run.cache, run.cache.k, want.k, list, token));
      std::copy_n(&apart.v[row * value_dim], value_dim, want.Row(run.cache, run.cache.v, want.v, list, token));
    }
  const WholeCache got(run.cache);
  EXPECT_TRUE(got.k == want.k);
  EXPECT_TRUE(got.v == want.v);
}

// One step of a case by `run`, out of place and in place.
inline void CheckStep(const StepCase& c, const HostBatch& batch, StepRun& run, Ran* ran) {
  const WholeCache before(run.cache);
  const StepResult result = run.Run(Placement::kOutOfPlace, ran);
  const WholeCache after(run.cache);
  EXPECT_TRUE(after.k == before.k && after.v == before.v);
  StepChecker checker(c, batch, result);
  ASSERT_NO_FATAL_FAILURE(checker.CheckLists());
  ASSERT_NO_FATAL_FAILURE(checker.CheckKeptRows());
  if (c.policy.signal == Signal::kDropKv) checker.CheckCertificate();
  ASSERT_NO_FATAL_FAILURE(CheckInPlace(run, result));
}

}  // namespace dropkv::cuda
