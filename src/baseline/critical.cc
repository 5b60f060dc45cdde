#include "baseline/critical.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "baseline/ranking.h"

namespace dropkv::baseline {
namespace {

class Stages {
 public:
  Stages(const Recipe& recipe, const LayerScores& scores, const std::vector<float>& padded)
      : recipe_(recipe), scores_(scores), padded_(padded) {
    const auto elements = static_cast<size_t>(scores.kv_heads) * scores.tokens;
    stages_.first.assign(elements, 0);
    stages_.value.resize(elements);
    for (size_t at = 0; at < elements; ++at)
      keys_.push_back(TokenKey(TokenClass::kScored, padded[at], static_cast<int32_t>(at % scores.tokens)));
  }

  void Uniform(int32_t kept, int32_t first_count) {
    stages_.budget.assign(scores_.kv_heads, kept);
    for (int32_t head = 0; head < scores_.kv_heads; ++head) TakeBest(Keys(head), First(head), first_count);
  }

  // Every head's safe tokens stand before all others of the layer; the flat order gives the heads' budgets, and a share
  // of each is the first stage, safe tokens first.
  void Adaptive(int32_t kept) {
    const auto safe = static_cast<int32_t>(kept * recipe_.policy.alpha);
    for (int32_t head = 0; head < scores_.kv_heads; ++head)
      stages_.budget.push_back(TakeBest(Keys(head), First(head), safe));
    std::vector<uint64_t> keys = keys_;
    std::vector<uint8_t> unused(keys.size());
    std::vector<std::span<uint64_t>> key_heads;
    std::vector<std::span<uint8_t>> unused_heads;
    for (int32_t head = 0; head < scores_.kv_heads; ++head) {
      key_heads.push_back(std::span(keys).subspan(Offset(head), scores_.tokens));
      unused_heads.push_back(std::span(unused).subspan(Offset(head), scores_.tokens));
    }
    const int64_t rest = int64_t{scores_.kv_heads} * (kept - safe);
    const std::vector<int32_t> flat = TakeBest(key_heads, unused_heads, rest);
    for (int32_t head = 0; head < scores_.kv_heads; ++head) {
      stages_.budget[head] += flat[head];
      const auto first = static_cast<int32_t>(stages_.budget[head] * recipe_.first_stage);
      TakeBest(Keys(head), First(head), std::max(0, first - safe));
    }
  }

  CriticalStages Finish() {
    for (size_t at = 0; at < padded_.size(); ++at)
      stages_.value[at] = stages_.first[at] != 0 ? std::numeric_limits<float>::max() : Product(at);
    return std::move(stages_);
  }

 private:
  size_t Offset(int32_t head) const { return static_cast<size_t>(head) * scores_.tokens; }
  std::span<uint64_t> Keys(int32_t head) { return std::span(keys_).subspan(Offset(head), scores_.tokens); }
  std::span<uint8_t> First(int32_t head) { return std::span(stages_.first).subspan(Offset(head), scores_.tokens); }

  float Product(size_t at) const {
    return static_cast<float>((static_cast<double>(padded_[at]) + recipe_.epsilon) * scores_.projected_norm[at]);
  }

  const Recipe& recipe_;
  const LayerScores& scores_;
  const std::vector<float>& padded_;
  std::vector<uint64_t> keys_;
  CriticalStages stages_;
};

}  // namespace

CriticalStages FindCritical(const Recipe& recipe, const LayerScores& scores, const std::vector<float>& padded,
                            int32_t kept, int32_t first_count) {
  Stages stages(recipe, scores, padded);
  if (recipe.policy.heads == HeadRule::kAda) {
    stages.Adaptive(kept);
  } else {
    stages.Uniform(kept, first_count);
  }
  return stages.Finish();
}

}  // namespace dropkv::baseline
