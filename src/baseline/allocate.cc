#include "baseline/allocate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "baseline/layer_order.h"

namespace dropkv::baseline {
namespace {

constexpr double kRoundingSlack = 1e-6;  // as in the engine: keeps 0.1 * 10 from becoming 0

// Rule K: a floor for every head, protected tokens inside it, and the rest by the layer's order.
void TakeAda(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  const double safe = recipe.policy.alpha * share.keep + (share.clamp ? kRoundingSlack : 0.0);
  const int32_t floor_count = std::min(share.keep, std::max(static_cast<int32_t>(safe), order->protected_tokens()));
  for (int32_t head = 0; head < order->kv_heads(); ++head) order->TakeFromHead(head, floor_count);
  order->TakeFromAll(int64_t{order->kv_heads()} * (share.keep - floor_count));
}

// Rule O: protected tokens, then counts of the layer's order drawn towards the uniform share.
void TakeAdaO(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  const int32_t fixed = std::min(share.keep, order->protected_tokens());
  for (int32_t head = 0; head < order->kv_heads(); ++head) order->TakeFromHead(head, fixed);
  const int32_t base = share.keep - fixed;
  LayerOrder flat = *order;
  const std::vector<int32_t> counts = flat.TakeFromAll(int64_t{order->kv_heads()} * base);
  const double uniform = std::floor(base * recipe.policy.alpha + kRoundingSlack);
  for (int32_t head = 0; head < order->kv_heads(); ++head)
    order->TakeFromHead(head,
                        static_cast<int64_t>(std::nearbyint(counts[head] * (1.0 - recipe.policy.alpha) + uniform)));
}

// trunc(kept * Hkv) of the layer, all protected tokens at least.
void TakeFlat(const LayerShareOf& share, LayerOrder* order) {
  const auto wanted = static_cast<int64_t>(share.exact * order->kv_heads());
  const int64_t smallest = share.clamp ? int64_t{order->kv_heads()} * order->protected_tokens() : 0;
  order->TakeFromAll(std::max(wanted, smallest));
}

void TakeUniform(const LayerShareOf& share, LayerOrder* order) {
  for (int32_t head = 0; head < order->kv_heads(); ++head) order->TakeFromHead(head, share.keep);
}

// Returns the layer's tokens per KV head, which chunks round.
int32_t Take(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  if (share.keep >= order->tokens()) {
    TakeUniform(share, order);
    return share.keep;
  }
  if (recipe.scorer == Scorer::kProjectionCode) {
    TakeProjectionChunks(recipe, share, order);
  } else if (recipe.chunk > 0 && order->tokens() >= recipe.chunk) {
    return TakeChunks(recipe, share, order);
  } else if (recipe.critical) {
    TakeCritical(recipe, share, order);
  } else if (recipe.flat_heads) {
    TakeFlat(share, order);
  } else if (recipe.policy.heads == HeadRule::kAda) {
    TakeAda(recipe, share, order);
  } else if (recipe.policy.heads == HeadRule::kAdaO) {
    TakeAdaO(recipe, share, order);
  } else {
    TakeUniform(share, order);
  }
  return share.keep;
}

Status CheckSize(const char* field, size_t layer, size_t size, size_t expected) {
  if (size == expected) return Status::Ok();
  return InvalidArgument("layers[" + std::to_string(layer) + "]." + field + ": expected " + std::to_string(expected) +
                         " elements, got " + std::to_string(size));
}

Status CheckLayers(const Recipe& recipe, std::span<const LayerScores> layers) {
  if (layers.empty()) return InvalidArgument("layers: expected at least 1, got 0");
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerScores& layer = layers[i];
    const std::string name = "layers[" + std::to_string(i) + "].";
    if (layer.tokens < 1)
      return InvalidArgument(name + "tokens: expected at least 1, got " + std::to_string(layer.tokens));
    if (layer.kv_heads < 1 || layer.kv_heads != layers.front().kv_heads)
      return InvalidArgument(name + "kv_heads: expected " + std::to_string(std::max(1, layers.front().kv_heads)) +
                             ", got " + std::to_string(layer.kv_heads));
    const size_t elements = static_cast<size_t>(layer.kv_heads) * layer.tokens;
    if (recipe.scorer == Scorer::kFull) continue;
    DROPKV_RETURN_IF_ERROR(CheckSize("score", i, layer.score.size(), elements));
    DROPKV_RETURN_IF_ERROR(CheckSize("is_protected", i, layer.is_protected.size(), layer.tokens));
    if (!layer.forced.empty()) DROPKV_RETURN_IF_ERROR(CheckSize("forced", i, layer.forced.size(), elements));
    if (!layer.first_stage.empty())
      DROPKV_RETURN_IF_ERROR(CheckSize("first_stage", i, layer.first_stage.size(), elements));
    if (recipe.critical) DROPKV_RETURN_IF_ERROR(CheckSize("projected_norm", i, layer.projected_norm.size(), elements));
  }
  return Status::Ok();
}

// Keep lists that grow layer by layer.
struct Lists {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;

