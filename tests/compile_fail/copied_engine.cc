// Two engines cannot share one thread pool.
#include <utility>

#include "dropkv/engine.h"

dropkv::Engine Take(dropkv::Engine& engine) {
#ifdef MUST_FAIL
  return engine;
#else
  return std::move(engine);
#endif
}
