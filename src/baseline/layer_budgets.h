// How the layers of a model share its budget: the rules one by one. allocate.h's ShareAmongLayers picks among them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/status.h"

namespace dropkv::baseline {

// Tokens per KV head of one layer of `layers`, window included, where the rule needs no scores: LayerRule::kSame,
// kPyramid (kvpress PyramidKVPress: real numbers, halves to even; uniform where the last layer's share is below the
// window) and kPyramidOriginal (KVCache-Factory: whole numbers, the shares are past tokens and the window comes on
// top). kept: tokens per KV head on average, unrounded. At most n. Errors: kUnsupported for the rules that look at
// scores, kInvalidArgument for a layer that the model does not have.
Result<int32_t> LayerShare(const Recipe& recipe, int32_t layer, int32_t layers, int32_t n, double kept);

// CAKE (antgroup/cakekv): the pool of layers * (kept - window) past tokens is shared by preference
// entropy^(1/tau1) * variance^(1/tau2), truncated; what a layer cannot hold goes to the others in equal parts, the
// remainder to the first of them, then what truncation left over in the same way. Returns tokens with the window.
// past: [layers] past tokens of a layer, all it can take. Preferences that say nothing (all 0, or none a number) give
// equal shares.
std::vector<int32_t> ShareByPreference(std::span<const double> entropy, std::span<const double> variance,
                                       std::span<const int32_t> past, int32_t window, int64_t kept, double tau1,
                                       double tau2);

}  // namespace dropkv::baseline
