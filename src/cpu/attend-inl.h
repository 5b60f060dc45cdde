// Pass 1: the online softmax of r rows over a range of tokens, with the greatest logit kept apart
// (docs/kernels/attend.md). Also the logits that both passes share.
//
// Per token and row: 2d + 2dv FLOP in the two products, about 16 vector operations per N rows for the softmax, and
// 4 (d + dv) bytes of cache read once per KV head, whatever the number of rows.

#if defined(DROPKV_CPU_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_ATTEND_INL_H_
#undef DROPKV_CPU_ATTEND_INL_H_
#else
#define DROPKV_CPU_ATTEND_INL_H_
#endif

#include <cmath>
#include <limits>

#include "cpu/exp-inl.h"
#include "cpu/kernels_load-inl.h"
#include "cpu/kernels_product-inl.h"
#include "hwy/highway.h"
#include "reference/reference.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Logits are clamped here where a float32 product could leave the range of floats: infinities would meet and make NaN.
inline constexpr float kLargestLogit = 1e37F;

// What one tile of tokens is, the same for all panels.
struct Tile {
  int32_t begin = 0;
  int32_t tokens = 0;
  bool any_bad = false;
  bool in_place = false;  // the keys are the cache's own, not yet known to be finite
  float key_max = 0.0F;   // largest magnitude; not in place
  Rows keys;
  Rows values;
};

// Calls f.operator()<NV>() with the panel's number of vectors.
template <class F>
HWY_INLINE void WithVectors(int32_t vectors, F&& f) {
  switch (vectors) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
#endif
    default:
      return;
  }
}

// Applies f to every logit of the tile.
template <int NV, class F>
HWY_INLINE void ForEachLogit(const Tile& tile, float* logits, F&& f) {
  const FloatTag d;
  for (int32_t t = 0; t < tile.tokens; ++t)
    for (int v = 0; v < NV; ++v) {
      float* at = logits + (t * NV + v) * kLanes;
      hn::Store(f(t, v, hn::Load(d, at)), d, at);
    }
}

// Hides tokens that a row does not see yet, and tokens that take no part.
template <int NV>
HWY_INLINE void MaskTile(const HeadRows& rows, int32_t first_lane, const Tile& tile, const TileScratch& scratch) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto hidden = hn::Set(d, kMinusInfinity);
  if (tile.begin + tile.tokens > rows.fewest_visible) {
    ForEachLogit<NV>(tile, scratch.logits, [&](int32_t t, int v, FloatVector x) HWY_ATTR {
      const auto visible = hn::Load(di, rows.visible + first_lane + v * kLanes);
      const auto seen = hn::RebindMask(d, hn::Gt(visible, hn::Set(di, tile.begin + t)));
      return hn::IfThenElse(seen, x, hidden);
    });
  }
  if (!tile.any_bad) return;
  for (int32_t t = 0; t < tile.tokens; ++t) {
    if (scratch.bad[t] == 0) continue;
    for (int v = 0; v < NV; ++v) hn::Store(hidden, d, scratch.logits + (t * NV + v) * kLanes);
  }
}

// Whether the caller's keys or values can be read where they are: float32 rows side by side, a whole tile of them, and
// a stride that does not put the rows of a block into one cache set.
inline bool InPlace(const HeadTokens& tokens, const HeadTensor& tensor, int32_t count) {
  constexpr int64_t kConflict = 512;  // elements; 12 rows then share two of the 64 sets
  return count == kTile && tensor.dtype == DType::kF32 && tensor.dim_stride == 1 && tokens.cells == nullptr &&
         tokens.subset == nullptr && tensor.token_stride % kConflict != 0 &&
         reinterpret_cast<uintptr_t>(tensor.data) % alignof(float) == 0;
}

inline Rows RowsInPlace(const HeadTensor& tensor, int32_t begin) {
  return {reinterpret_cast<const float*>(RowStart(tensor, begin)), tensor.token_stride};
}

