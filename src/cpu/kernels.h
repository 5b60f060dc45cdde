// The table of SIMD kernels, one row per instruction set that this machine has, and the plain structures that they
// read and write. Kernels check nothing: the engine has.
//
// Letters: r = g*w rows of one KV head, n tokens, d and dv head sizes, N floats in a vector. Rows lie along the lanes
// of vectors (everything after the products is then vertical: no shuffles, no reductions), tokens are streamed in
// tiles. Logits are in units of log 2 from the product on: 2^x needs no multiplication.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/workspace.h"
#include "dropkv/cache_view.h"

namespace dropkv::cpu {

// Tokens of a tile. A multiple of every number of rows that a product block takes (kernels_product-inl.h). K and V
// tiles of d = 128 together are 108 KiB: in the second-level cache. Half of it makes attend 6% slower, since a block of
// its second product is one tile deep.
inline constexpr int32_t kTile = 96;

// Rows of a converted tile are this many floats longer than the head, so that equal columns of its rows do not fall
// into the same cache sets.
inline constexpr int32_t kTilePadding = 16;

// Vectors of any instruction set fit into it.
inline constexpr int32_t kMaxVectorLanes = 16;
inline constexpr int32_t kMaxPanelLanes = 64;

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr double kLn2 = 0.6931471805599453;

// How r rows lie in memory: padded to whole vectors, cut into panels of at most `panel_vectors` vectors of nearly equal
// width. A matrix [dim, r] is stored panel by panel, each [dim, panel lanes] without gaps.
struct LaneLayout {
  int32_t lanes = 0;  // r, padded
  int32_t panels = 0;
  int32_t vector_lanes = 0;

  LaneLayout(int32_t rows, int32_t lanes_of_vector, int32_t panel_vectors) : vector_lanes(lanes_of_vector) {
    const int32_t vectors = (rows + vector_lanes - 1) / vector_lanes;
    lanes = vectors * vector_lanes;
    panels = (vectors + panel_vectors - 1) / panel_vectors;
  }

  // First lane of panel p; panel_begin(panels) is `lanes`.
  int32_t panel_begin(int32_t p) const {
    const int32_t vectors = lanes / vector_lanes;
    const int32_t wide = vectors % panels;  // the first ones have one vector more
    return (vectors / panels * p + std::min(p, wide)) * vector_lanes;
  }
  int32_t panel_lanes(int32_t p) const { return panel_begin(p + 1) - panel_begin(p); }
};

// Element (dim, lane) of a matrix [dims, r] in panels.
struct PanelAddress {
  int64_t first;   // of dim 0
  int32_t stride;  // between dims

  PanelAddress(const LaneLayout& layout, int32_t dims, int32_t lane) {
    int32_t p = 0;
    while (layout.panel_begin(p + 1) <= lane) ++p;
    const int32_t begin = layout.panel_begin(p);
    first = int64_t{begin} * dims + (lane - begin);
    stride = layout.panel_lanes(p);
  }
};

// Keys or values of one KV head; strides in elements.
struct HeadTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t token_stride = 0;
  int64_t dim_stride = 1;
  int32_t dim = 0;
};

// The tokens of one KV head: all of them, or a subset in ascending order.
struct HeadTokens {
  HeadTensor k;
  HeadTensor v;
  const int32_t* cells = nullptr;   // as KvView
  const int32_t* subset = nullptr;  // [count] positions; null: token j is position j
  int32_t count = 0;

  int64_t cell(int32_t token) const {
    const int32_t position = subset != nullptr ? subset[token] : token;
    return cells != nullptr ? cells[position] : position;
  }
};

// The rows of one KV head.
struct HeadRows {
  LaneLayout layout;
  const float* queries = nullptr;    // [d, r] in panels, scaled: the product is the logit (or tanh's argument)
  const int32_t* visible = nullptr;  // [r]; padding lanes: all
  int32_t fewest_visible = 0;        // smallest of them
  float cap = 0.0F;                  // > 0: logit = cap * tanh(product)
  float query_max = 0.0F;            // largest magnitude in `queries`
};

