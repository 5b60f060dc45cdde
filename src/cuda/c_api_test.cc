#include "cuda/step_case.h"
#include "dropkv/dropkv_cuda.h"

namespace dropkv::cuda {
namespace {

dropkv_cuda_cache ToC(const Cache& cache) {
  const auto tensor = [](const Tensor& t) {
    return dropkv_cuda_tensor{t.data, t.sequence_stride, t.head_stride, t.token_stride};
  };
  dropkv_cuda_cache c{};
  c.struct_size = sizeof c;
  c.dtype = static_cast<int32_t>(cache.dtype);
  c.sequences = cache.sequences;
  c.kv_heads = cache.kv_heads;
  c.key_dim = cache.key_dim;
  c.value_dim = cache.value_dim;
  c.max_tokens = cache.max_tokens;
  c.k = tensor(cache.k);
  c.v = tensor(cache.v);
  c.lengths = cache.lengths;
  c.starts = cache.starts;
  c.blocks = cache.blocks;
  c.blocks_stride = cache.blocks_stride;
  c.block_size = cache.block_size;
  c.offsets = cache.offsets;
  c.blocks_in_pool = cache.blocks_in_pool;
  c.rows_in_pool = cache.rows_in_pool;
  c.generated = cache.generated;
  c.max_generated = cache.max_generated;
  return c;
}

dropkv_cuda_rows ToC(const Rows& rows) {
  dropkv_cuda_rows c{};
  c.struct_size = sizeof c;
  c.q = rows.q;
  c.q_sequence_stride = rows.sequence_stride;
  c.q_head_stride = rows.head_stride;
  c.q_row_stride = rows.row_stride;
  c.query_heads = rows.query_heads;
  c.rows = rows.rows;
  c.visible = rows.visible;
  c.scale = rows.scale;
  c.weights = rows.weights;
  c.lse = rows.lse;
  c.out = rows.out;
  c.out_dtype = static_cast<int32_t>(rows.out_dtype);
  return c;
}

dropkv_cuda_outputs ToC(const Outputs& outputs) {
  dropkv_cuda_outputs c{};
  c.struct_size = sizeof c;
  c.raw_scores = outputs.raw_scores;
  c.scores = outputs.scores;
  c.offsets = outputs.offsets;
  c.positions = outputs.positions;
  c.capacity = outputs.capacity;
  c.output_error = outputs.output_error;
  c.evicted_mass = outputs.evicted_mass;
  c.k = outputs.k;
  c.v = outputs.v;
  c.compact = static_cast<int32_t>(outputs.placement);
  c.counters = outputs.counters;
  return c;
}

// The same step through both interfaces.
class CudaCApi : public testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    if (NoDevice()) GTEST_SKIP() << "there is no CUDA device";
    StepCase c = MakeStep("adadropkv", Budget::Fraction(0.1), "", DType::kBF16);
    c.batch.layout = GetParam();
    if (GetParam() != Layout::kPacked) {
      c.batch.generated = 40;
      c.batch.generated_each = GetParam() == Layout::kPaged;
      c.batch.weights = c.batch.any_visible = true;
    }
    run_ = std::make_unique<StepRun>(c, HostBatch(c.batch));
    want_ = run_->Run(Placement::kOutOfPlace, &ran_);
    cache_ = ToC(run_->cache);
    rows_ = ToC(run_->rows);
    outputs_ = ToC(run_->outputs(Placement::kOutOfPlace));
    policy_.struct_size = sizeof policy_;
    ASSERT_EQ(dropkv_policy_find("adadropkv", &policy_), DROPKV_OK);
    ASSERT_EQ(Create(cache_, nullptr, &plan_), DROPKV_OK) << dropkv_last_error();
  }
  void TearDown() override { dropkv_cuda_plan_free(plan_); }

  dropkv_status Create(const dropkv_cuda_cache& shape, const char* kernel, dropkv_cuda_plan** plan) const {
    const dropkv_budget budget{sizeof budget, 0.1, 0};
    return dropkv_cuda_plan_create(&shape, rows_.query_heads, rows_.rows, 0, &policy_, &budget, kernel, plan);
  }
  dropkv_status Run(const dropkv_cuda_cache& cache, const dropkv_cuda_rows& rows, const dropkv_cuda_outputs& outputs) {
    return dropkv_cuda_run(plan_, &cache, &rows, &outputs, run_->workspace(), run_->stream());
  }
  static void ExpectMessage(dropkv_status got, dropkv_status status, const std::string& field) {
    EXPECT_EQ(got, status);
    EXPECT_EQ(std::string(dropkv_last_error()).rfind(field, 0), 0U) << dropkv_last_error();
  }

  std::unique_ptr<StepRun> run_;
  StepResult want_;
  Ran ran_;
  dropkv_cuda_cache cache_{};
  dropkv_cuda_rows rows_{};
  dropkv_cuda_outputs outputs_{};
  dropkv_policy policy_{};
  dropkv_cuda_plan* plan_ = nullptr;
};

TEST_P(CudaCApi, MakesTheSameLists) {
  EXPECT_EQ(dropkv_cuda_plan_workspace_bytes(plan_), run_->plan.workspace_bytes);
  EXPECT_EQ(dropkv_cuda_plan_capacity(plan_), run_->plan.capacity);
  EXPECT_STREQ(dropkv_cuda_plan_kernels(plan_), "");
  run_->Clear();
  ASSERT_EQ(Run(cache_, rows_, outputs_), DROPKV_OK) << dropkv_last_error();
  EXPECT_TRUE(run_->Download().bytes == want_.bytes);
  EXPECT_EQ(dropkv_cuda_plan_kernels(plan_),
            "attend " + std::string(ran_.attend) + ", score " + std::string(ran_.score));

  run_->Clear();
  void* workspace = run_->workspace();
  ASSERT_EQ(dropkv_cuda_score(plan_, &cache_, &rows_, &outputs_, workspace, run_->stream()), DROPKV_OK);
  ASSERT_EQ(dropkv_cuda_select(plan_, &cache_, &outputs_, workspace, run_->stream()), DROPKV_OK);
  ASSERT_EQ(dropkv_cuda_compact(plan_, &cache_, &outputs_, workspace, run_->stream()), DROPKV_OK);
  const StepResult apart = run_->Download();
  EXPECT_EQ(apart.offsets, want_.offsets);
  EXPECT_EQ(apart.positions, want_.positions);
  EXPECT_TRUE(apart.k == want_.k && apart.v == want_.v);
}

