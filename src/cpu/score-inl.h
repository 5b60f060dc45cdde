// Pass 2: scores of tokens from the rows' outputs and log-sum-exps (docs/kernels/score.md).
//
// Per token and row: 2d + 2dv FLOP in the two products, about 20 vector operations per N rows for the weight and the
// distance. A token's sum needs no other token: any cut of the tokens gives the same bits.

#if defined(DROPKV_CPU_SCORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_SCORE_INL_H_
#undef DROPKV_CPU_SCORE_INL_H_
#else
#define DROPKV_CPU_SCORE_INL_H_
#endif

#include <atomic>
#include <cmath>
#include <limits>

#include "cpu/attend-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// log2 of the smallest p that counts: the squares of lesser ones would be subnormal.
inline constexpr float kSmallestShare = -63.0F;

// Takes the pairs that are computed elsewhere out of the tile.
inline void HideTops(const int32_t* tops, int32_t width, const Tile& tile, float* logits) {
  for (int32_t lane = 0; lane < width; ++lane) {
    const int32_t t = tops[lane] - tile.begin;
    if (tops[lane] >= 0 && t >= 0 && t < tile.tokens) logits[t * width + lane] = kMinusInfinity;
  }
}

// Writes tile.begin + t for lanes with log2(p) > log2(kFoundShare) and takes the pairs out (handed-in rows: share is
// 0). Other threads look at other tokens of the same rows; of several the lowest stays.
inline void FindTops(int32_t* tops, const float* base, int32_t width, const Tile& tile, float* logits) {
  const float least = std::log2(kFoundShare);
  for (int32_t t = 0; t < tile.tokens; ++t)
    for (int32_t lane = 0; lane < width; ++lane) {
      if (!(logits[t * width + lane] - base[lane] > least)) continue;
      logits[t * width + lane] = kMinusInfinity;
      const std::atomic_ref<int32_t> top(tops[lane]);
      int32_t seen = top.load(std::memory_order_relaxed);
      while ((seen < 0 || seen > tile.begin + t) && !top.compare_exchange_weak(seen, tile.begin + t)) {
      }
    }
}

// Whether any logit of the tile is above its row's base + log2(kFoundShare). The subtraction is monotone, so that of
// the greatest logit speaks for all; a maximum per vector, since one for all would wait for itself.
template <int NV>
HWY_INLINE bool HasTops(const float* base, const Tile& tile, const float* logits) {
  const FloatTag d;
  FloatVector largest[NV];
  for (int v = 0; v < NV; ++v) largest[v] = hn::Set(d, kMinusInfinity);
  for (int32_t t = 0; t < tile.tokens; ++t)
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) largest[v] = hn::Max(largest[v], hn::Load(d, logits + (t * NV + v) * kLanes));
  auto all = hn::Set(d, kMinusInfinity);
  for (int v = 0; v < NV; ++v) all = hn::Max(all, hn::Sub(largest[v], hn::Load(d, base + v * kLanes)));
  return !hn::AllFalse(d, hn::Gt(all, hn::Set(d, std::log2(kFoundShare))));
}

// p of one vector of rows; 0 where it is below 2^smallest.
HWY_INLINE FloatVector Share(FloatVector logit, FloatVector base, FloatVector share, float smallest) {
  return Exp2(FloatTag(), hn::Add(hn::Sub(logit, base), share), smallest);
}

// Half of (p/(1-p))^2, as half of (1/p - 1)^-2 with 1/p = 2^x; 0 for p below kSmallestShare. From the hardware's
// estimate e of 1/y: y e = 1 + s, and e^2 (3/2 - y e) = e^2 (1/2 - s) is half of y^-2 but for 3 s^2, |s| < 2^-11. e is
// taken out first: its square would be subnormal. Where x is infinite, y is NaN.
HWY_INLINE FloatVector HalfSquaredOdds(FloatVector x) {
  const FloatTag d;
  const auto y = hn::Sub(Exp2Unchecked(d, x), hn::Set(d, 1.0F));
  const auto seen = hn::Le(x, hn::Set(d, -kSmallestShare));
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  const auto e = hn::IfThenElseZero(seen, hn::Div(hn::Set(d, 1.0F), y));
#else
  const auto e = hn::IfThenElseZero(seen, hn::ApproximateReciprocal(y));
#endif
  return hn::IfThenElseZero(seen, hn::Mul(hn::Mul(e, e), hn::NegMulAdd(y, e, hn::Set(d, 1.5F))));
}

