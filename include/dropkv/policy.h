// Eviction policies as data: what is scored, how it is pooled, what is protected, how heads share the budget.
// docs/algorithm.md sections 3 and 4 are the contract.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "dropkv/export.h"
#include "dropkv/status.h"

namespace dropkv {

enum class Signal : int {
  kFull = 0,       // nothing is evicted
  kDropKv = 1,     // sum over rows of (p/(1-p))^2 |a - v|^2, mean over the group
  kAttention = 2,  // mean over rows and group of p (SnapKV)
  kRecency = 3,    // the position itself (StreamingLLM)
  kRandom = 4,     // counter-based, from seed, layer, head and position
};

enum class PoolKind : int { kMean = 0, kMax = 1 };

// Pooled score of token j: mean or max of the raw scores j-after .. j+before, so that a hit keeps `before` tokens
// before it and `after` tokens after it. Mean divides by before+after+1 always (zeros beyond both ends). Only scores
// that read queries (Policy::needs_queries) are pooled: positions and random numbers are not.
struct Pooling {
  PoolKind kind = PoolKind::kMean;
  int32_t before = 0;
  int32_t after = 0;
  bool past_only = false;  // pools the n-w past tokens only (SnapKV); else all n raw scores, the window's included

  bool operator==(const Pooling&) const = default;
};

enum class HeadRule : int {
  kUniform = 0,
  kAda = 1,   // rule K: floor(alpha * keep) safe tokens a head, the rest by the highest scores of the layer
  kAdaO = 2,  // rule O, the original AdaKV: flat counts, interpolated towards uniform
};

struct Policy {
  std::string name;
  Signal signal = Signal::kDropKv;
  int32_t window = 8;  // the prompt's last tokens: always kept; their rows judge, unless others are given
  Pooling pool{PoolKind::kMean, 5, 5, false};
  int32_t sink = 0;  // first tokens that are always kept
  HeadRule heads = HeadRule::kUniform;
  double alpha = 0.2;
  uint64_t seed = 0;  // kRandom only

  bool needs_queries() const { return signal == Signal::kDropKv || signal == Signal::kAttention; }

  bool operator==(const Policy&) const = default;
};

// The named presets, in the order of the documentation.
DROPKV_API std::span<const Policy> Presets();

// A preset by name; the error lists the known names.
DROPKV_API Result<Policy> FindPreset(std::string_view name);

// "full, dropkv, ..." for messages and help.
DROPKV_API std::string PresetNames();

// Largest `before` and `after` of a pooling.
inline constexpr int32_t kMaxPoolingReach = 1024;

// Checks window 1..128, before and after 0..1024, sink >= 0, 0 <= alpha <= 1; the message names the field.
DROPKV_API Status CheckPolicy(const Policy& policy);

// How much is KEPT: a share of the tokens, or a number of tokens per KV head.
struct Budget {
  std::optional<double> fraction;  // (0, 1]
  int64_t tokens = 0;              // used where fraction is empty; >= 1

  static Budget Fraction(double f) { return {f, 0}; }
  static Budget Tokens(int64_t t) { return {std::nullopt, t}; }

  bool operator==(const Budget&) const = default;
};

// Reads "10%", "2.5%" (0 < P <= 100, the share KEPT) or "512" (tokens per KV head), nothing else: no sign, no space, no
// exponent. A bare fraction is an error that suggests the percentage ("0.05": "5%").
DROPKV_API Result<Budget> ParseBudget(std::string_view text);

struct KeepCount {
  int32_t keep = 0;     // tokens per KV head, window and sinks included
  bool raised = false;  // a percentage fell below window + sink and was raised to it
};

// keep = clamp(floor(fraction * n + 1e-6), window + sink, n), n >= 0. A count below window + sink is an error, whatever
// n is, and suggests a percentage up to 100; one above n keeps all n. kFull keeps all n for any valid budget.
DROPKV_API Result<KeepCount> ResolveBudget(const Budget& budget, const Policy& policy, int32_t n);

// "mean 11", "mean 5,31", "max 7", "none"; " of the past" behind it for past_only.
DROPKV_API std::string PoolingText(const Pooling& pool);

// Reads "K" (odd; 1 is none), "B,F", "max:K" or "max:B,F" into kind, before and after; past_only stays false.
DROPKV_API Result<Pooling> ParsePooling(std::string_view text);

DROPKV_API std::string_view HeadRuleName(HeadRule rule);  // "uniform", "ada", "ada-o"

}  // namespace dropkv
