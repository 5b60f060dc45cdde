// A reference into a Result that is gone at the end of the line.
#include "dropkv/policy.h"

int Window() {
#ifdef MUST_FAIL
  dropkv::Policy& policy = dropkv::FindPreset("dropkv").value();
#else
  const dropkv::Policy& policy = dropkv::FindPreset("dropkv").value();  // a copy that lives as long as the name
#endif
  return policy.window;
}
