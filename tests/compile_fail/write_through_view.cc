// A KvView reads; compaction needs a view that may write.
#include "dropkv/engine.h"

dropkv::Status Shrink(const dropkv::KvView& view, const dropkv::MutableKvView& mutable_view,
                      const dropkv::KeepList& keep) {
#ifdef MUST_FAIL
  if (!dropkv::CompactInPlace(view, nullptr, keep, 0).ok()) return {};
#endif
  return dropkv::Compact(view, keep, 0, mutable_view);
}
