// Rows of a cache of any dtype and layout as float32 tiles [token, dim], with NaN and Inf found on the way.
//
// Copying a tile costs one load and one store per 16 elements against r multiply-adds per element in the products that
// follow, and buys: one kernel for every dtype, layout and cell order; no cache set conflicts (kTilePadding); values
// already centred.

#if defined(DROPKV_CPU_KERNELS_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DROPKV_CPU_KERNELS_LOAD_INL_H_
#undef DROPKV_CPU_KERNELS_LOAD_INL_H_
#else
#define DROPKV_CPU_KERNELS_LOAD_INL_H_
#endif

#include <cstring>
#include <limits>

#include "core/element.h"
#include "cpu/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dropkv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
inline constexpr int32_t kLanes = hn::MaxLanes(FloatTag());

// Largest vector of `kMax` floats or fewer.
template <int kMax>
using ShortTag = hn::CappedTag<float, kMax>;

// Exponent bits all set: NaN or Inf.
inline constexpr uint32_t kNonFiniteBits = 0x7F800000U;

template <class D>
using Bits = hn::Vec<hn::RebindToUnsigned<D>>;

template <class D, class V>
HWY_INLINE Bits<D> MagnitudeBits(D, V x) {
  return hn::BitCast(hn::RebindToUnsigned<D>(), hn::Abs(x));
}

struct LoadF32 {
  static constexpr int64_t kBytes = 4;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    return hn::LoadU(d, reinterpret_cast<const float*>(from));
  }
};

struct LoadBF16 {
  static constexpr int64_t kBytes = 2;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> half;
    const auto raw = hn::LoadU(half, reinterpret_cast<const uint16_t*>(from));
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, raw)));
  }
};

struct LoadF16 {
  static constexpr int64_t kBytes = 2;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::byte* from) {
#if HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
    const hn::Rebind<hwy::float16_t, D> half;
    return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
#else
    // Highway's own emulation does not keep NaN and Inf. Exponent and mantissa in place, times 2^112, are exact for
    // normal and subnormal halves.
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> half;
    const auto raw = hn::PromoteTo(du, hn::LoadU(half, reinterpret_cast<const uint16_t*>(from)));
    const auto magnitude = hn::And(raw, hn::Set(du, 0x7FFFU));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(raw, magnitude));
    const auto value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112F));
    const hn::RebindToSigned<D> di;  // compares of unsigned numbers are emulated on old instruction sets
    const auto large = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7BFF));
    const auto special = hn::IfThenElseZero(hn::RebindMask(du, large), hn::Set(du, kNonFiniteBits));
    return hn::BitCast(d, hn::Or(hn::Or(hn::BitCast(du, value), special), sign));
#endif
  }
};

// Copies elements [from, dim) of one row, as many at a time as D holds; returns where it stopped.
template <class Loader, class D>
HWY_INLINE int32_t CopyPart(D d, const std::byte* row, int32_t from, int32_t dim, const float* center, float* out,
                            Bits<D>& largest) {
  constexpr int32_t kStep = hn::MaxLanes(D());
  int32_t i = from;
  for (; i + kStep <= dim; i += kStep) {
    const auto x = Loader::Load(d, row + i * Loader::kBytes);
    largest = hn::Max(largest, MagnitudeBits(d, x));
    hn::StoreU(center != nullptr ? hn::Sub(x, hn::LoadU(d, center + i)) : x, d, out + i);
  }
  return i;
}

// Largest magnitude bits of the rows seen so far, still one per lane.
struct Largest {
  Bits<FloatTag> whole;
  Bits<ShortTag<8>> tail;

  // Not by initialisers of the members: the implicit constructor would be compiled for the baseline.
  HWY_INLINE Largest()
      : whole(hn::Zero(hn::RebindToUnsigned<FloatTag>())), tail(hn::Zero(hn::RebindToUnsigned<ShortTag<8>>())) {}

