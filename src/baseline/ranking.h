// The order in which tokens are kept, as one number each, and the search for the best of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dropkv::baseline {

// From the last to the first that are kept. NaN scores rank as +infinity: nothing that cannot be judged is dropped.
enum class TokenClass : uint8_t { kScored = 0, kFirstStage = 1, kForced = 2, kProtected = 3 };

// The larger, the earlier it is kept; never 0, which marks a token as taken. Inside kProtected the later token stands
// first, inside the other classes the higher score (to 50 bits beside kScored). Equal keys: the lower index first.
uint64_t TokenKey(TokenClass token_class, double score, int32_t token);

// Takes the `count` largest keys of all spans together, or all that are left: ties to the earlier span, then to the
// lower index. Sets their keys to 0 and the same places of `kept` to 1. Returns how many each span gave.
std::vector<int32_t> TakeBest(std::span<const std::span<uint64_t>> keys, std::span<const std::span<uint8_t>> kept,
                              int64_t count);

// The same of one span.
int32_t TakeBest(std::span<uint64_t> keys, std::span<uint8_t> kept, int64_t count);

}  // namespace dropkv::baseline
