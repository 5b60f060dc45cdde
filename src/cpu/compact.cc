#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "dropkv/engine.h"

namespace dropkv {
namespace {

// One head of keys or of values, as moved: source cells to destination cells 0, 1, ...
struct HeadMove {
  const std::byte* from;
  std::byte* to;
  KvTensor source;
  KvTensor destination;
  const int32_t* cells;  // of the source's tokens; null: token j lies in cell j
  std::span<const int32_t> positions;
  int32_t dim;

  int64_t cell(size_t row) const { return cells != nullptr ? cells[positions[row]] : positions[row]; }
};

// Rows of consecutive elements, q8_0 among them.
void MoveRows(const HeadMove& move) {
  const DType dtype = move.source.dtype;
  const auto bytes = static_cast<size_t>(DTypeBytes(dtype, move.dim));
  const int64_t from_stride = DTypeBytes(dtype, move.source.token_stride);
  const int64_t to_stride = DTypeBytes(dtype, move.destination.token_stride);
  for (size_t row = 0; row < move.positions.size(); ++row) {
    const std::byte* from = move.from + move.cell(row) * from_stride;
    std::byte* to = move.to + static_cast<int64_t>(row) * to_stride;
    if (from != to) std::memcpy(to, from, bytes);
  }
}

// Any strides, dim by dim: consecutive accesses where the tokens of a dim lie side by side.
template <typename T>
void MoveElements(const HeadMove& move) {
  for (int64_t c = 0; c < move.dim; ++c) {
    const T* from = reinterpret_cast<const T*>(move.from) + c * move.source.dim_stride;
    T* to = reinterpret_cast<T*>(move.to) + c * move.destination.dim_stride;
    for (size_t row = 0; row < move.positions.size(); ++row)
      to[static_cast<int64_t>(row) * move.destination.token_stride] = from[move.cell(row) * move.source.token_stride];
  }
}

void MoveTensor(const KvTensor& source, const int32_t* cells, const MutableKvTensor& destination, int32_t dim,
                const KeepList& keep, int32_t layer) {
  for (int32_t head = 0; head < keep.kv_heads(); ++head) {
    const HeadMove move{
        static_cast<const std::byte*>(source.data) + DTypeBytes(source.dtype, head * source.head_stride),
        static_cast<std::byte*>(destination.data) + DTypeBytes(source.dtype, head * destination.head_stride),
        source,
        destination,
        cells,
        keep.head(layer, head),
        dim};
    if (source.dim_stride == 1 && destination.dim_stride == 1) {
      MoveRows(move);
    } else if (source.dtype == DType::kF32) {
      MoveElements<uint32_t>(move);
    } else {
      MoveElements<uint16_t>(move);
    }
  }
}

Status CheckKeep(const KeepList& keep, int32_t layer, int32_t kv_heads) {
  if (keep.kv_heads() != kv_heads)
    return InvalidArgument("keep: expected lists of " + std::to_string(kv_heads) + " KV heads, got " +
                           std::to_string(keep.kv_heads()));
  if (layer < 0 || layer >= keep.layers())
    return InvalidArgument("layer: expected 0 to " + std::to_string(keep.layers() - 1) + ", got " +
                           std::to_string(layer));
  return Status::Ok();
}

// Positions lie in [0, tokens).
Status CheckPositions(const KeepList& keep, int32_t layer, int32_t tokens) {
  for (int32_t head = 0; head < keep.kv_heads(); ++head) {
    const auto list = keep.head(layer, head);
    if (list.empty() || (list.front() >= 0 && list.back() < tokens)) continue;
    return InvalidArgument("keep: expected positions 0 to " + std::to_string(tokens - 1) + " in head " +
                           std::to_string(head) + ", got " + std::to_string(list.front()) + " to " +
                           std::to_string(list.back()));
  }
  return Status::Ok();
}

Status CheckSameDType(const char* name, DType source, DType destination) {
  if (source == destination) return Status::Ok();
  return InvalidArgument("destination." + std::string(name) + ".dtype: expected the source's " +
                         std::string(DTypeName(source)) + ", got " + std::string(DTypeName(destination)));
}

Status CheckDestination(const KvView& source, const KeepList& keep, int32_t layer, const MutableKvView& destination) {
  DROPKV_RETURN_IF_ERROR(CheckKvView(destination));
  if (destination.kv_heads != source.kv_heads || destination.key_dim != source.key_dim ||
      destination.value_dim != source.value_dim)
    return InvalidArgument("destination: expected " + std::to_string(source.kv_heads) + " KV heads of key_dim " +
                           std::to_string(source.key_dim) + ", value_dim " + std::to_string(source.value_dim) +
                           ", got " + std::to_string(destination.kv_heads) + ", " +
                           std::to_string(destination.key_dim) + ", " + std::to_string(destination.value_dim));
  DROPKV_RETURN_IF_ERROR(CheckSameDType("k", source.k.dtype, destination.k.dtype));
  DROPKV_RETURN_IF_ERROR(CheckSameDType("v", source.v.dtype, destination.v.dtype));
  if (source.k.data == destination.k.data || source.v.data == destination.v.data)
    return InvalidArgument("destination: expected other memory than the source's, got the same; see CompactInPlace");
  for (int32_t head = 0; head < keep.kv_heads(); ++head)
    if (static_cast<int64_t>(keep.head(layer, head).size()) > destination.tokens)
      return InvalidArgument("destination.tokens: expected room for the " +
                             std::to_string(keep.head(layer, head).size()) + " kept tokens of head " +
                             std::to_string(head) + ", got " + std::to_string(destination.tokens));
  return Status::Ok();
}

// Row i of a list goes to cell i. With cells that ascend along the list, the cell of row i is at least i, and every
// later row comes from a later cell: nothing is overwritten before it moved.
Status CheckCells(const int32_t* cells, const KeepList& keep, int32_t layer, int32_t capacity) {
  for (int32_t head = 0; head < keep.kv_heads(); ++head) {
    int32_t previous = -1;
    for (const int32_t position : keep.head(layer, head)) {
      const int32_t cell = cells[position];
      const std::string name = "cells[" + std::to_string(position) + "]";
      if (cell < 0 || cell >= capacity)
        return InvalidArgument(name + ": expected 0 to " + std::to_string(capacity - 1) + ", got " +
                               std::to_string(cell));
      if (cell <= previous)
        return Unsupported(name + ": in place needs cells that ascend with the positions, got " + std::to_string(cell) +
                           " behind " + std::to_string(previous) + "; see Compact");
      previous = cell;
    }
  }
  return Status::Ok();
}

}  // namespace

Status Compact(const KvView& source, const KeepList& keep, int32_t layer, const MutableKvView& destination) {
  DROPKV_RETURN_IF_ERROR(CheckKvView(source));
  DROPKV_RETURN_IF_ERROR(CheckKeep(keep, layer, source.kv_heads));
  DROPKV_RETURN_IF_ERROR(CheckPositions(keep, layer, source.tokens));
  DROPKV_RETURN_IF_ERROR(CheckDestination(source, keep, layer, destination));
  MoveTensor(source.k, source.cells, destination.k, source.key_dim, keep, layer);
  MoveTensor(source.v, source.cells, destination.v, source.value_dim, keep, layer);
  return Status::Ok();
}

Status CompactInPlace(const MutableKvView& cache, const int32_t* cells, const KeepList& keep, int32_t layer) {
  DROPKV_RETURN_IF_ERROR(CheckKvView(cache));
  DROPKV_RETURN_IF_ERROR(CheckKeep(keep, layer, cache.kv_heads));
  DROPKV_RETURN_IF_ERROR(CheckPositions(keep, layer, cache.tokens));
  if (cells != nullptr) DROPKV_RETURN_IF_ERROR(CheckCells(cells, keep, layer, cache.tokens));
  MoveTensor(cache.k, cells, cache.k, cache.key_dim, keep, layer);
  MoveTensor(cache.v, cells, cache.v, cache.value_dim, keep, layer);
  return Status::Ok();
}

}  // namespace dropkv
