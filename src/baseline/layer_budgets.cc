#include "baseline/layer_budgets.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "baseline/allocate.h"

namespace dropkv::baseline {
namespace {

// Tokens from a real number, within [0, n].
int32_t Tokens(double value, int32_t n) { return static_cast<int32_t>(std::clamp(value, 0.0, static_cast<double>(n))); }

int32_t PyramidShare(const Recipe& recipe, int32_t layer, int32_t layers, int32_t n, double kept) {
  const double window = recipe.policy.window;
  double low = kept / recipe.pyramid_beta;
  double high = kept * 2 - low;
  if (high >= n - window) {
    high = n - window;
    low = kept * 2 - high;
  }
  if (layers < 2 || !(n >= high && high >= low && low >= window)) return Tokens(std::nearbyint(kept), n);
  const double step = (high - low) / (layers - 1);
  return Tokens(std::nearbyint(high - layer * step), n);
}

int32_t PyramidOriginalShare(const Recipe& recipe, int32_t layer, int32_t layers, int32_t n, double kept) {
  const int64_t window = recipe.policy.window;
  const auto capacity = static_cast<int64_t>(std::nearbyint(kept));
  const int64_t past = capacity - window;
  if (n < capacity) return n;
  if (past <= 0 || layers < 2 || n < past * 2) return Tokens(static_cast<double>(capacity), n);
  auto low = static_cast<int64_t>(std::floor(static_cast<double>(past) / recipe.pyramid_beta));
  int64_t high = past * 2 - low;
  if (high >= n - window) {
    high = n - window;
    low = past * 2 - high;
  }
  const int64_t step = (high - low) / (layers - 1);
  return Tokens(static_cast<double>(high - layer * step + window), n);
}

// Gives `amount` to the layers that can take more: equal parts, the remainder to the first of them. One pass, as in the
// reference: a part may overfill its layer.
void SpreadEvenly(int64_t amount, std::span<const int32_t> past, std::vector<int64_t>* shares) {
  std::vector<size_t> open;
  for (size_t i = 0; i < shares->size(); ++i)
    if ((*shares)[i] < past[i]) open.push_back(i);
  if (open.empty() || amount <= 0) return;
  const auto count = static_cast<int64_t>(open.size());
  for (int64_t i = 0; i < count; ++i) (*shares)[open[i]] += amount / count + (i < amount % count ? 1 : 0);
}

std::vector<double> Preferences(std::span<const double> entropy, std::span<const double> variance, double tau1,
                                double tau2) {
  std::vector<double> preferences;
  for (size_t i = 0; i < entropy.size(); ++i)
    preferences.push_back(std::pow(entropy[i], 1 / tau1) * std::pow(variance[i], 1 / tau2));
  const double sum = std::accumulate(preferences.begin(), preferences.end(), 0.0);
  if (!(sum > 0 && std::isfinite(sum))) preferences.assign(entropy.size(), 1.0);
  return preferences;
}

int32_t CountProtected(const LayerScores& layer) {
  return static_cast<int32_t>(
      std::count_if(layer.is_protected.begin(), layer.is_protected.end(), [](uint8_t mark) { return mark != 0; }));
}

std::vector<int32_t> CakeShares(const Recipe& recipe, std::span<const LayerScores> layers, double kept) {
  std::vector<double> entropy;
  std::vector<double> variance;
  std::vector<int32_t> past;
  for (const LayerScores& layer : layers) {
    entropy.push_back(layer.entropy);
    variance.push_back(layer.variance);
    past.push_back(std::max(0, layer.tokens - recipe.policy.window));
  }
  return ShareByPreference(entropy, variance, past, recipe.policy.window, static_cast<int64_t>(kept), recipe.cake_tau1,
                           recipe.cake_tau2);
}

}  // namespace

Result<int32_t> LayerShare(const Recipe& recipe, int32_t layer, int32_t layers, int32_t n, double kept) {
  if (layers < 1 || layer < 0 || layer >= layers)
    return InvalidArgument("layer: expected 0 to " + std::to_string(layers - 1) + ", got " + std::to_string(layer));
  switch (recipe.layers) {
    case LayerRule::kSame:
      return Tokens(kept, n);
    case LayerRule::kPyramid:
      return PyramidShare(recipe, layer, layers, n, kept);
    case LayerRule::kPyramidOriginal:
      return PyramidOriginalShare(recipe, layer, layers, n, kept);
    default:
      return Unsupported("policy " + recipe.name() + ": its layers share by their scores; expected those of all " +
                         std::to_string(layers) + " layers, got one layer's");
  }
}

std::vector<int32_t> ShareByPreference(std::span<const double> entropy, std::span<const double> variance,
                                       std::span<const int32_t> past, int32_t window, int64_t kept, double tau1,
                                       double tau2) {
  const std::vector<double> preferences = Preferences(entropy, variance, tau1, tau2);
  const double sum = std::accumulate(preferences.begin(), preferences.end(), 0.0);
  const int64_t pool = std::max<int64_t>(0, kept - window) * static_cast<int64_t>(past.size());
  std::vector<int64_t> shares;
  int64_t excess = 0;
  for (size_t i = 0; i < past.size(); ++i) {
    const auto wanted = static_cast<int64_t>(preferences[i] / sum * static_cast<double>(pool));
    shares.push_back(std::min<int64_t>(wanted, past[i]));
    excess += wanted - shares.back();
  }
  SpreadEvenly(excess, past, &shares);
  SpreadEvenly(pool - std::accumulate(shares.begin(), shares.end(), int64_t{0}), past, &shares);
  std::vector<int32_t> keep;
  for (size_t i = 0; i < past.size(); ++i)
    keep.push_back(static_cast<int32_t>(std::min<int64_t>(shares[i], past[i])) + window);
  return keep;
}

LayerBudgets ShareAmongLayers(const Recipe& recipe, std::span<const LayerScores> layers, double kept, bool clamp) {
  LayerBudgets budgets;
  const auto count = static_cast<int32_t>(layers.size());
  if (recipe.layers == LayerRule::kCake) budgets.keep = CakeShares(recipe, layers, kept);
  for (int32_t i = 0; i < count; ++i) {
    const LayerScores& layer = layers[i];
    if (recipe.scorer == Scorer::kFull) {
      budgets.keep.push_back(layer.tokens);
      continue;
    }
    if (recipe.layers == LayerRule::kFlat) {
      budgets.keep.push_back(Tokens(kept, layer.tokens));
    } else if (recipe.layers != LayerRule::kCake) {
      budgets.keep.push_back(LayerShare(recipe, i, count, layer.tokens, kept).value());
    }
    int32_t& keep = budgets.keep[i];
    keep = std::min(keep, layer.tokens);
    const int32_t smallest = std::min(layer.tokens, std::max(1, CountProtected(layer)));
    if (!clamp || keep >= smallest) continue;
    keep = smallest;
    budgets.raised = true;
  }
  if (recipe.layers == LayerRule::kFlat && count > 0) {
    int64_t tokens = 0;
    int64_t smallest = 0;
    for (const LayerScores& layer : layers) {
      tokens += int64_t{layer.kv_heads} * layer.tokens;
      smallest += int64_t{layer.kv_heads} * std::max(1, CountProtected(layer));
    }
    const auto wanted = static_cast<int64_t>(kept * layers.front().kv_heads * count);
    budgets.raised = clamp && wanted < smallest;
    budgets.total = std::min(tokens, budgets.raised ? smallest : wanted);
  }
  return budgets;
}

}  // namespace dropkv::baseline