// Copies the tile's keys, with the search for NaN and Inf.
inline void CopyKeys(const HeadTokens& tokens, const TileScratch& scratch, Tile& tile) {
  tile.in_place = false;
  tile.keys = {scratch.keys, tokens.k.dim + kTilePadding};
  tile.key_max = LoadTile(tokens, tokens.k, nullptr, tile.begin, tile.tokens, scratch, {scratch.keys, nullptr});
  for (int32_t t = 0; t < tile.tokens; ++t) tile.any_bad = tile.any_bad || scratch.bad[t] != 0;
}

// The tile's keys, in place where they can be. scratch.bad holds the tokens that are known to be bad.
inline void LoadKeys(const HeadTokens& tokens, const TileScratch& scratch, Tile& tile) {
  tile.in_place = InPlace(tokens, tokens.k, tile.tokens);
  if (!tile.in_place) return CopyKeys(tokens, scratch, tile);
  tile.keys = RowsInPlace(tokens.k, tile.begin);
}

// The tile's values minus center (null: 0), in place where they can be, and their squared norms, which also tell of NaN
// and Inf, and of numbers so large that they have to be looked at one by one.
inline void LoadValues(const HeadTokens& tokens, const float* center, const TileScratch& scratch, Tile& tile) {
  const int32_t dim = tokens.v.dim;
  if (center == nullptr && InPlace(tokens, tokens.v, tile.tokens)) {
    tile.values = RowsInPlace(tokens.v, tile.begin);
    bool finite = true;
    for (int32_t t = 0; t < tile.tokens; ++t) {
      scratch.norms[t] = SquaredNorm(tile.values.first + t * tile.values.stride, dim);
      finite = finite && scratch.norms[t] < std::numeric_limits<float>::infinity();
    }
    if (finite) return;
  }
  tile.values = {scratch.values, dim + kTilePadding};
  LoadTile(tokens, tokens.v, center, tile.begin, tile.tokens, scratch, {scratch.values, scratch.norms});
  for (int32_t t = 0; t < tile.tokens; ++t) tile.any_bad = tile.any_bad || scratch.bad[t] != 0;
}

// Null where it is 0: values are then read as they are.
inline const float* NullIfZero(const float* center, int32_t dim) {
  if (center != nullptr && std::all_of(center, center + dim, [](float x) { return x == 0.0F; })) return nullptr;
  return center;
}

// Whether all logits are numbers far from the end of their range: in a sum of squares NaN and Inf stay, and large ones
// become Inf.
template <int NV>
HWY_INLINE bool Ordinary(const Tile& tile, const float* logits) {
  const FloatTag d;
  FloatVector sum[NV];
  for (int v = 0; v < NV; ++v) sum[v] = hn::Zero(d);
  for (int32_t t = 0; t < tile.tokens; ++t)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const auto x = hn::Load(d, logits + (t * NV + v) * kLanes);
      sum[v] = hn::MulAdd(x, x, sum[v]);
    }
  for (int v = 1; v < NV; ++v) sum[0] = hn::Add(sum[0], sum[v]);
  return hn::AllTrue(d, hn::Lt(sum[0], hn::Set(d, std::numeric_limits<float>::infinity())));
}

// scratch.logits [tokens, NV vectors]: logits in units of log 2; -inf where the row does not see the token. Both passes
// call this, so that their logits are the same bits.
template <int NV>
HWY_INLINE void TileLogits(const HeadTokens& tokens, const HeadRows& rows, int32_t first_lane, Tile& tile,
                           const TileScratch& scratch, NextTile& next) {
  const FloatTag d;
  const int32_t dim = tokens.k.dim;
  const float* queries = rows.queries + int64_t{first_lane} * dim;
  TileProduct<NV>(tile.keys, tile.tokens, dim, queries, scratch.logits, next);
  // A key with a NaN or Inf shows in every row's logit, so in the first panel's, before anything was made of the tile.
  if (tile.in_place && !Ordinary<NV>(tile, scratch.logits)) {
    CopyKeys(tokens, scratch, tile);
    TileProduct<NV>(tile.keys, tile.tokens, dim, queries, scratch.logits, next);
  }
  // |<q,k>| <= d max|q| max|k|; written so that an overflow of the bound counts as too large.
  if (!tile.in_place && !(rows.query_max * tile.key_max * static_cast<float>(dim) < kLargestLogit)) {
    ForEachLogit<NV>(tile, scratch.logits, [&](int32_t, int, FloatVector x) HWY_ATTR {
      const auto finite = hn::IfThenElseZero(hn::Eq(x, x), x);
      return hn::Min(hn::Max(finite, hn::Set(d, -kLargestLogit)), hn::Set(d, kLargestLogit));
    });
  }
  if (rows.cap > 0.0F) {
    ForEachLogit<NV>(tile, scratch.logits,
                     [&](int32_t, int, FloatVector x) HWY_ATTR { return hn::Mul(hn::Set(d, rows.cap), Tanh(d, x)); });
  }
  MaskTile<NV>(rows, first_lane, tile, scratch);
}

