#include "llama/host_copy.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>

namespace dropkv::llama {
namespace {

// Where the bytes of neighbouring cells lie: `copies` pieces of `size` bytes, the same in the tensor and in its copy.
struct Place {
  size_t offset;
  size_t size;
  size_t copies;
  size_t stride;
};

Place PlaceOf(const ggml_tensor* root, bool transposed, int32_t first, int32_t count) {
  if (!transposed) return {first * root->nb[1], count * root->nb[1], 1, 0};
  const size_t element = ggml_element_size(root);
  return {first * element, count * element, static_cast<size_t>(root->ne[0]), root->ne[1] * element};
}

// Calls visit(first, count) for every run of neighbours.
template <typename Visit>
void ForRuns(std::span<const int32_t> cells, const Visit& visit) {
  for (size_t begin = 0, end = 0; begin < cells.size(); begin = end) {
    for (end = begin + 1; end < cells.size() && cells[end] == cells[end - 1] + 1;) ++end;
    visit(cells[begin], static_cast<int32_t>(end - begin));
  }
}

void ReadRun(const ggml_tensor* root, bool transposed, int32_t first, int32_t count, unsigned char* copy) {
  const Place place = PlaceOf(root, transposed, first, count);
  ggml_backend_tensor_get_2d(root, copy + place.offset, place.offset, place.size, place.copies, place.stride,
                             place.stride);
}

void WriteRun(ggml_tensor* root, bool transposed, int32_t first, int32_t count, const unsigned char* copy) {
  const Place place = PlaceOf(root, transposed, first, count);
  ggml_backend_tensor_set_2d(root, copy + place.offset, place.offset, place.size, place.copies, place.stride,
                             place.stride);
}

}  // namespace

void HostCopy::Forget(std::span<const int32_t> cells) {
  if (here_.empty()) return;
  for (const int32_t cell : cells) here_[cell] = 0;
}

void HostCopy::Read(const Roots& roots, std::span<const int32_t> cells) {
  if (here_.empty()) {
    here_.assign(roots.k->ne[1], 0);
    // Left as they come: a long context's pages are touched only where cells are read.
    k_ = std::make_unique_for_overwrite<unsigned char[]>(ggml_nbytes(roots.k));
    v_ = std::make_unique_for_overwrite<unsigned char[]>(ggml_nbytes(roots.v));
  }
  std::vector<int32_t> missing;
  std::copy_if(cells.begin(), cells.end(), std::back_inserter(missing),
               [this](int32_t cell) { return here_[cell] == 0; });
  ForRuns(missing, [&](int32_t first, int32_t count) {
    ReadRun(roots.k, false, first, count, k_.get());
    ReadRun(roots.v, roots.v_transposed, first, count, v_.get());
    std::fill_n(here_.begin() + first, count, 1);
  });
}

void HostCopy::Write(const Roots& roots, std::span<const int32_t> cells) const {
  ForRuns(cells, [&](int32_t first, int32_t count) {
    WriteRun(roots.k, false, first, count, k_.get());
    WriteRun(roots.v, roots.v_transposed, first, count, v_.get());
  });
}

}  // namespace dropkv::llama
