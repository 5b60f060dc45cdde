// Files for tests of refusals: models whose cache dropkv must not touch, and files that are no model.
#pragma once

#include <string>

#include "dropkv/status.h"

namespace dropkv::testing {

enum class OddModel {
  kRecurrent,       // mamba: a state, no key-value cache
  kEncoderDecoder,  // t5
  kLatent,          // deepseek2 with MLA: one latent row per token in place of keys and values
  kAlibi,           // bloom: the cell's position adds a bias to the logit
};

// Random weights, two layers, the vocabulary of GgufWriter; libllama loads it.
Status WriteOddModel(OddModel kind, const std::string& path);

// The first `share` (0 to 1) of the bytes of `source`.
Status WriteTruncated(const std::string& source, double share, const std::string& path);

// A text file under a model's name.
Status WriteNotGguf(const std::string& path);

}  // namespace dropkv::testing
