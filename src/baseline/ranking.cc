#include "baseline/ranking.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace dropkv::baseline {
namespace {

// Integers in the order of the numbers; -0 and +0 give the same. At least 2^52, at most that of +infinity.
uint64_t OrderedBits(double value) {
  if (std::isnan(value)) value = std::numeric_limits<double>::infinity();
  const auto bits = std::bit_cast<uint64_t>(value + 0.0);
  return (bits >> 63) != 0 ? ~bits : bits | uint64_t{1} << 63;
}

// Above the key of +infinity lie 2^52 - 1 numbers that no score has: the classes but kScored live there.
constexpr uint64_t kAboveScores = uint64_t{0xFFF} << 52;
constexpr int kClassBits = 50;

constexpr int kDigitBits = 12;
constexpr int kBins = 1 << kDigitBits;

// The smallest of the `count` largest keys, and how many of its equals belong to them. 1 <= count <= number of keys.
struct Limit {
  uint64_t key = 0;
  int64_t ties = 0;
};

// Digit by digit from the top: a histogram tells the bin that holds the rank; the next digit looks at that bin alone.
Limit FindLimit(std::span<const std::span<uint64_t>> spans, int64_t count) {
  std::array<int64_t, kBins> histogram{};
  uint64_t prefix = 0;
  for (int shift = 64; shift > 0;) {
    const int next = std::max(0, shift - kDigitBits);
    histogram.fill(0);
    for (const std::span<uint64_t> keys : spans)
      for (const uint64_t key : keys)
        if (shift == 64 || key >> shift == prefix) ++histogram[(key >> next) & ((1U << (shift - next)) - 1)];
    uint64_t bin = kBins - 1;
    while (histogram[bin] < count) count -= histogram[bin--];
    prefix = prefix << (shift - next) | bin;
    shift = next;
  }
  return {prefix, count};
}

}  // namespace

uint64_t TokenKey(TokenClass token_class, double score, int32_t token) {
  if (token_class == TokenClass::kScored) return OrderedBits(score);
  const uint64_t place =
      token_class == TokenClass::kProtected ? static_cast<uint64_t>(token) : OrderedBits(score) >> (64 - kClassBits);
  return kAboveScores + (static_cast<uint64_t>(token_class) << kClassBits) + place;
}

std::vector<int32_t> TakeBest(std::span<const std::span<uint64_t>> keys, std::span<const std::span<uint8_t>> kept,
                              int64_t count) {
  std::vector<int32_t> given(keys.size(), 0);
  int64_t left = 0;
  for (const std::span<uint64_t> span : keys)
    left += std::count_if(span.begin(), span.end(), [](uint64_t key) { return key != 0; });
  count = std::min(count, left);
  if (count <= 0) return given;
  Limit limit = FindLimit(keys, count);
  for (size_t i = 0; i < keys.size(); ++i)
    for (size_t j = 0; j < keys[i].size(); ++j) {
      uint64_t& key = keys[i][j];
      if (key < limit.key || (key == limit.key && limit.ties == 0)) continue;
      if (key == limit.key) --limit.ties;
      key = 0;
      kept[i][j] = 1;
      ++given[i];
    }
  return given;
}

int32_t TakeBest(std::span<uint64_t> keys, std::span<uint8_t> kept, int64_t count) {
  return TakeBest(std::span(&keys, 1), std::span(&kept, 1), count).front();
}

}  // namespace dropkv::baseline
