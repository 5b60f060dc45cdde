#include <gtest/gtest.h>

#include "cpu/ragged_test_case.h"

namespace dropkv::ragged_test {
namespace {

KeepList WithAppended(const KeepList& keep, int32_t first, int32_t count) {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  for (int32_t head = 0; head < keep.kv_heads(); ++head) {
    const auto list = keep.head(0, head);
    positions.insert(positions.end(), list.begin(), list.end());
    for (int32_t i = 0; i < count; ++i) positions.push_back(first + i);
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {1, keep.kv_heads(), std::move(offsets), std::move(positions)};
}

// Appends 150 tokens, so that the cache grows several times, drops the last 21, appends 5 others.
TEST(RaggedCache, AppendAndTruncate) {
  for (const DType dtype : kAllDTypes)
    for (const int32_t reserve : {0, 40}) {
      TestParam p{dtype, 64, 96, 3, {0, 1, 15, 300}};
      SCOPED_TRACE(testing::PrintToString(p));
      Case c = MakeCase(p, 700, 155);
      Subject s = MakeSubject(c, p, reserve);
      for (int32_t i = 0; i < 150; ++i) ASSERT_TRUE(s.cache.Append(c.source.view, 300 + i).ok());
      EXPECT_EQ(s.cache.length(0), 150);
      EXPECT_EQ(s.cache.length(3), 450);
      Expect(c, p, WithAppended(c.keep, 300, 150));
      ExpectClose(RunDecode(s, c, nullptr), c, p);
      ASSERT_TRUE(s.cache.Truncate(21).ok());
      EXPECT_EQ(s.cache.length(0), 129);
      Expect(c, p, WithAppended(c.keep, 300, 129));
      ExpectClose(RunDecode(s, c, nullptr), c, p);
      for (int32_t i = 0; i < 5; ++i) ASSERT_TRUE(s.cache.Append(c.source.view, 450 + i).ok());
      KeepList keep = WithAppended(WithAppended(c.keep, 300, 129), 450, 5);
      Expect(c, p, keep);
      ExpectClose(RunDecode(s, c, nullptr), c, p);
    }
}

TEST(RaggedCache, TruncatesToNothingAndChecksTheCount) {
  TestParam p{DType::kF16, 64, 64, 2, {5, 9}};
  Case c = MakeCase(p, 8);
  Expect(c, p, c.keep);
  Subject s = MakeSubject(c, p, 0);
  EXPECT_EQ(s.cache.Truncate(6).code(), Code::kInvalidArgument);
  EXPECT_EQ(s.cache.Truncate(-1).code(), Code::kInvalidArgument);
  ASSERT_TRUE(s.cache.Truncate(5).ok());
  const std::vector<float> out = RunDecode(s, c, nullptr);
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 128), std::vector<float>(128, 0.0F));
  EXPECT_NE(out[128], 0.0F);
}

// The same content through every layout gives the same bits.
TEST(RaggedCache, LayoutsOfTheSource) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    TestParam p{dtype, 64, 80, 3, {100, 37, 129}};
    Case c = MakeCase(p, 900);
    Expect(c, p, c.keep);
    Subject s = MakeSubject(c, p, 0);
    const std::vector<float> want = RunDecode(s, c, nullptr);
    const KvView& kv = c.source.view;
    const int32_t heads = kv.kv_heads;
    const int32_t n = kv.tokens;
    std::vector<int32_t> cells(n);  // token j lies in cell (7 j + 3) mod n + 2
    for (int32_t j = 0; j < n; ++j) cells[j] = (7 * j + 3) % n + 2;
    const int64_t width = DTypeBytes(dtype, 1);
    const auto copy = [&](const KvTensor& from, int32_t dim, const KvTensor& to, std::vector<uint8_t>& bytes) {
      for (int32_t h = 0; h < heads; ++h)
        for (int32_t j = 0; j < n; ++j)
          for (int32_t i = 0; i < dim; ++i)
            std::memcpy(&bytes[(h * to.head_stride + cells[j] * to.token_stride + i * to.dim_stride) * width],
                        static_cast<const uint8_t*>(from.data) +
                            (h * from.head_stride + j * from.token_stride + i * from.dim_stride) * width,
                        width);
    };
    for (const bool transposed : {false, true}) {
      std::vector<uint8_t> k(heads * (n + 2) * 64 * width), v(heads * (n + 2) * 80 * width);
      KvView other = kv;
      other.cells = cells.data();
      other.k = {k.data(), dtype, 64, int64_t{heads} * 64, 1};
      other.v = transposed ? KvTensor{v.data(), dtype, int64_t{80} * (n + 2), 1, n + 2}
                           : KvTensor{v.data(), dtype, 80, int64_t{heads} * 80, 1};
      copy(kv.k, 64, other.k, k);
      copy(kv.v, 80, other.v, v);
      ASSERT_TRUE(s.cache.Assign(other, c.keep, 0, 3).ok());
      EXPECT_EQ(RunDecode(s, c, nullptr), want);
    }
  }
}

