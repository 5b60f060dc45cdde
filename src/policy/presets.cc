#include <array>
#include <cmath>

#include "dropkv/cache_view.h"
#include "dropkv/policy.h"

namespace dropkv {
namespace {

constexpr Pooling kNoPooling{PoolKind::kMean, 0, 0, false};

// algorithm.md section 4, "Presets" and "The other presets". Streaming protects its 4 sinks and, by the window of 1,
// the last token; the other keep - 5 places go to the latest tokens by score, so the rule is "4 sinks and the last keep
// - 4" and the smallest budget is 5.
const std::array<Policy, 8>& PresetTable() {
  static const std::array<Policy, 8> presets = {{
      {.name = "full", .signal = Signal::kFull, .window = 1, .pool = kNoPooling},
      {.name = "dropkv"},
      {.name = "dropkv-w32", .window = 32, .pool = {PoolKind::kMean, 3, 3, false}},
      {.name = "adadropkv", .heads = HeadRule::kAda},
      {.name = "dropkv-fwd", .pool = {PoolKind::kMean, 5, 31, false}, .heads = HeadRule::kAda},
      {.name = "snapkv", .signal = Signal::kAttention, .window = 64, .pool = {PoolKind::kMean, 2, 2, true}},
      {.name = "streaming", .signal = Signal::kRecency, .window = 1, .pool = kNoPooling, .sink = 4},
      {.name = "random", .signal = Signal::kRandom, .pool = kNoPooling},
  }};
  return presets;
}

Status CheckRange(const char* field, int32_t value, int32_t lowest, int32_t highest) {
  if (value >= lowest && value <= highest) return Status::Ok();
  return InvalidArgument(std::string("policy.") + field + ": expected " + std::to_string(lowest) + " to " +
                         std::to_string(highest) + ", got " + std::to_string(value));
}

}  // namespace

std::span<const Policy> Presets() { return PresetTable(); }

Result<Policy> FindPreset(std::string_view name) {
  for (const Policy& preset : Presets())
    if (preset.name == name) return preset;
  return Status(Code::kNotFound, "policy: expected one of " + PresetNames() + ", got \"" + std::string(name) + "\"");
}

std::string PresetNames() {
  std::string names;
  for (const Policy& preset : Presets()) names += (names.empty() ? "" : ", ") + preset.name;
  return names;
}

Status CheckPolicy(const Policy& policy) {
  DROPKV_RETURN_IF_ERROR(CheckRange("signal", static_cast<int32_t>(policy.signal), 0, 4));
  DROPKV_RETURN_IF_ERROR(CheckRange("window", policy.window, 1, kMaxRows));
  DROPKV_RETURN_IF_ERROR(CheckRange("pool.kind", static_cast<int32_t>(policy.pool.kind), 0, 1));
  DROPKV_RETURN_IF_ERROR(CheckRange("pool.before", policy.pool.before, 0, kMaxPoolingReach));
  DROPKV_RETURN_IF_ERROR(CheckRange("pool.after", policy.pool.after, 0, kMaxPoolingReach));
  DROPKV_RETURN_IF_ERROR(CheckRange("heads", static_cast<int32_t>(policy.heads), 0, 2));
  if (policy.sink < 0) return InvalidArgument("policy.sink: expected at least 0, got " + std::to_string(policy.sink));
  if (!(policy.alpha >= 0.0 && policy.alpha <= 1.0))
    return InvalidArgument("policy.alpha: expected 0 to 1, got " + std::to_string(policy.alpha));
  return Status::Ok();
}

std::string_view HeadRuleName(HeadRule rule) {
  switch (rule) {
    case HeadRule::kUniform:
      return "uniform";
    case HeadRule::kAda:
      return "ada";
    case HeadRule::kAdaO:
      return "ada-o";
  }
  return "?";
}

}  // namespace dropkv