  void AddAll(const LayerScores& layer) {
    for (int32_t head = 0; head < layer.kv_heads; ++head) {
      for (int32_t j = 0; j < layer.tokens; ++j) positions.push_back(j);
      offsets.push_back(static_cast<int64_t>(positions.size()));
    }
  }
};

void SelectLayers(const Recipe& recipe, std::span<const LayerScores> layers, LayerShareOf share, Selection* selection,
                  Lists* lists) {
  const double kept = share.exact;
  const double fraction = share.fraction;
  for (size_t i = 0; i < layers.size(); ++i) {
    int32_t& keep = selection->budgets.keep[i];
    LayerOrder order(recipe, layers[i], keep);
    if (share.clamp && keep < order.protected_tokens()) {
      keep = order.protected_tokens();
      selection->budgets.raised = true;
    }
    // Only an equal share knows more about itself than its whole number.
    const bool same = recipe.layers == LayerRule::kSame && std::floor(kept) == keep;
    share.keep = keep;
    share.exact = same ? kept : keep;
    share.fraction =
        same ? (fraction > 0 ? fraction : kept / layers[i].tokens) : static_cast<double>(keep) / layers[i].tokens;
    keep = Take(recipe, share, &order);
    order.Write(&lists->offsets, &lists->positions);
  }
}

// The best tokens of all layers and heads in one order.
void SelectFlat(const Recipe& recipe, std::span<const LayerScores> layers, const Selection& selection, Lists* lists) {
  std::vector<LayerOrder> orders;
  for (size_t i = 0; i < layers.size(); ++i) orders.emplace_back(recipe, layers[i], selection.budgets.keep[i]);
  std::vector<std::span<uint64_t>> keys;
  std::vector<std::span<uint8_t>> kept;
  for (LayerOrder& order : orders)
    for (int32_t head = 0; head < order.kv_heads(); ++head) {
      keys.push_back(order.keys(head));
      kept.push_back(order.kept(head));
    }
  TakeBest(keys, kept, selection.budgets.total);
  for (const LayerOrder& order : orders) order.Write(&lists->offsets, &lists->positions);
}

// Scores with a window of queries, or one that is a setting of the method's.
bool HasWindow(const Recipe& recipe) {
  return NeedsOf(recipe).window_queries || recipe.scorer == Scorer::kAttentionSum || recipe.scorer == Scorer::kCaote ||
         recipe.scorer == Scorer::kRandom || recipe.scorer == Scorer::kRecency || recipe.scorer == Scorer::kFull;
}

void AddWarnings(const Recipe& recipe, Selection* selection) {
  const bool adaptive = recipe.policy.heads != HeadRule::kUniform || recipe.flat_heads;
  if (adaptive && !ComparableAcrossHeads(recipe))
    selection->warnings.push_back("policy " + recipe.name() +
                                  ": its scores do not mean the same in every head, and heads share by them");
  if (recipe.policy.window > 0 && !HasWindow(recipe))
    selection->warnings.push_back("window: policy " + recipe.name() + " looks at no queries; its window of " +
                                  std::to_string(recipe.policy.window) + " only protects the last tokens");
  if (selection->budgets.raised)
    selection->warnings.push_back("budget: raised to the protected tokens of policy " + recipe.name());
}

}  // namespace

Result<Selection> Select(const Recipe& recipe, std::span<const LayerScores> layers, double kept, bool clamp,
                         double kept_fraction) {
  DROPKV_RETURN_IF_ERROR(CheckRecipe(recipe));
  DROPKV_RETURN_IF_ERROR(CheckLayers(recipe, layers));
  if (!(kept >= 0 && std::isfinite(kept)))
    return InvalidArgument("kept: expected a number of tokens of at least 0, got " + std::to_string(kept));
  if (!(kept_fraction >= 0 && kept_fraction <= 1))
    return InvalidArgument("kept_fraction: expected 0 to 1, got " + std::to_string(kept_fraction));
  int32_t most = 0;
  for (const LayerScores& layer : layers) most = std::max(most, layer.tokens);
  kept = std::min(kept, static_cast<double>(most));
  Selection selection{{}, ShareAmongLayers(recipe, layers, kept, clamp), {}};
  Lists lists;
  if (recipe.scorer == Scorer::kFull) {
    for (const LayerScores& layer : layers) lists.AddAll(layer);
  } else if (recipe.layers == LayerRule::kFlat) {
    SelectFlat(recipe, layers, selection, &lists);
  } else {
    SelectLayers(recipe, layers, {.exact = kept, .fraction = kept_fraction, .clamp = clamp}, &selection, &lists);
  }
  selection.keep = KeepList(static_cast<int32_t>(layers.size()), layers.front().kv_heads, std::move(lists.offsets),
                            std::move(lists.positions));
  AddWarnings(recipe, &selection);
  return selection;
}

}  // namespace dropkv::baseline
