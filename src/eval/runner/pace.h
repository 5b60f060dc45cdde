// How long what is left will take, from what is done: seconds per prompt token.
#pragma once

#include <cstdint>
#include <string>

namespace dropkv::eval {

class Pace {
 public:
  void Add(int64_t tokens, double seconds) {
    tokens_ += tokens;
    seconds_ += seconds;
  }

  // 0 as long as nothing is known.
  double Estimate(int64_t tokens) const {
    return tokens_ > 0 ? seconds_ / static_cast<double>(tokens_) * static_cast<double>(tokens) : 0;
  }

 private:
  int64_t tokens_ = 0;
  double seconds_ = 0;
};

// "42 s", "12 min", "3 h 05 min".
std::string DurationText(double seconds);

}  // namespace dropkv::eval