  template <class D>
  static uint32_t Lane(D, Bits<D> bits) {
    HWY_ALIGN uint32_t lanes[hn::MaxLanes(D())];
    hn::Store(bits, hn::RebindToUnsigned<D>(), lanes);
    return *std::max_element(lanes, lanes + hn::MaxLanes(D()));
  }
  uint32_t value() const { return std::max(Lane(FloatTag(), whole), Lane(ShortTag<8>(), tail)); }
};

// One contiguous row. `dim` is a multiple of 8, so only vectors of 16 leave a tail.
template <class Loader>
struct CopyRow {
  static HWY_INLINE void Run(const std::byte* row, int32_t dim, const float* center, float* out, Largest& largest) {
    const int32_t done = CopyPart<Loader>(FloatTag(), row, 0, dim, center, out, largest.whole);
    if (done < dim) CopyPart<Loader>(ShortTag<8>(), row, done, dim, center, out, largest.tail);
  }
};

// q8_0: blocks of 32 with a half as scale.
struct CopyRowQ8 {
  static HWY_INLINE void Run(const std::byte* row, int32_t dim, const float* center, float* out, Largest& largest) {
    const FloatTag d;
    const hn::Rebind<int8_t, FloatTag> d8;
    const hn::RebindToSigned<FloatTag> di;
    for (int32_t block = 0; block < dim; block += kQ8BlockElements, row += kQ8BlockBytes) {
      uint16_t half;
      std::memcpy(&half, row, sizeof(half));
      const auto scale = hn::Set(d, HalfToFloat(half));
      const auto* quants = reinterpret_cast<const int8_t*>(row + 2);
      for (int32_t i = 0; i < kQ8BlockElements; i += kLanes) {
        const auto x = hn::Mul(scale, hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, quants + i))));
        largest.whole = hn::Max(largest.whole, MagnitudeBits(d, x));
        const auto y = center != nullptr ? hn::Sub(x, hn::LoadU(d, center + block + i)) : x;
        hn::StoreU(y, d, out + block + i);
      }
    }
  }
};

// Any other strides, one element at a time.
inline uint32_t CopyRowStrided(const HeadTensor& tensor, int64_t cell, const float* center, float* out) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < tensor.dim; ++i) {
    const float x = LoadElement(tensor.data, tensor.dtype, cell * tensor.token_stride + i * tensor.dim_stride);
    largest = std::max(largest, std::bit_cast<uint32_t>(x) & 0x7FFFFFFFU);
    out[i] = center != nullptr ? x - center[i] : x;
  }
  return largest;
}

// Calls f.operator()<Copier>() with the copier of a contiguous row of `dtype`.
template <class F>
HWY_INLINE uint32_t WithCopier(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<CopyRow<LoadF32>>();
    case DType::kF16:
      return f.template operator()<CopyRow<LoadF16>>();
    case DType::kBF16:
      return f.template operator()<CopyRow<LoadBF16>>();
    case DType::kQ8_0:
      return f.template operator()<CopyRowQ8>();
  }
  return kNonFiniteBits;
}

inline const std::byte* RowStart(const HeadTensor& tensor, int64_t cell) {
  return tensor.data + DTypeBytes(tensor.dtype, cell * tensor.token_stride);
}

// Rows of floats that a product reads.
struct Rows {
  const float* first = nullptr;
  int64_t stride = 0;
};

// |row|^2; `dim` is a multiple of 8.
HWY_INLINE float SquaredNorm(const float* row, int32_t dim) {
  const FloatTag d;
  const ShortTag<8> d8;
  auto sum = hn::Zero(d);
  int32_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const auto x = hn::LoadU(d, row + i);
    sum = hn::MulAdd(x, x, sum);
  }
  float norm = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < dim; i += static_cast<int32_t>(hn::MaxLanes(ShortTag<8>()))) {
    const auto x = hn::LoadU(d8, row + i);
    norm += hn::GetLane(hn::SumOfLanes(d8, hn::Mul(x, x)));
  }
  return norm;
}

// Where a tile goes: rows [kTile, dim + kTilePadding] and, where wanted, their squared norms [kTile], taken while the
// row is still in the first-level cache.
struct TileRows {
  float* rows;
  float* norms;
};

