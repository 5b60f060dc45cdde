// Which tokens stay: ascending positions per (layer, KV head).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dropkv/export.h"

namespace dropkv {

// Lists of all layers and heads, one behind the other. List i = layer * kv_heads + head.
class DROPKV_API KeepList {
 public:
  KeepList() = default;

  // Takes over offsets [lists + 1] and positions [offsets.back()]; each list strictly ascending.
  KeepList(int32_t layers, int32_t kv_heads, std::vector<int64_t> offsets, std::vector<int32_t> positions);

  // Every head of every layer keeps tokens 0 .. n-1.
  static KeepList All(int32_t layers, int32_t kv_heads, int32_t n);

  int32_t layers() const { return layers_; }
  int32_t kv_heads() const { return kv_heads_; }

  std::span<const int32_t> head(int32_t layer, int32_t head) const {
    const auto list = static_cast<size_t>(layer) * kv_heads_ + head;
    return std::span(positions_).subspan(offsets_[list], offsets_[list + 1] - offsets_[list]);
  }

  int64_t total() const { return static_cast<int64_t>(positions_.size()); }
  int32_t min_length() const;
  int32_t max_length() const;
  double mean_length() const;
  bool uniform() const { return min_length() == max_length(); }

 private:
  int32_t layers_ = 0;
  int32_t kv_heads_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<int32_t> positions_;
};

}  // namespace dropkv