// x of the rows that count; 0 of the others, whatever x is: they judge nothing.
HWY_INLINE FloatVector WhereCounted(FloatVector counts, FloatVector x) {
  return hn::IfThenElseZero(hn::Gt(counts, hn::Zero(FloatTag())), x);
}

// Adds half of one panel's rows' terms to scratch.partial [tokens, one vector]. kGiven: shares are 0.
template <int NV, bool kGiven, bool kWeighted>
HWY_INLINE void AddPanel(const ScoreRows& rows, int32_t first_lane, const Tile& tile, const TileScratch& scratch) {
  const FloatTag d;
  FloatVector base[NV];
  FloatVector share[NV];
  FloatVector norm[NV];
  for (int v = 0; v < NV; ++v) {
    base[v] = hn::Load(d, rows.denominators.base + first_lane + v * kLanes);
    share[v] = hn::Load(d, rows.denominators.share + first_lane + v * kLanes);
    norm[v] = hn::Load(d, rows.norms + first_lane + v * kLanes);
  }
  for (int32_t t = 0; t < tile.tokens; ++t) {
    const auto value_norm = hn::Set(d, scratch.norms[t]);
    auto sum = hn::Load(d, scratch.partial + t * kLanes);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const auto x = hn::Sub(base[v], hn::Load(d, scratch.logits + (t * NV + v) * kLanes));
      const auto weight = HalfSquaredOdds(kGiven ? x : hn::Sub(x, share[v]));
      const auto cross = hn::Load(d, scratch.products + (t * NV + v) * kLanes);
      const auto distance = hn::Max(hn::Add(hn::Add(value_norm, norm[v]), cross), hn::Zero(d));
      if constexpr (kWeighted) {
        const auto counts = hn::Load(d, rows.weights + first_lane + v * kLanes);
        sum = hn::MulAdd(hn::Mul(weight, counts), WhereCounted(counts, distance), sum);
      } else {
        sum = hn::MulAdd(weight, distance, sum);
      }
    }
    hn::Store(sum, d, scratch.partial + t * kLanes);
  }
}

template <int NV>
HWY_INLINE void AddRows(const ScoreRows& rows, int32_t first_lane, const Tile& tile, const TileScratch& scratch) {
  if (rows.weights != nullptr) {
    rows.find_tops ? AddPanel<NV, true, true>(rows, first_lane, tile, scratch)
                   : AddPanel<NV, false, true>(rows, first_lane, tile, scratch);
  } else {
    rows.find_tops ? AddPanel<NV, true, false>(rows, first_lane, tile, scratch)
                   : AddPanel<NV, false, false>(rows, first_lane, tile, scratch);
  }
}

// Lane sums to raw scores.
inline void StoreScores(const Tile& tile, float share, const TileScratch& scratch, float* raw, uint8_t* flags) {
  const FloatTag d;
  for (int32_t t = 0; t < tile.tokens; ++t) {
    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, scratch.partial + t * kLanes)));
    const bool bad = scratch.bad[t] != 0;
    raw[tile.begin + t] = bad ? std::numeric_limits<float>::quiet_NaN() : sum * share;
    flags[tile.begin + t] = bad ? reference::kNonFinite : 0;
  }
}

// Steps of NextTile in a tile's products over `dims` in all.
inline int32_t Steps(const LaneLayout& layout, int32_t tokens, int32_t dims) {
  int32_t steps = 0;
  for (int32_t p = 0; p < layout.panels; ++p) steps += TileSteps(tokens, dims, layout.panel_lanes(p) / kLanes);
  return steps;
}