// Rows [begin, begin + count) of any layout to `out`; returns the largest magnitude's bits.
inline uint32_t CopyRows(const HeadTokens& tokens, const HeadTensor& tensor, const float* center, int32_t begin,
                         int32_t count, const TileRows& out) {
  const int32_t stride = tensor.dim + kTilePadding;
  if (tensor.dim_stride != 1) {
    uint32_t largest = 0;
    for (int32_t t = 0; t < count; ++t) {
      float* row = out.rows + t * stride;
      largest = std::max(largest, CopyRowStrided(tensor, tokens.cell(begin + t), center, row));
      if (out.norms != nullptr) out.norms[t] = SquaredNorm(row, tensor.dim);
    }
    return largest;
  }
  return WithCopier(tensor.dtype, [&]<class Copier>() HWY_ATTR {
    Largest largest;
    for (int32_t t = 0; t < count; ++t) {
      float* row = out.rows + t * stride;
      Copier::Run(RowStart(tensor, tokens.cell(begin + t)), tensor.dim, center, row, largest);
      if (out.norms != nullptr) out.norms[t] = SquaredNorm(row, tensor.dim);
    }
    return largest.value();
  });
}

// The same where the tokens lie side by side for every dim: converts along the tokens, then transposes.
template <class Loader>
HWY_INLINE uint32_t CopyColumns(const HeadTensor& tensor, int64_t cell, int32_t count, const float* center,
                                const TileScratch& scratch, const TileRows& out) {
  const FloatTag d;
  for (int32_t i = 0; i < tensor.dim; ++i) {
    const std::byte* column = tensor.data + (cell + i * tensor.dim_stride) * Loader::kBytes;
    float* to = scratch.columns + i * kTile;
    int32_t t = 0;
    for (; t + kLanes <= count; t += kLanes) hn::StoreU(Loader::Load(d, column + t * Loader::kBytes), d, to + t);
    for (; t < count; ++t) to[t] = hn::GetLane(Loader::Load(ShortTag<1>(), column + t * Loader::kBytes));
  }
  Largest largest;
  for (int32_t t = 0; t < count; ++t) {
    float* row = out.rows + t * (tensor.dim + kTilePadding);
    for (int32_t i = 0; i < tensor.dim; ++i) row[i] = scratch.columns[i * kTile + t];
    CopyRow<LoadF32>::Run(reinterpret_cast<const std::byte*>(row), tensor.dim, center, row, largest);
    if (out.norms != nullptr) out.norms[t] = SquaredNorm(row, tensor.dim);
  }
  return largest.value();
}

inline bool LiesInColumns(const HeadTokens& tokens, const HeadTensor& tensor) {
  return tokens.cells == nullptr && tokens.subset == nullptr && tensor.token_stride == 1 && tensor.dim_stride != 1 &&
         tensor.dtype != DType::kQ8_0;
}

inline bool LoadRow(const HeadTensor& tensor, int64_t cell, const float* center, float* out) {
  uint32_t largest = 0;
  if (tensor.dim_stride != 1) {
    largest = CopyRowStrided(tensor, cell, center, out);
  } else {
    largest = WithCopier(tensor.dtype, [&]<class Copier>() HWY_ATTR {
      Largest of_row;
      Copier::Run(RowStart(tensor, cell), tensor.dim, center, out, of_row);
      return of_row.value();
    });
  }
  if (largest < kNonFiniteBits) return true;
  std::fill_n(out, tensor.dim, 0.0F);
  return false;
}