TEST(RaggedCache, MemoryIsTightAndReturned) {
  TestParam p{DType::kF16, 64, 64, 3, {4000, 3000, 200}};
  Case c = MakeCase(p, 11, 1000);
  Subject s = MakeSubject(c, p, 64);
  EXPECT_EQ(s.cache.used_bytes(), 7200 * 256);
  EXPECT_LE(s.cache.capacity_bytes(), (7200 + 3 * (64 + 16)) * 256);
  for (int32_t i = 0; i < 1000; ++i) ASSERT_TRUE(s.cache.Append(c.source.view, 4000 + i).ok());
  EXPECT_EQ(s.cache.used_bytes(), 10200 * 256);
  EXPECT_LE(s.cache.capacity_bytes(), s.cache.used_bytes() * 9 / 8 + 3 * (64 + 16) * 256);
  ASSERT_TRUE(s.cache.Assign(c.source.view, SpreadLists({100, 50, 0}, 4000), 0, 0).ok());
  EXPECT_LE(s.cache.capacity_bytes(), (112 + 64) * 256);
}

TEST(RaggedCache, ErrorsNameTheArgument) {
  const auto message = [](const Status& status) { return status.message(); };
  EXPECT_NE(message(RaggedCache::Create(DType::kF16, 2, 12, 64).status()).find("key_dim"), std::string::npos);
  EXPECT_NE(message(RaggedCache::Create(DType::kQ8_0, 2, 64, 40).status()).find("value_dim"), std::string::npos);
  EXPECT_NE(message(RaggedCache::Create(DType::kF16, 0, 64, 64).status()).find("kv_heads"), std::string::npos);
  EXPECT_NE(message(RaggedDecode::Create(2, 17, 64, 64).status()).find("group"), std::string::npos);
  EXPECT_NE(message(RaggedDecode::Create(2, 1, 264, 64).status()).find("key_dim"), std::string::npos);

  TestParam p{DType::kF16, 64, 64, 2, {5, 9}};
  Case c = MakeCase(p, 12);
  Subject s = MakeSubject(c, p, 0);
  RaggedCache wide = RaggedCache::Create(DType::kF32, 2, 64, 64).value();
  Status status = wide.Assign(c.source.view, c.keep, 0, 0);
  EXPECT_NE(message(status).find("expected keys and values of f32, got f16"), std::string::npos) << message(status);
  status = s.cache.Assign(c.source.view, c.keep, 1, 0);
  EXPECT_NE(message(status).find("layer: expected 0 to 0, got 1"), std::string::npos) << message(status);
  status = s.cache.Assign(c.source.view, SpreadLists({5, 20}, 40), 0, 0);
  EXPECT_NE(message(status).find("positions below 9"), std::string::npos) << message(status);
  status = s.cache.Assign(c.source.view, c.keep, 0, -1);
  EXPECT_NE(message(status).find("reserve"), std::string::npos) << message(status);
  status = s.cache.Append(c.source.view, 9);
  EXPECT_NE(message(status).find("token: expected 0 to 8, got 9"), std::string::npos) << message(status);
  EXPECT_EQ(s.cache.length(1), 9);  // nothing changed

  std::vector<float> out(4 * 64);
  RaggedDecode other = RaggedDecode::Create(2, 2, 64, 80).value();
  status = other.Run(s.cache, c.spec, c.q.data(), out.data(), nullptr);
  EXPECT_NE(message(status).find("value_dim 80, got"), std::string::npos) << message(status);
  EXPECT_EQ(s.decode.Run(s.cache, c.spec, nullptr, out.data(), nullptr).code(), Code::kInvalidArgument);
  EXPECT_EQ(s.decode.Begin(s.cache, c.spec, c.q.data(), out.data(), 0).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace dropkv::ragged_test
