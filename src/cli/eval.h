// `dropkv eval`: answers the questions of a suite from the full cache and from every evicted one.
#pragma once

#include <string>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::cli {

// The arguments behind "eval". A stop by the user is kCancelled.
Status Eval(const std::vector<std::string>& arguments);

}  // namespace dropkv::cli