// Tokens [begin, begin + count) to `out`; rows up to kTile are zeroed. Marks bad tokens, whose rows become 0, in
// scratch.bad. Returns the largest magnitude before centring, infinite where a token is bad.
inline float LoadTile(const HeadTokens& tokens, const HeadTensor& tensor, const float* center, int32_t begin,
                      int32_t count, const TileScratch& scratch, const TileRows& out) {
  const int32_t stride = tensor.dim + kTilePadding;
  uint32_t largest = 0;
  if (!LiesInColumns(tokens, tensor)) {
    largest = CopyRows(tokens, tensor, center, begin, count, out);
  } else if (tensor.dtype == DType::kF32) {
    largest = CopyColumns<LoadF32>(tensor, begin, count, center, scratch, out);
  } else if (tensor.dtype == DType::kF16) {
    largest = CopyColumns<LoadF16>(tensor, begin, count, center, scratch, out);
  } else {
    largest = CopyColumns<LoadBF16>(tensor, begin, count, center, scratch, out);
  }
  for (int32_t t = count; t < kTile; ++t) std::fill_n(out.rows + t * stride, tensor.dim, 0.0F);
  if (largest < kNonFiniteBits) return std::bit_cast<float>(largest);
  // Rare: which tokens it was.
  for (int32_t t = 0; t < count; ++t) {
    float* row = out.rows + t * stride;
    if (!LoadRow(tensor, tokens.cell(begin + t), center, row)) scratch.bad[t] = 1;
    if (out.norms != nullptr) out.norms[t] = SquaredNorm(row, tensor.dim);
  }
  return std::numeric_limits<float>::infinity();
}

// Fetches the next tile's bytes into the second-level cache, a few lines at a time, while the present tile is computed:
// a tile that is first touched when it is copied waits for memory, and the arithmetic with it. More lines at once would
// wait themselves: a core has a dozen buffers for lines under way.
class NextTile {
 public:
  // values: whether they are read. steps: how often Step will be called, about.
  NextTile(const HeadTokens& tokens, bool values, int32_t begin, int32_t end, int32_t steps)
      : tokens_(tokens), begin_(begin), rows_(std::max(0, std::min(kTile, end - begin))) {
    const int32_t keys = Parts(tokens.k);
    key_parts_ = keys;
    parts_ = rows_ > 0 ? keys + (values ? Parts(tokens.v) : 0) : 0;
    const int64_t lines = int64_t{keys} * Lines(tokens.k) + (values ? int64_t{Parts(tokens.v)} * Lines(tokens.v) : 0);
    per_step_ = static_cast<int32_t>((lines + steps - 1) / steps);
  }

  HWY_INLINE void Step() {
    for (int32_t i = 0; i < per_step_; ++i) {
      if (left_ == 0 && !Advance()) return;
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
      --left_;
    }
  }

 private:
  static constexpr int32_t kLine = 64;

  // A part is one row or, in columns, one dim of all tokens; where the rows leave no gaps, all of them.
  static bool InRows(const HeadTensor& tensor) { return tensor.dim_stride == 1; }
  bool WithoutGaps(const HeadTensor& tensor) const {
    return InRows(tensor) && tensor.token_stride == tensor.dim && tokens_.cells == nullptr && tokens_.subset == nullptr;
  }
  int32_t Parts(const HeadTensor& tensor) const {
    if (WithoutGaps(tensor)) return 1;
    return InRows(tensor) ? rows_ : tensor.dim;
  }
  int32_t Lines(const HeadTensor& tensor) const {
    const int64_t rows = WithoutGaps(tensor) ? rows_ : 1;
    const int64_t elements = InRows(tensor) ? rows * tensor.dim : rows_;
    return static_cast<int32_t>((DTypeBytes(tensor.dtype, elements) + kLine - 1) / kLine);
  }

  HWY_INLINE bool Advance() {
    if (part_ >= parts_) return false;
    const bool key = part_ < key_parts_;
    const HeadTensor& tensor = key ? tokens_.k : tokens_.v;
    const int32_t part = key ? part_ : part_ - key_parts_;
    const bool row = InRows(tensor);
    const int64_t element =
        tokens_.cell(begin_ + (row ? part : 0)) * tensor.token_stride + (row ? 0 : part * tensor.dim_stride);
    at_ = tensor.data + DTypeBytes(tensor.dtype, element);
    left_ = Lines(tensor);
    ++part_;
    return true;
  }

  const HeadTokens& tokens_;
  int32_t begin_;
  int32_t rows_;
  int32_t key_parts_;
  int32_t parts_;
  int32_t per_step_;
  int32_t part_ = 0;
  int32_t left_ = 0;
  const std::byte* at_ = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace dropkv::cpu
HWY_AFTER_NAMESPACE();

#endif  // DROPKV_CPU_KERNELS_LOAD_INL_H_
