#include <gtest/gtest.h>

#include <cstring>

#include "cuda/decode_run.h"
#include "cuda/device_tolerance.h"
#include "reference/reference.h"

namespace dropkv::cuda {
namespace {

using KernelCase = std::tuple<DeviceCase, const char*>;

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The tensor-core kernels round their weights to the cache's type before they meet V: an error of at most the type's
// unit roundoff, 2^-8 or 2^-11, of the largest value. Their sums, and all of the careful kernel, are float32
// (device_tolerance.h).
void ExpectReference(const HostBatch& batch, const std::vector<float>& out, const Precision& precision) {
  const DeviceCase& c = batch.shape();
  for (int32_t list = 0; list < c.lists(); ++list) {
    const reference::Layer layer = reference::LoadLayer(batch.kv(list));
    const ObservationRows rows = batch.rows(list);
    const AttentionSpec spec = batch.attention(list);
    for (int32_t g = 0; g < c.group; ++g) {
      const reference::Row want = reference::SoftmaxRow(layer, rows, spec, g, 0);
      const reference::Magnitudes m = want.skipped ? reference::Magnitudes{} : MagnitudesOf(layer, rows, spec, g, 0);
      const double bound = want.skipped ? 0.0 : ErrorsOf(m, precision).out * m.value_max;
      for (int32_t i = 0; i < c.value_dim; ++i) {
        const float got = out[(int64_t{list} * c.group + g) * c.value_dim + i];
        ASSERT_LE(std::abs(got - want.out[i]), bound)
            << "list " << list << " of " << layer.tokens << " tokens, head " << g << ", dim " << i << ": got " << got
            << ", expected " << want.out[i];
      }
    }
  }
}

DeviceCase BaseCase() {
  DeviceCase c;
  c.layout = Layout::kRagged;
  c.lengths = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 4099};
  c.kv_heads = 1;
  c.rows = 1;
  c.splits = 1;
  return c;
}

std::vector<DeviceCase> DecodeCases() {
  std::vector<DeviceCase> cases;
  const auto add = [&cases](auto&& change) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      DeviceCase c = BaseCase();
      c.dtype = dtype;
      change(c);
      cases.push_back(c);
    }
  };
  for (const int32_t d : {64, 80, 96, 128, 256})
    for (const int32_t g : {1, 3, 4, 7, 8, 16}) add([&](DeviceCase& c) { c.key_dim = c.value_dim = d, c.group = g; });
  for (const auto& [d, dv] : {std::pair{192, 128}, {128, 64}, {8, 256}, {72, 104}, {40, 24}})
    add([&, d = d, dv = dv](DeviceCase& c) { c.key_dim = d, c.value_dim = dv, c.group = 5; });
  for (const Layout layout :
       {Layout::kHeadMajor, Layout::kTokenMajor, Layout::kPacked, Layout::kPaged, Layout::kRagged})
    for (const bool misaligned : {false, true})
      add([&](DeviceCase& c) {
        c.layout = layout, c.misaligned = misaligned, c.lengths = {151, 0, 64, 1290}, c.kv_heads = 3;
        c.key_dim = c.value_dim = 96;
      });
  for (const int32_t block_size : {8, 16, 64, 48})
    add([&](DeviceCase& c) {
      c.layout = Layout::kPaged, c.block_size = block_size, c.lengths = {700, 1, 65}, c.kv_heads = 2;
      c.key_dim = c.value_dim = 128;
    });
  for (const Content content : {Content::kDominant, Content::kEqualKeys, Content::kLarge, Content::kOffset})
    for (const bool sinks : {false, true})
      add([&](DeviceCase& c) { c.content = content, c.sinks = sinks, c.kv_heads = 2; });
  for (const float cap : {1.5F, 30.0F})
    for (const Content content : {Content::kNormal, Content::kLarge, Content::kNonFinite})
      add([&](DeviceCase& c) {
        c.content = content, c.soft_cap = cap, c.sinks = cap > 2.0F;
        c.lengths.push_back(5);  // non-finite: an infinite key, which a cap could hide, and no NaN beside it
      });
  for (const Layout layout : {Layout::kHeadMajor, Layout::kPaged, Layout::kRagged})
    for (const int32_t g : {2, 12})
      add([&](DeviceCase& c) {
        c.content = Content::kNonFinite, c.layout = layout, c.group = g, c.lengths = {2, 300, 90, 1000};
      });
  add([&](DeviceCase& c) { c.lengths = {5000, 20000, 70000}, c.key_dim = 16, c.value_dim = 16, c.group = 2; });
  return cases;
}

