// A Result that nobody looks at.
#include "dropkv/engine.h"

bool Create() {
#ifdef MUST_FAIL
  dropkv::Engine::Create();
#endif
  return dropkv::Engine::Create().ok();
}
