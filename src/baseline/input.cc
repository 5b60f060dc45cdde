#include "baseline/input.h"

#include <cmath>

namespace dropkv::baseline {

Rope Rope::Standard(int32_t dims, double theta) {
  Rope rope;
  rope.dims = dims;
  for (int32_t i = 0; i < dims / 2; ++i) rope.frequencies.push_back(std::pow(theta, -2.0 * i / dims));
  return rope;
}

void Rope::Turns(double position, bool undo, double* turns) const {
  const double factor = undo ? 1.0 / magnitude : magnitude;
  const double sign = undo ? -1.0 : 1.0;
  for (int32_t i = 0; i < dims / 2; ++i) {
    const double angle = position * frequencies[i];
    turns[2 * i] = factor * std::cos(angle);
    turns[2 * i + 1] = sign * factor * std::sin(angle);
  }
}

void Rope::Rotate(double position, bool undo, float* x) const {
  std::vector<double> turns(dims);
  Turns(position, undo, turns.data());
  Turn(turns.data(), x);
}

}  // namespace dropkv::baseline
