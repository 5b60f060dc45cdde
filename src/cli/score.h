// `dropkv score`: any policy on the tensors of one attention layer, without a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/score_input.h"
#include "cli/score_options.h"
#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/status.h"

namespace dropkv::cli {

struct ScoreResult {
  std::vector<float> score;         // [Hkv, n]
  KeepList keep;                    // one layer
  int32_t certificate_rows = 0;     // 0: no queries, no certificate
  std::vector<float> output_error;  // [Hq] over the rows
  std::vector<float> evicted_mass;  // [Hq]
  int64_t nonfinite_tokens = 0;
  std::vector<std::string> remarks;
};

// Scores, selects and measures; writes nothing.
Result<ScoreResult> ScoreLayer(const ScoreOptions& options, const ScoreInput& input, Engine* engine);

// The whole command: the arguments behind `dropkv score`. Prints the summary on standard output.
Status Score(const std::vector<std::string>& arguments);

}  // namespace dropkv::cli
