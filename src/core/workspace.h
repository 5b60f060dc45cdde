// A bump allocator over the caller's memory. The same code, run on a null base, computes the size that is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dropkv {

class Workspace {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and a vector of any instruction set

  Workspace() = default;  // counts only
  explicit Workspace(std::span<std::byte> memory) : base_(memory.data()), capacity_(memory.size()) {}

  // `count` objects of T, aligned to 64 bytes; not initialised. Null when counting, or when the memory is too small.
  template <typename T>
  T* Take(size_t count) {
    const auto address = reinterpret_cast<uintptr_t>(base_) + used_;
    const size_t padding = base_ == nullptr ? 0 : (kAlignment - address % kAlignment) % kAlignment;
    const size_t bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    const size_t begin = used_ + padding;
    used_ = begin + bytes;
    if (base_ == nullptr || used_ > capacity_) return nullptr;
    return reinterpret_cast<T*>(base_ + begin);
  }

  // Bytes that hold what was taken, wherever the memory starts.
  size_t bytes_needed() const { return used_ + (base_ == nullptr ? kAlignment : 0); }
  bool overflow() const { return base_ != nullptr && used_ > capacity_; }

 private:
  std::byte* base_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace dropkv
