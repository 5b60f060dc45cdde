// Which settings a policy of `dropkv run` gets: its own, those that compared policies share, and what the flags say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv::cli {

struct PolicyFlags {
  std::optional<int32_t> window;
  std::optional<baseline::RowSources> rows;
  std::optional<int32_t> sink;
  std::optional<double> alpha;
  std::optional<Pooling> pool;
  std::optional<HeadRule> heads;
  bool own_settings = false;
};

// --rows: its sources, and its window as if --window had said it. Error: both flags name different windows.
Status ReadRows(const std::string& text, PolicyFlags* flags);

// Adds the policy of that name, or every preset for "all" and the paper's for "tier1"; those that are there already are
// left out. Errors begin with the flag.
Status AddPolicies(const std::string& flag, const std::string& name, uint64_t seed,
                   std::vector<baseline::Recipe>* policies);

// Compared policies that read a window's queries share window, rows, pooling and sinks of the first of them, if it is
// the first policy that evicts: then only the score differs. Without such queries a policy is its own settings (sinks
// of streaming, lags, chunks), and so are a last row (tova) and chunks of code (andpro_code). Flags come on top; in a
// list they leave out those policies that have no such setting, of a single policy they ask for it. Errors:
// CheckRecipe's, with the policy's name where no flag is to blame; and a flag that none of the policies reads.
Status Settle(const PolicyFlags& flags, std::vector<baseline::Recipe>* policies);

}  // namespace dropkv::cli
