// The pipeline through the float64 reference: what Engine runs under the kernel name "reference". Slow, and it
// allocates; a second opinion on any result.
#pragma once

#include <span>

#include "dropkv/engine.h"

namespace dropkv {

// Arguments as Engine::Run, already checked.
KeepList RunReference(const Plan& plan, std::span<const LayerInput> layers, const EvictOutput& output,
                      EvictReport& report);

}  // namespace dropkv
