// What is refused before anything is launched: these tests need no device.
#include <gtest/gtest.h>

#include <array>

#include "cuda/memory.h"
#include "cuda/plan.h"
#include "dropkv/dropkv_cuda.h"

namespace dropkv::cuda {
namespace {

Cache SomeCache() {
  Cache cache;
  cache.sequences = 3;
  cache.kv_heads = 2;
  cache.key_dim = cache.value_dim = 64;
  cache.max_tokens = 1000;
  return cache;
}

void ExpectError(const Status& status, Code code, std::string_view text) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
}

Status PlanStatus(const Cache& cache, int32_t rows) {
  return MakePlan(cache, 8, rows, false, FindPreset("dropkv").value(), Budget::Fraction(0.1)).status();
}

TEST(CudaChecks, PlanNamesMaxGenerated) {
  for (const int32_t generated : {-1, 1001}) {
    Cache cache = SomeCache();
    cache.max_generated = generated;
    ExpectError(PlanStatus(cache, 8), Code::kInvalidArgument,
                "cache.max_generated: expected 0 to 1000, got " + std::to_string(generated));
  }
  // Any number of rows, whatever the window; then the device is asked, where there is one.
  Cache cache = SomeCache();
  cache.max_generated = 1000;
  for (const int32_t rows : {1, 19, 128}) {
    const Status status = PlanStatus(cache, rows);
    EXPECT_TRUE(status.ok() || status.message().starts_with("multiprocessors")) << status.message();
  }
  ExpectError(PlanStatus(cache, 129), Code::kInvalidArgument, "rows: expected 1 to 128, got 129");
}

// A plan by hand, and pointers that nobody follows before everything has been checked.
struct Call {
  Plan plan;
  Cache cache = SomeCache();
  Rows rows;
  Outputs outputs;
  alignas(256) std::array<unsigned char, 256> memory{};
  void* workspace = memory.data();

  Call() {
    void* somewhere = workspace;
    cache.k = cache.v = {somewhere, 128000, 64000, 64};
    cache.max_generated = 40;
    plan.shape = cache;
    plan.query_heads = rows.query_heads = 8;
    plan.rows = rows.rows = 19;
    plan.policy = FindPreset("dropkv").value();
    plan.budget = Budget::Fraction(0.1);
    plan.capacity = outputs.capacity = 100;
    rows.q = somewhere;
    outputs.offsets = static_cast<int64_t*>(somewhere);
    outputs.positions = static_cast<int32_t*>(somewhere);
  }
  Status Run() const { return cuda::Run(plan, cache, rows, outputs, workspace, nullptr); }
};

TEST(CudaChecks, RunAsksForThePlansMaxGenerated) {
  Call call;
  call.cache.max_generated = 41;
  ExpectError(call.Run(), Code::kInvalidArgument, "cache: expected the plan's dtype and sizes");
  EXPECT_EQ(Score(call.plan, call.cache, call.rows, call.outputs, call.workspace, nullptr).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(Select(call.plan, call.cache, call.outputs, call.workspace, nullptr).code(), Code::kInvalidArgument);
}

TEST(CudaChecks, RunNamesTheRows) {
  Call call;
  call.rows.rows = 8;
  ExpectError(call.Run(), Code::kInvalidArgument, "rows: expected the plan's 8 query heads and 19 rows, got 8 and 8");
}

TEST(CudaChecks, KeptCachesHaveNoGeneratedTokens) {
  Call call;
  const int32_t counts[3] = {};
  call.plan.shape.generated = counts;
  const Cache kept = KeptCache(call.plan, call.outputs);
  EXPECT_EQ(kept.max_generated, 0);
  EXPECT_EQ(kept.generated, nullptr);
}

// Behind a structure of the first header, whose caller knows of no later field, lies anything.
struct FirstHeader {
  dropkv_cuda_cache cache{};
  dropkv_policy policy{};
  dropkv_budget budget{sizeof(dropkv_budget), 0.1, 0};

  FirstHeader() {
    policy.struct_size = sizeof policy;
    EXPECT_EQ(dropkv_policy_find("dropkv", &policy), DROPKV_OK);
    cache.struct_size = offsetof(dropkv_cuda_cache, generated);
    cache.dtype = DROPKV_BF16;
    cache.sequences = 3;
    cache.kv_heads = 2;
    cache.key_dim = cache.value_dim = 64;
    cache.max_tokens = 1000;
    cache.max_generated = -77;
  }
  dropkv_status Create() const {
    dropkv_cuda_plan* plan = nullptr;
    const dropkv_status status = dropkv_cuda_plan_create(&cache, 8, 8, 0, &policy, &budget, nullptr, &plan);
    dropkv_cuda_plan_free(plan);
    return status;
  }
};

TEST(CudaChecks, CStructuresGrowAtTheirEnds) {
  EXPECT_EQ(offsetof(dropkv_cuda_cache, generated), 152U);
  EXPECT_EQ(offsetof(dropkv_cuda_rows, weights), 96U);
  FirstHeader call;
  const dropkv_status status = call.Create();
  EXPECT_TRUE(status == DROPKV_OK || std::string(dropkv_last_error()).starts_with("multiprocessors"))
      << dropkv_last_error();
  call.cache.struct_size -= 8;
  EXPECT_EQ(call.Create(), DROPKV_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(dropkv_last_error()).starts_with("shape.struct_size: expected 152 or more, got 144"))
      << dropkv_last_error();
  call.cache.struct_size = sizeof call.cache;
  EXPECT_EQ(call.Create(), DROPKV_INVALID_ARGUMENT);
  EXPECT_TRUE(std::string(dropkv_last_error()).starts_with("cache.max_generated")) << dropkv_last_error();
}

TEST(CudaChecks, ANewerHeadersFieldIsRefused) {
  struct {
    dropkv_cuda_cache known;
    int64_t later;
  } newer = {FirstHeader().cache, 1};
  newer.known.struct_size = sizeof newer;
  newer.known.max_generated = 0;
  FirstHeader call;
  dropkv_cuda_plan* plan = nullptr;
  EXPECT_EQ(dropkv_cuda_plan_create(&newer.known, 8, 8, 0, &call.policy, &call.budget, nullptr, &plan),
            DROPKV_UNSUPPORTED);
  EXPECT_TRUE(std::string(dropkv_last_error()).starts_with("shape: a field is set")) << dropkv_last_error();
}

}  // namespace
}  // namespace dropkv::cuda
