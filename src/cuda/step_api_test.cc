#include <functional>

#include "cuda/step_case.h"

namespace dropkv::cuda {
namespace {

constexpr const char* kNoDevice = "there is no CUDA device";

void ExpectError(const Status& status, Code code, const std::string& field) {
  EXPECT_EQ(status.code(), code) << field << ": " << status.message();
  EXPECT_EQ(status.message().rfind(field, 0), 0U) << "expected " << field << ", got " << status.message();
}

TEST(CudaStepErrors, MakePlanNamesTheField) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  struct Arguments {
    Cache cache;
    int32_t query_heads = 8;
    int32_t rows = 8;
    Policy policy = PolicyNamed("dropkv");
    Budget budget = Budget::Fraction(0.1);
    std::string kernel;
    Status Make() const { return MakePlan(cache, query_heads, rows, false, policy, budget, kernel).status(); }
  };
  Arguments right;
  right.cache.sequences = 3;
  right.cache.kv_heads = 2;
  right.cache.key_dim = right.cache.value_dim = 64;
  right.cache.max_tokens = 1000;
  ASSERT_TRUE(right.Make().ok()) << right.Make().message();
  const auto expect = [&](Code code, const char* field, const std::function<void(Arguments&)>& change) {
    Arguments wrong = right;
    change(wrong);
    ExpectError(wrong.Make(), code, field);
  };
  expect(Code::kUnsupported, "cache.dtype", [](auto& a) { a.cache.dtype = DType::kF32; });
  expect(Code::kUnsupported, "cache.dtype", [](auto& a) { a.cache.dtype = DType::kQ8_0; });
  expect(Code::kInvalidArgument, "cache.sequences", [](auto& a) { a.cache.sequences = 0; });
  expect(Code::kInvalidArgument, "cache.kv_heads", [](auto& a) { a.cache.kv_heads = 0; });
  for (const int32_t dim : {-8, 0, 12, 264}) {
    expect(Code::kInvalidArgument, "cache.key_dim", [dim](auto& a) { a.cache.key_dim = dim; });
    expect(Code::kInvalidArgument, "cache.value_dim", [dim](auto& a) { a.cache.value_dim = dim; });
  }
  expect(Code::kInvalidArgument, "cache.max_tokens", [](auto& a) { a.cache.max_tokens = 0; });
  for (const int32_t generated : {-1, 1001})
    expect(Code::kInvalidArgument, "cache.max_generated", [generated](auto& a) { a.cache.max_generated = generated; });
  for (const int32_t heads : {0, 7, 34})
    expect(Code::kInvalidArgument, "query_heads", [heads](auto& a) { a.query_heads = heads; });
  for (const int32_t rows : {0, 129}) expect(Code::kInvalidArgument, "rows", [rows](auto& a) { a.rows = rows; });
  expect(Code::kInvalidArgument, "policy.window", [](auto& a) { a.policy.window = 0; });
  expect(Code::kInvalidArgument, "policy.alpha", [](auto& a) { a.policy.alpha = 2.0; });
  for (const char* preset : {"full", "streaming", "random"})
    expect(Code::kUnsupported, "policy.signal", [preset](auto& a) { a.policy = PolicyNamed(preset); });
  expect(Code::kInvalidArgument, "budget.tokens", [](auto& a) { a.budget = Budget::Tokens(0); });
  expect(Code::kInvalidArgument, "budget.fraction", [](auto& a) { a.budget = Budget::Fraction(0.0); });
  expect(Code::kInvalidArgument, "budget", [](auto& a) { a.budget = Budget::Tokens(3); });
  expect(Code::kNotFound, "force_kernel", [](auto& a) { a.kernel = "avx2"; });
  if (!IsHopper()) expect(Code::kNotFound, "force_kernel", [](auto& a) { a.kernel = "sm90"; });
}

struct RunArguments {
  Cache cache;
  Rows rows;
  Outputs outputs;
  void* workspace;
};

// One wrong thing at a time; afterwards nothing has been written.
class CudaRunErrors : public testing::Test {
 protected:
  void SetUp() override {
    if (NoDevice()) GTEST_SKIP() << kNoDevice;
    const StepCase c = MakeStep("dropkv", Budget::Fraction(0.1), "", DType::kBF16);
    run_ = std::make_unique<StepRun>(c, HostBatch(c.batch));
    run_->Clear();
  }
  void TearDown() override {
    if (run_ == nullptr) return;
    const StepResult nothing = run_->Download();
    EXPECT_TRUE(Untouched(nothing.bytes.data(), nothing.bytes.size()));
  }
  RunArguments Right() const {
    return {run_->cache, run_->rows, run_->outputs(Placement::kOutOfPlace), run_->workspace()};
  }
  Status Run(const RunArguments& a) const {
    return cuda::Run(run_->plan, a.cache, a.rows, a.outputs, a.workspace, run_->stream());
  }
  void Expect(Code code, const char* field, const std::function<void(RunArguments&)>& change) const {
    RunArguments wrong = Right();
    change(wrong);
    ExpectError(Run(wrong), code, field);
  }
  // Anything that is not null.
  template <typename T>
  T* Somewhere() const {
    return static_cast<T*>(run_->workspace());
  }

