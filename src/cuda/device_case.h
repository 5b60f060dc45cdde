// Test cases of the CUDA kernels: a batch on the host, list by list as the reference takes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <vector>

#include "core/element.h"
#include "cpu/score_case.h"

namespace dropkv::cuda {

using cpu::Content;

enum class Layout { kHeadMajor, kTokenMajor, kPacked, kPaged, kRagged };

struct DeviceCase {
  std::vector<int32_t> lengths = {151, 63};  // of every sequence; ragged: list (b, h) has 13 h fewer
  int32_t kv_heads = 2;
  int32_t group = 4;
  int32_t rows = 8;
  int32_t key_dim = 64;
  int32_t value_dim = 64;
  Layout layout = Layout::kHeadMajor;
  DType dtype = DType::kBF16;
  int32_t block_size = 16;  // paged
  bool misaligned = false;  // rows start at odd addresses
  Content content = Content::kNormal;
  float soft_cap = 0.0F;
  bool sinks = false;
  bool any_visible = false;  // visible counts in no order, 0 and 1 among them
  int32_t splits = 3;
  bool odd_values = true;       // kNonFinite: in values too
  int32_t generated = 0;        // last tokens of every sequence, which are no candidates
  bool generated_each = false;  // counted by sequence, three fewer in each
  bool weights = false;         // of the rows, 0 among them

  int32_t sequences() const { return static_cast<int32_t>(lengths.size()); }
  int32_t head_rows() const { return group * rows; }
  int32_t lists() const { return sequences() * kv_heads; }
  int32_t max_tokens() const { return *std::max_element(lengths.begin(), lengths.end()); }
  int32_t generated_of(int32_t sequence) const {
    return std::clamp(generated - (generated_each ? 3 * sequence : 0), 0, lengths[sequence]);
  }
};

inline std::ostream& operator<<(std::ostream& out, const DeviceCase& c) {
  static constexpr const char* kLayouts[] = {"head-major", "token-major", "packed", "paged", "ragged"};
  static constexpr const char* kContents[] = {"normal", "dominant",   "equal keys", "large",
                                              "offset", "non-finite", "huge"};
  out << "n";
  for (const int32_t n : c.lengths) out << " " << n;
  out << " Hkv " << c.kv_heads << " g " << c.group << " w " << c.rows << " d " << c.key_dim << " dv " << c.value_dim
      << " " << kLayouts[static_cast<int>(c.layout)] << " " << DTypeName(c.dtype) << " "
      << kContents[static_cast<int>(c.content)] << " splits " << c.splits;
  if (c.layout == Layout::kPaged) out << " blocks of " << c.block_size;
  if (c.misaligned) out << " misaligned";
  if (c.soft_cap > 0.0F) out << " soft cap " << c.soft_cap;
  if (c.sinks) out << " sinks";
  if (c.any_visible) out << " any visible counts";
  if (c.generated > 0) out << " generated " << c.generated << (c.generated_each ? " and less" : "");
  if (c.weights) out << " weights";
  return out;
}

inline uint16_t Round(DType dtype, float x) { return dtype == DType::kF16 ? FloatToHalf(x) : FloatToBFloat(x); }
inline float Widen(DType dtype, uint16_t x) { return dtype == DType::kF16 ? HalfToFloat(x) : BFloatToFloat(x); }

// Keys [tokens, d] and values [tokens, dv] of one (sequence, KV head).
struct HostList {
  int32_t tokens = 0;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  std::vector<int32_t> visible;  // [w]
};

// The batch as the reference takes it: every list is a layer with one KV head.
class HostBatch {
 public:
  explicit HostBatch(const DeviceCase& c) : case_(c), random_(static_cast<uint64_t>(c.key_dim) + c.rows) {
    MakeQueries();
    for (int32_t list = 0; list < c.lists(); ++list) MakeList(list);
    for (int32_t h = 0; h < c.kv_heads * c.group; ++h) sinks_.push_back(0.3F * static_cast<float>(h) - 1.0F);
    for (int32_t b = 0; b < c.sequences(); ++b)
      for (int32_t i = 0; i < c.rows; ++i)
        weights_.push_back(i % 5 == 3 ? 0.0F : 0.3F + 0.4F * static_cast<float>((i * 7 + b) % 4));
  }

