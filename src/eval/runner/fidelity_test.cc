#include "eval/runner/fidelity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace dropkv::eval {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TokenFidelity Compare(const std::vector<float>& full, const std::vector<float>& evicted) {
  return CompareLogits(full, evicted);
}

// p = (1/4, 3/4), q = (1/2, 1/2): ln(1/2) / 4 + 3 ln(3/2) / 4.
TEST(Fidelity, DivergenceByHand) {
  const float ln3 = std::log(3.0F);
  EXPECT_NEAR(Compare({0, ln3}, {0, 0}).kl, 0.1308120359, 1e-7);
  // The other way round: ln(2) / 2 + ln(2/3) / 2.
  EXPECT_NEAR(Compare({0, 0}, {0, ln3}).kl, 0.1438410362, 1e-7);
}

TEST(Fidelity, AConstantMakesNoDifference) {
  const float ln3 = std::log(3.0F);
  EXPECT_NEAR(Compare({1000, 1000 + ln3}, {-1000, -1000}).kl, 0.1308120359, 1e-4);  // floats of that size
  EXPECT_EQ(Compare({3, 1, 2}, {3, 1, 2}).kl, 0);
  EXPECT_NEAR(Compare({3, 1, 2}, {5, 3, 4}).kl, 0, 1e-12);
}

TEST(Fidelity, TokensThatCannotCome) {
  // p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): ln(2).
  EXPECT_NEAR(Compare({0, 0, -kInfinity}, {0, 0, std::log(2.0F)}).kl, std::log(2.0), 1e-7);
  EXPECT_EQ(Compare({0, 0}, {0, -kInfinity}).kl, kInfinity);
}

TEST(Fidelity, MostLikelyToken) {
  EXPECT_TRUE(Compare({1, 3, 2}, {0, 9, 8}).same_top);
  EXPECT_FALSE(Compare({1, 3, 2}, {0, 8, 9}).same_top);
  EXPECT_TRUE(Compare({3, 3}, {5, 1}).same_top);  // the first of equal ones, as the answers take it
  EXPECT_FALSE(Compare({3, 3}, {1, 5}).same_top);
}

TEST(Fidelity, Mean) {
  FidelityMean mean;
  EXPECT_FALSE(mean.kl().has_value());
  EXPECT_FALSE(mean.top1().has_value());
  mean.Add({0.5, true});
  mean.Add({1.0, false});
  mean.Add({0.0, true});
  mean.Add({0.5, false});
  EXPECT_EQ(mean.kl(), 0.5);
  EXPECT_EQ(mean.top1(), 0.5);
}

}  // namespace
}  // namespace dropkv::eval
