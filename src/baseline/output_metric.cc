#include "baseline/output_metric.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "baseline/aligned.h"
#include "baseline/window_kernel.h"
#include "core/workspace.h"

namespace dropkv::baseline {
namespace {

constexpr int32_t kBlock = 128;  // rows of W_O at a time; the depth of the products
constexpr double kLeastPivot = 1e-6;

// Memory of one thread for the products of one block.
struct Scratch {
  std::vector<std::byte> memory;
  cpu::TileScratch tile;
  std::vector<float> columns;  // [dv, kBlock] the head's columns of the block
  AlignedFloats packed;        // [kBlock, lanes] in panels
  std::vector<float> product;  // [tile, lanes]

  Scratch(int32_t dim, const cpu::LaneLayout& layout)
      : columns(static_cast<size_t>(dim) * kBlock),
        packed(static_cast<size_t>(kBlock) * layout.lanes),
        product(static_cast<size_t>(cpu::kTile) * layout.lanes) {
    Workspace counting;
    cpu::TileScratch::Take(counting, kBlock, kBlock);
    memory.resize(counting.bytes_needed());
    Workspace workspace(memory);
    tile = cpu::TileScratch::Take(workspace, kBlock, kBlock);
  }
  Scratch(Scratch&&) = default;
  Scratch(const Scratch&) = delete;  // `tile` points into `memory`
  Scratch& operator=(const Scratch&) = delete;
};

// gram [dv, dv] += W^T W of block [kBlock, columns], columns first .. first + dv - 1; rows beyond the last are 0.
void AddBlock(const float* block, int32_t columns, int32_t first, int32_t dim, const cpu::LaneLayout& layout,
              Scratch& scratch, double* gram) {
  for (int32_t lane = 0; lane < dim; ++lane) {
    const cpu::PanelAddress at(layout, kBlock, lane);
    for (int32_t r = 0; r < kBlock; ++r) {
      const float x = block[static_cast<size_t>(r) * columns + first + lane];
      scratch.columns[static_cast<size_t>(lane) * kBlock + r] = x;
      scratch.packed[at.first + int64_t{r} * at.stride] = x;
    }
  }
  cpu::HeadTokens dims;
  dims.v = {reinterpret_cast<const std::byte*>(scratch.columns.data()), DType::kF32, kBlock, 1, kBlock};
  dims.count = dim;
  for (int32_t begin = 0; begin < dim; begin += cpu::kTile) {
    const int32_t count = std::min(cpu::kTile, dim - begin);
    BestWindowKernels().products(dims, layout, scratch.packed.data(), begin, count, scratch.product.data(), nullptr,
                                 scratch.tile);
    for (int32_t t = 0; t < count; ++t)
      for (int32_t i = 0; i < dim; ++i)
        gram[static_cast<size_t>(begin + t) * dim + i] += scratch.product[static_cast<size_t>(t) * layout.lanes + i];
  }
}

// L [dv, dv] with L L^T = gram, positive semidefinite: Cholesky with the greatest remaining square as pivot, so that a
// matrix of lower rank ends with columns of 0 instead of amplified rounding.
void Factor(int32_t dim, const double* gram, float* out) {
  const auto row_of = [dim](int32_t i) { return static_cast<size_t>(i) * dim; };
  std::vector<double> l(row_of(dim), 0.0);
  std::vector<double> left(dim);  // squares that remain; -1: the dim was a pivot
  for (int32_t i = 0; i < dim; ++i) left[i] = gram[row_of(i) + i];
  const double least = kLeastPivot * *std::max_element(left.begin(), left.end());
  for (int32_t k = 0; k < dim; ++k) {
    const auto pivot = static_cast<int32_t>(std::max_element(left.begin(), left.end()) - left.begin());
    if (!(left[pivot] > least)) break;
    const double root = std::sqrt(left[pivot]);
    for (int32_t i = 0; i < dim; ++i) {
      if (left[i] < 0.0 && i != pivot) continue;
      double sum = gram[row_of(i) + pivot];
      for (int32_t m = 0; m < k; ++m) sum -= l[row_of(i) + m] * l[row_of(pivot) + m];
      l[row_of(i) + k] = sum / root;
      left[i] = std::max(0.0, left[i] - l[row_of(i) + k] * l[row_of(i) + k]);
    }
    left[pivot] = -1.0;
  }
  std::transform(l.begin(), l.end(), out, [](double x) { return static_cast<float>(x); });
}

}  // namespace

OutputMetric::OutputMetric(const OutputProjection& wo, int32_t value_dim, ThreadPool* pool)
    : heads_(wo.columns / value_dim), dim_(value_dim), factors_(static_cast<size_t>(heads_) * value_dim * value_dim) {
  const cpu::Kernels& kernels = cpu::KernelTable().front();
  const cpu::LaneLayout layout(dim_, kernels.vector_lanes, kernels.panel_vectors);
  std::vector<Scratch> scratch;
  scratch.reserve(pool->threads());
  for (int32_t i = 0; i < pool->threads(); ++i) scratch.emplace_back(dim_, layout);
  std::vector<float> block(static_cast<size_t>(kBlock) * wo.columns);
  std::vector<double> grams(factors_.size(), 0.0);
  const size_t square = static_cast<size_t>(dim_) * dim_;
  for (int32_t first = 0; first < wo.hidden; first += kBlock) {
    pool->For(kBlock, [&](int64_t r, int32_t) {
      float* row = block.data() + r * wo.columns;
      if (first + r < wo.hidden) return wo.read_row(first + static_cast<int32_t>(r), row);
      std::fill_n(row, wo.columns, 0.0F);
    });
    pool->For(heads_, [&](int64_t head, int32_t worker) {
      AddBlock(block.data(), wo.columns, static_cast<int32_t>(head) * dim_, dim_, layout, scratch[worker],
               grams.data() + head * square);
    });
  }
  pool->For(heads_, [&](int64_t head, int32_t) {
    Factor(dim_, grams.data() + head * square, factors_.data() + head * square);
  });
}

}  // namespace dropkv::baseline
