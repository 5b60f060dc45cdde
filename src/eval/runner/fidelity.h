// How far an evicted cache's next-token distributions are from the full cache's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace dropkv::eval {

struct TokenFidelity {
  double kl = 0;  // nats, KL(full || evicted)
  bool same_top = false;
};

// Both [vocab], of one size. A logit of -inf is a token that cannot come.
TokenFidelity CompareLogits(std::span<const float> full, std::span<const float> evicted);

class FidelityMean {
 public:
  void Add(const TokenFidelity& token);

  int32_t count() const { return count_; }
  std::optional<double> kl() const;    // nothing: no token was added
  std::optional<double> top1() const;  // share of the tokens

 private:
  double kl_ = 0;
  int32_t same_ = 0;
  int32_t count_ = 0;
};

}  // namespace dropkv::eval