// One panel of the online softmax.
template <int NV>
struct SoftmaxPanel {
  const HeadTokens& tokens;
  const SoftmaxState& state;
  const float* center;
  const TileScratch& scratch;
  int32_t first_lane;
  float* sums;  // [dv, NV vectors]; null: not wanted

  static constexpr int32_t kWidth = NV * kLanes;

  // Adds weight * (value - center) of a token to one lane's sums.
  void AddValue(int32_t token, int32_t lane, float weight) const {
    if (sums == nullptr) return;
    LoadRow(tokens.v, tokens.cell(token), center, scratch.row);
    for (int32_t i = 0; i < tokens.v.dim; ++i) sums[i * kWidth + lane] += weight * scratch.row[i];
  }

  // The lane's greatest logit of the tile beats the one so far: the former top joins the others, at `weight`. The new
  // one leaves the tile.
  void ReplaceTop(const Tile& tile, int32_t lane, float top, float weight) const {
    const int32_t at = first_lane + lane;
    if (state.token[at] >= 0) {
      state.rest[at] += weight;
      AddValue(state.token[at], lane, weight);
    }
    int32_t t = 0;
    while (scratch.logits[t * kWidth + lane] != top) ++t;
    scratch.logits[t * kWidth + lane] = kMinusInfinity;
    state.token[at] = tile.begin + t;
  }

  void ScaleSums(int v, FloatVector factor) const {
    const FloatTag d;
    if (sums == nullptr) return;
    for (int32_t i = 0; i < tokens.v.dim; ++i) {
      float* at = sums + i * kWidth + v * kLanes;
      hn::Store(hn::Mul(hn::Load(d, at), factor), d, at);
    }
  }

