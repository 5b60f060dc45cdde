// `dropkv run`: a prompt goes in, a small cache comes out, an answer is decoded from it.
#pragma once

#include <string>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::cli {

// `arguments` behind the word "run". Writes answers and table (or JSON) to standard output, progress to standard error.
Status Run(const std::vector<std::string>& arguments);

}  // namespace dropkv::cli
