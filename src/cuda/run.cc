// The step on the device: which kernel of the table takes the views, and the launches in their order.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/plan.h"

namespace dropkv::cuda {
namespace {

enum class Kernel { kSm90, kSm80, kAny };

std::string_view Name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm90:
      return "sm90";
    case Kernel::kSm80:
      return "sm80";
    case Kernel::kAny:
      return "any";
  }
  return "?";
}

// One call's parameters.
struct Call {
  AttendParams attend;
  ScoreParams score;
  Kernel kernel = Kernel::kAny;
  std::string_view refused;
  cudaStream_t stream = nullptr;
};

Status CheckShape(const Plan& plan, const Cache& cache) {
  const Cache& shape = plan.shape;
  const bool same = cache.dtype == shape.dtype && cache.sequences == shape.sequences &&
                    cache.kv_heads == shape.kv_heads && cache.key_dim == shape.key_dim &&
                    cache.value_dim == shape.value_dim && cache.max_tokens == shape.max_tokens &&
                    cache.max_generated == shape.max_generated;
  if (!same) return InvalidArgument("cache: expected the plan's dtype and sizes");
  return CheckCache(cache);
}

Status CheckRows(const Plan& plan, const Cache& cache, const Rows& rows) {
  if (rows.q == nullptr) return InvalidArgument("rows.q: expected a device pointer, got null");
  if (rows.query_heads != plan.query_heads || rows.rows != plan.rows)
    return InvalidArgument("rows: expected the plan's " + std::to_string(plan.query_heads) + " query heads and " +
                           std::to_string(plan.rows) + " rows, got " + std::to_string(rows.query_heads) + " and " +
                           std::to_string(rows.rows));
  if (!(rows.scale > 0.0F))
    return InvalidArgument("rows.scale: expected more than 0, got " + std::to_string(rows.scale));
  if (!(rows.soft_cap >= 0.0F))
    return InvalidArgument("rows.soft_cap: expected 0 or more, got " + std::to_string(rows.soft_cap));
  if ((rows.lse != nullptr) != (rows.out != nullptr))
    return InvalidArgument("rows.lse and rows.out: expected both or none");
  if ((rows.lse != nullptr) != plan.rows_given)
    return InvalidArgument(plan.rows_given ? "rows.lse: expected, since the plan was made for rows with lse and out"
                                           : "rows.lse: the plan was made for rows without lse and out");
  if (rows.out_dtype == DType::kF32 || rows.out_dtype == cache.dtype) return Status::Ok();
  return Unsupported("rows.out_dtype: expected f32 or the cache's, got " + std::string(DTypeName(rows.out_dtype)));
}

Status CheckLists(const Plan& plan, const Outputs& outputs) {
  if (outputs.offsets == nullptr) return InvalidArgument("outputs.offsets: expected a device pointer, got null");
  if (outputs.positions == nullptr) return InvalidArgument("outputs.positions: expected a device pointer, got null");
  if (outputs.capacity >= plan.capacity) return Status::Ok();
  return {Code::kWorkspaceTooSmall, "outputs.capacity: expected at least " + std::to_string(plan.capacity) + ", got " +
                                        std::to_string(outputs.capacity)};
}

RowParams ToRows(const Cache& cache, const Rows& rows) {
  RowParams params;
  params.q = rows.q;
  params.q_sequence_stride = rows.sequence_stride;
  params.q_head_stride = rows.head_stride;
  params.q_row_stride = rows.row_stride;
  params.group = rows.query_heads / cache.kv_heads;
  params.rows = rows.rows;
  params.visible = rows.visible;
  params.scale = rows.scale;
  params.soft_cap = rows.soft_cap;
  params.sinks = rows.sinks;
  params.weights = rows.weights;
  return params;
}

AttendParams ToAttend(const Cache& cache, const Rows& rows, const RowMemory& memory) {
  AttendParams params;
  params.cache = cache;
  params.rows = ToRows(cache, rows);
  params.state = memory.state;
  params.partials = memory.partials;
  params.given_lse = rows.lse;
  params.given_out = rows.out;
  params.given_dtype = rows.out_dtype;
  params.row_ok = memory.row_ok;
  params.redo = memory.redo;
  params.top_split = memory.top_split;
  params.has_tops = memory.has_tops;
  return params;
}

