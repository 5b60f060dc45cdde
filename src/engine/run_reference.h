// The pipeline through the float64 reference: what Engine runs under the kernel name "reference". Slow, and it
// allocates; a second opinion on any result.
#pragma once

#include <span>

#include "engine/engine_impl.h"

namespace dropkv {

// For runs that share a pass, already checked: their lists, reports and outputs.
void RunReference(std::span<const LayerInput> layers, std::span<PlanRun> runs);

}  // namespace dropkv
