// Test cases of the CPU kernels: one structure describes a case completely and prints itself.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <ostream>
#include <string>
#include <vector>

#include "core/element.h"
#include "core/random.h"
#include "dropkv/engine.h"

namespace dropkv::cpu {

enum class Layout { kHeadMajor, kTokenMajor, kTransposedV };

enum class Content {
  kNormal,
  kDominant,   // row i's greatest key stands above the others by a gap that grows with i: p from 1/2 to 1
  kEqualKeys,  // all keys the same
  kLarge,      // logits of some thousands
  kOffset,     // values around 1000
  kNonFinite,  // NaN and Inf in some keys, values and queries
  kHuge,       // products beyond the range of floats
};

struct ScoreCase {
  int32_t kv_heads = 2;
  int32_t group = 4;
  int32_t rows = 8;
  int32_t tokens = 151;
  int32_t key_dim = 64;
  int32_t value_dim = 64;
  Layout layout = Layout::kHeadMajor;
  DType dtype = DType::kF32;
  bool cells = false;       // tokens lie in permuted cells, with gaps
  bool misaligned = false;  // tensors start at an address that is a multiple of 2 only
  Content content = Content::kNormal;
  float soft_cap = 0.0F;
  bool sinks = false;
  bool any_visible = false;  // visible counts in no order, 0 and 1 among them
  int32_t generated = 0;     // of the tokens: the last ones are no candidates
  bool weights = false;      // rows count differently, some not at all

  int32_t candidates() const { return tokens - generated; }
  int32_t query_heads() const { return kv_heads * group; }
  int32_t head_rows() const { return group * rows; }
};

inline std::ostream& operator<<(std::ostream& out, const ScoreCase& c) {
  static constexpr const char* kLayouts[] = {"head-major", "token-major", "transposed V"};
  static constexpr const char* kContents[] = {"normal", "dominant",   "equal keys", "large",
                                              "offset", "non-finite", "huge"};
  out << "Hkv " << c.kv_heads << " g " << c.group << " w " << c.rows << " n " << c.tokens << " d " << c.key_dim
      << " dv " << c.value_dim << " " << kLayouts[static_cast<int>(c.layout)] << " " << DTypeName(c.dtype) << " "
      << kContents[static_cast<int>(c.content)];
  if (c.cells) out << " cells";
  if (c.misaligned) out << " misaligned";
  if (c.soft_cap > 0.0F) out << " soft cap " << c.soft_cap;
  if (c.sinks) out << " sinks";
  if (c.any_visible) out << " any visible counts";
  if (c.generated > 0) out << " generated " << c.generated;
  if (c.weights) out << " weights";
  return out;
}

// Numbers of a stream: the same on every machine.
class RandomStream {
 public:
  explicit RandomStream(uint64_t seed) : seed_(seed) {}
  float Uniform() { return RandomUniform(seed_, counter_++); }
  float Normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform()));
    return static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * Uniform()));
  }
  // 0 to count-1.
  int32_t Below(int32_t count) { return static_cast<int32_t>(Uniform() * static_cast<float>(count)); }

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

// Owns a tensor in any layout; everything that no token owns is NaN.
class StoredTensor {
 public:
  StoredTensor(const ScoreCase& c, int32_t dim, bool transposed) : dim_(dim), dtype_(c.dtype) {
    const int64_t capacity = c.tokens + 7;
    const int64_t padded = dim + 32;
    if (transposed && c.dtype != DType::kQ8_0) {
      tensor_ = {nullptr, dtype_, capacity * dim, 1, capacity};
    } else if (c.layout == Layout::kHeadMajor) {
      tensor_ = {nullptr, dtype_, capacity * padded, padded, 1};
    } else {
      tensor_ = {nullptr, dtype_, padded, c.kv_heads * padded, 1};
    }
    const int64_t elements = c.kv_heads * capacity * padded;
    bytes_.assign(DTypeBytes(dtype_, elements) + 64, 0xFF);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    start_ = (64 - address % 64) % 64 + (c.misaligned ? 2 : 0);
  }

