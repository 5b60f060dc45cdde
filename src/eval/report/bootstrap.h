// 95% intervals of a mean over tasks by a stratified bootstrap over samples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace dropkv::eval {

struct Interval {
  double low = 0;
  double high = 0;
};

// The samples of one task.
struct Stratum {
  std::vector<double> values;  // not empty
  double weight = 1;           // of the task's mean in the sum
  // Which random numbers the task draws. Equal for all settings, so that intervals of the same samples come from the
  // same resamples.
  uint64_t stream = 0;
};

inline constexpr int32_t kResamples = 2000;

// sum over tasks of weight * mean(values)
double WeightedMean(std::span<const Stratum> strata);

// From the 50th smallest to the 50th largest of 2,000 means, each over tasks resampled on their own, with replacement.
// A paired difference is the interval of the samples' differences. Nothing where a task has a single sample: how far
// that would spread is unknown.
std::optional<Interval> BootstrapInterval(std::span<const Stratum> strata);

}  // namespace dropkv::eval
