// One policy and budget applied to a prefilled prompt.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "llama/prefill.h"

namespace dropkv::llama {

struct Evicted {
  KeepList keep;  // list i belongs to layer prefilled.layers[i]; empty where every layer slides
  EvictReport report;
  std::vector<std::string> warnings;
  double score_seconds = 0;      // attend, score, pool and select: what an eviction costs beside the prefill
  double output_error = 0;       // mean over layers and query heads of sqrt(mean_i err_i^2), over certificate_rows rows
  double evicted_mass = 0;       // mean over layers and query heads of the evicted probability
  int32_t certificate_rows = 0;  // the last ones of the prompt, the same for every policy of a prefill
};

// Tokens that every head keeps by their position, as far as the recipe alone tells: window, sinks, recent ones.
int32_t ProtectedTokens(const baseline::Recipe& recipe);

// ResolveBudget of policy.h for a recipe: tokens per KV head, on average where heads or layers share.
// protected_tokens: what every head keeps; at least what ProtectedTokens says.
Result<KeepCount> ResolveBudget(const Budget& budget, const baseline::Recipe& recipe, int32_t protected_tokens,
                                int32_t n);

// The budget holds for the layers that see the whole prompt. Policies of the engine run there; all others are scored
// and selected by src/baseline, and their lists are checked to hold what the budget says. The certificate is measured
// over all captured rows. Errors: rows or statistics that the prefill did not capture (pass the recipe to it), what the
// scorer refuses.
Result<Evicted> Evict(const Prefilled& prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget);

struct EvictJob {
  const baseline::Recipe* recipe;
  Budget budget;
};

// Evict for every job, in their order: the same lists and numbers, but jobs whose recipes share scores are scored once,
// and all certificates of such jobs are measured over one pass. Their reports and score_seconds have the time of that
// scoring each, as if it had been their own; of a certificate's time, where the policy's rows are not the
// certificate's, an even share. Fails as a whole, where any job fails.
Result<std::vector<Evicted>> EvictAll(const Prefilled& prefilled, Engine* engine, std::span<const EvictJob> jobs);

// Whether EvictAll scores once for both, whatever their budgets are.
bool SharesScores(const baseline::Recipe& a, const baseline::Recipe& b);

}  // namespace dropkv::llama
