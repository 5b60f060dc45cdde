// The C ABI's errors, version and policies: what needs no engine.
#include <cstdio>
#include <string>

#include "dropkv/policy.h"
#include "dropkv/version.h"
#include "engine/c_api.h"

static_assert(DROPKV_OK == static_cast<int>(dropkv::Code::kOk));
static_assert(DROPKV_INVALID_ARGUMENT == static_cast<int>(dropkv::Code::kInvalidArgument));
static_assert(DROPKV_UNSUPPORTED == static_cast<int>(dropkv::Code::kUnsupported));
static_assert(DROPKV_NOT_FOUND == static_cast<int>(dropkv::Code::kNotFound));
static_assert(DROPKV_IO == static_cast<int>(dropkv::Code::kIo));
static_assert(DROPKV_WORKSPACE_TOO_SMALL == static_cast<int>(dropkv::Code::kWorkspaceTooSmall));
static_assert(DROPKV_FAILED_PRECONDITION == static_cast<int>(dropkv::Code::kFailedPrecondition));
static_assert(DROPKV_CANCELLED == static_cast<int>(dropkv::Code::kCancelled));
static_assert(DROPKV_INTERNAL == static_cast<int>(dropkv::Code::kInternal));
static_assert(DROPKV_SIGNAL_FULL == static_cast<int>(dropkv::Signal::kFull));
static_assert(DROPKV_SIGNAL_DROPKV == static_cast<int>(dropkv::Signal::kDropKv));
static_assert(DROPKV_SIGNAL_ATTENTION == static_cast<int>(dropkv::Signal::kAttention));
static_assert(DROPKV_SIGNAL_RECENCY == static_cast<int>(dropkv::Signal::kRecency));
static_assert(DROPKV_SIGNAL_RANDOM == static_cast<int>(dropkv::Signal::kRandom));
static_assert(DROPKV_POOL_MEAN == static_cast<int>(dropkv::PoolKind::kMean));
static_assert(DROPKV_POOL_MAX == static_cast<int>(dropkv::PoolKind::kMax));
static_assert(DROPKV_HEADS_UNIFORM == static_cast<int>(dropkv::HeadRule::kUniform));
static_assert(DROPKV_HEADS_ADA == static_cast<int>(dropkv::HeadRule::kAda));
static_assert(DROPKV_HEADS_ADA_O == static_cast<int>(dropkv::HeadRule::kAdaO));

namespace dropkv::c_api {
namespace {

// A plain array: its first use in a thread must not allocate.
thread_local char last_error[1024];

Status CheckEnum(int32_t value, int32_t last, const char* name) {
  if (value >= 0 && value <= last) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected 0 to " + std::to_string(last) + ", got " +
                         std::to_string(value));
}

}  // namespace

dropkv_status Fail(Code code, const char* message) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", message);
  return static_cast<dropkv_status>(code);
}

Result<Policy> ToPolicy(const dropkv_policy* in) {
  if (Status status = CheckInput(in, "policy"); !status.ok()) return status;
  if (Status status = CheckEnum(in->signal, DROPKV_SIGNAL_RANDOM, "policy.signal"); !status.ok()) return status;
  if (Status status = CheckEnum(in->pool_kind, DROPKV_POOL_MAX, "policy.pool_kind"); !status.ok()) return status;
  if (Status status = CheckEnum(in->heads, DROPKV_HEADS_ADA_O, "policy.heads"); !status.ok()) return status;
  Policy policy;
  policy.signal = static_cast<Signal>(in->signal);
  policy.window = in->window;
  policy.pool = {static_cast<PoolKind>(in->pool_kind), in->pool_before, in->pool_after, in->pool_past_only != 0};
  policy.sink = in->sink;
  policy.heads = static_cast<HeadRule>(in->heads);
  policy.alpha = in->alpha;
  policy.seed = in->seed;
  return policy;
}

Result<Budget> ToBudget(const dropkv_budget* in) {
  if (Status status = CheckInput(in, "budget"); !status.ok()) return status;
  if ((in->fraction != 0) == (in->tokens != 0))
    return InvalidArgument("budget: expected either fraction or tokens, got fraction " + std::to_string(in->fraction) +
                           " and tokens " + std::to_string(in->tokens));
  return in->fraction != 0 ? Budget::Fraction(in->fraction) : Budget::Tokens(in->tokens);
}

}  // namespace dropkv::c_api

using namespace dropkv;         // NOLINT(google-build-using-namespace): the functions below are outside any namespace
using namespace dropkv::c_api;  // NOLINT(google-build-using-namespace)

const char* dropkv_status_name(dropkv_status status) { return CodeName(static_cast<Code>(status)).data(); }

const char* dropkv_last_error(void) { return last_error; }

const char* dropkv_version(void) { return Version().data(); }

dropkv_status dropkv_policy_find(const char* name, dropkv_policy* policy) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(name, "name"));
    DROPKV_RETURN_IF_ERROR(CheckOutput(policy, "policy"));
    const auto found = FindPreset(name);
    if (!found.ok()) return found.status();
    dropkv_policy out = {};
    out.signal = static_cast<int32_t>(found->signal);
    out.window = found->window;
    out.pool_kind = static_cast<int32_t>(found->pool.kind);
    out.pool_before = found->pool.before;
    out.pool_after = found->pool.after;
    out.pool_past_only = found->pool.past_only ? 1 : 0;
    out.sink = found->sink;
    out.heads = static_cast<int32_t>(found->heads);
    out.alpha = found->alpha;
    out.seed = found->seed;
    Store(policy, out);
    return Status::Ok();
  });
}

dropkv_status dropkv_policy_name(int32_t index, const char** name) {
  return Guard([&]() -> Status {
    DROPKV_RETURN_IF_ERROR(CheckPointer(name, "name"));
    const auto presets = Presets();
    if (index < 0 || index >= static_cast<int32_t>(presets.size()))
      return {Code::kNotFound,
              "index: expected 0 to " + std::to_string(presets.size() - 1) + ", got " + std::to_string(index)};
    *name = presets[index].name.c_str();
    return Status::Ok();
  });
}