  // Writes one token's row.
  void Write(int32_t head, int64_t cell, const float* row) {
    const int64_t first = head * tensor_.head_stride + cell * tensor_.token_stride;
    if (dtype_ == DType::kQ8_0) return WriteQ8(first, row);
    for (int32_t i = 0; i < dim_; ++i) {
      const int64_t at = first + i * tensor_.dim_stride;
      const uint16_t half = dtype_ == DType::kF16 ? FloatToHalf(row[i]) : FloatToBFloat(row[i]);
      if (dtype_ == DType::kF32) {
        std::memcpy(data() + at * 4, row + i, 4);
      } else {
        std::memcpy(data() + at * 2, &half, 2);
      }
    }
  }

  KvTensor view() {
    KvTensor tensor = tensor_;
    tensor.data = data();
    return tensor;
  }

 private:
  unsigned char* data() { return bytes_.data() + start_; }

  void WriteQ8(int64_t first, const float* row) {
    for (int32_t begin = 0; begin < dim_; begin += kQ8BlockElements) {
      unsigned char* block = data() + (first + begin) / kQ8BlockElements * kQ8BlockBytes;
      float largest = 0.0F;
      bool finite = true;
      for (int32_t i = begin; i < begin + kQ8BlockElements; ++i) {
        finite = finite && std::isfinite(row[i]);
        largest = std::max(largest, std::abs(row[i]));
      }
      const uint16_t scale = FloatToHalf(finite ? largest / 127.0F : NAN);
      std::memcpy(block, &scale, 2);
      const float inverse = finite && largest > 0.0F ? 127.0F / largest : 0.0F;
      for (int32_t i = 0; i < kQ8BlockElements; ++i)
        block[2 + i] =
            static_cast<unsigned char>(static_cast<int8_t>(finite ? std::lrint(row[begin + i] * inverse) : 1));
    }
  }

  int32_t dim_;
  DType dtype_;
  KvTensor tensor_;
  std::vector<unsigned char> bytes_;
  size_t start_ = 0;
};

// The buffers of a case, and views of them.
class CaseData {
 public:
  explicit CaseData(const ScoreCase& c, uint64_t seed = 0)
      : case_(c), seed_(16 * seed), k_(c, c.key_dim, false), v_(c, c.value_dim, c.layout == Layout::kTransposedV) {
    MakeQueries();
    MakeCells();
    MakeTokens();
    for (int32_t i = 0; i < c.rows; ++i) weights_.push_back(0.25F * static_cast<float>((7 * i + 1) % 11));
    for (int32_t i = 0; i < c.rows; ++i)
      visible_.push_back(c.any_visible ? i * i * 37 % (c.tokens + 1) : std::max(0, c.tokens - c.rows + i + 1));
    for (int32_t h = 0; h < c.query_heads(); ++h) sinks_.push_back(0.3F * static_cast<float>(h) - 1.0F);
  }

  KvView kv() {
    return {case_.kv_heads,
            case_.tokens,
            case_.key_dim,
            case_.value_dim,
            k_.view(),
            v_.view(),
            case_.cells ? cells_.data() : nullptr};
  }
  ObservationRows rows() const {
    return {q_.data(),       int64_t{case_.rows} * case_.key_dim,      case_.key_dim, case_.query_heads(), case_.rows,
            visible_.data(), case_.weights ? weights_.data() : nullptr};
  }
  AttentionSpec attention() const {
    return {1.0F / std::sqrt(static_cast<float>(case_.key_dim)), case_.soft_cap, case_.sinks ? sinks_.data() : nullptr};
  }
  LayerInput input() { return {kv(), rows(), attention(), nullptr, nullptr, 0}; }

 private:
  void MakeQueries() {
    RandomStream random(seed_ + 1);
    float scale = 1.0F;
    if (case_.content == Content::kLarge) scale = 400.0F;
    if (case_.content == Content::kHuge) scale = 1e30F;
    for (int64_t i = 0; i < int64_t{case_.query_heads()} * case_.rows * case_.key_dim; ++i)
      q_.push_back(scale * random.Normal());
    if (case_.content != Content::kNonFinite) return;
    q_[3] = NAN;
    if (case_.query_heads() > 1) q_[static_cast<size_t>(case_.rows) * case_.key_dim] = INFINITY;
  }

