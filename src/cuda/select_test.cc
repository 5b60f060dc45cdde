#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/kernels.h"
#include "cuda/select_case.h"

namespace dropkv::cuda {
namespace {

// Device memory of one case, and its parameters.
struct DeviceCase {
  DeviceArray<float> raw;
  DeviceArray<int32_t> lengths;
  DeviceArray<int32_t> generated;
  DeviceArray<int64_t> offsets;
  DeviceArray<int32_t> positions;
  DeviceArray<float> pooled;
  DeviceArray<Counters> counters;
  DeviceArray<unsigned char> workspace;
  SelectParams params;

  DeviceCase(const SelectCase& c, const std::vector<float>& host_raw, int64_t capacity)
      : raw(host_raw),
        lengths(Lengths(c)),
        generated(c.generated),
        offsets(c.lengths.size() * c.kv_heads + 2),
        positions(capacity + 64),
        pooled(host_raw.size()),
        counters(std::vector<Counters>{{1000, 2000, 3000}}) {
    params.sequences = c.sequences();
    params.kv_heads = c.kv_heads;
    params.max_tokens = c.max_tokens();
    params.lengths = c.without_lengths ? nullptr : lengths.get();
    if (!c.generated.empty()) {
      params.max_generated = *std::max_element(c.generated.begin(), c.generated.end());
      params.generated = c.one_generated ? nullptr : generated.get();
    }
    params.raw = raw.get();
    params.window = c.window;
    params.sink = c.sink;
    params.pool = c.pool;
    params.heads = c.heads;
    params.alpha = c.alpha;
    params.fraction = c.fraction;
    params.budget_tokens = c.tokens;
    params.offsets = offsets.get();
    params.positions = positions.get();
    params.capacity = capacity;
    params.pooled = pooled.get();
    params.counters = counters.get();
    workspace = DeviceArray<unsigned char>(SelectWorkspaceBytes(params));
    params.workspace = workspace.get();
  }

 private:
  static std::vector<int32_t> Lengths(const SelectCase& c) {
    std::vector<int32_t> lengths = c.lengths;
    for (size_t b = 0; b < lengths.size(); ++b) lengths[b] += c.generated_of(b);
    return lengths;
  }
};

void ExpectBits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0) << i << ": got " << got[i] << ", want " << want[i];
}

void ExpectSelected(const SelectCase& c, const Selection& want, const DeviceCase& device) {
  std::vector<int64_t> offsets = device.offsets.Download();
  EXPECT_EQ(offsets.back(), -1) << "written behind offsets";
  offsets.pop_back();
  ASSERT_EQ(offsets, want.offsets);
  const std::vector<int32_t> positions = device.positions.Download();
  for (size_t i = 0; i < positions.size(); ++i) {
    const bool inside = i < want.positions.size() && static_cast<int64_t>(i) < device.params.capacity;
    ASSERT_EQ(positions[i], inside ? want.positions[i] : -1) << "position " << i;
  }
  const Counters counters = device.counters.Download()[0];
  EXPECT_EQ(counters.nonfinite_tokens, 1000 + want.nonfinite);
  EXPECT_EQ(counters.dominant_tokens, 2000 + want.dominant);
  EXPECT_EQ(counters.skipped_rows, 3000U);
  const std::vector<float> pooled = device.pooled.Download();
  std::vector<float> of_tokens;
  for (size_t list = 0; list < c.lengths.size() * c.kv_heads; ++list) {
    const auto row = pooled.begin() + static_cast<std::ptrdiff_t>(list * c.max_tokens());
    const int32_t n = c.lengths[list / c.kv_heads];
    of_tokens.insert(of_tokens.end(), row, row + n);
    EXPECT_TRUE(std::all_of(row + n, row + c.max_tokens(), [](float x) { return std::isnan(x); }));
  }
  ExpectBits(of_tokens, want.pooled);
}

void Compare(const SelectCase& c, uint64_t seed) {
  SCOPED_TRACE(testing::PrintToString(c) + " seed " + std::to_string(seed));
  const std::vector<float> raw = MakeRaw(c, seed);
  const Selection want = SelectOnHost(c, raw);
  const DeviceCase device(c, raw, static_cast<int64_t>(want.positions.size()));
  ASSERT_EQ(LaunchSelect(device.params, nullptr), cudaSuccess);
  ExpectSelected(c, want, device);
}

constexpr HeadRule kRules[] = {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO};

