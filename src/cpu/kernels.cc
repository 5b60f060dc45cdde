#include "cpu/kernels.h"

#include <array>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cc"  // NOLINT: read by foreach_target.h
#include "hwy/foreach_target.h"              // IWYU pragma: keep
// After foreach_target.h, which includes this file once per instruction set.
#include "cpu/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {

const Kernels* TargetKernels() {
  static const Kernels kernels{hwy::TargetName(HWY_TARGET), kLanes, kPanelVectors, &Attend, &Score, &Mass, &LoadRow};
  return &kernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dropkv::cpu {
namespace {

HWY_EXPORT(TargetKernels);

struct Table {
  std::array<Kernels, 16> rows;
  size_t count = 0;

  // A mask of our own instead of Highway's global one: the choice is then nobody else's business.
  Table() {
    for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
      hwy::ChosenTarget chosen;
      chosen.Update(left & -left);  // the lowest bit is the best instruction set
      rows[count++] = *HWY_DISPATCH_TABLE(TargetKernels)[chosen.GetIndex()]();
    }
  }
};

}  // namespace

std::span<const Kernels> KernelTable() {
  static const Table table;
  return {table.rows.data(), table.count};
}

TileScratch TileScratch::Take(Workspace& workspace, int32_t key_dim, int32_t value_dim) {
  TileScratch scratch;
  scratch.keys = workspace.Take<float>(size_t{kTile} * (key_dim + kTilePadding));
  scratch.values = workspace.Take<float>(size_t{kTile} * (value_dim + kTilePadding));
  const int32_t dim = std::max({key_dim, value_dim, 2 * kMaxPanelLanes});
  scratch.columns = workspace.Take<float>(size_t{kTile} * dim);
  scratch.logits = scratch.columns;
  if (scratch.columns != nullptr) scratch.products = scratch.columns + kTile * kMaxPanelLanes;
  scratch.partial = workspace.Take<float>(size_t{kTile} * kMaxVectorLanes);
  scratch.norms = workspace.Take<float>(kTile);
  scratch.row = workspace.Take<float>(std::max(key_dim, value_dim));
  scratch.bad = workspace.Take<uint8_t>(kTile);
  return scratch;
}

}  // namespace dropkv::cpu
#endif  // HWY_ONCE
