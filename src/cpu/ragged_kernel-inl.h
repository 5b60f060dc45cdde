// The decode kernel. Per tile of 256 tokens of one KV head, for its g query heads:
//
//   1. logits  [g, 256] = q [g, d] K^T: K's blocks of 16 tokens are transposed, so lanes are tokens. A step holds
//      GT heads x KT vectors of tokens in registers and walks d: one load per vector of keys, one broadcast per head.
//   2. softmax [g, 256]: maximum, rescaling factor, weights exp(l - max) and their sum.
//   3. values  [g, dv] += weights [g, 256] V [256, dv]: a step holds GT heads x VT vectors of dims and walks tokens.
//
// Per token: d + dv elements read once from memory, g * (d + dv) multiply-adds. At g = 3 with f16 that is 1.5
// multiply-adds a byte, far below what the units can do at the rate of memory: memory bounds the long contexts. So it
// must never rest: step 1 asks for the values of its tokens, step 3 for the keys of the next tile, a line at a time.
// Registers: 32 with AVX-512, else 16; a group that does not fit is cut into even pieces.
// docs/kernels/decode.md has the measurements.
#if defined(DROPKV_CPU_RAGGED_KERNEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_RAGGED_KERNEL_INL_H_
#undef DROPKV_CPU_RAGGED_KERNEL_INL_H_
#else
#define DROPKV_CPU_RAGGED_KERNEL_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/element.h"
#include "cpu/exp-inl.h"
#include "cpu/kernels_load-inl.h"
#include "cpu/ragged_kernel.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::ragged {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using cpu::HWY_NAMESPACE::LoadBF16;
using cpu::HWY_NAMESPACE::LoadF16;
using cpu::HWY_NAMESPACE::LoadF32;

using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;
inline constexpr int kLanes = hn::MaxLanes(DF());
inline constexpr int kBlock = 16;  // tokens in a block of keys
inline constexpr bool kManyRegisters = kLanes == 16;
inline constexpr int kMaxGroupTile = kManyRegisters ? 8 : 4;

// kLanes int8 as float.
HWY_INLINE VF LoadI8(const int8_t* p) {
  const hn::Rebind<int8_t, DF> di8;
  const hn::RebindToSigned<DF> di32;
  return hn::ConvertTo(DF(), hn::PromoteTo(di32, hn::LoadU(di8, p)));
}

// ---- 1. logits -----------------------------------------------------------------------------------------------------

// Keys of a range of blocks, and where the range's values lie.
struct KeyRange {
  const std::byte* k;   // first block
  int64_t block_bytes;  // of 16 tokens
  int d;
  const std::byte* values;  // of the first token: asked into the cache meanwhile
};

// Piece `index` of a stream of pieces of kBytes bytes: asks for the cache lines that begin in it. A product over the
// same number of bytes spreads the requests evenly, so that they never wait for each other.
template <int kBytes>
HWY_INLINE void Fetch(const std::byte* stream, int64_t index) {
  constexpr int kLine = 64;
  if constexpr (kBytes >= kLine) {
    for (int at = 0; at < kBytes; at += kLine) hwy::Prefetch(stream + index * kBytes + at);
  } else {
    if (index % (kLine / kBytes) == 0) hwy::Prefetch(stream + index * kBytes);
  }
}

// Unscaled logits of KT * kLanes tokens from token `token` on for GT heads: into s + head * kTile.
template <class L, int GT, int KT>
HWY_INLINE void LogitStep(const KeyRange& keys, int token, const float* HWY_RESTRICT q, float* HWY_RESTRICT s) {
  const DF df;
  const std::byte* HWY_RESTRICT k[KT];
  for (int t = 0; t < KT; ++t) {
    const int at = token + t * kLanes;
    k[t] = keys.k + at / kBlock * keys.block_bytes + at % kBlock * L::kBytes;
  }
  VF acc[GT][KT];
  for (int h = 0; h < GT; ++h)
    for (int t = 0; t < KT; ++t) acc[h][t] = hn::Zero(df);
  const std::byte* values = keys.values + int64_t{token} * keys.d * L::kBytes;
  for (int c = 0; c < keys.d; ++c) {
    Fetch<KT * kLanes * L::kBytes>(values, c);
    VF key[KT];
    for (int t = 0; t < KT; ++t) key[t] = L::Load(df, k[t] + c * kBlock * L::kBytes);
    for (int h = 0; h < GT; ++h) {
      const VF query = hn::Set(df, q[h * keys.d + c]);
      for (int t = 0; t < KT; ++t) acc[h][t] = hn::MulAdd(query, key[t], acc[h][t]);
    }
  }
  for (int h = 0; h < GT; ++h)
    for (int t = 0; t < KT; ++t) hn::StoreU(acc[h][t], df, s + h * kTile + t * kLanes);
}

