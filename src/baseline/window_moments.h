// Mean and variance over the window's rows of p, and what CAKE makes of them: scores, and a layer's preference.
#pragma once

#include <cstdint>
#include <vector>

#include "baseline/window_attention.h"

namespace dropkv::baseline {

struct WindowMoments {
  std::vector<float> score;  // [Hq, n] mean + gamma * unbiased variance over the rows that judge
  // Over all query heads, rows and the `past` first tokens: -sum p ln(p + 1e-10), and the sum of the variances.
  double entropy = 0;
  double variance = 0;
};

// scores, preference: which of them are wanted.
WindowMoments MeasureMoments(WindowAttention& attention, int32_t past, double gamma, bool scores, bool preference);

}  // namespace dropkv::baseline