std::vector<KernelCase> KernelCases() {
  std::vector<KernelCase> cases;
  for (const DeviceCase& c : DecodeCases())
    for (const char* kernel : {"any", "sm80", "sm90"}) cases.emplace_back(c, kernel);
  return cases;
}

// Whether a kernel should take a case.
bool Takes(const std::string& kernel, const DeviceCase& c) {
  if (kernel == "any") return true;
  if (c.misaligned || c.layout != Layout::kPaged) return !c.misaligned;
  return kernel == "sm80" ? c.block_size % 16 == 0 : 64 % c.block_size == 0;
}

class CudaDecodeTest : public testing::TestWithParam<KernelCase> {};

TEST_P(CudaDecodeTest, MatchesReference) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  const auto& [shape, kernel] = GetParam();
  const HostBatch batch(shape);
  DecodeRun run(batch);
  const char* refused = Refused(kernel, run.params());
  ASSERT_EQ(refused == nullptr, Takes(kernel, shape)) << (refused != nullptr ? refused : "taken");
  if (refused != nullptr) GTEST_SKIP() << kernel << " does not take " << refused;
  const bool fast = std::string(kernel) != "any";
  if (std::string(kernel) == "sm90" && !IsHopper()) GTEST_SKIP() << "the device is not of compute capability 9.0";
  const std::vector<float> out = run.Run(kernel);
  ExpectReference(batch, out, PrecisionOf(fast, shape.dtype));
  const std::vector<uint16_t> out16 = run.Out16();
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out16[i], Round(shape.dtype, out[i])) << "element " << i;
}

INSTANTIATE_TEST_SUITE_P(All, CudaDecodeTest, testing::ValuesIn(KernelCases()));

// Where all keys are the same, all weights are 1 and the output is the mean: no weight is rounded, and the bound is so
// tight that one token too few, too many or twice would show.
void ExpectMeans(const HostBatch& batch, const std::vector<float>& out, int32_t tensor_core_tokens) {
  const DeviceCase& c = batch.shape();
  for (int32_t list = 0; list < c.lists(); ++list) {
    const reference::Layer layer = reference::LoadLayer(batch.kv(list));
    for (int32_t i = 0; i < c.value_dim; ++i) {
      double mean = 0.0;
      double largest = 0.0;
      for (int32_t j = 0; j < layer.tokens; ++j) {
        mean += layer.value(0, j)[i] / layer.tokens;
        largest = std::max(largest, std::abs(layer.value(0, j)[i]));
      }
      // Tensor cores truncate, by 2u of a sum that is on average half of what it becomes; then sums are added.
      const double bound = (tensor_core_tokens * reference::kUnitRoundoff + reference::Gamma(200)) * largest;
      ASSERT_LE(bound, layer.tokens > 1 ? 1.0 / layer.tokens : 1.0);
      for (int32_t g = 0; g < c.group; ++g)
        ASSERT_NEAR(out[(int64_t{list} * c.group + g) * c.value_dim + i], mean, bound)
            << "list " << list << " dim " << i;
    }
  }
}

TEST(CudaDecode, EveryTokenCountsOnce) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  for (const std::string& kernel : FastKernels())
    for (const int32_t d : {64, 128}) {
      SCOPED_TRACE(kernel);
      DeviceCase c = BaseCase();
      c.content = Content::kEqualKeys;
      c.key_dim = c.value_dim = d;
      c.group = 3;
      c.lengths = {1, 127, 128, 129, 511, 4096, 4097, 6554};
      const HostBatch batch(c);
      DecodeRun run(batch);
      ExpectMeans(batch, run.Run(kernel), kernel == "sm80" ? 64 : 256);
    }
}