// Names the layout; its loads need the scales.
struct LoadQ8 {
  static constexpr int64_t kBytes = 1;  // nearly, for Fetch
};

// q8_0: inside a block of 32 dims the products of the integers are summed, then scaled once.
template <int GT, int KT>
HWY_INLINE void LogitStepQ8(const KeyRange& keys, int token, const float* HWY_RESTRICT q, float* HWY_RESTRICT s) {
  const DF df;
  const std::byte* HWY_RESTRICT k[KT];
  for (int t = 0; t < KT; ++t) k[t] = keys.k + (token + t * kLanes) / kBlock * keys.block_bytes;
  VF acc[GT][KT];
  for (int h = 0; h < GT; ++h)
    for (int t = 0; t < KT; ++t) acc[h][t] = hn::Zero(df);
  const std::byte* values = keys.values + int64_t{token} * keys.d;
  for (int c = 0; c < keys.d; c += 32) {
    VF part[GT][KT];
    for (int h = 0; h < GT; ++h)
      for (int t = 0; t < KT; ++t) part[h][t] = hn::Zero(df);
    for (int i = 0; i < 32; ++i) {
      Fetch<KT * kLanes>(values, c + i);
      VF key[KT];
      for (int t = 0; t < KT; ++t) {
        const int lane = (token + t * kLanes) % kBlock;
        key[t] = LoadI8(reinterpret_cast<const int8_t*>(k[t] + 2 * kBlock + i * kBlock + lane));
      }
      for (int h = 0; h < GT; ++h) {
        const VF query = hn::Set(df, q[h * keys.d + c + i]);
        for (int t = 0; t < KT; ++t) part[h][t] = hn::MulAdd(query, key[t], part[h][t]);
      }
    }
    for (int t = 0; t < KT; ++t) {
      const int lane = (token + t * kLanes) % kBlock;
      const VF scale = LoadF16::Load(df, k[t] + 2 * lane);
      for (int h = 0; h < GT; ++h) acc[h][t] = hn::MulAdd(scale, part[h][t], acc[h][t]);
      k[t] += 34 * kBlock;
    }
  }
  for (int h = 0; h < GT; ++h)
    for (int t = 0; t < KT; ++t) hn::StoreU(acc[h][t], df, s + h * kTile + t * kLanes);
}

template <class L, int GT, int KT>
HWY_INLINE void Step(const KeyRange& keys, int token, const float* q, float* s) {
  if constexpr (std::is_same_v<L, LoadQ8>) {
    LogitStepQ8<GT, KT>(keys, token, q, s);
  } else {
    LogitStep<L, GT, KT>(keys, token, q, s);
  }
}

// All tokens of `blocks` blocks for GT heads.
template <class L, int GT>
HWY_NOINLINE void Logits(const KeyRange& keys, int blocks, const float* q, float* s) {
  constexpr int kVectors = kManyRegisters ? (GT <= 4 ? 4 : 2) : (GT <= 2 ? 4 : 2);
  constexpr int kStep = kVectors * kLanes;
  const int tokens = blocks * kBlock;
  int token = 0;
  for (; token + kStep <= tokens; token += kStep) {
    Step<L, GT, kVectors>(keys, token, q, s + token);
  }
  // What is left in as few walks over d as possible.
  constexpr int kBlockVectors = std::max(1, kBlock / kLanes);
  const int left = (tokens - token) / kBlock;
  if constexpr (kStep >= 4 * kBlock)
    if (left == 3) return Step<L, GT, 3 * kBlockVectors>(keys, token, q, s + token);
  if constexpr (kStep >= 3 * kBlock)
    if (left == 2) return Step<L, GT, 2 * kBlockVectors>(keys, token, q, s + token);
  if constexpr (kStep >= 2 * kBlock)
    if (left == 1) return Step<L, GT, kBlockVectors>(keys, token, q, s + token);
}

// ---- 2. softmax ----------------------------------------------------------------------------------------------------