  // Two greatest logits of every lane.
  void TopTwo(const Tile& tile, FloatVector (&first)[NV], FloatVector (&second)[NV]) const {
    const FloatTag d;
    for (int v = 0; v < NV; ++v) first[v] = second[v] = hn::Set(d, kMinusInfinity);
    for (int32_t t = 0; t < tile.tokens; ++t) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        const auto x = hn::Load(d, scratch.logits + (t * NV + v) * kLanes);
        second[v] = hn::Max(second[v], hn::Min(first[v], x));
        first[v] = hn::Max(first[v], x);
      }
    }
  }

  // Merges the tile's greatest logits of vector v into the state, which is rescaled where they changed.
  void MergeTops(const Tile& tile, int v, FloatVector tile_top, FloatVector tile_second) const {
    const FloatTag d;
    const int32_t at = first_lane + v * kLanes;
    const auto old_top = hn::Load(d, state.top + at);
    const auto old_second = hn::Load(d, state.second + at);
    const auto second = hn::Max(hn::Min(old_top, tile_top), hn::Max(old_second, tile_second));
    const auto risen = hn::Gt(tile_top, old_top);
    if (hn::AllTrue(d, hn::Eq(second, old_second)) && hn::AllFalse(d, risen)) return;

    const auto nothing = hn::Set(d, kMinusInfinity);
    const auto base = hn::IfThenElseZero(hn::Gt(second, nothing), second);
    const auto factor = Exp2(d, hn::Sub(old_second, base));  // 0 where there were no others
    hn::Store(hn::Mul(hn::Load(d, state.rest + at), factor), d, state.rest + at);
    ScaleSums(v, factor);
    hn::Store(second, d, state.second + at);
    if (hn::AllFalse(d, risen)) return;

    HWY_ALIGN float tops[kLanes];
    HWY_ALIGN float olds[kLanes];
    HWY_ALIGN float weights[kLanes];
    hn::Store(tile_top, d, tops);
    hn::Store(old_top, d, olds);
    hn::Store(Exp2(d, hn::Sub(old_top, base)), d, weights);
    for (int32_t lane = 0; lane < kLanes; ++lane)
      if (tops[lane] > olds[lane]) ReplaceTop(tile, v * kLanes + lane, tops[lane], weights[lane]);
    hn::Store(hn::Max(old_top, tile_top), d, state.top + at);
  }

  // Logits to weights 2^(l - second), in place; adds their sums to state.rest. A tile's terms are summed first: the
  // error of a long range then grows with its tiles, not with its tokens.
  void Exponentials(const Tile& tile) const {
    const FloatTag d;
    FloatVector base[NV];
    FloatVector sum[NV];
    for (int v = 0; v < NV; ++v) {
      const auto second = hn::Load(d, state.second + first_lane + v * kLanes);
      base[v] = hn::IfThenElseZero(hn::Gt(second, hn::Set(d, kMinusInfinity)), second);
      sum[v] = hn::Zero(d);
    }
    for (int32_t t = 0; t < tile.tokens; ++t) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        float* at = scratch.logits + (t * NV + v) * kLanes;
        const auto weight = Exp2(d, hn::Sub(hn::Load(d, at), base[v]));
        sum[v] = hn::Add(sum[v], weight);
        hn::Store(weight, d, at);
      }
    }
    for (int v = 0; v < NV; ++v) {
      float* rest = state.rest + first_lane + v * kLanes;
      hn::Store(hn::Add(hn::Load(d, rest), sum[v]), d, rest);
    }
  }

  void Run(const Tile& tile, NextTile& next) const {
    FloatVector top[NV];
    FloatVector second[NV];
    TopTwo(tile, top, second);
    for (int v = 0; v < NV; ++v) MergeTops(tile, v, top[v], second[v]);
    Exponentials(tile);
    if (sums != nullptr) ValueProduct<NV>(tile.values, tile.tokens, tokens.v.dim, scratch.logits, sums, next);
  }
};

// Loads a tile of keys and values, with the values' norms. A bad row becomes zeros.
inline Tile LoadTiles(const HeadTokens& tokens, const float* center, int32_t begin, int32_t end,
                      const TileScratch& scratch) {
  Tile tile;
  tile.begin = begin;
  tile.tokens = std::min(kTile, end - begin);
  std::fill_n(scratch.bad, tile.tokens, uint8_t{0});
  LoadValues(tokens, center, scratch, tile);
  LoadKeys(tokens, scratch, tile);
  return tile;
}

inline void Attend(const HeadTokens& tokens, const HeadRows& rows, const float* center, int32_t begin, int32_t end,
                   const SoftmaxState& state, uint8_t* flags, const TileScratch& scratch) {
  const float* shift = NullIfZero(center, tokens.v.dim);
  for (int32_t first = begin; first < end; first += kTile) {
    Tile tile = LoadTiles(tokens, shift, first, end, scratch);
    int32_t steps = 0;
    for (int32_t p = 0; p < rows.layout.panels; ++p) {
      const int32_t vectors = rows.layout.panel_lanes(p) / kLanes;
      steps += TileSteps(tile.tokens, tokens.k.dim, vectors);
      if (center != nullptr) steps += ValueSteps(tile.tokens, tokens.v.dim, vectors);
    }
    NextTile next(tokens, true, first + kTile, end, steps);
    for (int32_t p = 0; p < rows.layout.panels; ++p) {
      const int32_t lane = rows.layout.panel_begin(p);
      WithVectors(rows.layout.panel_lanes(p) / kLanes, [&]<int NV>() HWY_ATTR {
        TileLogits<NV>(tokens, rows, lane, tile, scratch, next);
        float* sums = center != nullptr ? state.sums + int64_t{lane} * tokens.v.dim : nullptr;
        SoftmaxPanel<NV>{tokens, state, center, scratch, lane, sums}.Run(tile, next);
      });
    }
    if (flags == nullptr) continue;
    for (int32_t t = 0; t < tile.tokens; ++t) flags[first + t] = scratch.bad[t] != 0 ? reference::kNonFinite : 0;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_ATTEND_INL_H_
