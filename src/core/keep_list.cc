#include "dropkv/keep_list.h"

#include <algorithm>
#include <cassert>
#include <numeric>

namespace dropkv {

KeepList::KeepList(int32_t layers, int32_t kv_heads, std::vector<int64_t> offsets, std::vector<int32_t> positions)
    : layers_(layers), kv_heads_(kv_heads), offsets_(std::move(offsets)), positions_(std::move(positions)) {
  assert(offsets_.size() == static_cast<size_t>(layers) * kv_heads + 1);
  assert(offsets_.back() == static_cast<int64_t>(positions_.size()));
}

KeepList KeepList::All(int32_t layers, int32_t kv_heads, int32_t n) {
  const size_t lists = static_cast<size_t>(layers) * kv_heads;
  std::vector<int64_t> offsets(lists + 1);
  for (size_t i = 0; i <= lists; ++i) offsets[i] = static_cast<int64_t>(i) * n;
  std::vector<int32_t> positions(lists * n);
  for (size_t i = 0; i < lists; ++i) std::iota(positions.begin() + i * n, positions.begin() + (i + 1) * n, 0);
  return {layers, kv_heads, std::move(offsets), std::move(positions)};
}

int32_t KeepList::min_length() const {
  int64_t shortest = offsets_.size() > 1 ? offsets_[1] - offsets_[0] : 0;
  for (size_t i = 1; i + 1 < offsets_.size(); ++i) shortest = std::min(shortest, offsets_[i + 1] - offsets_[i]);
  return static_cast<int32_t>(shortest);
}

int32_t KeepList::max_length() const {
  int64_t longest = 0;
  for (size_t i = 0; i + 1 < offsets_.size(); ++i) longest = std::max(longest, offsets_[i + 1] - offsets_[i]);
  return static_cast<int32_t>(longest);
}

double KeepList::mean_length() const {
  return offsets_.size() > 1 ? static_cast<double>(total()) / static_cast<double>(offsets_.size() - 1) : 0.0;
}

}  // namespace dropkv
