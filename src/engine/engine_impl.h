// What the files of the engine share.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "dropkv/engine.h"

namespace dropkv {

struct Engine::Impl {
  const cpu::Kernels* kernels;  // null: the reference
  ThreadPool pool;

  Impl(const cpu::Kernels* table_row, int32_t threads) : kernels(table_row), pool(threads) {}
};

inline bool WantsCertificate(const EvictOutput& output) {
  return output.output_error != nullptr || output.evicted_mass != nullptr;
}

// One plan of a run: what is wanted of it, and what becomes of it.
struct PlanRun {
  const Plan* plan;
  EvictOutput output;
  EvictReport report{};
  std::vector<int64_t> offsets{};    // of what is selected so far
  std::vector<int32_t> positions{};  // the same
  KeepList keep{};

  void Finish() {
    positions.resize(offsets.back());
    keep = {plan->shape.layers, plan->shape.kv_heads, std::move(offsets), std::move(positions)};
  }
};

// ", got 7": the end of a message.
std::string Got(int64_t value);

// A shape that the kernels take.
Status CheckShape(const EvictShape& shape);

// Tokens of a view: the prompt's and those behind it.
inline int32_t ViewTokens(const EvictShape& shape) { return shape.tokens + shape.generated; }

// There is a plan, and all of them can be run over one pass.
Status CheckOnePass(std::span<const Plan> plans);

// The layer's keys and values have the batch's shape.
Status CheckLayer(const EvictShape& shape, const LayerInput& layer);

// So have its rows, `rows` of them; source: what asks for that number.
Status CheckLayerRows(const EvictShape& shape, int32_t rows, std::string_view source, const LayerInput& layer);

}  // namespace dropkv
