// How many tokens a list keeps: docs/algorithm.md section 4.3 and "Adaptive head budgets", in the same double
// arithmetic as on the host. The _rn intrinsics keep the compiler from fusing a product with a sum, which would round
// otherwise.
#pragma once

#include "cuda/device/cache.cuh"

namespace dropkv::cuda {

inline constexpr double kRoundingSlack = 1e-6;  // keeps 0.1 * 10 from becoming 0

// Of every list of one sequence.
struct SelectBudget {
  int32_t tokens;     // n
  int32_t generated;  // behind them: kept on top of everything below
  int32_t begin;      // candidates: tokens begin .. end-1, all others are protected
  int32_t end;
  int32_t others;  // candidates kept per head, on average
  int32_t safe;    // rule K: candidates that every head keeps
  bool all;        // all n are kept

  __device__ bool candidate(int32_t token) const { return token >= begin && token < end; }

  // The heads of the sequence compete for `others - safe` tokens each.
  __device__ bool shared(HeadRule rule) const { return rule != HeadRule::kUniform && !all && others > safe; }
};

__device__ inline int32_t SequenceLength(const SelectParams& params, int32_t sequence) {
  return params.lengths != nullptr ? params.lengths[sequence] : params.max_tokens;
}
__device__ inline int32_t SequenceCandidates(const SelectParams& params, int32_t sequence) {
  return Candidates(params, sequence, SequenceLength(params, sequence));
}

__device__ inline double FloorOfProduct(double x, double y) {
  return floor(__dadd_rn(__dmul_rn(x, y), kRoundingSlack));
}

__device__ inline SelectBudget BudgetOf(const SelectParams& params, int32_t sequence) {
  SelectBudget budget{};
  const int32_t length = SequenceLength(params, sequence);
  const int32_t n = Candidates(params, sequence, length);
  const int64_t smallest = int64_t{params.window} + params.sink;
  int64_t keep =
      params.fraction > 0.0 ? static_cast<int64_t>(FloorOfProduct(params.fraction, n)) : params.budget_tokens;
  keep = min(max(keep, smallest), int64_t{n});
  budget.tokens = n;
  budget.generated = length - n;
  budget.all = smallest >= n || keep >= n;
  if (budget.all) return budget;
  budget.begin = params.sink;
  budget.end = n - params.window;
  budget.others = static_cast<int32_t>(keep - smallest);
  if (params.heads != HeadRule::kAda) return budget;
  const auto share = static_cast<int64_t>(FloorOfProduct(params.alpha, static_cast<double>(keep)));
  budget.safe = static_cast<int32_t>(min(max(share - smallest, int64_t{0}), int64_t{budget.others}));
  return budget;
}

// Rule O: the head's count in the order of the layer, drawn towards the uniform share.
__device__ inline int32_t DrawnCount(const SelectParams& params, const SelectBudget& budget, int32_t count) {
  const double uniform = FloorOfProduct(budget.others, params.alpha);
  const double drawn = rint(__dadd_rn(__dmul_rn(count, __dsub_rn(1.0, params.alpha)), uniform));
  return min(max(static_cast<int32_t>(drawn), 0), budget.end - budget.begin);
}

}  // namespace dropkv::cuda