  void MakeCells() {
    RandomStream random(seed_ + 2);
    for (int32_t j = 0; j < case_.tokens + 7; ++j) cells_.push_back(j);
    for (size_t j = cells_.size() - 1; j > 0; --j)
      std::swap(cells_[j], cells_[static_cast<size_t>(random.Uniform() * static_cast<float>(j))]);
    cells_.resize(case_.tokens);
  }

  void MakeTokens() {
    RandomStream random(seed_ + 3);
    std::vector<float> key(case_.key_dim);
    std::vector<float> value(case_.value_dim);
    for (int32_t head = 0; head < case_.kv_heads; ++head)
      for (int32_t j = 0; j < case_.tokens; ++j) {
        if (case_.content != Content::kEqualKeys || j == 0)
          for (float& x : key) x = random.Normal();
        for (float& x : value) x = random.Normal() + (case_.content == Content::kOffset ? 1000.0F : 0.0F);
        if (case_.content == Content::kHuge) std::for_each(key.begin(), key.end(), [](float& x) { x *= 1e20F; });
        if (case_.content == Content::kDominant) FavourRow(head, j, key);
        if (case_.content == Content::kNonFinite) Spoil(head, j, key, value);
        const int64_t cell = case_.cells ? cells_[j] : j;
        k_.Write(head, cell, key.data());
        v_.Write(head, cell, value.data());
      }
  }

  // Token 5 * id is turned towards row id of the group, further for every row: shares from about 1/2 up to 1.
  void FavourRow(int32_t head, int32_t token, std::vector<float>& key) const {
    const int32_t id = token / 5;
    if (token % 5 != 0 || id >= case_.head_rows()) return;
    const float* q = q_.data() + (int64_t{head} * case_.head_rows() + id) * case_.key_dim;
    float norm = 0.0F;
    for (int32_t i = 0; i < case_.key_dim; ++i) norm += q[i] * q[i];
    const float logit = 5.0F + static_cast<float>(id % 16) * 1.6F;
    for (int32_t i = 0; i < case_.key_dim; ++i)
      key[i] = q[i] * logit * std::sqrt(static_cast<float>(case_.key_dim)) / norm;
  }

  void Spoil(int32_t head, int32_t token, std::vector<float>& key, std::vector<float>& value) const {
    if (token % 29 == 7) key[token % case_.key_dim] = NAN;
    if (token % 31 == 11) value[token % case_.value_dim] = head == 0 ? -INFINITY : NAN;
    if (token == case_.tokens - 2) key[0] = INFINITY;
  }

  ScoreCase case_;
  uint64_t seed_;
  StoredTensor k_;
  StoredTensor v_;
  std::vector<float> q_;
  std::vector<int32_t> cells_;
  std::vector<int32_t> visible_;
  std::vector<float> weights_;
  std::vector<float> sinks_;
};

