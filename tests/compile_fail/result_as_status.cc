// A Result handed on as a Status: the value would be lost without a word.
#include "dropkv/policy.h"

dropkv::Status Find() {
#ifdef MUST_FAIL
  return dropkv::FindPreset("dropkv");
#else
  return dropkv::FindPreset("dropkv").status();
#endif
}
