#include <gtest/gtest.h>

#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "core/random.h"
#include "dropkv/engine.h"

namespace dropkv {
namespace {

constexpr int32_t kHeads = 3;
constexpr int32_t kTokens = 50;

enum class Layout { kHeadMajor, kTokenMajor, kTransposed };

struct TestParam {
  DType dtype;
  Layout k;
  Layout v;
  bool cells;  // tokens lie in ascending cells with gaps
};

std::ostream& operator<<(std::ostream& os, const TestParam& p) {
  return os << DTypeName(p.dtype) << " layouts " << static_cast<int>(p.k) << ' ' << static_cast<int>(p.v) << " cells "
            << p.cells;
}

std::vector<TestParam> AllParams() {
  std::vector<TestParam> params;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0})
    for (const Layout k : {Layout::kHeadMajor, Layout::kTokenMajor, Layout::kTransposed})
      for (const Layout v : {Layout::kHeadMajor, Layout::kTokenMajor, Layout::kTransposed})
        for (const bool cells : {false, true})
          if (dtype != DType::kQ8_0 || (k != Layout::kTransposed && v != Layout::kTransposed))
            params.push_back({dtype, k, v, cells});
  return params;
}

MutableKvTensor Tensor(Layout layout, DType dtype, int32_t dim, int32_t capacity, std::vector<uint8_t>& bytes) {
  switch (layout) {
    case Layout::kHeadMajor:
      return {bytes.data(), dtype, int64_t{capacity} * dim, dim, 1};
    case Layout::kTokenMajor:
      return {bytes.data(), dtype, dim, int64_t{kHeads} * dim, 1};
    case Layout::kTransposed:
      return {bytes.data(), dtype, int64_t{capacity} * dim, 1, capacity};
  }
  return {};
}

// Bytes of element or, for q8_0, of block `index` of (head, cell): where they lie in the tensor's memory.
int64_t ByteAt(const KvTensor& tensor, int32_t head, int32_t cell, int32_t index) {
  const int32_t step = tensor.dtype == DType::kQ8_0 ? 32 : 1;
  return DTypeBytes(tensor.dtype,
                    head * tensor.head_stride + cell * tensor.token_stride + index * step * tensor.dim_stride);
}

struct Cache {
  Layout k_layout, v_layout;
  int32_t capacity;
  std::vector<uint8_t> k, v;

  Cache(const TestParam& p, int32_t d, int32_t dv, int32_t tokens, uint64_t seed)
      : k_layout(p.k),
        v_layout(p.v),
        capacity(tokens),
        k(DTypeBytes(p.dtype, int64_t{kHeads} * tokens * d)),
        v(DTypeBytes(p.dtype, int64_t{kHeads} * tokens * dv)) {
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<uint8_t>(RandomBits(seed, i));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(RandomBits(seed + 1, i));
  }

  MutableKvView view(DType dtype, int32_t d, int32_t dv) {
    return {kHeads, capacity, d, dv, Tensor(k_layout, dtype, d, capacity, k), Tensor(v_layout, dtype, dv, capacity, v)};
  }
};

KeepList RaggedLists() {
  std::vector<int64_t> offsets{0, 7, 7, 7 + 31};  // the second head keeps nothing
  std::vector<int32_t> positions{0, 1, 2, 9, 10, 30, 49};
  for (int32_t i = 0; i < 31; ++i) positions.push_back(i + 19);
  return {1, kHeads, std::move(offsets), std::move(positions)};
}

std::vector<int32_t> GappedCells() {
  std::vector<int32_t> cells(kTokens);
  for (int32_t j = 0; j < kTokens; ++j) cells[j] = j + 1 + j / 3;
  return cells;
}

// Moves the rows one byte range after the other, from a copy: what both functions must do.
void ExpectedMove(const KvTensor& from, const std::vector<uint8_t>& from_bytes, const int32_t* cells,
                  const KvTensor& to, std::vector<uint8_t>& to_bytes, int32_t dim, const KeepList& keep) {
  const bool blocks = from.dtype == DType::kQ8_0;
  const int32_t count = blocks ? dim / 32 : dim;
  const int64_t size = DTypeBytes(from.dtype, blocks ? 32 : 1);
  for (int32_t head = 0; head < kHeads; ++head) {
    const auto list = keep.head(0, head);
    for (size_t row = 0; row < list.size(); ++row)
      for (int32_t i = 0; i < count; ++i)
        std::memcpy(&to_bytes[ByteAt(to, head, static_cast<int32_t>(row), i)],
                    &from_bytes[ByteAt(from, head, cells != nullptr ? cells[list[row]] : list[row], i)], size);
  }
}

