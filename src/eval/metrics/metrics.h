// How answers are judged: RULER's and LongBench's metrics with their quirks.
#pragma once

#include <string>
#include <string_view>

#include "eval/sample.h"

namespace dropkv::eval {

// 0..1. What the suite does to an answer first (first line, control characters) is done here.
double ScoreAnswer(const Sample& sample, std::string_view answer);

}  // namespace dropkv::eval
