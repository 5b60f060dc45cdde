// A Status that nobody looks at.
#include "dropkv/policy.h"

bool Check(const dropkv::Policy& policy) {
#ifdef MUST_FAIL
  dropkv::CheckPolicy(policy);
#endif
  return dropkv::CheckPolicy(policy).ok();
}
