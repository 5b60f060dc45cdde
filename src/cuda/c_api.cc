// The C ABI of the CUDA part.
#include "engine/c_api.h"

#include <utility>

#include "dropkv/cuda.h"
#include "dropkv/dropkv_cuda.h"

struct dropkv_cuda_plan {
  dropkv::cuda::Plan plan;
  std::string kernels;
};

static_assert(DROPKV_CUDA_LISTS_ONLY == static_cast<int>(dropkv::cuda::Placement::kNone));
static_assert(DROPKV_CUDA_OUT_OF_PLACE == static_cast<int>(dropkv::cuda::Placement::kOutOfPlace));
static_assert(DROPKV_CUDA_IN_PLACE == static_cast<int>(dropkv::cuda::Placement::kInPlace));

namespace dropkv::c_api {

// Sizes of the first header, before generated tokens and weights.
template <>
inline constexpr size_t kFirstSize<dropkv_cuda_cache> = offsetof(dropkv_cuda_cache, generated);
template <>
inline constexpr size_t kFirstSize<dropkv_cuda_rows> = offsetof(dropkv_cuda_rows, weights);

namespace {

cuda::Tensor ToTensor(const dropkv_cuda_tensor& tensor) {
  return {tensor.data, tensor.sequence_stride, tensor.head_stride, tensor.token_stride};
}

Result<cuda::Cache> ToCache(const dropkv_cuda_cache* caller, const char* name) {
  const auto in = ReadInput(caller, name);
  if (!in.ok()) return in.status();
  cuda::Cache cache;
  cache.dtype = static_cast<DType>(in->dtype);
  cache.sequences = in->sequences;
  cache.kv_heads = in->kv_heads;
  cache.key_dim = in->key_dim;
  cache.value_dim = in->value_dim;
  cache.max_tokens = in->max_tokens;
  cache.k = ToTensor(in->k);
  cache.v = ToTensor(in->v);
  cache.lengths = in->lengths;
  cache.starts = in->starts;
  cache.blocks = in->blocks;
  cache.blocks_stride = in->blocks_stride;
  cache.block_size = in->block_size;
  cache.offsets = in->offsets;
  cache.blocks_in_pool = in->blocks_in_pool;
  cache.rows_in_pool = in->rows_in_pool;
  cache.generated = in->generated;
  cache.max_generated = in->max_generated;
  return cache;
}

Result<cuda::Rows> ToRows(const dropkv_cuda_rows* caller) {
  const auto in = ReadInput(caller, "rows");
  if (!in.ok()) return in.status();
  cuda::Rows rows;
  rows.q = in->q;
  rows.sequence_stride = in->q_sequence_stride;
  rows.head_stride = in->q_head_stride;
  rows.row_stride = in->q_row_stride;
  rows.query_heads = in->query_heads;
  rows.rows = in->rows;
  rows.visible = in->visible;
  rows.scale = in->scale;
  rows.soft_cap = in->soft_cap;
  rows.sinks = in->sinks;
  rows.lse = in->lse;
  rows.out = in->out;
  rows.out_dtype = static_cast<DType>(in->out_dtype);
  rows.weights = in->weights;
  return rows;
}

Result<cuda::Outputs> ToOutputs(const dropkv_cuda_outputs* in) {
  if (Status status = CheckInput(in, "outputs"); !status.ok()) return status;
  if (in->compact < DROPKV_CUDA_LISTS_ONLY || in->compact > DROPKV_CUDA_IN_PLACE)
    return InvalidArgument("outputs.compact: expected 0 to 2, got " + std::to_string(in->compact));
  cuda::Outputs outputs;
  outputs.raw_scores = in->raw_scores;
  outputs.scores = in->scores;
  outputs.offsets = in->offsets;
  outputs.positions = in->positions;
  outputs.capacity = in->capacity;
  outputs.output_error = in->output_error;
  outputs.evicted_mass = in->evicted_mass;
  outputs.placement = static_cast<cuda::Placement>(in->compact);
  outputs.k = in->k;
  outputs.v = in->v;
  outputs.counters = in->counters;
  return outputs;
}

// What all calls with a plan take.
struct Inputs {
  cuda::Cache cache;
  cuda::Outputs outputs;
};

Result<Inputs> ToInputs(const dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                        const dropkv_cuda_outputs* outputs) {
  if (Status status = CheckPointer(plan, "plan"); !status.ok()) return status;
  auto to_cache = ToCache(cache, "cache");
  if (!to_cache.ok()) return to_cache.status();
  auto to_outputs = ToOutputs(outputs);
  if (!to_outputs.ok()) return to_outputs.status();
  return Inputs{*to_cache, *to_outputs};
}

// call(plan, cache, rows, outputs, workspace, stream, ran)
template <typename F>
Status WithRows(dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache, const dropkv_cuda_rows* rows,
                const dropkv_cuda_outputs* outputs, void* workspace, void* stream, F&& call) {
  const auto inputs = ToInputs(plan, cache, outputs);
  if (!inputs.ok()) return inputs.status();
  const auto to_rows = ToRows(rows);
  if (!to_rows.ok()) return to_rows.status();
  cuda::Ran ran;
  DROPKV_RETURN_IF_ERROR(
      call(plan->plan, inputs->cache, *to_rows, inputs->outputs, workspace, static_cast<cuda::Stream>(stream), &ran));
  plan->kernels = "attend " + std::string(ran.attend) + ", score " + std::string(ran.score);
  if (!ran.refused.empty()) plan->kernels += " (a faster one does not take " + std::string(ran.refused) + ")";
  return Status::Ok();
}

}  // namespace
}  // namespace dropkv::c_api

