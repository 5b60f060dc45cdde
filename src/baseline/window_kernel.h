// SIMD kernels of the scorers that look at single rows: weights, products and sums of one tile of tokens. They stand
// beside the engine's (cpu/kernels.h), share its structures and layouts, and check as little. Matrices in panels start
// at a cache line (aligned.h); all else may lie anywhere.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace dropkv::baseline {

// One instruction set's. Tiles have up to cpu::kTile tokens; [count, lanes] has no gaps, whatever the panels.
struct WindowKernels {
  // weights [count, lanes] = p of tokens begin .. begin + count - 1; 0 where the row does not see the token, for rows
  // that judge nothing and for padding lanes. logits, optional: their logits (natural), 0 where p is 0. flags [n]:
  // reference::kNonFinite, as the engine's attend found them.
  void (*weights)(const cpu::HeadTokens& tokens, const cpu::HeadRows& rows, const cpu::Denominators& denominators,
                  const uint8_t* flags, int32_t begin, int32_t count, float* weights, float* logits,
                  const cpu::TileScratch& scratch);

  // out [count, lanes] = values B, with B [dv, lanes] in panels of `layout`; 0 for tokens with a non-finite value.
  // norms [count], optional: |v|^2.
  void (*products)(const cpu::HeadTokens& tokens, const cpu::LaneLayout& layout, const float* b, int32_t begin,
                   int32_t count, float* out, float* norms, const cpu::TileScratch& scratch);

  // out [count] += the sum over the lanes of |values B|.
  void (*add_magnitudes)(const cpu::HeadTokens& tokens, const cpu::LaneLayout& layout, const float* b, int32_t begin,
                         int32_t count, float* out, const cpu::TileScratch& scratch);

  // out [count]: the sum over the lanes of a [count, lanes] times b; b_stride: `lanes`, or 0 for one row for all.
  void (*dots)(const float* a, const float* b, int32_t b_stride, int32_t count, int32_t lanes, float* out);

  // The sum of p ln(p + 1e-10) over count numbers; count is a multiple of the vector's lanes.
  double (*entropy)(const float* weights, int64_t count);
};

// The best instruction set of this machine; cpu::KernelTable()'s first row is of the same one.
const WindowKernels& BestWindowKernels();

}  // namespace dropkv::baseline