// Turns `tokens` unscaled logits of one head into weights; updates the head's maximum and sum. Returns the factor for
// what was summed before.
HWY_INLINE float Softmax(const Part& part, int tokens, float* HWY_RESTRICT s, float& largest, float& weight) {
  const DF df;
  const VF minus_infinity = hn::Set(df, -HUGE_VALF);
  const VF scale = hn::Set(df, part.scale);
  const VF finite = hn::Set(df, std::numeric_limits<float>::max());
  VF top = minus_infinity;
  for (int j = 0; j < tokens; j += kLanes) {
    VF logit = hn::Mul(hn::LoadU(df, s + j), scale);
    auto valid = hn::Le(hn::Abs(logit), finite);  // false for NaN
    if (part.soft_cap > 0.0F) {
      const VF bounded = hn::IfThenElseZero(valid, hn::Div(logit, hn::Set(df, part.soft_cap)));
      logit = hn::Mul(cpu::HWY_NAMESPACE::Tanh(df, bounded), hn::Set(df, part.soft_cap));
    }
    if (j + kLanes > tokens) valid = hn::And(valid, hn::FirstN(df, static_cast<size_t>(tokens - j)));
    logit = hn::IfThenElse(valid, logit, minus_infinity);
    hn::StoreU(logit, df, s + j);
    top = hn::Max(top, logit);
  }
  const float before = largest;
  largest = std::max(before, hn::GetLane(hn::MaxOfLanes(df, top)));
  if (largest == -HUGE_VALF) {
    for (int j = 0; j < tokens; j += kLanes) hn::StoreU(hn::Zero(df), df, s + j);
    return 0.0F;
  }
  const VF shift = hn::Set(df, largest);
  const VF log2e = hn::Set(df, 0x1.715476p+0F);
  VF sum = hn::Zero(df);
  for (int j = 0; j < tokens; j += kLanes) {
    const VF p = cpu::HWY_NAMESPACE::Exp2(df, hn::Mul(hn::Sub(hn::LoadU(df, s + j), shift), log2e));
    hn::StoreU(p, df, s + j);
    sum = hn::Add(sum, p);
  }
  const float factor = std::exp(before - largest);
  weight = weight * factor + hn::GetLane(hn::SumOfLanes(df, sum));
  return factor;
}

// ---- 3. values -----------------------------------------------------------------------------------------------------

// The values of a tile and what comes after it.
struct ValueRange {
  const std::byte* v;
  int64_t row_bytes;
  int dims;  // dv, padded
  int tokens;
  const std::byte* next_keys;  // asked into the cache meanwhile
};

// sum[head, column ..) = factor[head] * sum + weights V for VT vectors of dims.
template <class L, int GT, int VT>
HWY_INLINE void ValueStep(const ValueRange& range, int column, const float* HWY_RESTRICT s,
                          const float* HWY_RESTRICT factor, float* HWY_RESTRICT sum) {
  const DF df;
  VF acc[GT][VT];
  for (int h = 0; h < GT; ++h)
    for (int i = 0; i < VT; ++i)
      acc[h][i] = hn::Mul(hn::Set(df, factor[h]), hn::LoadU(df, sum + h * range.dims + column + i * kLanes));
  const std::byte* next_keys = range.next_keys + int64_t{column} * range.tokens * L::kBytes;
  for (int j = 0; j < range.tokens; ++j) {
    Fetch<VT * kLanes * L::kBytes>(next_keys, j);
    VF p[GT];
    for (int h = 0; h < GT; ++h) p[h] = hn::Set(df, s[h * kTile + j]);
    const std::byte* row = range.v + j * range.row_bytes;
    for (int i = 0; i < VT; ++i) {
      VF value;
      if constexpr (std::is_same_v<L, LoadQ8>) {
        const int c = column + i * kLanes;
        const std::byte* block = row + c / 32 * 34;
        value = hn::Mul(hn::Set(df, LoadElement(block, DType::kF16, 0)),
                        LoadI8(reinterpret_cast<const int8_t*>(block + 2 + c % 32)));
      } else {
        value = L::Load(df, row + (column + i * kLanes) * L::kBytes);
      }
      for (int h = 0; h < GT; ++h) acc[h][i] = hn::MulAdd(p[h], value, acc[h][i]);
    }
  }
  for (int h = 0; h < GT; ++h)
    for (int i = 0; i < VT; ++i) hn::StoreU(acc[h][i], df, sum + h * range.dims + column + i * kLanes);
}

