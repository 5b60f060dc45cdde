#include "dropkv/version.h"

#define DROPKV_TEXT_(x) #x
#define DROPKV_TEXT(x) DROPKV_TEXT_(x)

namespace dropkv {

std::string_view Version() {
  return DROPKV_TEXT(DROPKV_VERSION_MAJOR) "." DROPKV_TEXT(DROPKV_VERSION_MINOR) "." DROPKV_TEXT(DROPKV_VERSION_PATCH);
}

}  // namespace dropkv
