#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "cpu/ragged_kernel.h"
#include "cpu/ragged_test_case.h"

// Counts the allocations of the program.
static std::atomic<int64_t> allocations{0};

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace dropkv::ragged_test {
namespace {

void CompareOnEveryInstructionSet(const TestParam& p, uint64_t seed) {
  SCOPED_TRACE(testing::PrintToString(p) + " seed " + std::to_string(seed));
  Case c = MakeCase(p, seed);
  Expect(c, p, c.keep);
  Subject s = MakeSubject(c, p, 0);
  ForEachInstructionSet([&] { ExpectClose(RunDecode(s, c, nullptr), c, p); });
}

TEST(RaggedDecode, EveryShape) {
  uint64_t seed = 1;
  for (const DType dtype : kAllDTypes)
    for (const int32_t d : {8, 64, 80, 96, 128, 256})
      for (const int32_t group : {1, 3, 4, 6, 7, 8, 16}) {
        if (dtype == DType::kQ8_0 && d % 32 != 0) continue;
        CompareOnEveryInstructionSet({dtype, d, d, group, {0, 1, 15, 16, 17, 255, 256, 257}}, ++seed);
        if (HasFatalFailure()) return;
      }
}

TEST(RaggedDecode, EveryGroup) {
  for (int32_t group = 1; group <= 16; ++group)
    for (const DType dtype : {DType::kF16, DType::kQ8_0}) {
      CompareOnEveryInstructionSet({dtype, 64, 96, group, {300, 33}}, 100 + group);
      if (HasFatalFailure()) return;
    }
}

TEST(RaggedDecode, KeyAndValueSizesDiffer) {
  for (const auto& [d, dv] : {std::pair{8, 256}, {256, 8}, {24, 40}, {192, 128}, {72, 104}}) {
    CompareOnEveryInstructionSet({DType::kF16, d, dv, 5, {1, 40, 700}}, 200 + d);
    if (HasFatalFailure()) return;
  }
}

TEST(RaggedDecode, ManyTokens) {
  uint64_t seed = 300;
  for (const DType dtype : kAllDTypes)
    for (const Content content : {Content::kNormal, Content::kLargeLogits, Content::kDominant, Content::kEqual}) {
      CompareOnEveryInstructionSet({dtype, 64, 64, 3, {1000, 4099, 0, 16}, content}, ++seed);
      if (HasFatalFailure()) return;
    }
}

TEST(RaggedDecode, SoftCapAndSinks) {
  uint64_t seed = 400;
  for (const DType dtype : kAllDTypes)
    for (const float cap : {0.0F, 1.5F, 50.0F})
      for (const bool sinks : {false, true}) {
        CompareOnEveryInstructionSet({dtype, 64, 64, 2, {0, 1, 19, 520}, Content::kNormal, cap, sinks}, ++seed);
        CompareOnEveryInstructionSet({dtype, 64, 64, 4, {900, 31}, Content::kLargeLogits, cap, sinks}, ++seed);
        if (HasFatalFailure()) return;
      }
}

TEST(RaggedDecode, NonFiniteTokensTakeNoPart) {
  uint64_t seed = 500;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    for (const float cap : {0.0F, 30.0F}) {
      TestParam p{dtype, 64, 72, 3, {1, 8, 300, 700}, Content::kNormal, cap, false, true};
      CompareOnEveryInstructionSet(p, ++seed);
      if (HasFatalFailure()) return;
    }
}

// q8_0 marks such tokens by the scale of a block.
TEST(RaggedDecode, NonFiniteQ8ScalesTakeNoPart) {
  TestParam p{DType::kQ8_0, 64, 64, 3, {200, 90}};
  Case c = MakeCase(p, 17);
  const uint16_t infinite = 0x7C00;
  const uint16_t nan = 0xFE01;
  std::memcpy(&c.source.k[(3 * 2 + 1) * 34], &infinite, 2);  // token 3, second block
  std::memcpy(&c.source.v[(7 * 2) * 34], &nan, 2);           // token 7
  Expect(c, p, c.keep);
  Subject s = MakeSubject(c, p, 0);
  ForEachInstructionSet([&] { ExpectClose(RunDecode(s, c, nullptr), c, p); });
}

TEST(RaggedDecode, AllTokensNonFiniteGivesZero) {
  TestParam p{DType::kF16, 64, 64, 2, {20}};
  Case c = MakeCase(p, 3);
  for (size_t i = 0; i < c.source.k.size(); i += 2) c.source.k[i + 1] |= 0x7C;
  Expect(c, p, c.keep);
  Subject s = MakeSubject(c, p, 0);
  ForEachInstructionSet([&] { EXPECT_EQ(RunDecode(s, c, nullptr), std::vector<float>(c.expected.size(), 0.0F)); });
}

TEST(RaggedDecode, NonFiniteQueryGivesZero) {
  TestParam p{DType::kF16, 64, 64, 2, {300}};
  Case c = MakeCase(p, 4);
  c.q[5] = NAN;
  c.q[64 + 9] = HUGE_VALF;
  Expect(c, p, c.keep);
  Subject s = MakeSubject(c, p, 0);
  ForEachInstructionSet([&] { EXPECT_EQ(RunDecode(s, c, nullptr), std::vector<float>(c.expected.size(), 0.0F)); });
}

// Equal bits for any number of workers, through Run and through Begin and Work, and over repeats.
TEST(RaggedDecode, BitsDoNotDependOnWorkers) {
  for (const DType dtype : kAllDTypes) {
    TestParam p{dtype, 64, 64, 3, {4099, 1000, 17}};
    Case c = MakeCase(p, 600);
    Expect(c, p, c.keep);
    Subject s = MakeSubject(c, p, 0);
    ForEachInstructionSet([&] {
      const std::vector<float> alone = RunDecode(s, c, nullptr);
      for (int32_t workers = 1; workers <= 3; ++workers) {
        ThreadPool pool(workers);
        for (int repeat = 0; repeat < 20; ++repeat) {
          ASSERT_EQ(RunDecode(s, c, &pool), alone) << workers << " workers, repeat " << repeat;
          std::vector<float> out(alone.size(), -77.0F);
          ASSERT_TRUE(s.decode.Begin(s.cache, c.spec, c.q.data(), out.data(), workers).ok());
          std::vector<std::thread> threads;
          for (int32_t w = 0; w < workers; ++w) threads.emplace_back([&, w] { s.decode.Work(w); });
          for (std::thread& thread : threads) thread.join();
          ASSERT_EQ(out, alone) << workers << " workers, repeat " << repeat;
        }
      }
    });
  }
}

TEST(RaggedDecode, ForcedInstructionSetRuns) {
  EXPECT_GE(hwy::SupportedAndGeneratedTargets().size(), 1U);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    EXPECT_EQ(ragged::KernelName(), hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
}

TEST(RaggedDecode, AllocatesNothingOnceWarm) {
  TestParam p{DType::kF16, 64, 64, 3, {4000, 300, 0}};
  Case c = MakeCase(p, 800);
  Subject s = MakeSubject(c, p, 0);
  ThreadPool pool(2);
  std::vector<float> out(c.q.size());
  ASSERT_TRUE(s.decode.Run(s.cache, c.spec, c.q.data(), out.data(), &pool).ok());
  const int64_t before = allocations;
  for (int repeat = 0; repeat < 5; ++repeat) {
    ASSERT_TRUE(s.decode.Run(s.cache, c.spec, c.q.data(), out.data(), &pool).ok());
    ASSERT_TRUE(s.decode.Begin(s.cache, c.spec, c.q.data(), out.data(), 1).ok());
    s.decode.Work(0);
  }
  EXPECT_EQ(allocations, before);
}

}  // namespace
}  // namespace dropkv::ragged_test