template <class L, int GT>
HWY_NOINLINE void Values(const ValueRange& range, const float* s, const float* factor, float* sum) {
  constexpr int kMost = kManyRegisters ? (GT <= 3 ? 8 : GT <= 7 ? 4 : 2) : (GT == 1 ? 8 : GT <= 3 ? 4 : 2);
  int column = 0;
  for (; column + kMost * kLanes <= range.dims; column += kMost * kLanes)
    ValueStep<L, GT, kMost>(range, column, s, factor, sum);
  if constexpr (kMost > 4)
    for (; column + 4 * kLanes <= range.dims; column += 4 * kLanes) ValueStep<L, GT, 4>(range, column, s, factor, sum);
  if constexpr (kMost > 2)
    for (; column + 2 * kLanes <= range.dims; column += 2 * kLanes) ValueStep<L, GT, 2>(range, column, s, factor, sum);
  for (; column < range.dims; column += kLanes) ValueStep<L, GT, 1>(range, column, s, factor, sum);
}

// ---- the part ------------------------------------------------------------------------------------------------------

// Calls f with the number of heads as a constant.
template <class F>
HWY_INLINE void WithGroupTile(int heads, F&& f) {
  switch (heads) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
  }
  if constexpr (kMaxGroupTile > 4) {
    switch (heads) {
      case 5:
        return f(std::integral_constant<int, 5>());
      case 6:
        return f(std::integral_constant<int, 6>());
      case 7:
        return f(std::integral_constant<int, 7>());
      case 8:
        return f(std::integral_constant<int, 8>());
    }
  }
}

template <class L>
void AttendTyped(const Part& part, int64_t block_bytes, int64_t row_bytes) {
  HWY_ALIGN float s[16 * kTile];
  float factor[16];
  const int pieces = (part.group + kMaxGroupTile - 1) / kMaxGroupTile;
  const auto piece_begin = [&](int piece) { return part.group * piece / pieces; };
  std::fill_n(part.largest, part.group, -HUGE_VALF);
  std::fill_n(part.weight, part.group, 0.0F);
  std::fill_n(part.sum, static_cast<size_t>(part.group) * part.value_dim, 0.0F);
  for (int begin = part.begin; begin < part.end; begin += kTile) {
    const int tokens = std::min(kTile, part.end - begin);
    const std::byte* v = part.v + begin * row_bytes;
    const KeyRange keys{part.k + begin / kBlock * block_bytes, block_bytes, part.key_dim, v};
    const std::byte* next_keys = keys.k;  // in the cache already: nothing is asked for
    if (begin + kTile < part.end) {
      next_keys = keys.k + kTile / kBlock * block_bytes;
    } else if (part.next_k != nullptr) {
      next_keys = part.next_k;
    }
    const ValueRange values{v, row_bytes, part.value_dim, tokens, next_keys};
    for (int piece = 0; piece < pieces; ++piece) {
      const int head = piece_begin(piece);
      WithGroupTile(piece_begin(piece + 1) - head, [&](auto heads) {
        Logits<L, heads>(keys, (tokens + kBlock - 1) / kBlock, part.q + head * part.key_dim, s + head * kTile);
      });
    }
    for (int head = 0; head < part.group; ++head)
      factor[head] = Softmax(part, tokens, s + head * kTile, part.largest[head], part.weight[head]);
    for (int piece = 0; piece < pieces; ++piece) {
      const int head = piece_begin(piece);
      WithGroupTile(piece_begin(piece + 1) - head, [&](auto heads) {
        Values<L, heads>(values, s + head * kTile, factor + head, part.sum + head * part.value_dim);
      });
    }
  }
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

void AttendPart(const Part& part) {
  switch (part.dtype) {
    case DType::kF32:
      return AttendTyped<LoadF32>(part, 64 * part.key_dim, 4 * part.value_dim);
    case DType::kF16:
      return AttendTyped<LoadF16>(part, 32 * part.key_dim, 2 * part.value_dim);
    case DType::kBF16:
      return AttendTyped<LoadBF16>(part, 32 * part.key_dim, 2 * part.value_dim);
    case DType::kQ8_0:
      return AttendTyped<LoadQ8>(part, 17 * part.key_dim, 34 * part.value_dim / 32);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::ragged
HWY_AFTER_NAMESPACE();

#endif  // include guard