// Shapes, layouts, dtypes and contents, each varied around an ordinary case.
inline std::vector<ScoreCase> AllCases() {
  std::vector<ScoreCase> cases;
  const auto add = [&cases](auto&& change) {
    ScoreCase c;
    change(c);
    cases.push_back(c);
  };
  for (const auto& [d, dv] :
       {std::pair{8, 8}, {64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {24, 40}, {128, 64}})
    add([&, d = d, dv = dv](ScoreCase& c) { c.key_dim = d, c.value_dim = dv; });
  for (const auto& [g, w] : {std::pair{1, 1}, {1, 8}, {1, 128}, {3, 32}, {7, 8}, {8, 32}, {16, 8}, {16, 128}})
    add([&, g = g, w = w](ScoreCase& c) { c.kv_heads = 1, c.group = g, c.rows = w; });
  for (const int32_t n : {1, 8, 9, 47, 48, 49, 151}) add([&](ScoreCase& c) { c.tokens = n, c.rows = std::min(n, 8); });
  add([&](ScoreCase& c) { c.tokens = 4099, c.kv_heads = 1; });
  add([&](ScoreCase& c) { c.tokens = 2200, c.kv_heads = 8, c.group = 1, c.rows = 2; });  // ranges joined or not
  add([&](ScoreCase& c) { c.tokens = 9001, c.kv_heads = 1, c.group = 1, c.rows = 3, c.content = Content::kDominant; });
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0})
    for (const Layout layout : {Layout::kHeadMajor, Layout::kTokenMajor, Layout::kTransposedV})
      for (const bool cells : {false, true})
        add([&](ScoreCase& c) {
          c.dtype = dtype, c.layout = layout, c.cells = cells, c.misaligned = cells, c.key_dim = 96, c.tokens = 101;
        });
  for (const Content content : {Content::kDominant, Content::kEqualKeys, Content::kLarge, Content::kOffset})
    for (const bool sinks : {false, true}) add([&](ScoreCase& c) { c.content = content, c.sinks = sinks; });
  for (const Layout layout : {Layout::kHeadMajor, Layout::kTransposedV})
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0})
      add([&](ScoreCase& c) { c.content = Content::kNonFinite, c.layout = layout, c.dtype = dtype; });
  for (const bool sinks : {false, true}) add([&](ScoreCase& c) { c.any_visible = true, c.sinks = sinks; });
  // Rows of the window's end and of all generated tokens; of generated ones alone; in any order.
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0})
    for (const bool weights : {false, true})
      add([&](ScoreCase& c) { c.generated = 5, c.rows = 13, c.dtype = dtype, c.weights = weights; });
  for (const Content content : {Content::kDominant, Content::kNonFinite, Content::kOffset})
    for (const bool sinks : {false, true})
      add([&](ScoreCase& c) {
        c.content = content, c.sinks = sinks, c.any_visible = sinks, c.generated = 40, c.weights = true;
      });
  add([&](ScoreCase& c) { c.generated = 9, c.rows = 9, c.soft_cap = 20.0F, c.layout = Layout::kTransposedV; });
  add([&](ScoreCase& c) { c.generated = 4, c.tokens = 5, c.rows = 5, c.weights = true; });
  add([&](ScoreCase& c) { c.kv_heads = 1, c.group = 16, c.rows = 128, c.weights = true, c.generated = 1; });
  add([&](ScoreCase& c) { c.tokens = 4099, c.kv_heads = 1, c.generated = 7, c.weights = true; });
  add([&](ScoreCase& c) { c.tokens = 5300, c.kv_heads = 1, c.group = 1, c.generated = 3100, c.rows = 2; });
  add([&](ScoreCase& c) { c.soft_cap = 20.0F; });
  add([&](ScoreCase& c) { c.soft_cap = 50.0F, c.sinks = true, c.content = Content::kDominant; });
  add([&](ScoreCase& c) { c.soft_cap = 30.0F, c.content = Content::kLarge; });
  return cases;
}

// Every element within its bound; NaN and infinities at the same places. Names the worst element.
template <class Got, class Want>
void ExpectWithin(const std::vector<Got>& got, const std::vector<Want>& want, const std::vector<double>& bound,
                  size_t per_bound, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  size_t worst = 0;
  double worst_ratio = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(got[i]);
    const auto y = static_cast<double>(want[i]);
    double ratio = std::abs(x - y) / bound[i / per_bound];
    if (x == y || (std::isnan(x) && std::isnan(y))) ratio = 0.0;
    if (std::isnan(ratio)) ratio = INFINITY;
    if (ratio <= worst_ratio) continue;
    worst_ratio = ratio;
    worst = i;
  }
  EXPECT_LE(worst_ratio, 1.0) << what << "[" << worst << "]: got " << got[worst] << ", expected " << want[worst]
                              << ", bound " << bound[worst / per_bound];
}

}  // namespace dropkv::cpu