// More lists than one thread, and one round of a warp, hold in the plans.
TEST(CudaDecode, ManyShortLists) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  for (const int32_t count : {127, 129, 1000, 4500}) {
    DeviceCase c = BaseCase();
    c.key_dim = c.value_dim = 8;
    c.group = 2;
    c.lengths.clear();
    for (int32_t i = 0; i < count; ++i) c.lengths.push_back(i % 500 == 3 ? 300 : i * 7 % 6);
    const HostBatch batch(c);
    DecodeRun run(batch);
    for (const std::string& kernel : FastKernels()) {
      SCOPED_TRACE(kernel);
      ExpectReference(batch, run.Run(kernel), PrecisionOf(true, c.dtype));
    }
  }
}

TEST(CudaDecode, ProductsBeyondFloatsAndNothingButNonFiniteTokens) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  for (const float cap : {0.0F, 20.0F})
    for (const bool sinks : {false, true}) {
      DeviceCase c = BaseCase();
      c.lengths = {40, 300};
      c.soft_cap = cap;
      c.sinks = sinks;
      DecodeRun run{HostBatch(c)};
      const DecodeParams& params = run.params();
      const size_t bytes = size_t{340} * params.cache.k.token_stride * 2;
      Check(cudaMemset(const_cast<void*>(params.cache.k.data), 0x7F, bytes), "memset");  // above 1e38
      std::vector<std::string> kernels = FastKernels();
      kernels.emplace_back("any");
      for (const std::string& kernel : kernels)
        for (const float x : run.Run(kernel)) ASSERT_TRUE(std::isfinite(x)) << kernel;
      Check(cudaMemset(const_cast<void*>(params.cache.k.data), 0xFF, bytes), "memset");  // NaN
      for (const std::string& kernel : kernels)
        for (const float x : run.Run(kernel)) ASSERT_EQ(x, 0.0F) << kernel;
    }
}

// The parameters of one sequence of a batch.
DecodeParams Alone(const DecodeParams& batch, const DeviceCase& c, int32_t sequence) {
  DecodeParams params = batch;
  CacheParams& cache = params.cache;
  const int64_t heads = int64_t{sequence} * c.kv_heads;
  cache.sequences = 1;
  cache.max_tokens = c.lengths[sequence];
  if (cache.lengths != nullptr) cache.lengths += sequence;
  if (cache.starts != nullptr) cache.starts += sequence;
  if (cache.offsets != nullptr) cache.offsets += heads;
  if (cache.blocks != nullptr) {
    cache.blocks += int64_t{sequence} * cache.blocks_stride;
  } else {
    cache.k.data = static_cast<const uint16_t*>(cache.k.data) + sequence * cache.k.sequence_stride;
    cache.v.data = static_cast<const uint16_t*>(cache.v.data) + sequence * cache.v.sequence_stride;
  }
  params.q = static_cast<const uint16_t*>(params.q) + heads * c.group * c.key_dim;
  params.out = static_cast<uint16_t*>(params.out) + heads * c.group * c.value_dim;
  params.out32 += heads * c.group * c.value_dim;
  return params;
}

// One workspace serves the batch and its parts: a launch leaves it as it was. The kernel of sm_80 cuts a list by its
// own length alone, so that its bits are the same too; that of sm_90 cuts all lists together.
TEST(CudaDecode, ResultsDoNotDependOnNeighbours) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  for (const Layout layout : {Layout::kRagged, Layout::kHeadMajor, Layout::kPacked, Layout::kPaged}) {
    DeviceCase c = BaseCase();
    c.layout = layout;
    c.kv_heads = 2;
    c.lengths = {6554, 1, 0, 300, 2000, 129};
    c.key_dim = c.value_dim = 128;
    DecodeRun run{HostBatch(c)};
    const int64_t size = int64_t{c.kv_heads} * c.group * c.value_dim;
    for (const std::string& kernel : FastKernels()) {
      const std::vector<float> all = run.Run(kernel);
      for (int32_t b = 0; b < c.sequences(); ++b) {
        const std::vector<float> alone = run.Run(kernel, Alone(run.params(), c, b));
        if (kernel == "sm80") {
          EXPECT_EQ(std::memcmp(&alone[b * size], &all[b * size], size * sizeof(float)), 0) << "sequence " << b;
        }
        for (int64_t i = b * size; i < (b + 1) * size; ++i)
          ASSERT_NEAR(alone[i], all[i], 1e-2) << kernel << ", sequence " << b << ", element " << i;
      }
      EXPECT_TRUE(SameBits(run.Run(kernel), all)) << kernel;
    }
  }
}

