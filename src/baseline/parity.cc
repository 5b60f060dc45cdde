#include "baseline/parity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "baseline/critical.h"

namespace dropkv::baseline {
namespace {

// What a reference writes over protected tokens.
enum class Padding {
  kNone,
  kLayerMaxPlusOne,  // greatest score of the layer that is no padding, plus 1
  kLayerMax,
  kHeadMaxPlusOne,  // over all of the head's tokens, protected ones included
  kOne,
  kLargest,   // of float32
  kPosition,  // StreamingLLM: 1 for what the ratio keeps, else 0
};

Padding PaddingOf(Scorer scorer) {
  switch (scorer) {
    case Scorer::kAttention:
    case Scorer::kAttentionSum:
    case Scorer::kLastRow:
    case Scorer::kFinch:
    case Scorer::kExpected:
    case Scorer::kCapKv:
    case Scorer::kProjection:
    case Scorer::kCaote:
    case Scorer::kObCache:
    case Scorer::kVariance:
      return Padding::kLayerMaxPlusOne;
    case Scorer::kCompactor:
    case Scorer::kDefensive:
      return Padding::kLayerMax;
    case Scorer::kDropKv:
    case Scorer::kDropKvCompat:
    case Scorer::kDropKvWo:
      return Padding::kHeadMaxPlusOne;
    case Scorer::kCur:
    case Scorer::kLag:
      return Padding::kOne;
    case Scorer::kVatp:
      return Padding::kLargest;
    case Scorer::kRecency:
      return Padding::kPosition;
    case Scorer::kFull:
    case Scorer::kRandom:
    case Scorer::kProjectionCode:
    case Scorer::kAttentionMean:
    case Scorer::kKeyNorm:
    case Scorer::kKeyDiff:
    case Scorer::kLocalAttention:
      return Padding::kNone;
  }
  return Padding::kNone;
}

// Greatest score of tokens `from` .. `to` - 1 of the flat array; protected ones where they are asked for.
float Largest(const LayerScores& scores, size_t from, size_t to, bool with_protected) {
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t at = from; at < to; ++at) {
    if (!with_protected && scores.is_protected[at % scores.tokens] != 0) continue;
    const auto score = static_cast<float>(scores.score[at]);
    if (score > largest) largest = score;  // never for NaN
  }
  return std::isinf(largest) ? 0.0F : largest;
}

// The tokens between the sinks and the latest are 0, the others 1.
void PadByPosition(const Recipe& recipe, double ratio, const LayerScores& scores, std::vector<float>* padded) {
  const int32_t n = scores.tokens;
  const auto kept = static_cast<int32_t>(n * (1.0 - ratio));
  for (size_t at = 0; at < padded->size(); ++at) {
    const auto j = static_cast<int32_t>(at % n);
    (*padded)[at] = j >= recipe.policy.sink && j < recipe.policy.sink + n - kept ? 0.0F : 1.0F;
  }
}

float PadValue(Padding padding, const LayerScores& scores, int32_t head) {
  const auto n = static_cast<size_t>(scores.tokens);
  switch (padding) {
    case Padding::kLayerMaxPlusOne:
      return Largest(scores, 0, scores.score.size(), false) + 1.0F;
    case Padding::kLayerMax:
      return Largest(scores, 0, scores.score.size(), false);
    case Padding::kHeadMaxPlusOne:
      return Largest(scores, head * n, (head + 1) * n, true) + 1.0F;
    case Padding::kLargest:
      return std::numeric_limits<float>::max();
    default:
      return 1.0F;
  }
}

}  // namespace

std::vector<float> PaddedScores(const Recipe& recipe, const LayerScores& scores, double ratio) {
  std::vector<float> padded(scores.score.begin(), scores.score.end());
  const Padding padding = PaddingOf(recipe.scorer);
  if (padding == Padding::kNone) return padded;
  if (padding == Padding::kPosition) {
    PadByPosition(recipe, ratio, scores, &padded);
    return padded;
  }
  for (int32_t head = 0; head < scores.kv_heads; ++head) {
    const float value = PadValue(padding, scores, head);
    const size_t first = static_cast<size_t>(head) * scores.tokens;
    for (int32_t j = 0; j < scores.tokens; ++j) {
      const bool first_stage = !scores.first_stage.empty() && scores.first_stage[first + j] != 0;
      if (scores.is_protected[j] != 0 || first_stage) padded[first + j] = value;
    }
  }
  return padded;
}

Result<std::vector<float>> ParityScores(const Recipe& recipe, const LayerScores& scores, double ratio) {
  if (!(ratio >= 0.0 && ratio < 1.0))
    return InvalidArgument("ratio: expected 0 up to but not 1, the share removed, got " + std::to_string(ratio));
  const size_t count = static_cast<size_t>(scores.kv_heads) * scores.tokens;
  if (scores.score.size() != count || scores.is_protected.size() != static_cast<size_t>(scores.tokens))
    return InvalidArgument("scores: expected [Hkv, n] = [" + std::to_string(scores.kv_heads) + ", " +
                           std::to_string(scores.tokens) + "] of them, got " + std::to_string(scores.score.size()));
  std::vector<float> padded = PaddedScores(recipe, scores, ratio);
  if (!recipe.critical) return padded;
  if (scores.projected_norm.size() != count)
    return InvalidArgument("scores.projected_norm: expected " + std::to_string(count) + " numbers for policy " +
                           recipe.name() + ", got " + std::to_string(scores.projected_norm.size()));
  const auto kept = static_cast<int32_t>(scores.tokens * (1.0 - ratio));
  const auto first = static_cast<int32_t>((1.0 - ratio) * scores.tokens * recipe.first_stage);
  return FindCritical(recipe, scores, padded, kept, first).value;
}

}  // namespace dropkv::baseline
