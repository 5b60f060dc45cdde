// What the machine's multiply-add units can do.
#pragma once

namespace dropkv::bench {

// FLOP/s of one core: independent multiply-adds on registers, best of several runs, best instruction set.
double FmaPeak();

}  // namespace dropkv::bench