TEST(CudaSelect, ShortLists) {
  uint64_t seed = 1;
  for (const HeadRule rule : kRules)
    for (const int32_t n : {1, 2, 8, 9, 13, 100, 2047, 2049})
      for (const double fraction : {0.01, 0.5, 0.97, 1.0})
        for (const int levels : {1, 3, 1 << 20}) {
          ++seed;
          Compare({.kv_heads = 1 + static_cast<int32_t>(seed % 5),
                   .lengths = {n},
                   .sink = seed % 3 == 0 ? 4 : 0,
                   .heads = rule,
                   .fraction = fraction,
                   .levels = levels,
                   .flag_rate = seed % 2 == 0 ? 0.0 : 0.1,
                   .spare = static_cast<int32_t>(seed % 2)},
                  seed);
        }
}

TEST(CudaSelect, LongLists) {
  uint64_t seed = 100;
  for (const HeadRule rule : kRules)
    for (const int32_t n : {8192, 8193, 20001, 70000})
      for (const double fraction : {0.05, 0.6})
        for (const int levels : {1, 5, 1 << 20}) {
          ++seed;
          Compare({.kv_heads = seed % 2 == 0 ? 8 : 5,
                   .lengths = {n},
                   .heads = rule,
                   .fraction = fraction,
                   .levels = levels},
                  seed);
        }
}

TEST(CudaSelect, EveryPooling) {
  uint64_t seed = 200;
  for (const bool past_only : {false, true})
    for (const PoolKind kind : {PoolKind::kMean, PoolKind::kMax})
      for (const auto& [before, after] : {std::pair{0, 0},
                                          {1, 0},
                                          {0, 1},
                                          {0, 3},
                                          {2, 1},
                                          {2, 2},
                                          {5, 31},
                                          {31, 5},
                                          {1024, 1024},
                                          {0, 1024},
                                          {1024, 0}})
        for (const int32_t n : {20, 3000, 9000}) {
          ++seed;
          Compare({.kv_heads = 2,
                   .lengths = {n, n / 2},
                   .window = 16,
                   .pool = {kind, before, after, past_only},
                   .heads = kRules[seed % 3],
                   .fraction = 0.3},
                  seed);
        }
}

TEST(CudaSelect, EveryAlphaAndManyHeads) {
  uint64_t seed = 300;
  for (const HeadRule rule : {HeadRule::kAda, HeadRule::kAdaO})
    for (const double alpha : {0.0, 0.1, 0.29, 0.5, 1.0})
      for (const int32_t heads : {1, 2, 4, 9, 33})
        for (const double flags : {0.0, 0.3}) {
          ++seed;
          Compare({.kv_heads = heads,
                   .lengths = {640, 2500},
                   .sink = 2,
                   .heads = rule,
                   .alpha = alpha,
                   .fraction = 0.25,
                   .levels = seed % 3 == 0 ? 7 : 1 << 20,
                   .flag_rate = flags},
                  seed);
        }
}

TEST(CudaSelect, RaggedBatches) {
  uint64_t seed = 400;
  for (const HeadRule rule : kRules)
    for (const bool by_tokens : {false, true}) {
      const double fraction = by_tokens ? 0.0 : 0.2;
      Compare({.kv_heads = 4,
               .lengths = {0, 5, 3000, 0, 7, 9000, 8, 2048, 0},
               .heads = rule,
               .fraction = fraction,
               .tokens = 100},
              ++seed);
      Compare({.kv_heads = 2,
               .lengths = {6000, 1, 4096, 900},
               .sink = 3,
               .heads = rule,
               .fraction = fraction,
               .tokens = 5000},
              ++seed);
      Compare({.kv_heads = 2,
               .lengths = std::vector<int32_t>(150, 40),
               .heads = rule,
               .fraction = fraction,
               .tokens = 12,
               .spare = 0,
               .without_lengths = true},
              ++seed);
    }
}

// Lists end with the generated tokens, whatever the budget; n is what the rules see.
TEST(CudaSelect, GeneratedTokens) {
  uint64_t seed = 800;
  for (const HeadRule rule : kRules)
    for (const bool by_tokens : {false, true})
      for (const bool past_only : {false, true}) {
        const double fraction = by_tokens ? 0.0 : 0.2;
        const Pooling pool{past_only ? PoolKind::kMax : PoolKind::kMean, 5, 40, past_only};
        Compare({.kv_heads = 4,
                 .lengths = {0, 5, 3000, 0, 7, 9000, 8, 2048, 0},
                 .pool = pool,
                 .heads = rule,
                 .fraction = fraction,
                 .tokens = 100,
                 .generated = {40, 3, 0, 0, 700, 33, 1, 2048, 5}},
                ++seed);
        Compare({.kv_heads = 3,
                 .lengths = {1900, 1},
                 .sink = 3,
                 .pool = pool,
                 .heads = rule,
                 .fraction = fraction,
                 .tokens = 64,
                 .generated = {200, 200},
                 .one_generated = true},
                ++seed);
        Compare({.kv_heads = 2,
                 .lengths = std::vector<int32_t>(150, 40),
                 .pool = pool,
                 .heads = rule,
                 .fraction = fraction,
                 .tokens = 12,
                 .spare = 0,
                 .without_lengths = true,
                 .generated = std::vector<int32_t>(150, 9),
                 .one_generated = true},
                ++seed);
      }
}

