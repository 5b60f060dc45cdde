#include "eval/runner/fidelity.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

namespace dropkv::eval {
namespace {

// log(sum(exp(x))).
double LogSumExp(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  return most + std::log(sum);
}

}  // namespace

TokenFidelity CompareLogits(std::span<const float> full, std::span<const float> evicted) {
  assert(!full.empty() && full.size() == evicted.size());
  const double full_sum = LogSumExp(full);
  const double evicted_sum = LogSumExp(evicted);
  TokenFidelity token;
  for (size_t i = 0; i < full.size(); ++i) {
    if (full[i] == -std::numeric_limits<float>::infinity()) continue;
    const double log_p = full[i] - full_sum;
    const double log_q = evicted[i] - evicted_sum;
    token.kl += std::exp(log_p) * (log_p - log_q);
  }
  // Rounding may leave a tiny negative sum where both are alike.
  if (token.kl < 0) token.kl = 0;
  token.same_top = std::max_element(full.begin(), full.end()) - full.begin() ==
                   std::max_element(evicted.begin(), evicted.end()) - evicted.begin();
  return token;
}

void FidelityMean::Add(const TokenFidelity& token) {
  kl_ += token.kl;
  same_ += token.same_top ? 1 : 0;
  ++count_;
}

std::optional<double> FidelityMean::kl() const { return count_ > 0 ? std::optional(kl_ / count_) : std::nullopt; }

std::optional<double> FidelityMean::top1() const {
  return count_ > 0 ? std::optional(static_cast<double>(same_) / count_) : std::nullopt;
}

}  // namespace dropkv::eval