TEST_P(CudaCApi, DecodesTheSame) {
  const Outputs outputs = run_->outputs(Placement::kOutOfPlace);
  const Cache kept = KeptCache(run_->plan, outputs);
  const dropkv_cuda_cache c_kept = ToC(kept);
  const int32_t heads = run_->rows.query_heads;
  const size_t bytes = DecodeWorkspaceBytes(kept, heads);
  EXPECT_EQ(dropkv_cuda_decode_workspace_bytes(&c_kept, heads), bytes);
  const int64_t rows = int64_t{kept.sequences} * heads;
  const DeviceArray<uint16_t> q(std::vector<uint16_t>(rows * kept.key_dim, Round(kept.dtype, 0.25F)));
  const DeviceArray<uint16_t> out(rows * kept.value_dim);
  const DeviceArray<uint16_t> c_out(rows * kept.value_dim);
  const DeviceArray<uint8_t> workspace{std::vector<uint8_t>(bytes, 0xFF)};
  ASSERT_EQ(dropkv_cuda_decode_prepare(workspace.get(), run_->stream()), DROPKV_OK) << dropkv_last_error();
  ASSERT_TRUE(Decode(kept, {q.get(), out.get(), heads, 0.125F, 20.0F, nullptr}, workspace.get(), run_->stream()).ok());
  ASSERT_EQ(
      dropkv_cuda_decode(&c_kept, heads, q.get(), c_out.get(), 0.125F, 20.0F, nullptr, workspace.get(), run_->stream()),
      DROPKV_OK)
      << dropkv_last_error();
  EXPECT_TRUE(c_out.Download() == out.Download());
  ExpectMessage(
      dropkv_cuda_decode(&c_kept, heads, nullptr, c_out.get(), 0.125F, 0.0F, nullptr, workspace.get(), run_->stream()),
      DROPKV_INVALID_ARGUMENT, "input.q");
  ExpectMessage(dropkv_cuda_decode_prepare(nullptr, run_->stream()), DROPKV_INVALID_ARGUMENT, "workspace");
}

TEST_P(CudaCApi, TellsWhatIsWrong) {
  dropkv_cuda_cache cache = cache_;
  cache.struct_size = offsetof(dropkv_cuda_cache, generated) - 8;
  ExpectMessage(Run(cache, rows_, outputs_), DROPKV_INVALID_ARGUMENT, "cache.struct_size");
  dropkv_cuda_plan* other = nullptr;
  ExpectMessage(Create(cache, nullptr, &other), DROPKV_INVALID_ARGUMENT, "shape.struct_size");
  ExpectMessage(Create(cache_, "avx2", &other), DROPKV_NOT_FOUND, "force_kernel");
  ExpectMessage(Create(cache_, nullptr, nullptr), DROPKV_INVALID_ARGUMENT, "plan");
  EXPECT_EQ(other, nullptr);
  dropkv_cuda_rows rows = rows_;
  rows.struct_size = 8;
  ExpectMessage(Run(cache_, rows, outputs_), DROPKV_INVALID_ARGUMENT, "rows.struct_size");
  dropkv_cuda_outputs outputs = outputs_;
  outputs.struct_size = 0;
  ExpectMessage(Run(cache_, rows_, outputs), DROPKV_INVALID_ARGUMENT, "outputs.struct_size");
  outputs = outputs_;
  outputs.compact = 3;
  ExpectMessage(Run(cache_, rows_, outputs), DROPKV_INVALID_ARGUMENT, "outputs.compact");
  outputs = outputs_;
  outputs.capacity = 1;
  ExpectMessage(Run(cache_, rows_, outputs), DROPKV_WORKSPACE_TOO_SMALL, "outputs.capacity");
  cache = cache_;
  cache.dtype = 77;
  ExpectMessage(Create(cache, nullptr, &other), DROPKV_UNSUPPORTED, "cache.dtype");
  ExpectMessage(dropkv_cuda_run(nullptr, &cache_, &rows_, &outputs_, run_->workspace(), run_->stream()),
                DROPKV_INVALID_ARGUMENT, "plan");
  ExpectMessage(dropkv_cuda_select(plan_, &cache_, nullptr, run_->workspace(), run_->stream()), DROPKV_INVALID_ARGUMENT,
                "outputs");
  ExpectMessage(dropkv_cuda_compact(plan_, nullptr, &outputs_, run_->workspace(), run_->stream()),
                DROPKV_INVALID_ARGUMENT, "cache");
  EXPECT_STREQ(dropkv_cuda_plan_kernels(plan_), "");
  EXPECT_STREQ(dropkv_cuda_plan_kernels(nullptr), "");
  EXPECT_EQ(dropkv_cuda_plan_workspace_bytes(nullptr), 0U);
  EXPECT_EQ(dropkv_cuda_plan_capacity(nullptr), 0);
  dropkv_cuda_plan_free(nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, CudaCApi, testing::Values(Layout::kTokenMajor, Layout::kPacked, Layout::kPaged));

}  // namespace
}  // namespace dropkv::cuda
