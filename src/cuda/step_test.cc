#include <bit>
#include <tuple>

#include "cuda/step_case.h"

namespace dropkv::cuda {
namespace {

constexpr const char* kNoDevice = "there is no CUDA device";

bool Untouched(const std::vector<float>& x, size_t first, size_t end) {
  return std::all_of(x.begin() + first, x.begin() + end, [](float y) { return std::bit_cast<uint32_t>(y) == ~0U; });
}

// The kernels of this machine by name; "": the best one.
std::vector<std::string> Kernels() {
  return IsHopper() ? std::vector<std::string>{"any", "sm80", "sm90", ""} : std::vector<std::string>{"any", "sm80", ""};
}

Precision PrecisionOf(const StepCase& c) { return cuda::PrecisionOf(c.kernel != "any", c.batch.dtype); }

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
void CheckInPlace(StepRun& run, const StepResult& apart) {
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

using StepParam = std::tuple<const char*, DType, const char*, Layout>;  // kernel, dtype, policy, layout

class CudaStepTest : public testing::TestWithParam<StepParam> {};

TEST_P(CudaStepTest, FollowsTheContract) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const auto& [kernel, dtype, policy, layout] = GetParam();
  if (std::string(kernel) == "sm90" && !IsHopper()) GTEST_SKIP() << "the device is not of compute capability 9.0";
  const bool by_tokens = (std::string(kernel).size() / 2 + std::string(policy).size() + static_cast<int>(layout)) % 2;
  StepCase c = MakeStep(policy, by_tokens ? Budget::Tokens(96) : Budget::Fraction(0.1), kernel, dtype);
  c.batch.layout = layout;
  if (layout == Layout::kTokenMajor) c.batch.content = Content::kDominant;
  if (layout == Layout::kPaged) c.batch.content = Content::kNonFinite;
  SCOPED_TRACE(testing::PrintToString(c.batch) + " " + policy + " kernel " + kernel);
  const HostBatch batch(c.batch);
  StepRun run(c, batch);
  const WholeCache before(run.cache);
  Ran ran;
  const StepResult result = run.Run(Placement::kOutOfPlace, &ran);
  const std::string expected = kernel[0] != '\0' ? kernel : IsHopper() ? "sm90" : "sm80";
  EXPECT_EQ(ran.attend, expected);
  EXPECT_EQ(ran.score, expected);
  EXPECT_EQ(ran.refused, "");
  const WholeCache after(run.cache);
  EXPECT_TRUE(after.k == before.k && after.v == before.v);
  StepChecker checker(c, batch, result);
  ASSERT_NO_FATAL_FAILURE(checker.CheckLists());
  ASSERT_NO_FATAL_FAILURE(checker.CheckKeptRows());
  if (c.policy.signal == Signal::kDropKv) checker.CheckCertificate();
  ASSERT_NO_FATAL_FAILURE(CheckInPlace(run, result));
}

INSTANTIATE_TEST_SUITE_P(All, CudaStepTest,
                         testing::Combine(testing::Values("any", "sm80", "sm90", ""),
                                          testing::Values(DType::kF16, DType::kBF16),
                                          testing::Values("dropkv", "adadropkv", "ada-o", "snapkv"),
                                          testing::Values(Layout::kHeadMajor, Layout::kTokenMajor, Layout::kPaged)));

using Tokens = std::vector<std::pair<int32_t, int32_t>>;  // (head, token)

Tokens In(const StepResult& result, int32_t sequence, int32_t heads) {
  Tokens tokens;
  for (int32_t h = 0; h < heads; ++h)
    for (const int32_t j : result.list(sequence * heads + h)) tokens.emplace_back(h, j);
  return tokens;
}

Tokens In(const KeepList& lists) {
  Tokens tokens;
  for (int32_t h = 0; h < lists.kv_heads(); ++h)
    for (const int32_t j : lists.head(0, h)) tokens.emplace_back(h, j);
  return tokens;
}

// One of two lists may keep a token in another's place only where the scores tell them apart by less than the bounds.
// across: heads share the budget.
void ExpectSwapsInBand(const Tokens& a, const Tokens& b, const SequenceScores& scores, double bounds, bool across) {
  ASSERT_EQ(a.size(), b.size());
  Tokens only_a, only_b;
  std::ranges::set_difference(a, b, std::back_inserter(only_a));
  std::ranges::set_difference(b, a, std::back_inserter(only_b));
  EXPECT_LE(only_a.size(), a.size() / 5);
  for (const auto& [head, token] : only_a)
    for (const auto& [other_head, other] : only_b) {
      if (!across && head != other_head) continue;
      const int64_t x = int64_t{head} * scores.tokens + token;
      const int64_t y = int64_t{other_head} * scores.tokens + other;
      EXPECT_EQ(scores.flags[x] | scores.flags[y], 0) << "a flagged token is gone";
      EXPECT_LE(std::abs(scores.pooled[x] - scores.pooled[y]), bounds * (scores.tolerance[x] + scores.tolerance[y]))
          << "head " << head << " token " << token << " for head " << other_head << " token " << other;
    }
}

// Rows computed here and handed in, beside the reference's own lists and beside each other.
TEST(CudaStep, KeepsWhatTheReferenceKeeps) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const char* policy : {"dropkv", "adadropkv", "snapkv"})
    for (const DType dtype : {DType::kF16, DType::kBF16})
      for (const Content content : {Content::kNormal, Content::kDominant}) {
        StepCase c = MakeStep(policy, Budget::Fraction(0.1), "", dtype);
        c.batch.content = content;
        const HostBatch batch(c.batch);
        // Bounds of the careful kernel, and the loosest of all that run below.
        const Precision loosest = WithGivenRows(cuda::PrecisionOf(true, dtype), DType::kF32, dtype);
        std::vector<SequenceScores> careful, others;
        for (int32_t b = 0; b < c.batch.sequences(); ++b) {
          careful.push_back(ScoresOfReference(c, batch, b, {}));
          others.push_back(ScoresOfReference(c, batch, b, loosest));
        }
        std::optional<StepResult> computed;
        for (const std::string& kernel : Kernels())
          for (const std::optional<DType> given :
               {std::optional<DType>(), std::optional(DType::kF32), std::optional(dtype)}) {
            c.kernel = kernel;
            c.given = given;
            SCOPED_TRACE(std::string(policy) + " " + testing::PrintToString(c.batch) + " kernel " + kernel +
                         (given.has_value() ? " given " + std::string(DTypeName(*given)) : ""));
            StepRun run(c, batch);
            Ran ran;
            const StepResult result = run.Run(Placement::kOutOfPlace, &ran);
            EXPECT_EQ(ran.attend == "given", given.has_value());
            if (!computed.has_value()) computed = result;
            const bool across = c.policy.heads != HeadRule::kUniform;
            const auto& scores = kernel == "any" && !given.has_value() ? careful : others;
            for (int32_t b = 0; b < c.batch.sequences(); ++b) {
              const Tokens own = In(result, b, c.batch.kv_heads);
              ExpectSwapsInBand(own, In(ListsOf(c, scores[b])), scores[b], 1.0, across);
              ExpectSwapsInBand(own, In(*computed, b, c.batch.kv_heads), others[b], 2.0, across);
            }
          }
      }
}

