// What `dropkv score` writes and prints.
#pragma once

#include <string>

#include "cli/score.h"

namespace dropkv::cli {

// The tensors that docs/score.md names, into options.output.
Status WriteScore(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result);

std::string ScoreText(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result);

// One object and a newline.
std::string ScoreJson(const ScoreOptions& options, const ScoreInput& input, const ScoreResult& result);

}  // namespace dropkv::cli