// The first kernel of the table that takes both passes of these views.
void Choose(const Plan& plan, Call& call) {
  const std::string& forced = plan.force_kernel;
  if (plan.compute_capability == 90 && (forced.empty() || forced == "sm90")) {
    const char* reason = RefusesAttendSm90(call.attend);
    if (reason == nullptr) reason = RefusesScoreSm90(call.score);
    if (reason == nullptr) {
      call.kernel = Kernel::kSm90;
      return;
    }
    call.refused = reason;
  }
  const bool fits = SupportsAttendSm80(call.attend) && SupportsScoreSm80(call.score);
  call.kernel = forced != "any" && fits ? Kernel::kSm80 : Kernel::kAny;
  if (forced != "any" && !fits && call.refused.empty())
    call.refused = "a shape that the tensor-core kernels do not take";
}

cudaError_t Attend(const Call& call, bool exclude) {
  return call.kernel == Kernel::kSm90 ? LaunchAttendSm90(call.attend, exclude, call.stream)
                                      : LaunchAttendSm80(call.attend, exclude, call.stream);
}

// The rows' state, by partials and their sum or by the careful kernel.
cudaError_t AttendRows(const Call& call) {
  if (const cudaError_t error = LaunchPrepare(call.attend, call.stream); error != cudaSuccess) return error;
  if (call.attend.given_lse != nullptr) return LaunchAttendAny(call.attend, true, call.stream);
  if (call.kernel == Kernel::kAny) return LaunchAttendAny(call.attend, false, call.stream);
  if (const cudaError_t error = Attend(call, false); error != cudaSuccess) return error;
  if (const cudaError_t error = LaunchCombine(call.attend, call.stream); error != cudaSuccess) return error;
  if (const cudaError_t error = LaunchAttendAny(call.attend, true, call.stream); error != cudaSuccess) return error;
  if (call.attend.partials.out == nullptr) return cudaSuccess;  // the sum of p needs no pair apart
  if (const cudaError_t error = Attend(call, true); error != cudaSuccess) return error;
  return LaunchFinishTops(call.attend, call.stream);
}

cudaError_t ScoreTokens(const Call& call) {
  cudaError_t error = cudaSuccess;
  switch (call.kernel) {
    case Kernel::kSm90:
      error = LaunchScoreSm90(call.score, call.stream);
      break;
    case Kernel::kSm80:
      error = LaunchScoreSm80(call.score, call.stream);
      break;
    case Kernel::kAny:
      error = LaunchScoreAny(call.score, call.stream);
      break;
  }
  if (error != cudaSuccess || !call.score.find_tops) return error;
  return LaunchResolveGiven(call.attend, call.score, call.stream);
}

Call MakeCall(const Plan& plan, const Cache& cache, const Rows& rows, const Outputs& outputs, const RunMemory& memory,
              Stream stream) {
  Call call;
  call.stream = stream;
  call.attend = ToAttend(cache, rows, memory.rows);
  call.score.cache = cache;
  call.score.rows = call.attend.rows;
  call.score.state = memory.rows.state;
  call.score.signal = plan.policy.signal;
  call.score.find_tops = rows.lse != nullptr && plan.policy.signal == Signal::kDropKv;
  call.score.row_ok = memory.rows.row_ok;
  call.score.has_tops = memory.rows.has_tops;
  call.score.raw = outputs.raw_scores != nullptr ? outputs.raw_scores : memory.raw;
  Choose(plan, call);
  return call;
}

SelectParams SelectCall(const Plan& plan, const Cache& cache, const Outputs& outputs, const RunMemory& memory,
                        Counters* counters) {
  SelectParams params = ToSelect(plan);
  params.lengths = cache.lengths;
  params.generated = cache.generated;
  params.raw = outputs.raw_scores != nullptr ? outputs.raw_scores : memory.raw;
  params.offsets = outputs.offsets;
  params.positions = outputs.positions;
  params.capacity = outputs.capacity;
  params.pooled = outputs.scores;
  params.workspace = memory.select;
  params.counters = counters;
  return params;
}

