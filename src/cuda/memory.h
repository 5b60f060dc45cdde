// How a run's workspace is cut. The same code sizes it and takes it.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "dropkv/cuda.h"

namespace dropkv::cuda {

// The rows' state and the flags of one attend.
struct RowMemory {
  RowState state;
  Partials partials;
  uint8_t* row_ok = nullptr;
  int32_t* redo = nullptr;
  int32_t* top_split = nullptr;
  int32_t* has_tops = nullptr;
};

struct RunMemory {
  RowMemory rows;
  RowMemory kept;              // of the certificate, and
  int32_t* visible = nullptr;  // [B, Hkv, w] what its rows see of the lists
  float* raw = nullptr;        // [B, Hkv, max_tokens]; before the scores are written, the partials lie here
  void* select = nullptr;
  int32_t* compact = nullptr;
  size_t bytes = 0;
};

// base null: sizes only.
RunMemory CutMemory(const Plan& plan, const SelectParams& select, const CompactParams& compact, void* base);

}  // namespace dropkv::cuda