TEST(CudaStep, SameBitsEveryTimeAndInAGraph) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const std::string& kernel : Kernels())
    for (const Content content : {Content::kDominant, Content::kNonFinite}) {
      StepCase c = MakeStep("adadropkv", Budget::Fraction(0.1), kernel, DType::kBF16);
      c.batch.content = content;
      SCOPED_TRACE(testing::PrintToString(c.batch) + " kernel " + kernel);
      StepRun run(c, HostBatch(c.batch));
      const StepResult first = run.Run(Placement::kOutOfPlace);
      for (int repeat = 0; repeat < 20; ++repeat)
        ASSERT_TRUE(run.Run(Placement::kOutOfPlace).bytes == first.bytes) << "repeat " << repeat;
      run.Clear();
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t instance = nullptr;
      Check(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeGlobal), "begin");
      const Status status = run.Launch(Placement::kOutOfPlace);
      Check(cudaStreamEndCapture(run.stream(), &graph), "end");
      ASSERT_TRUE(status.ok()) << status.message();
      Check(cudaGraphInstantiate(&instance, graph, 0), "instantiate");
      for (int replay = 0; replay < 5; ++replay) {
        run.Clear();
        Check(cudaGraphLaunch(instance, run.stream()), "launch");
        EXPECT_TRUE(run.Download().bytes == first.bytes) << "replay " << replay;
      }
      cudaGraphExecDestroy(instance);
      cudaGraphDestroy(graph);
    }
}

TEST(CudaStep, StepsApartMakeTheSameLists) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  const StepCase c = MakeStep("adadropkv", Budget::Tokens(200), "", DType::kF16);
  StepRun run(c, HostBatch(c.batch));
  const StepResult whole = run.Run(Placement::kOutOfPlace);
  run.Clear();
  Outputs outputs = run.outputs(Placement::kOutOfPlace);
  outputs.raw_scores = nullptr;  // they stay in the workspace
  ASSERT_TRUE(Score(run.plan, run.cache, run.rows, outputs, run.workspace(), run.stream()).ok());
  ASSERT_TRUE(Select(run.plan, run.cache, outputs, run.workspace(), run.stream()).ok());
  ASSERT_TRUE(Compact(run.plan, run.cache, outputs, run.workspace(), run.stream()).ok());
  const StepResult apart = run.Download();
  EXPECT_EQ(apart.offsets, whole.offsets);
  EXPECT_EQ(apart.positions, whole.positions);
  EXPECT_TRUE(apart.k == whole.k && apart.v == whole.v);
  EXPECT_TRUE(Untouched(apart.raw, 0, apart.raw.size()));
}

// A view that TMA does not take: another kernel runs, says why, and sm90 by force is an error.
TEST(CudaStep, FallsBackWhereAKernelRefuses) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  StepCase c = MakeStep("dropkv", Budget::Fraction(0.1), "", DType::kBF16);
  c.batch.misaligned = true;
  const HostBatch batch(c.batch);
  StepRun run(c, batch);
  Ran ran;
  const StepResult result = run.Run(Placement::kOutOfPlace, &ran);
  EXPECT_EQ(ran.score, ran.attend);
  EXPECT_NE(ran.score, "sm90");
  if (IsHopper()) EXPECT_EQ(ran.refused, "a cache that does not start at a multiple of 16 bytes");
  StepChecker checker(c, batch, result);
  ASSERT_NO_FATAL_FAILURE(checker.CheckLists());
  ASSERT_NO_FATAL_FAILURE(checker.CheckKeptRows());
  if (!IsHopper()) return;
  c.kernel = "sm90";
  StepRun forced(c, batch);
  forced.Clear();
  const Status status = forced.Launch(Placement::kOutOfPlace);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message().rfind("force_kernel: sm90 does not take a cache", 0), 0U) << status.message();
}

}  // namespace
}  // namespace dropkv::cuda