TEST(Compact, OutOfPlaceMovesExactlyTheKeptBytes) {
  constexpr int32_t kD = 64;
  constexpr int32_t kDv = 96;
  for (const TestParam& p : AllParams())
    for (const Layout to_v : {Layout::kHeadMajor, Layout::kTransposed}) {
      if (p.dtype == DType::kQ8_0 && to_v == Layout::kTransposed) continue;
      SCOPED_TRACE(testing::PrintToString(p) + " to " + std::to_string(static_cast<int>(to_v)));
      const KeepList keep = RaggedLists();
      const std::vector<int32_t> cells = GappedCells();
      Cache source(p, kD, kDv, 80, 1);
      const Cache before = source;
      TestParam to = p;
      to.v = to_v;
      Cache destination(to, kD, kDv, 33, 2);
      Cache expected = destination;
      const MutableKvView from_view = source.view(p.dtype, kD, kDv);
      KvView from = from_view;
      from.tokens = kTokens;
      from.cells = p.cells ? cells.data() : nullptr;
      const MutableKvView target = destination.view(p.dtype, kD, kDv);
      ExpectedMove(from.k, before.k, from.cells, target.k, expected.k, kD, keep);
      ExpectedMove(from.v, before.v, from.cells, target.v, expected.v, kDv, keep);
      const Status status = Compact(from, keep, 0, target);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(destination.k, expected.k);
      EXPECT_EQ(destination.v, expected.v);
      EXPECT_EQ(source.k, before.k);
      EXPECT_EQ(source.v, before.v);
    }
}

TEST(Compact, InPlaceMovesExactlyTheKeptBytes) {
  constexpr int32_t kD = 96;
  constexpr int32_t kDv = 64;
  for (const TestParam& p : AllParams()) {
    SCOPED_TRACE(testing::PrintToString(p));
    const KeepList keep = RaggedLists();
    const std::vector<int32_t> cells = GappedCells();
    const int32_t* at = p.cells ? cells.data() : nullptr;
    Cache cache(p, kD, kDv, 80, 3);
    const Cache before = cache;
    Cache expected = cache;
    const MutableKvView view = cache.view(p.dtype, kD, kDv);
    ExpectedMove(view.k, before.k, at, view.k, expected.k, kD, keep);
    ExpectedMove(view.v, before.v, at, view.v, expected.v, kDv, keep);
    const Status status = CompactInPlace(view, at, keep, 0);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(cache.k, expected.k);
    EXPECT_EQ(cache.v, expected.v);
  }
}

TEST(Compact, TakesTheListsOfItsLayer) {
  const TestParam p{DType::kF16, Layout::kHeadMajor, Layout::kHeadMajor, false};
  const KeepList two_layers(2, kHeads, {0, 1, 2, 3, 4, 5, 6}, {1, 2, 3, 7, 8, 9});
  const KeepList second(1, kHeads, {0, 1, 2, 3}, {7, 8, 9});
  Cache cache(p, 8, 16, kTokens, 4);
  Cache expected = cache;
  ASSERT_TRUE(CompactInPlace(cache.view(p.dtype, 8, 16), nullptr, two_layers, 1).ok());
  ASSERT_TRUE(CompactInPlace(expected.view(p.dtype, 8, 16), nullptr, second, 0).ok());
  EXPECT_EQ(cache.k, expected.k);
  EXPECT_EQ(cache.v, expected.v);
}

TEST(Compact, InPlaceRejectsCellsThatDoNotAscend) {
  const TestParam p{DType::kF16, Layout::kTokenMajor, Layout::kTokenMajor, true};
  Cache cache(p, 64, 64, 80, 5);
  const Cache before = cache;
  std::vector<int32_t> cells = GappedCells();
  std::swap(cells[9], cells[10]);
  const Status status = CompactInPlace(cache.view(p.dtype, 64, 64), cells.data(), RaggedLists(), 0);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("cells[10]"), std::string::npos) << status.message();
  EXPECT_EQ(cache.k, before.k);
  EXPECT_EQ(cache.v, before.v);

  std::swap(cells[3], cells[4]);  // of tokens that no head keeps first: only kept tokens' cells count
  std::swap(cells[9], cells[10]);
  EXPECT_TRUE(CompactInPlace(cache.view(p.dtype, 64, 64), cells.data(), RaggedLists(), 0).ok());
}

TEST(Compact, ErrorsNameTheArgument) {
  const TestParam p{DType::kF16, Layout::kHeadMajor, Layout::kHeadMajor, false};
  const KeepList keep = RaggedLists();
  Cache source(p, 64, 64, kTokens, 6);
  Cache destination(p, 64, 64, 40, 7);
  const MutableKvView from = source.view(p.dtype, 64, 64);
  const MutableKvView to = destination.view(p.dtype, 64, 64);
  const auto expect = [](const Status& status, const char* text) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  MutableKvView wrong = to;
  wrong.tokens = 30;
  expect(Compact(from, keep, 0, wrong), "destination.tokens: expected room for the 31 kept tokens of head 2, got 30");
  wrong = to;
  wrong.k.dtype = DType::kBF16;
  expect(Compact(from, keep, 0, wrong), "destination.k.dtype: expected the source's f16, got bf16");
  wrong = to;
  wrong.value_dim = 56;
  expect(Compact(from, keep, 0, wrong), "destination: expected 3 KV heads of key_dim 64, value_dim 64, got 3, 64, 56");
  expect(Compact(from, keep, 0, from), "CompactInPlace");
  expect(Compact(from, keep, 1, to), "layer: expected 0 to 0, got 1");
  expect(Compact(from, KeepList::All(1, 2, 5), 0, to), "keep: expected lists of 3 KV heads, got 2");
  KvView shorter = from;
  shorter.tokens = 49;
  expect(Compact(shorter, keep, 0, to), "keep: expected positions 0 to 48 in head 0, got 0 to 49");
  const std::vector<int32_t> cells(kTokens, 77);
  expect(CompactInPlace(from, cells.data(), keep, 0), "cells[0]: expected 0 to 49, got 77");
}

}  // namespace
}  // namespace dropkv
