// What the files of the engine share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "dropkv/engine.h"

namespace dropkv {

struct Engine::Impl {
  const cpu::Kernels* kernels;  // null: the reference
  ThreadPool pool;

  Impl(const cpu::Kernels* table_row, int32_t threads) : kernels(table_row), pool(threads) {}
};

// ", got 7": the end of a message.
std::string Got(int64_t value);

// A shape that the kernels take.
Status CheckShape(const EvictShape& shape);

// Tokens of a view: the prompt's and those behind it.
inline int32_t ViewTokens(const EvictShape& shape) { return shape.tokens + shape.generated; }

// The layer's keys and values have the batch's shape.
Status CheckLayer(const EvictShape& shape, const LayerInput& layer);

// So have its rows, `rows` of them; source: what asks for that number.
Status CheckLayerRows(const EvictShape& shape, int32_t rows, std::string_view source, const LayerInput& layer);

}  // namespace dropkv
