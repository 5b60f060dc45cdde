// One layer on its way from scores to kept tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "baseline/ranking.h"
#include "baseline/recipe.h"
#include "baseline/score.h"

namespace dropkv::baseline {

// What a layer may keep, and how.
struct LayerShareOf {
  int32_t keep = 0;     // tokens per KV head on average
  double exact = 0;     // the same before rounding, where the layer's rule rounds again
  double fraction = 0;  // of the layer's tokens, as the caller knows it
  bool clamp = true;    // protected tokens are kept whatever the budget
};

// Order and kept marks of a layer's tokens. Rules take tokens from it until the budget is used.
class LayerOrder {
 public:
  // Protected are scores.is_protected and the latest recent_share * keep tokens.
  LayerOrder(const Recipe& recipe, const LayerScores& scores, int32_t keep);

  const LayerScores& scores() const { return *scores_; }
  int32_t kv_heads() const { return scores_->kv_heads; }
  int32_t tokens() const { return scores_->tokens; }
  const std::vector<uint8_t>& is_protected() const { return protected_; }
  int32_t protected_tokens() const;  // of a head

  // Keys [Hkv, n] and marks [Hkv, n] by head.
  std::vector<std::span<uint64_t>> keys();
  std::vector<std::span<uint8_t>> kept();
  std::span<uint64_t> keys(int32_t head) { return std::span(keys_).subspan(Offset(head), tokens()); }
  std::span<uint8_t> kept(int32_t head) { return std::span(kept_).subspan(Offset(head), tokens()); }

  // A token's class beside protection: forced by a mark or by a score that is no number, or in the first stage.
  TokenClass ClassOf(int32_t head, int32_t token) const;

  int32_t TakeFromHead(int32_t head, int64_t count) { return TakeBest(keys(head), kept(head), count); }
  std::vector<int32_t> TakeFromAll(int64_t count) { return TakeBest(keys(), kept(), count); }

  // Appends the layer's lists: one offset a head and the ascending positions.
  void Write(std::vector<int64_t>* offsets, std::vector<int32_t>* positions) const;

 private:
  size_t Offset(int32_t head) const { return static_cast<size_t>(head) * tokens(); }

  const LayerScores* scores_;
  std::vector<uint8_t> protected_;  // [n]
  std::vector<uint64_t> keys_;      // [Hkv, n]
  std::vector<uint8_t> kept_;       // [Hkv, n]
};

// ChunkKV (kvpress ChunkKVPress): the best chunks by the mean over their tokens of the sum over KV heads of the padded
// scores; trunc(chunks * fraction) of them, one at least; the same tokens in all heads. With clamp chunks that hold
// protected tokens come first and are all kept. Returns the tokens that every head keeps.
int32_t TakeChunks(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order);

// AnDPro's code (commit dfc2617): chunks of every head, by the score that their tokens share; floor(Hkv * keep / chunk)
// of them in one order over the layer, those whose tokens are all protected included.
void TakeProjectionChunks(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order);

// CriticalKV and CriticalAdaKV: critical.h's stages.
void TakeCritical(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order);

}  // namespace dropkv::baseline
