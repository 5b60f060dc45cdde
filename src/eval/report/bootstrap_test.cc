#include "eval/report/bootstrap.h"

#include <gtest/gtest.h>

namespace dropkv::eval {
namespace {

TEST(Bootstrap, MeanOfTheTasksMeans) {
  const std::vector<Stratum> strata = {{{1, 0, 0, 1}, 0.5, 0}, {{0.25}, 0.5, 1}};
  EXPECT_DOUBLE_EQ(WeightedMean(strata), 0.5 * 0.5 + 0.5 * 0.25);
}

TEST(Bootstrap, EqualValuesHaveNoWidth) {
  const std::vector<Stratum> strata = {{{0.5, 0.5, 0.5}, 0.5, 0}, {{0.25, 0.25}, 0.5, 1}};
  const std::optional<Interval> interval = BootstrapInterval(strata);
  ASSERT_TRUE(interval.has_value());
  EXPECT_DOUBLE_EQ(interval->low, 0.375);
  EXPECT_DOUBLE_EQ(interval->high, 0.375);
}

// Resampled without regard to the tasks, the mean would range over 0 to 1.
TEST(Bootstrap, TasksAreResampledOnTheirOwn) {
  const std::vector<Stratum> strata = {{{0, 0, 0}, 0.5, 0}, {{1, 1, 1}, 0.5, 1}};
  const std::optional<Interval> interval = BootstrapInterval(strata);
  ASSERT_TRUE(interval.has_value());
  EXPECT_DOUBLE_EQ(interval->low, 0.5);
  EXPECT_DOUBLE_EQ(interval->high, 0.5);
}

// A mean of {0, 1} is 0, 0.5 or 1 with probability 1/4, 1/2, 1/4: both ends weigh more than 2.5%.
TEST(Bootstrap, TwoSamplesOfOneTask) {
  const std::vector<Stratum> strata = {{{0, 1}, 0.5, 0}, {{0.5, 0.5}, 0.5, 1}};
  const std::optional<Interval> interval = BootstrapInterval(strata);
  ASSERT_TRUE(interval.has_value());
  EXPECT_DOUBLE_EQ(interval->low, 0.25);
  EXPECT_DOUBLE_EQ(interval->high, 0.75);
}

// Ones among four draws from {0, 0, 0, 1}: P(0) = 31.6%, P(>= 3) = 5.1%, P(4) = 0.4%. So [0, 3/4].
TEST(Bootstrap, QuantilesOfABinomial) {
  const std::optional<Interval> interval = BootstrapInterval(std::vector<Stratum>{{{0, 0, 0, 1}, 1, 0}});
  ASSERT_TRUE(interval.has_value());
  EXPECT_DOUBLE_EQ(interval->low, 0);
  EXPECT_DOUBLE_EQ(interval->high, 0.75);
}

// 100 samples of one half: standard error 0.05, so about 0.5 +- 0.098; the distribution's steps are 0.01.
TEST(Bootstrap, WidthOfManySamples) {
  Stratum task;
  for (int i = 0; i < 100; ++i) task.values.push_back(i % 2);
  const std::optional<Interval> interval = BootstrapInterval(std::vector<Stratum>{task});
  ASSERT_TRUE(interval.has_value());
  EXPECT_NEAR(interval->low, 0.402, 0.015);
  EXPECT_NEAR(interval->high, 0.598, 0.015);
}

TEST(Bootstrap, SameStreamSameInterval) {
  const std::vector<double> values = {0.1, 0.9, 0.3, 0.4, 0.75, 0.2};
  const auto low_of = [&](uint64_t stream) {
    return BootstrapInterval(std::vector<Stratum>{{values, 1, stream}})->low;
  };
  EXPECT_EQ(low_of(3), low_of(3));
  // Other streams are other resamples: of eight not all agree to the last bit.
  bool differs = false;
  for (uint64_t stream = 0; stream < 8; ++stream) differs = differs || low_of(stream) != low_of(3);
  EXPECT_TRUE(differs);
}

TEST(Bootstrap, ASingleSampleHasNoInterval) {
  EXPECT_FALSE(BootstrapInterval(std::vector<Stratum>{{{0, 1, 1}, 0.5, 0}, {{1}, 0.5, 1}}).has_value());
  EXPECT_FALSE(BootstrapInterval({}).has_value());
}

}  // namespace
}  // namespace dropkv::eval
