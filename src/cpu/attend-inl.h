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
  float key_max = 0.0F;
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

// scratch.logits [tokens, NV vectors]: logits in units of log 2; -inf where the row does not see the token. Both passes
// call this, so that their logits are the same bits.
template <int NV>
HWY_INLINE void TileLogits(const HeadRows& rows, int32_t first_lane, int32_t dim, const Tile& tile,
                           const TileScratch& scratch, NextTile& next) {
  const FloatTag d;
  TileProduct<NV>(scratch.keys, tile.tokens, dim, rows.queries + int64_t{first_lane} * dim, scratch.logits, next);
  // |<q,k>| <= d max|q| max|k|; written so that an overflow of the bound counts as too large.
  if (!(rows.query_max * tile.key_max * static_cast<float>(dim) < kLargestLogit)) {
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
    if (sums != nullptr) ValueProduct<NV>(scratch.values, tile.tokens, tokens.v.dim, scratch.logits, sums, next);
  }
};

// Loads a tile of keys and values. A bad row becomes zeros; flags [n] (optional) get kNonFinite for the token.
inline Tile LoadTiles(const HeadTokens& tokens, const float* center, int32_t begin, int32_t end,
                      const TileScratch& scratch, uint8_t* flags) {
  Tile tile{begin, std::min(kTile, end - begin), false, 0.0F};
  std::fill_n(scratch.bad, tile.tokens, uint8_t{0});
  tile.key_max = LoadTile(tokens, tokens.k, nullptr, begin, tile.tokens, scratch, scratch.keys);
  LoadTile(tokens, tokens.v, center, begin, tile.tokens, scratch, scratch.values);
  for (int32_t t = 0; t < tile.tokens; ++t) {
    tile.any_bad = tile.any_bad || scratch.bad[t] != 0;
    if (flags != nullptr) flags[begin + t] = scratch.bad[t] != 0 ? reference::kNonFinite : 0;
  }
  return tile;
}

inline void Attend(const HeadTokens& tokens, const HeadRows& rows, const float* center, int32_t begin, int32_t end,
                   const SoftmaxState& state, uint8_t* flags, const TileScratch& scratch) {
  for (int32_t first = begin; first < end; first += kTile) {
    const Tile tile = LoadTiles(tokens, center, first, end, scratch, flags);
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
        TileLogits<NV>(rows, lane, tokens.k.dim, tile, scratch, next);
        float* sums = center != nullptr ? state.sums + int64_t{lane} * tokens.v.dim : nullptr;
        SoftmaxPanel<NV>{tokens, state, center, scratch, lane, sums}.Run(tile, next);
      });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_ATTEND_INL_H_