  std::unique_ptr<StepRun> run_;
};

TEST_F(CudaRunErrors, NameTheFieldOfTheCache) {
  const auto wrong = [&](const char* field, const std::function<void(Cache&)>& change) {
    Expect(Code::kInvalidArgument, field, [&](RunArguments& a) { change(a.cache); });
  };
  for (const auto member : {&Cache::sequences, &Cache::kv_heads, &Cache::max_tokens, &Cache::key_dim, &Cache::value_dim,
                            &Cache::max_generated})
    wrong("cache: expected the plan's", [member](Cache& c) { c.*member += 8; });
  wrong("cache: expected the plan's", [](Cache& c) { c.dtype = DType::kF16; });
  wrong("cache.k.data", [](Cache& c) { c.k.data = nullptr; });
  wrong("cache.v.data", [](Cache& c) { c.v.data = nullptr; });
  wrong("cache.k", [](Cache& c) { c.k.token_stride = 0; });
  wrong("cache.v", [](Cache& c) { c.v.head_stride = -8; });
  wrong("cache.k", [](Cache& c) { c.k.sequence_stride = -8; });
  wrong("cache", [&](Cache& c) { c.starts = Somewhere<int64_t>(), c.blocks = Somewhere<int32_t>(); });
  wrong("cache.rows_in_pool", [&](Cache& c) { c.starts = Somewhere<int64_t>(), c.rows_in_pool = 0; });
  const auto paged = [&](Cache& c) {
    c.blocks = Somewhere<int32_t>(), c.block_size = 16, c.blocks_stride = 300, c.blocks_in_pool = 1000;
  };
  wrong("cache.block_size", [&](Cache& c) { paged(c), c.block_size = 0; });
  wrong("cache.blocks_stride", [&](Cache& c) { paged(c), c.blocks_stride = 0; });
  wrong("cache.blocks_in_pool", [&](Cache& c) { paged(c), c.blocks_in_pool = 0; });
  RunArguments ragged = Right();
  ragged.cache.offsets = Somewhere<int64_t>();
  ragged.cache.rows_in_pool = 100;
  ExpectError(Run(ragged), Code::kUnsupported, "cache.offsets");
  ExpectError(Select(run_->plan, ragged.cache, ragged.outputs, ragged.workspace, run_->stream()), Code::kUnsupported,
              "cache.offsets");
}

TEST_F(CudaRunErrors, NameTheFieldOfTheRows) {
  const auto wrong = [&](const char* field, const std::function<void(Rows&)>& change) {
    Expect(Code::kInvalidArgument, field, [&](RunArguments& a) { change(a.rows); });
  };
  wrong("rows.q", [](Rows& r) { r.q = nullptr; });
  wrong("rows: expected the plan's", [](Rows& r) { r.rows = 4; });
  wrong("rows: expected the plan's", [](Rows& r) { r.query_heads = 16; });
  for (const float scale : {0.0F, -1.0F, NAN}) wrong("rows.scale", [scale](Rows& r) { r.scale = scale; });
  for (const float cap : {-1.0F, NAN}) wrong("rows.soft_cap", [cap](Rows& r) { r.soft_cap = cap; });
  wrong("rows.lse and rows.out", [&](Rows& r) { r.lse = Somewhere<float>(); });
  wrong("rows.lse and rows.out", [&](Rows& r) { r.out = Somewhere<float>(); });
  wrong("rows.lse", [&](Rows& r) { r.lse = Somewhere<float>(), r.out = Somewhere<float>(); });
  Expect(Code::kUnsupported, "rows.out_dtype", [](RunArguments& a) { a.rows.out_dtype = DType::kF16; });
  StepCase given = MakeStep("dropkv", Budget::Fraction(0.1), "", DType::kBF16);
  given.given = DType::kF32;
  StepRun run(given, HostBatch(given.batch));
  run.rows.lse = nullptr;
  run.rows.out = nullptr;
  ExpectError(run.Launch(Placement::kNone), Code::kInvalidArgument, "rows.lse: expected");
}

TEST_F(CudaRunErrors, NameTheOutput) {
  const auto wrong = [&](Code code, const char* field, const std::function<void(Outputs&)>& change) {
    Expect(code, field, [&](RunArguments& a) { change(a.outputs); });
  };
  wrong(Code::kInvalidArgument, "outputs.offsets", [](Outputs& o) { o.offsets = nullptr; });
  wrong(Code::kInvalidArgument, "outputs.positions", [](Outputs& o) { o.positions = nullptr; });
  wrong(Code::kWorkspaceTooSmall, "outputs.capacity", [](Outputs& o) { o.capacity -= 1; });
  wrong(Code::kInvalidArgument, "outputs.k and outputs.v", [](Outputs& o) { o.k = nullptr; });
  wrong(Code::kInvalidArgument, "outputs.k and outputs.v", [](Outputs& o) { o.v = nullptr; });
  wrong(Code::kInvalidArgument, "outputs.output_error and", [](Outputs& o) { o.output_error = nullptr; });
  wrong(Code::kInvalidArgument, "outputs.output_error and", [](Outputs& o) { o.evicted_mass = nullptr; });
  for (const Placement placement : {Placement::kNone, Placement::kInPlace})
    wrong(Code::kUnsupported, "outputs.output_error", [placement](Outputs& o) { o.placement = placement; });
  Expect(Code::kInvalidArgument, "workspace", [](RunArguments& a) { a.workspace = nullptr; });
  Expect(Code::kInvalidArgument, "workspace",
         [](RunArguments& a) { a.workspace = static_cast<uint8_t*>(a.workspace) + 128; });
  const RunArguments right = Right();
  void* off = static_cast<uint8_t*>(right.workspace) + 16;
  ExpectError(Score(run_->plan, right.cache, right.rows, right.outputs, off, run_->stream()), Code::kInvalidArgument,
              "workspace");
  ExpectError(Select(run_->plan, right.cache, right.outputs, off, run_->stream()), Code::kInvalidArgument, "workspace");
  ExpectError(Compact(run_->plan, right.cache, right.outputs, off, run_->stream()), Code::kInvalidArgument,
              "workspace");
}

// Decode attention over what a step kept: every head its own number of tokens.
class CudaDecodeOfKept : public testing::TestWithParam<DType> {
 protected:
  // The queries of every head's last row.
  static std::vector<uint16_t> LastRows(const HostBatch& batch) {
    const DeviceCase& c = batch.shape();
    std::vector<uint16_t> q;
    for (int64_t head = 0; head < int64_t{c.lists()} * c.group; ++head) {
      const auto row = batch.q().begin() + ((head + 1) * c.rows - 1) * c.key_dim;
      q.insert(q.end(), row, row + c.key_dim);
    }
    return q;
  }

