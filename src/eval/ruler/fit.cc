#include "eval/ruler/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace dropkv::eval {
namespace {

constexpr int64_t kFirstStep = 64;      // sizes: enough to learn what one costs
constexpr int32_t kCloseEnough = 256;   // a rest of one part in so many is left
constexpr double kLeastPerSize = 0.05;  // tokens; no guess runs away where a count hardly grew
constexpr int kGuesses = 6;             // by interpolation; then every other one halves the range

// `too_long`: the smallest size known not to fit; 0: none known yet.
int64_t NextSize(int64_t fits, int64_t too_long, int64_t largest, double sizes_left, int guess) {
  const int64_t limit = too_long > 0 ? too_long - 1 : largest;
  if (guess >= kGuesses && guess % 2 == 0 && too_long > 0) return fits + (limit - fits + 1) / 2;
  return fits + static_cast<int64_t>(std::clamp(sizes_left, 1.0, static_cast<double>(limit - fits)));
}

}  // namespace

Result<int32_t> CountTokens(const Sample& sample, const TokenCounter& count) {
  const int32_t tokens = count(sample.context + sample.question + sample.prefix);
  if (tokens < 0) {
    return Status(Code::kInternal, fmt::format("{}: the tokenizer returned {} tokens", sample.task, tokens));
  }
  return tokens;
}

int32_t LeastTokens(const FitLimits& limits) {
  return static_cast<int32_t>((int64_t{limits.length} * 95 + 99) / 100) - limits.reserved;
}

Result<Fitted> FitToLength(const FitLimits& limits, const RenderSample& render, const TokenCounter& count) {
  const int32_t room = limits.length - limits.reserved;
  Fitted best{render(limits.smallest), limits.smallest};
  Result<int32_t> tokens = CountTokens(best.sample, count);
  if (!tokens.ok()) return tokens.status();
  best.tokens = *tokens;
  if (best.tokens > room) {
    return InvalidArgument(fmt::format("length {}: too short for {}, whose sample {} takes {} tokens at least",
                                       limits.length, best.sample.task, best.sample.id,
                                       int64_t{best.tokens} + limits.reserved));
  }
  int64_t too_long = 0;
  double per_size = 0;
  const auto open = [&] { return best.size < (too_long > 0 ? too_long - 1 : limits.largest); };
  for (int guess = 0; open() && room - best.tokens >= std::max(1, room / kCloseEnough); ++guess) {
    const int64_t size = guess == 0
                             ? std::min(limits.smallest + kFirstStep, limits.largest)
                             : NextSize(best.size, too_long, limits.largest, (room - best.tokens) / per_size, guess);
    Sample sample = render(size);
    tokens = CountTokens(sample, count);
    if (!tokens.ok()) return tokens.status();
    per_size = static_cast<double>(*tokens - best.tokens) / static_cast<double>(size - best.size);
    per_size = std::max(per_size, kLeastPerSize);
    if (*tokens <= room) {
      best = {std::move(sample), size, *tokens};
    } else {
      too_long = size;
    }
  }
  return best;
}

}  // namespace dropkv::eval