inline void Score(const HeadTokens& tokens, const HeadRows& rows, const ScoreRows& score_rows, const float* center,
                  float share, int32_t begin, int32_t end, float* raw, uint8_t* flags, const TileScratch& scratch) {
  const float* shift = NullIfZero(center, tokens.v.dim);
  for (int32_t first = begin; first < end; first += kTile) {
    Tile tile = LoadTiles(tokens, shift, first, end, scratch);
    std::fill_n(scratch.partial, tile.tokens * kLanes, 0.0F);
    NextTile next(tokens, true, first + kTile, end, Steps(rows.layout, tile.tokens, tokens.k.dim + tokens.v.dim));
    for (int32_t p = 0; p < rows.layout.panels; ++p) {
      const int32_t lane = rows.layout.panel_begin(p);
      WithVectors(rows.layout.panel_lanes(p) / kLanes, [&]<int NV>() HWY_ATTR {
        constexpr int32_t kWidth = NV * kLanes;
        TileLogits<NV>(tokens, rows, lane, tile, scratch, next);
        TileProduct<NV>(tile.values, tile.tokens, tokens.v.dim, score_rows.outputs + int64_t{lane} * tokens.v.dim,
                        scratch.products, next);
        // After the product: the logits are then on their way to AddPanel.
        if (!score_rows.find_tops) {
          HideTops(score_rows.tops + lane, kWidth, tile, scratch.logits);
        } else if (HasTops<NV>(score_rows.denominators.base + lane, tile, scratch.logits)) {
          FindTops(score_rows.tops + lane, score_rows.denominators.base + lane, kWidth, tile, scratch.logits);
        }
        AddRows<NV>(score_rows, lane, tile, scratch);
      });
    }
    StoreScores(tile, 2.0F * share, scratch, raw, flags);  // halves were summed
  }
}

// The sum of p over one panel's rows, times their weights, added to scratch.partial.
template <int NV, bool kWeighted>
HWY_INLINE void AddMass(const Denominators& denominators, const float* weights, int32_t first_lane, const Tile& tile,
                        const TileScratch& scratch) {
  const FloatTag d;
  for (int32_t t = 0; t < tile.tokens; ++t) {
    auto sum = hn::Load(d, scratch.partial + t * kLanes);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) {
      const auto logit = hn::Load(d, scratch.logits + (t * NV + v) * kLanes);
      const int32_t lane = first_lane + v * kLanes;
      const auto base = hn::Load(d, denominators.base + lane);
      const auto p = Share(logit, base, hn::Load(d, denominators.share + lane), -126.0F);
      if constexpr (kWeighted) {
        const auto counts = hn::Load(d, weights + lane);
        sum = hn::MulAdd(counts, WhereCounted(counts, p), sum);
      } else {
        sum = hn::Add(sum, p);
      }
    }
    hn::Store(sum, d, scratch.partial + t * kLanes);
  }
}

// The keys alone; bad tokens are known from pass 1.
inline Tile LoadKeysAlone(const HeadTokens& tokens, int32_t begin, int32_t end, const uint8_t* flags,
                          const TileScratch& scratch) {
  Tile tile;
  tile.begin = begin;
  tile.tokens = std::min(kTile, end - begin);
  for (int32_t t = 0; t < tile.tokens; ++t) {
    scratch.bad[t] = (flags[begin + t] & reference::kNonFinite) != 0 ? 1 : 0;
    tile.any_bad = tile.any_bad || scratch.bad[t] != 0;
  }
  LoadKeys(tokens, scratch, tile);
  return tile;
}

inline void Mass(const HeadTokens& tokens, const HeadRows& rows, const Denominators& denominators, const float* weights,
                 float share, bool find_bad, int32_t begin, int32_t end, float* raw, uint8_t* flags,
                 const TileScratch& scratch) {
  for (int32_t first = begin; first < end; first += kTile) {
    Tile tile =
        find_bad ? LoadTiles(tokens, nullptr, first, end, scratch) : LoadKeysAlone(tokens, first, end, flags, scratch);
    std::fill_n(scratch.partial, tile.tokens * kLanes, 0.0F);
    NextTile next(tokens, find_bad, first + kTile, end, Steps(rows.layout, tile.tokens, tokens.k.dim));
    for (int32_t p = 0; p < rows.layout.panels; ++p) {
      const int32_t lane = rows.layout.panel_begin(p);
      WithVectors(rows.layout.panel_lanes(p) / kLanes, [&]<int NV>() HWY_ATTR {
        TileLogits<NV>(tokens, rows, lane, tile, scratch, next);
        weights != nullptr ? AddMass<NV, true>(denominators, weights, lane, tile, scratch)
                           : AddMass<NV, false>(denominators, weights, lane, tile, scratch);
      });
    }
    StoreScores(tile, share, scratch, raw, flags);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_SCORE_INL_H_
