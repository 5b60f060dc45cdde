// Version of the headers, and what the library was built with.
#pragma once

#include <string_view>

#include "dropkv/export.h"

#define DROPKV_VERSION_MAJOR 0
#define DROPKV_VERSION_MINOR 1
#define DROPKV_VERSION_PATCH 0

namespace dropkv {

// "0.1.0", of the library that is linked.
DROPKV_API std::string_view Version();

}  // namespace dropkv
