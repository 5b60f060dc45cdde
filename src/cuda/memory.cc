#include "cuda/memory.h"

#include <algorithm>
#include <cstddef>

namespace dropkv::cuda {
namespace {

constexpr size_t kAlignment = 256;

class Cutter {
 public:
  explicit Cutter(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* Take(int64_t count) {
    T* taken = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

struct Sizes {
  int64_t lists;
  int64_t rows;  // of all lists
  int64_t partial_rows;
  int64_t key_dim;
  int64_t value_dim;
  bool values;
};

RowMemory CutRows(const Sizes& sizes, Cutter& cutter) {
  RowMemory memory;
  memory.state.lse2 = cutter.Take<float>(sizes.rows);
  memory.state.out = cutter.Take<float>(sizes.rows * sizes.value_dim);
  memory.state.out16 = cutter.Take<uint16_t>(sizes.rows * sizes.value_dim);
  memory.state.q16 = cutter.Take<uint16_t>(sizes.rows * sizes.key_dim);
  memory.state.norm = cutter.Take<float>(sizes.rows);
  memory.state.top = cutter.Take<int32_t>(sizes.rows);
  memory.state.contribution = cutter.Take<float>(sizes.rows);
  memory.row_ok = cutter.Take<uint8_t>(sizes.rows);
  memory.redo = cutter.Take<int32_t>(sizes.lists);
  memory.top_split = cutter.Take<int32_t>(sizes.rows);
  memory.has_tops = cutter.Take<int32_t>(sizes.lists);
  return memory;
}

Partials CutPartials(const Plan& plan, const Sizes& sizes, Cutter& cutter) {
  Partials partials;
  partials.max = cutter.Take<float>(sizes.partial_rows);
  partials.sum = cutter.Take<float>(sizes.partial_rows);
  if (sizes.values) partials.out = cutter.Take<float>(sizes.partial_rows * sizes.value_dim);
  partials.splits = plan.splits;
  partials.split_tokens = plan.split_tokens;
  partials.padded_rows = static_cast<int32_t>(sizes.partial_rows / (sizes.lists * plan.splits));
  return partials;
}

}  // namespace

RunMemory CutMemory(const Plan& plan, const SelectParams& select, const CompactParams& compact, void* base) {
  const Cache& shape = plan.shape;
  const int64_t head_rows = int64_t{plan.query_heads} / shape.kv_heads * plan.rows;
  Sizes sizes{int64_t{shape.sequences} * shape.kv_heads, 0, 0, shape.key_dim, shape.value_dim,
              plan.policy.signal == Signal::kDropKv};
  sizes.rows = sizes.lists * head_rows;
  sizes.partial_rows = sizes.lists * plan.splits * ((head_rows + 63) / 64 * 64);
  Cutter cutter(base);
  RunMemory memory;
  memory.rows = CutRows(sizes, cutter);
  memory.select = cutter.Take<std::byte>(static_cast<int64_t>(SelectWorkspaceBytes(select)));
  memory.compact = cutter.Take<int32_t>(static_cast<int64_t>(CompactWorkspaceBytes(compact) / sizeof(int32_t)));
  // The first pass is over when the second writes its scores, and selection is over when the certificate attends.
  Cutter scores(base == nullptr ? nullptr : static_cast<std::byte*>(base) + cutter.used());
  memory.raw = scores.Take<float>(sizes.lists * shape.max_tokens);
  Cutter first(base == nullptr ? nullptr : static_cast<std::byte*>(base) + cutter.used());
  memory.rows.partials = CutPartials(plan, sizes, first);
  Cutter certificate(base == nullptr ? nullptr : static_cast<std::byte*>(base) + cutter.used());
  memory.visible = certificate.Take<int32_t>(sizes.lists * plan.rows);
  memory.kept = CutRows(sizes, certificate);
  memory.kept.partials = CutPartials(plan, sizes, certificate);
  memory.bytes = cutter.used() + std::max({scores.used(), first.used(), certificate.used()});
  return memory;
}

}  // namespace dropkv::cuda
