// `dropkv eval report`: what the result folders of `dropkv eval` say.
#pragma once

#include <string>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::cli {

// `arguments` behind the words "eval report": folders and flags. Tables on standard output, Markdown and HTML into
// files. Errors name the argument, or the file and line that is wrong.
Status EvalReport(const std::vector<std::string>& arguments);

}  // namespace dropkv::cli