  // The same rows over some tokens of every list, the window's among them: ragged lists.
  HostBatch Kept(const std::vector<std::vector<int32_t>>& positions) const {
    HostBatch kept = *this;
    kept.case_.layout = Layout::kRagged;
    kept.case_.generated = 0;
    std::fill(kept.case_.lengths.begin(), kept.case_.lengths.end(), 0);
    for (int32_t list = 0; list < case_.lists(); ++list) {
      const HostList& all = lists_[list];
      HostList& data = kept.lists_[list];
      data = {static_cast<int32_t>(positions[list].size()), {}, {}, {}};
      for (const int32_t j : positions[list]) {
        data.k.insert(data.k.end(), &all.k[int64_t{j} * case_.key_dim], &all.k[int64_t{j + 1} * case_.key_dim - 1] + 1);
        data.v.insert(data.v.end(), &all.v[int64_t{j} * case_.value_dim],
                      &all.v[int64_t{j + 1} * case_.value_dim - 1] + 1);
      }
      for (int32_t i = 0; i < case_.rows; ++i)
        data.visible.push_back(std::clamp(data.tokens - case_.rows + i + 1, 0, data.tokens));
      int32_t& longest = kept.case_.lengths[list / case_.kv_heads];
      longest = std::max(longest, data.tokens);
    }
    return kept;
  }

  const DeviceCase& shape() const { return case_; }
  const std::vector<HostList>& lists() const { return lists_; }
  const std::vector<uint16_t>& q() const { return q16_; }  // [B, Hq, w, d]
  const std::vector<int32_t>& visible() const { return visible_; }
  const std::vector<float>& sinks() const { return sinks_; }
  const std::vector<float>& weights() const { return weights_; }  // [B, w]
  int32_t generated(int32_t list) const {
    return std::min(lists_[list].tokens, case_.generated_of(list / case_.kv_heads));
  }
  int32_t candidates(int32_t list) const { return lists_[list].tokens - generated(list); }

  KvView kv(int32_t list) const {
    const HostList& data = lists_[list];
    return {1,
            data.tokens,
            case_.key_dim,
            case_.value_dim,
            {data.k.data(), case_.dtype, 0, case_.key_dim, 1},
            {data.v.data(), case_.dtype, 0, case_.value_dim, 1},
            nullptr};
  }
  ObservationRows rows(int32_t list) const {
    const int64_t head = int64_t{case_.rows} * case_.key_dim;
    return {q_.data() + list * case_.group * head,
            head,
            case_.key_dim,
            case_.group,
            case_.rows,
            lists_[list].visible.data(),
            case_.weights ? &weights_[int64_t{list} / case_.kv_heads * case_.rows] : nullptr};
  }
  AttentionSpec attention(int32_t list) const {
    const int32_t first = list % case_.kv_heads * case_.group;
    return {1.0F / std::sqrt(static_cast<float>(case_.key_dim)), case_.soft_cap,
            case_.sinks ? sinks_.data() + first : nullptr};
  }

 private:
  void MakeQueries() {
    const float scale = case_.content == Content::kLarge ? 400.0F : 1.0F;
    const int64_t count = int64_t{case_.lists()} * case_.head_rows() * case_.key_dim;
    for (int64_t i = 0; i < count; ++i) q16_.push_back(Round(case_.dtype, scale * random_.Normal()));
    if (case_.content == Content::kNonFinite) {
      q16_[3] = Round(case_.dtype, NAN);
      q16_[static_cast<size_t>(case_.rows) * case_.key_dim] = Round(case_.dtype, INFINITY);
    }
    for (const uint16_t x : q16_) q_.push_back(Widen(case_.dtype, x));
    if (!case_.any_visible) return;
    for (const int32_t n : case_.lengths)
      for (int32_t i = 0; i < case_.rows; ++i) visible_.push_back(i * (i * 37 + n % 7) % (n + 1));
  }

