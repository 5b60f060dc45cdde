// One policy and budget applied to a prefilled prompt.
#pragma once

#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/policy.h"
#include "llama/prefill.h"

namespace dropkv::llama {

struct Evicted {
  KeepList keep;  // list i belongs to layer prefilled.layers[i]; empty where every layer slides
  EvictReport report;
  double score_seconds = 0;  // attend, score, pool and select: what an eviction costs beside the prefill
  double output_error = 0;   // mean over layers and query heads of sqrt(mean_i err_i^2), over the policy's window
  double evicted_mass = 0;   // mean over layers and query heads of the evicted probability
};

// The budget holds for the layers that see the whole prompt. The certificate is measured over min(max(window, 1), rows)
// captured rows, for every policy.
Result<Evicted> Evict(const Prefilled& prefilled, Engine* engine, const Policy& policy, const Budget& budget);

}  // namespace dropkv::llama
