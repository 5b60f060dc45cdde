// Floats at the start of a cache line, as the kernels' matrices in panels must lie.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "core/workspace.h"

namespace dropkv::baseline {

template <typename T>
struct AlignedAllocator {
  using value_type = T;  // NOLINT(readability-identifier-naming): the standard's name

  AlignedAllocator() = default;
  template <typename U>
  explicit AlignedAllocator(const AlignedAllocator<U>& /*other*/) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{Workspace::kAlignment}));
  }
  void deallocate(T* memory, size_t /*count*/) { ::operator delete (memory, std::align_val_t{Workspace::kAlignment}); }
  bool operator==(const AlignedAllocator& /*other*/) const { return true; }
};

using AlignedFloats = std::vector<float, AlignedAllocator<float>>;

}  // namespace dropkv::baseline