  void MakeList(int32_t list) {
    const int32_t sequence = list / case_.kv_heads;
    const int32_t head = list % case_.kv_heads;
    HostList data;
    data.tokens = case_.lengths[sequence];
    if (case_.layout == Layout::kRagged) data.tokens = std::max(0, data.tokens - 13 * head);
    std::vector<float> key(case_.key_dim);
    std::vector<float> value(case_.value_dim);
    for (int32_t j = 0; j < data.tokens; ++j) {
      if (case_.content != Content::kEqualKeys || j == 0)
        for (float& x : key) x = random_.Normal();
      for (float& x : value) x = random_.Normal() + (case_.content == Content::kOffset ? 1000.0F : 0.0F);
      if (case_.content == Content::kDominant) FavourRow(list, j, key);
      if (case_.content == Content::kNonFinite) Spoil(list, j, data.tokens, key, value);
      for (const float x : key) data.k.push_back(Round(case_.dtype, x));
      for (const float x : value) data.v.push_back(Round(case_.dtype, x));
    }
    for (int32_t i = 0; i < case_.rows; ++i) {
      const int32_t seen = visible_.empty() ? data.tokens - case_.rows + i + 1 : visible_[sequence * case_.rows + i];
      data.visible.push_back(std::clamp(seen, 0, data.tokens));
    }
    lists_.push_back(std::move(data));
  }

  // Token 5 id is turned towards row id of the group: shares from about 1/2 up to 1 - 1e-8, and one far beyond.
  void FavourRow(int32_t list, int32_t token, std::vector<float>& key) const {
    const int32_t id = token / 5;
    if (token % 5 != 0 || id >= case_.head_rows()) return;
    const float* q = q_.data() + (int64_t{list} * case_.head_rows() + id) * case_.key_dim;
    const float norm = std::inner_product(q, q + case_.key_dim, q, 0.0F);
    const float logit = id % 16 == 15 ? 200.0F : 5.0F + static_cast<float>(id % 16) * 1.3F;
    for (int32_t i = 0; i < case_.key_dim; ++i)
      key[i] = q[i] * logit * std::sqrt(static_cast<float>(case_.key_dim)) / norm;
  }

  void Spoil(int32_t list, int32_t token, int32_t tokens, std::vector<float>& key, std::vector<float>& value) const {
    if (token % 29 == 7) key[token % key.size()] = NAN;
    if (case_.odd_values && token % 31 == 11) value[token % value.size()] = list == 0 ? -INFINITY : NAN;
    if (token == tokens - 2) key[0] = INFINITY;
  }