// More keys than the shared memory of all multiprocessors holds: some are made again in every pass.
TEST(CudaSelect, MoreKeysThanFit) {
  uint64_t seed = 500;
  for (const HeadRule rule : kRules)
    Compare({.kv_heads = 8, .lengths = {1 << 20}, .heads = rule, .fraction = 0.05, .flag_rate = 0.001}, ++seed);
}

// 2 heads, 10 tokens each above the window, flat counts (15, 5): rule K keeps (15, 5), rule O moves to (14, 6).
TEST(CudaSelect, HandComputedHeadCounts) {
  constexpr int32_t kTokens = 41;
  std::vector<float> raw(2 * kTokens, 0.0F);
  for (int32_t j = 0; j < 15; ++j) raw[j * 2] = 9.0F;
  for (int32_t j = 0; j < 5; ++j) raw[kTokens + 3 * j] = 9.0F;
  SelectCase c{.kv_heads = 2, .lengths = {kTokens}, .window = 1, .pool = {}, .fraction = 0.0, .tokens = 11, .spare = 0};
  const auto offsets = [&](HeadRule rule) {
    c.heads = rule;
    const DeviceCase device(c, raw, 100);
    EXPECT_EQ(LaunchSelect(device.params, nullptr), cudaSuccess);
    std::vector<int64_t> all = device.offsets.Download();
    all.pop_back();
    return all;
  };
  EXPECT_EQ(offsets(HeadRule::kAda), (std::vector<int64_t>{0, 16, 22}));
  EXPECT_EQ(offsets(HeadRule::kAdaO), (std::vector<int64_t>{0, 15, 22}));
  EXPECT_EQ(offsets(HeadRule::kUniform), (std::vector<int64_t>{0, 11, 22}));
}

TEST(CudaSelect, WritesNothingBeyondTheCapacity) {
  for (const HeadRule rule : kRules) {
    const SelectCase c{.kv_heads = 3, .lengths = {9000, 500}, .heads = rule};
    const std::vector<float> raw = MakeRaw(c, 600);
    const DeviceCase device(c, raw, 1234);
    ASSERT_EQ(LaunchSelect(device.params, nullptr), cudaSuccess);
    ExpectSelected(c, SelectOnHost(c, raw), device);
  }
}

TEST(CudaSelect, RefusesWrongShapes) {
  const SelectCase c{.lengths = {10}};
  DeviceCase device(c, MakeRaw(c, 1), 100);
  device.params.kv_heads = 0;
  EXPECT_EQ(LaunchSelect(device.params, nullptr), cudaErrorInvalidValue);
  device.params.kv_heads = 1 << 20;
  device.params.max_tokens = 1 << 20;
  EXPECT_EQ(LaunchSelect(device.params, nullptr), cudaErrorInvalidValue);
}

// Captured in a graph, and run again over the memory that the previous run left.
TEST(CudaSelect, RepeatsInAGraph) {
  for (const HeadRule rule : kRules)
    for (const int32_t n : {4000, 30000}) {
      const SelectCase c{.kv_heads = 8, .lengths = {n}, .heads = rule};
      const std::vector<float> raw = MakeRaw(c, 700);
      const Selection want = SelectOnHost(c, raw);
      DeviceCase device(c, raw, static_cast<int64_t>(want.positions.size()));
      cudaStream_t stream = nullptr;
      Check(cudaStreamCreate(&stream), "stream");
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      ASSERT_EQ(LaunchSelect(device.params, stream), cudaSuccess);
      Check(cudaStreamEndCapture(stream, &graph), "capture");
      Check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
      for (int run = 0; run < 10; ++run) {
        device.counters.Upload({{1000, 2000, 3000}});
        Check(cudaMemset(device.positions.get(), 0xFF, device.positions.size() * sizeof(int32_t)), "clear");
        Check(cudaGraphLaunch(exec, stream), "launch");
        Check(cudaStreamSynchronize(stream), "run");
        ExpectSelected(c, want, device);
      }
      Check(cudaGraphExecDestroy(exec), "graph");
      Check(cudaGraphDestroy(graph), "graph");
      Check(cudaStreamDestroy(stream), "stream");
    }
}

}  // namespace
}  // namespace dropkv::cuda