using namespace dropkv;         // NOLINT(google-build-using-namespace): the functions below are outside any namespace
using namespace dropkv::c_api;  // NOLINT(google-build-using-namespace)

dropkv_status dropkv_cuda_plan_create(const dropkv_cuda_cache* shape, int32_t query_heads, int32_t rows,
                                      int32_t rows_given, const dropkv_policy* policy, const dropkv_budget* budget,
                                      const char* force_kernel, dropkv_cuda_plan** plan) {
  return Guard([&]() -> Status {
    const auto cache = ToCache(shape, "shape");
    if (!cache.ok()) return cache.status();
    const auto wanted = ToPolicy(policy);
    if (!wanted.ok()) return wanted.status();
    const auto kept = ToBudget(budget);
    if (!kept.ok()) return kept.status();
    DROPKV_RETURN_IF_ERROR(CheckPointer(plan, "plan"));
    auto made = cuda::MakePlan(*cache, query_heads, rows, rows_given != 0, *wanted, *kept,
                               force_kernel != nullptr ? force_kernel : "");
    if (!made.ok()) return made.status();
    *plan = new dropkv_cuda_plan{std::move(made).value(), {}};
    return Status::Ok();
  });
}

size_t dropkv_cuda_plan_workspace_bytes(const dropkv_cuda_plan* plan) {
  return plan != nullptr ? plan->plan.workspace_bytes : 0;
}

int64_t dropkv_cuda_plan_capacity(const dropkv_cuda_plan* plan) { return plan != nullptr ? plan->plan.capacity : 0; }

const char* dropkv_cuda_plan_kernels(const dropkv_cuda_plan* plan) {
  return plan != nullptr ? plan->kernels.c_str() : "";
}

void dropkv_cuda_plan_free(dropkv_cuda_plan* plan) { delete plan; }

dropkv_status dropkv_cuda_score(dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache, const dropkv_cuda_rows* rows,
                                const dropkv_cuda_outputs* outputs, void* workspace, void* stream) {
  return Guard([&] { return WithRows(plan, cache, rows, outputs, workspace, stream, cuda::Score); });
}

dropkv_status dropkv_cuda_select(const dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                 const dropkv_cuda_outputs* outputs, void* workspace, void* stream) {
  return Guard([&]() -> Status {
    const auto inputs = ToInputs(plan, cache, outputs);
    if (!inputs.ok()) return inputs.status();
    return cuda::Select(plan->plan, inputs->cache, inputs->outputs, workspace, static_cast<cuda::Stream>(stream));
  });
}

dropkv_status dropkv_cuda_compact(const dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                  const dropkv_cuda_outputs* outputs, void* workspace, void* stream) {
  return Guard([&]() -> Status {
    const auto inputs = ToInputs(plan, cache, outputs);
    if (!inputs.ok()) return inputs.status();
    return cuda::Compact(plan->plan, inputs->cache, inputs->outputs, workspace, static_cast<cuda::Stream>(stream));
  });
}

dropkv_status dropkv_cuda_run(dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache, const dropkv_cuda_rows* rows,
                              const dropkv_cuda_outputs* outputs, void* workspace, void* stream) {
  return Guard([&] { return WithRows(plan, cache, rows, outputs, workspace, stream, cuda::Run); });
}

size_t dropkv_cuda_decode_workspace_bytes(const dropkv_cuda_cache* cache, int32_t query_heads) {
  const auto view = ToCache(cache, "cache");
  return view.ok() ? cuda::DecodeWorkspaceBytes(*view, query_heads) : 0;
}

dropkv_status dropkv_cuda_decode_prepare(void* workspace, void* stream) {
  return Guard([&] { return cuda::PrepareDecode(workspace, static_cast<cuda::Stream>(stream)); });
}

dropkv_status dropkv_cuda_decode(const dropkv_cuda_cache* cache, int32_t query_heads, const void* q, void* out,
                                 float scale, float soft_cap, const float* sinks, void* workspace, void* stream) {
  return Guard([&]() -> Status {
    const auto view = ToCache(cache, "cache");
    if (!view.ok()) return view.status();
    return cuda::Decode(*view, {q, out, query_heads, scale, soft_cap, sinks}, workspace,
                        static_cast<cuda::Stream>(stream));
  });
}