  DeviceCase case_;
  cpu::RandomStream random_;
  std::vector<HostList> lists_;
  std::vector<uint16_t> q16_;
  std::vector<float> q_;
  std::vector<int32_t> visible_;
  std::vector<float> sinks_;
  std::vector<float> weights_;
};

// Adds cases with generated tokens and with weights: add(change) takes a case that change(case) has changed.
template <typename Add>
void AddRowCases(Add&& add) {
  // Rows of the window's end and of all generated tokens; a sequence that is nothing but generated.
  for (const Layout layout : {Layout::kHeadMajor, Layout::kPacked, Layout::kPaged, Layout::kRagged})
    for (const bool each : {false, true})
      add([&](DeviceCase& c) {
        c.layout = layout, c.lengths = {151, 9, 0, 290}, c.generated = 12, c.generated_each = each, c.rows = 17;
        c.weights = each;
      });
  // n at the end of a tile, and behind it; more generated tokens than the prompt has.
  for (const int32_t generated : {44, 43, 299})
    add([&](DeviceCase& c) { c.lengths = {300, 300}, c.generated = generated, c.weights = true; });
  // Every instance of the kernels: r = g w rows.
  for (const auto& [d, g, w] : {std::tuple{64, 8, 8},
                                {64, 4, 32},
                                {80, 8, 32},
                                {128, 1, 1},
                                {128, 8, 8},
                                {128, 4, 32},
                                {128, 16, 40},
                                {256, 4, 8},
                                {256, 6, 32}})
    add([&, d = d, g = g, w = w](DeviceCase& c) {
      c.key_dim = c.value_dim = d, c.kv_heads = 1, c.group = g, c.rows = w, c.weights = true, c.generated = d / 8;
      c.lengths = {200};
    });
  for (const bool sinks : {false, true})
    add([&](DeviceCase& c) {
      c.content = Content::kDominant, c.lengths = {201, 64}, c.generated = 60, c.weights = sinks, c.sinks = sinks;
    });
  add([&](DeviceCase& c) { c.content = Content::kDominant, c.lengths = {201, 64}, c.weights = true; });
  add([&](DeviceCase& c) { c.content = Content::kOffset, c.generated = 30, c.weights = true; });
  for (const Layout layout : {Layout::kTokenMajor, Layout::kPaged})
    add([&](DeviceCase& c) { c.content = Content::kNonFinite, c.layout = layout, c.generated = 40, c.weights = true; });
  for (const bool each : {false, true})
    add([&](DeviceCase& c) {
      c.any_visible = true, c.generated = 35, c.generated_each = each, c.weights = each, c.lengths = {300, 40};
    });
  add([&](DeviceCase& c) { c.soft_cap = 20.0F, c.generated = 20, c.weights = true; });
  add([&](DeviceCase& c) { c.misaligned = true, c.generated = 20, c.weights = true; });
  add([&](DeviceCase& c) { c.lengths = {4099}, c.kv_heads = 1, c.splits = 16, c.generated = 700, c.weights = true; });
}

// Shapes, layouts, dtypes and contents, each varied around an ordinary case.
inline std::vector<DeviceCase> AllDeviceCases() {
  std::vector<DeviceCase> cases;
  const auto add = [&cases](auto&& change) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      DeviceCase c;
      c.dtype = dtype;
      change(c);
      cases.push_back(c);
    }
  };
  for (const auto& [d, dv] :
       {std::pair{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {128, 64}, {64, 128}, {72, 40}, {8, 24}})
    add([&, d = d, dv = dv](DeviceCase& c) { c.key_dim = d, c.value_dim = dv; });
  for (const auto& [g, w] :
       {std::pair{1, 1}, {1, 8}, {3, 8}, {4, 32}, {7, 8}, {8, 32}, {16, 8}, {1, 128}, {3, 128}, {16, 128}})
    add([&, g = g, w = w](DeviceCase& c) {
      c.kv_heads = 1, c.group = g, c.rows = w, c.lengths = {g * w > 512 ? 200 : 300, 129};
    });
  for (const int32_t n : {1, 8, 63, 64, 65, 127, 129, 1000}) add([&](DeviceCase& c) { c.lengths = {n}; });
  for (const int32_t splits : {1, 3, 16})
    add([&](DeviceCase& c) { c.lengths = {4099}, c.kv_heads = 1, c.splits = splits, c.key_dim = c.value_dim = 128; });
  for (const Layout layout :
       {Layout::kHeadMajor, Layout::kTokenMajor, Layout::kPacked, Layout::kPaged, Layout::kRagged})
    for (const bool misaligned : {false, true})
      add([&](DeviceCase& c) {
        c.layout = layout, c.misaligned = misaligned, c.lengths = {151, 0, 64, 290}, c.kv_heads = 3, c.key_dim = 96;
        c.value_dim = 96, c.sinks = misaligned;
      });
  add([&](DeviceCase& c) { c.layout = Layout::kPaged, c.block_size = 64, c.lengths = {1000, 65}, c.rows = 32; });
  add([&](DeviceCase& c) { c.layout = Layout::kPaged, c.block_size = 16, c.lengths = {1000, 65}, c.key_dim = 128; });
  add([&](DeviceCase& c) { c.layout = Layout::kRagged, c.lengths = {1000, 65}, c.content = Content::kDominant; });
  for (const Content content : {Content::kDominant, Content::kEqualKeys, Content::kLarge, Content::kOffset})
    for (const bool sinks : {false, true})
      add([&](DeviceCase& c) { c.content = content, c.sinks = sinks, c.lengths = {201, 64}; });
  add([&](DeviceCase& c) {
    c.content = Content::kDominant, c.lengths = {1500}, c.rows = 32, c.key_dim = c.value_dim = 128;
  });
  for (const Layout layout : {Layout::kHeadMajor, Layout::kPaged})
    add([&](DeviceCase& c) { c.content = Content::kNonFinite, c.layout = layout; });
  for (const bool sinks : {false, true})
    add([&](DeviceCase& c) { c.any_visible = true, c.sinks = sinks, c.lengths = {300, 40}; });
  add([&](DeviceCase& c) { c.soft_cap = 20.0F; });
  add([&](DeviceCase& c) { c.soft_cap = 50.0F, c.sinks = true, c.content = Content::kDominant; });
  add([&](DeviceCase& c) { c.soft_cap = 30.0F, c.content = Content::kNonFinite; });
  AddRowCases(add);
  return cases;
}

}  // namespace dropkv::cuda
