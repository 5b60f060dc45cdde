#include "eval/report/bootstrap.h"

#include <algorithm>
#include <numeric>

#include "core/random.h"

namespace dropkv::eval {
namespace {

constexpr uint64_t kSeed = 42;
constexpr int32_t kTail = kResamples / 40;  // 2.5% at either end

// Mean of values.size() draws with replacement; the draws depend on (stream, resample, number) alone.
double ResampledMean(const Stratum& stratum, int32_t resample) {
  const auto count = static_cast<uint64_t>(stratum.values.size());
  const uint64_t seed = RandomBits(kSeed, stratum.stream);
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t bits = RandomBits(seed, static_cast<uint64_t>(resample) * count + i) >> 32;
    sum += stratum.values[(bits * count) >> 32];
  }
  return sum / static_cast<double>(count);
}

}  // namespace

double WeightedMean(std::span<const Stratum> strata) {
  double sum = 0;
  for (const Stratum& stratum : strata)
    sum += stratum.weight * std::accumulate(stratum.values.begin(), stratum.values.end(), 0.0) /
           static_cast<double>(stratum.values.size());
  return sum;
}

std::optional<Interval> BootstrapInterval(std::span<const Stratum> strata) {
  if (strata.empty() || std::ranges::any_of(strata, [](const Stratum& task) { return task.values.size() < 2; }))
    return std::nullopt;
  std::vector<double> means(kResamples, 0.0);
  for (const Stratum& stratum : strata)
    for (int32_t resample = 0; resample < kResamples; ++resample)
      means[static_cast<size_t>(resample)] += stratum.weight * ResampledMean(stratum, resample);
  std::ranges::sort(means);
  return Interval{means[kTail - 1], means[kResamples - kTail]};
}

}  // namespace dropkv::eval
