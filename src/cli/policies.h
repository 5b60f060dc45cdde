// `dropkv policies`: every eviction policy, as a table.
#pragma once

#include <string>
#include <vector>

#include "dropkv/status.h"

namespace dropkv::cli {

// `arguments` behind the word "policies": --markdown for docs/policies.md, names for those alone. Writes to standard
// output. Errors name the argument; kNotFound for an unknown policy.
Status Policies(const std::vector<std::string>& arguments);

}  // namespace dropkv::cli