// Online softmax of r rows over the tokens seen so far, with the greatest logit kept apart: it is never mixed with the
// rest, so that 1 - p and the output without the top token come without a subtraction (docs/kernels/attend.md).
struct SoftmaxState {
  float* top = nullptr;      // [r] greatest logit; -inf: nothing seen
  float* second = nullptr;   // [r] greatest logit of the others; -inf: none
  float* rest = nullptr;     // [r] sum over the others of 2^(l - second)
  int32_t* token = nullptr;  // [r] the top token (lowest index among equals); -1
  float* sums = nullptr;     // [dv, r] in panels: sum over the others of 2^(l - second) (v - center)
};

// The denominators of r rows' softmax: p = 2^((l - base) + share). Two numbers instead of their difference, log2 of the
// denominator: beside a logit of thousands a float has no digits left for the logarithm of a sum.
struct Denominators {
  float* base = nullptr;   // [r] greatest logit, the sink's included; +inf: the row judges nothing
  float* share = nullptr;  // [r] log2 of 2^base's part of the denominator
};

// What the score needs of r rows.
struct ScoreRows {
  Denominators denominators;
  const float* outputs = nullptr;  // [dv, r] in panels: -2 (a - center)
  const float* norms = nullptr;    // [r] |a - center|^2
  // [r] token whose pair with the row is left out, or -1. When `find_tops`, pairs with p > kFoundShare are left out and
  // their tokens are written here (the lowest, should a wrong lse yield several).
  int32_t* tops = nullptr;
  bool find_tops = false;
  const float* weights = nullptr;  // [r] how much a row counts; null: 1 each
};

// A row handed in with its lse may have two tokens at 1/2 up to rounding; both stay in the vector path.
inline constexpr float kFoundShare = 0.51F;

// Memory of one thread for one tile.
struct TileScratch {
  float* keys = nullptr;      // [kTile, d + padding]
  float* values = nullptr;    // [kTile, dv + padding]
  float* logits = nullptr;    // [kTile, kMaxPanelLanes]
  float* products = nullptr;  // [kTile, kMaxPanelLanes]
  float* partial = nullptr;   // [kTile, kMaxVectorLanes] sums per token, still one per lane
  float* norms = nullptr;     // [kTile] |v - center|^2
  float* columns = nullptr;  // [max(d, dv), kTile] transposed layouts on their way; shares logits' and products' memory
  float* row = nullptr;      // [dv] one value
  uint8_t* bad = nullptr;    // [kTile] 1: the token has a NaN or Inf

  static TileScratch Take(Workspace& workspace, int32_t key_dim, int32_t value_dim);
};

struct Kernels {
  std::string_view name;
  int32_t vector_lanes = 0;
  int32_t panel_vectors = 0;

  // Continues `state` over tokens [begin, end). center [dv]; null: values are not accumulated and state.sums is not
  // touched, but tokens with a non-finite value are still left out. flags [n], optional: reference::kNonFinite is
  // written, and 0 for the others.
  void (*attend)(const HeadTokens& tokens, const HeadRows& rows, const float* center, int32_t begin, int32_t end,
                 const SoftmaxState& state, uint8_t* flags, const TileScratch& scratch);

  // raw [n]: the sum over the rows of (p/(1-p))^2 |a - v|^2, times the row's weight, times `share`, for tokens
  // [begin, end); NaN and reference::kNonFinite in flags [n] for tokens that take no part. Pairs in rows.tops are left
  // out.
  void (*score)(const HeadTokens& tokens, const HeadRows& rows, const ScoreRows& score_rows, const float* center,
                float share, int32_t begin, int32_t end, float* raw, uint8_t* flags, const TileScratch& scratch);

  // raw [n]: the sum over the rows of p, times weights [r] (null: 1 each), times `share`; NaN where flags [n] says
  // kNonFinite. Reads the keys alone, unless `find_bad`: then the values are searched for NaN and Inf first, as attend
  // would have done.
  void (*mass)(const HeadTokens& tokens, const HeadRows& rows, const Denominators& denominators, const float* weights,
               float share, bool find_bad, int32_t begin, int32_t end, float* raw, uint8_t* flags,
               const TileScratch& scratch);

  // out [dim] = the token's row as float32, minus center [dim] (null: 0). Returns false, and zeros, where it has a NaN
  // or Inf.
  bool (*load_row)(const HeadTensor& tensor, int64_t cell, const float* center, float* out);
};

// Best first; never empty.
std::span<const Kernels> KernelTable();

}  // namespace dropkv::cpu