CompactParams CompactCall(const Plan& plan, const Cache& cache, const Outputs& outputs, const RunMemory& memory) {
  CompactParams params = ToCompact(plan);
  params.source = cache;
  params.offsets = outputs.offsets;
  params.positions = outputs.positions;
  params.k = outputs.placement == Placement::kOutOfPlace ? outputs.k : nullptr;
  params.v = outputs.placement == Placement::kOutOfPlace ? outputs.v : nullptr;
  params.workspace = memory.compact;
  return params;
}

RunMemory Memory(const Plan& plan, void* workspace) {
  return CutMemory(plan, ToSelect(plan), ToCompact(plan), workspace);
}

// Whether the rows are those of the last tokens of every kept list too, since these tokens are always kept.
bool AreOfTheListsEnds(const Plan& plan, const Cache& cache, const Rows& rows) {
  const int64_t kept = int64_t{plan.policy.window} + (cache.generated == nullptr ? cache.max_generated : 0);
  return rows.visible == nullptr && rows.rows <= kept;
}

// The same rows over the kept tokens.
Status Certify(const Plan& plan, const Rows& rows, const Outputs& outputs, const RunMemory& memory, const Call& full) {
  Rows same = rows;
  same.lse = nullptr;
  same.out = nullptr;
  Call kept = full;
  kept.attend = ToAttend(KeptCache(plan, outputs), same, memory.kept);
  if (!AreOfTheListsEnds(plan, full.attend.cache, rows)) {
    kept.attend.rows.visible = memory.visible;
    kept.attend.rows.visible_heads = plan.shape.kv_heads;
    DROPKV_RETURN_IF_ERROR(
        FromCuda(LaunchKeptVisible(full.attend, outputs.offsets, outputs.positions, memory.visible, full.stream),
                 "certificate"));
  }
  kept.score.cache = kept.attend.cache;
  Choose(plan, kept);
  DROPKV_RETURN_IF_ERROR(FromCuda(AttendRows(kept), "certificate"));
  return FromCuda(
      LaunchCertificate(full.attend, memory.kept.state, outputs.output_error, outputs.evicted_mass, full.stream),
      "certificate");
}

Status CheckCertificate(const Plan& plan, const Outputs& outputs) {
  if (outputs.output_error == nullptr && outputs.evicted_mass == nullptr) return Status::Ok();
  if (outputs.output_error == nullptr || outputs.evicted_mass == nullptr)
    return InvalidArgument("outputs.output_error and outputs.evicted_mass: expected both or none");
  if (plan.policy.signal != Signal::kDropKv)
    return Unsupported("outputs.output_error: the policy's scores need no outputs, so there are none to compare");
  if (outputs.placement == Placement::kOutOfPlace) return Status::Ok();
  return Unsupported("outputs.output_error: expected placement kOutOfPlace, whose rows are attended");
}

Status CheckPlacement(const Outputs& outputs) {
  if (outputs.placement != Placement::kOutOfPlace) return Status::Ok();
  if (outputs.k != nullptr && outputs.v != nullptr) return Status::Ok();
  return InvalidArgument("outputs.k and outputs.v: expected device pointers for compaction out of place, got null");
}

Status CheckWhole(const Cache& cache) {
  if (cache.offsets == nullptr) return Status::Ok();
  return Unsupported("cache.offsets: expected sequences whose heads hold the same tokens, got a ragged cache");
}

// Pass 1 and 2 of a call that was checked.
Status LaunchScore(const Plan& plan, const Call& call, Ran* ran) {
  if (!plan.force_kernel.empty() && Name(call.kernel) != plan.force_kernel)
    return Unsupported("force_kernel: " + plan.force_kernel + " does not take " + std::string(call.refused));
  DROPKV_RETURN_IF_ERROR(FromCuda(AttendRows(call), "attend"));
  if (ran != nullptr)
    *ran = {plan.rows_given ? std::string_view("given") : Name(call.kernel), Name(call.kernel), call.refused};
  return FromCuda(ScoreTokens(call), "score");
}

}  // namespace