TEST(CudaDecode, RepeatsHaveEqualBits) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  for (const Content content : {Content::kNormal, Content::kNonFinite}) {
    DeviceCase c = BaseCase();
    c.content = content;
    c.kv_heads = 2;
    c.lengths = {6554, 4099, 1000, 17};
    DecodeRun run{HostBatch(c)};
    std::vector<std::string> kernels = FastKernels();
    kernels.emplace_back("any");
    for (const std::string& kernel : kernels) {
      const std::vector<float> first = run.Run(kernel);
      for (int repeat = 0; repeat < 20; ++repeat) ASSERT_TRUE(SameBits(run.Run(kernel), first)) << kernel;
    }
  }
}

// Two launches in one graph: the second begins while the first still runs.
TEST(CudaDecode, GraphReplays) {
  if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
  DeviceCase c = BaseCase();
  c.kv_heads = 2;
  DecodeRun run{HostBatch(c)};
  for (const std::string& kernel : FastKernels()) {
    const std::vector<float> direct = run.Run(kernel);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    Check(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeGlobal), "begin");
    run.Launch(kernel, run.params());
    run.Launch(kernel, run.params());
    Check(cudaStreamEndCapture(run.stream(), &graph), "end");
    Check(cudaGraphInstantiate(&instance, graph, 0), "instantiate");
    for (int replay = 0; replay < 3; ++replay) {
      run.Clear();
      Check(cudaGraphLaunch(instance, run.stream()), "launch");
      EXPECT_TRUE(SameBits(run.Out(), direct)) << kernel << ", replay " << replay;
    }
    cudaGraphExecDestroy(instance);
    cudaGraphDestroy(graph);
  }
}

TEST(CudaDecode, RefusesWhatTheyCannotTake) {
  DecodeParams params;
  params.cache.sequences = 2;
  params.cache.kv_heads = 4;
  params.cache.key_dim = 64;
  params.cache.value_dim = 64;
  params.cache.max_tokens = 100;
  params.cache.k = {nullptr, 64 * 400, 64 * 100, 64};
  params.cache.v = params.cache.k;
  params.group = 16;
  EXPECT_TRUE(SupportsDecodeSm80(params));
  EXPECT_EQ(RefusesDecodeSm90(params), nullptr);
  const auto refuses = [&](auto&& change) {
    DecodeParams changed = params;
    change(changed);
    return !SupportsDecodeSm80(changed) && RefusesDecodeSm90(changed) != nullptr;
  };
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.group = 17; }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.dtype = DType::kF32; }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.key_dim = 264; }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.value_dim = 60; }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.k.token_stride = 65; }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.v.data = reinterpret_cast<void*>(8); }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.q = reinterpret_cast<void*>(2); }));
  EXPECT_TRUE(refuses([](DecodeParams& p) { p.cache.sequences = 4097; }));
  const int32_t block = 0;
  EXPECT_TRUE(refuses([&](DecodeParams& p) { p.cache.blocks = &block, p.cache.block_size = 12; }));
  params.cache.blocks = &block;
  params.cache.block_size = 8;
  EXPECT_FALSE(SupportsDecodeSm80(params));
  EXPECT_EQ(RefusesDecodeSm90(params), nullptr);
  params.cache.block_size = 48;
  EXPECT_TRUE(SupportsDecodeSm80(params));
  EXPECT_NE(RefusesDecodeSm90(params), nullptr);
}

}  // namespace
}  // namespace dropkv::cuda
