// What `dropkv score` was asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/policy.h"
#include "dropkv/status.h"

namespace dropkv::cli {

struct ScoreOptions {
  std::string input;
  std::string output;
  baseline::Recipe recipe;  // flags applied
  Budget budget = Budget::Fraction(0.1);
  std::string budget_text = "10%";          // as typed
  std::optional<double> compression_ratio;  // the share REMOVED; instead of the budget
  bool parity = false;
  bool json = false;
  int32_t threads = 0;  // 0: one per core
  // Instead of the file's metadata of the same names.
  std::optional<double> scale;
  std::optional<double> rope_theta;
  std::optional<double> soft_cap;
  std::optional<int32_t> layer;
  std::optional<int32_t> layers;
};

// Parses the arguments behind `dropkv score`, in order. Errors name the flag, what was expected and what came; on
// "--help" the result is empty.
Result<std::optional<ScoreOptions>> ParseScore(std::vector<std::string> arguments);

// The text of `dropkv score --help`.
std::string ScoreHelp();

}  // namespace dropkv::cli