Status Score(const Plan& plan, const Cache& cache, const Rows& rows, const Outputs& outputs, void* workspace,
             Stream stream, Ran* ran) {
  DROPKV_RETURN_IF_ERROR(CheckShape(plan, cache));
  DROPKV_RETURN_IF_ERROR(CheckRows(plan, cache, rows));
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  return LaunchScore(plan, MakeCall(plan, cache, rows, outputs, Memory(plan, workspace), stream), ran);
}

Status Select(const Plan& plan, const Cache& cache, const Outputs& outputs, void* workspace, Stream stream) {
  DROPKV_RETURN_IF_ERROR(CheckShape(plan, cache));
  DROPKV_RETURN_IF_ERROR(CheckLists(plan, outputs));
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  DROPKV_RETURN_IF_ERROR(CheckWhole(cache));
  return FromCuda(LaunchSelect(SelectCall(plan, cache, outputs, Memory(plan, workspace), nullptr), stream), "select");
}

Status Compact(const Plan& plan, const Cache& cache, const Outputs& outputs, void* workspace, Stream stream) {
  DROPKV_RETURN_IF_ERROR(CheckShape(plan, cache));
  DROPKV_RETURN_IF_ERROR(CheckLists(plan, outputs));
  DROPKV_RETURN_IF_ERROR(CheckPlacement(outputs));
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  if (outputs.placement == Placement::kNone) return Status::Ok();
  return FromCuda(LaunchCompact(CompactCall(plan, cache, outputs, Memory(plan, workspace)), stream), "compact");
}

Status Run(const Plan& plan, const Cache& cache, const Rows& rows, const Outputs& outputs, void* workspace,
           Stream stream, Ran* ran) {
  // Nothing is launched before everything has been checked.
  DROPKV_RETURN_IF_ERROR(CheckLists(plan, outputs));
  DROPKV_RETURN_IF_ERROR(CheckPlacement(outputs));
  DROPKV_RETURN_IF_ERROR(CheckCertificate(plan, outputs));
  DROPKV_RETURN_IF_ERROR(CheckWhole(cache));
  DROPKV_RETURN_IF_ERROR(CheckShape(plan, cache));
  DROPKV_RETURN_IF_ERROR(CheckRows(plan, cache, rows));
  DROPKV_RETURN_IF_ERROR(CheckWorkspace(workspace));
  static_assert(sizeof(Counters) == 3 * sizeof(*outputs.counters));
  auto* counters = reinterpret_cast<Counters*>(outputs.counters);
  const RunMemory memory = Memory(plan, workspace);
  Call call = MakeCall(plan, cache, rows, outputs, memory, stream);
  call.attend.counters = counters;
  DROPKV_RETURN_IF_ERROR(LaunchScore(plan, call, ran));
  DROPKV_RETURN_IF_ERROR(FromCuda(LaunchSelect(SelectCall(plan, cache, outputs, memory, counters), stream), "select"));
  if (outputs.placement != Placement::kNone)
    DROPKV_RETURN_IF_ERROR(FromCuda(LaunchCompact(CompactCall(plan, cache, outputs, memory), stream), "compact"));
  if (outputs.output_error == nullptr) return Status::Ok();
  return Certify(plan, rows, outputs, memory, call);
}

Cache KeptCache(const Plan& plan, const Outputs& outputs) {
  Cache kept = plan.shape;
  kept.k = {outputs.k, 0, 0, plan.shape.key_dim};
  kept.v = {outputs.v, 0, 0, plan.shape.value_dim};
  kept.lengths = nullptr;
  kept.starts = nullptr;
  kept.blocks = nullptr;
  kept.offsets = outputs.offsets;
  kept.generated = nullptr;
  kept.max_generated = 0;
  kept.rows_in_pool = outputs.capacity;
  return kept;
}

}  // namespace dropkv::cuda