  // The output is rounded to 16 bits, by the half of its last place; else as decode_test.cc.
  static void ExpectReference(const HostBatch& batch, int32_t list, std::span<const int32_t> kept,
                              const std::vector<uint16_t>& q16, const std::vector<uint16_t>& out) {
    const DeviceCase& c = batch.shape();
    std::vector<float> q;
    for (int64_t i = 0; i < int64_t{c.group} * c.key_dim; ++i)
      q.push_back(Widen(c.dtype, q16[int64_t{list} * c.group * c.key_dim + i]));
    const KeepList keep(1, 1, {0, static_cast<int64_t>(kept.size())}, {kept.begin(), kept.end()});
    const std::vector<double> want =
        reference::RaggedDecode(batch.kv(list), keep, 0, batch.attention(list), q.data(), c.group);
    const int32_t tokens = batch.lists()[list].tokens;
    const ObservationRows rows{q.data(), c.key_dim, c.key_dim, c.group, 1, &tokens};
    const reference::Layer layer = reference::LoadLayer(batch.kv(list));
    for (int32_t g = 0; g < c.group; ++g) {
      const reference::Magnitudes m = MagnitudesOf(layer, rows, batch.attention(list), g, 0);
      const double bound = ErrorsOf(m, PrecisionOf(true, c.dtype)).out * m.value_max;
      for (int32_t i = 0; i < c.value_dim; ++i) {
        const double expected = want[int64_t{g} * c.value_dim + i];
        const float got = Widen(c.dtype, out[(int64_t{list} * c.group + g) * c.value_dim + i]);
        ASSERT_NEAR(got, expected, bound + UnitRoundoff(c.dtype) * (std::abs(expected) + bound))
            << "list " << list << " head " << g << " dim " << i;
      }
    }
  }
};

TEST_P(CudaDecodeOfKept, MatchesReference) {
  if (NoDevice()) GTEST_SKIP() << kNoDevice;
  for (const Layout layout : {Layout::kHeadMajor, Layout::kPaged}) {
    StepCase c = MakeStep("adadropkv", Budget::Fraction(0.1), "", GetParam());
    c.batch.layout = layout;
    const HostBatch batch(c.batch);
    StepRun run(c, batch);
    const StepResult result = run.Run(Placement::kOutOfPlace);
    const std::vector<uint16_t> host_q = LastRows(batch);
    const DeviceArray<uint16_t> q(host_q);
    const DeviceArray<uint16_t> out(host_q.size());
    const DecodeInput input{q.get(), out.get(), run.rows.query_heads, run.rows.scale, 0.0F, nullptr};
    const Cache kept = KeptCache(run.plan, run.outputs(Placement::kOutOfPlace));
    const DeviceArray<uint8_t> workspace(std::vector<uint8_t>(
        std::max(DecodeWorkspaceBytes(kept, input.query_heads), DecodeWorkspaceBytes(run.cache, input.query_heads)),
        0xFF));
    ASSERT_TRUE(PrepareDecode(workspace.get(), run.stream()).ok());
    const auto decode = [&](const Cache& cache) {
      const Status status = Decode(cache, input, workspace.get(), run.stream());
      EXPECT_TRUE(status.ok()) << status.message();
      return out.Download();
    };
    const std::vector<uint16_t> over_kept = decode(kept);
    const std::vector<uint16_t> over_all = decode(run.cache);
    EXPECT_TRUE(decode(kept) == over_kept);
    for (int32_t list = 0; list < c.batch.lists(); ++list) {
      ASSERT_NO_FATAL_FAILURE(ExpectReference(batch, list, result.list(list), host_q, over_kept));
      const KeepList all = KeepList::All(1, 1, batch.lists()[list].tokens);
      ASSERT_NO_FATAL_FAILURE(ExpectReference(batch, list, all.head(0, 0), host_q, over_all));
    }
    const auto expect = [&](const char* field, DecodeInput wrong, void* memory) {
      ExpectError(Decode(kept, wrong, memory, run.stream()), Code::kInvalidArgument, field);
    };
    expect("input.q", {nullptr, out.get(), 8, 1.0F, 0.0F, nullptr}, workspace.get());
    expect("input.out", {q.get(), nullptr, 8, 1.0F, 0.0F, nullptr}, workspace.get());
    expect("query_heads", {q.get(), out.get(), 7, 1.0F, 0.0F, nullptr}, workspace.get());
    expect("workspace", input, nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaDecodeOfKept, testing::Values(DType::kF16, DType::kBF16));

}  // namespace
}  // namespace dropkv::cuda
