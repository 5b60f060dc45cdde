// A cache is moved; a copy of its memory is never made by accident.
#include <utility>

#include "dropkv/ragged_cache.h"

dropkv::RaggedCache Take(dropkv::RaggedCache& cache) {
#ifdef MUST_FAIL
  return cache;
#else
  return std::move(cache);
#endif
}
