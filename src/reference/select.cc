#include <algorithm>
#include <cmath>

#include "reference/reference.h"

namespace dropkv::reference {
namespace {

constexpr double kRoundingSlack = 1e-6;  // algorithm.md section 4.3: keeps 0.1 * 10 from becoming 0

// A token that is not protected by index, with its place in the order of candidates.
struct Candidate {
  int32_t head;
  int32_t token;
  int32_t kind;  // 0 non-finite, 1 dominant, 2 by pooled score
  double score;  // 0, raw, pooled

  bool operator<(const Candidate& other) const {
    if (kind != other.kind) return kind < other.kind;
    if (score != other.score) return score > other.score;
    if (head != other.head) return head < other.head;
    return token < other.token;
  }
};

struct Layout {
  int32_t kv_heads;
  int32_t n;
  int32_t window;
  int32_t sink;
  int32_t others;  // budget per head beyond the protected tokens

  bool is_protected(int32_t token) const { return token < sink || token >= n - window; }
};

using HeadLists = std::vector<std::vector<Candidate>>;  // [Hkv] candidates, best first

HeadLists SortedCandidates(const Layout& layout, const double* raw, const double* pooled, const uint8_t* flags) {
  HeadLists heads(layout.kv_heads);
  for (int32_t u = 0; u < layout.kv_heads; ++u) {
    for (int32_t j = 0; j < layout.n; ++j) {
      if (layout.is_protected(j)) continue;
      const size_t at = static_cast<size_t>(u) * layout.n + j;
      if ((flags[at] & kNonFinite) != 0) {
        heads[u].push_back({u, j, 0, 0.0});
      } else if ((flags[at] & kDominant) != 0) {
        heads[u].push_back({u, j, 1, raw[at]});
      } else {
        heads[u].push_back({u, j, 2, pooled[at]});
      }
    }
    std::sort(heads[u].begin(), heads[u].end());
  }
  return heads;
}

// How many of the best `total` candidates of the layer each head holds, the first `taken` of every head left out.
std::vector<int32_t> FlatCounts(const HeadLists& heads, int32_t taken, int64_t total) {
  std::vector<Candidate> flat;
  for (const auto& head : heads) flat.insert(flat.end(), head.begin() + taken, head.end());
  std::sort(flat.begin(), flat.end());
  std::vector<int32_t> counts(heads.size(), 0);
  for (int64_t i = 0; i < std::min<int64_t>(total, flat.size()); ++i) ++counts[flat[i].head];
  return counts;
}

// Rule K (algorithm.md "Adaptive head budgets"): a floor per head, the rest by the layer's highest scores.
std::vector<int32_t> CountsRuleK(const HeadLists& heads, const Layout& layout, double alpha, int32_t keep) {
  const auto safe = static_cast<int32_t>(std::floor(alpha * keep + kRoundingSlack));
  const int32_t floor_count = std::clamp(safe - layout.window - layout.sink, 0, layout.others);
  const int64_t rest = static_cast<int64_t>(layout.kv_heads) * (layout.others - floor_count);
  std::vector<int32_t> counts = FlatCounts(heads, floor_count, rest);
  for (int32_t& count : counts) count += floor_count;
  return counts;
}

// Rule O (the original AdaKV): flat counts, drawn towards the uniform share; the total may drift by rounding.
std::vector<int32_t> CountsRuleO(const HeadLists& heads, const Layout& layout, double alpha) {
  const double base = std::floor(layout.others * alpha + kRoundingSlack);
  std::vector<int32_t> counts = FlatCounts(heads, 0, static_cast<int64_t>(layout.kv_heads) * layout.others);
  for (size_t u = 0; u < counts.size(); ++u) {
    const double wanted = std::nearbyint(counts[u] * (1.0 - alpha) + base);
    counts[u] = static_cast<int32_t>(std::min(wanted, static_cast<double>(heads[u].size())));
  }
  return counts;
}

std::vector<int32_t> Counts(const Policy& policy, const HeadLists& heads, const Layout& layout, int32_t keep) {
  switch (policy.heads) {
    case HeadRule::kAda:
      return CountsRuleK(heads, layout, policy.alpha, keep);
    case HeadRule::kAdaO:
      return CountsRuleO(heads, layout, policy.alpha);
    case HeadRule::kUniform:
      break;
  }
  return std::vector<int32_t>(heads.size(), layout.others);
}

}  // namespace

KeepList Select(const Policy& policy, const KeepCount& budget, int32_t kv_heads, int32_t n, const double* raw,
                const double* pooled, const uint8_t* flags, int32_t generated) {
  const int32_t smallest = policy.window + policy.sink;
  if (policy.signal == Signal::kFull || budget.keep >= n || n <= smallest)
    return KeepList::All(1, kv_heads, n + generated);
  const Layout layout{kv_heads, n, policy.window, policy.sink, budget.keep - smallest};
  const HeadLists heads = SortedCandidates(layout, raw, pooled, flags);
  const std::vector<int32_t> counts = Counts(policy, heads, layout, budget.keep);

  std::vector<int64_t> offsets{0};
  std::vector<int32_t> positions;
  for (int32_t u = 0; u < kv_heads; ++u) {
    const auto first = static_cast<std::ptrdiff_t>(positions.size());
    for (int32_t j = 0; j < n; ++j)
      if (layout.is_protected(j)) positions.push_back(j);
    for (int32_t i = 0; i < counts[u]; ++i) positions.push_back(heads[u][i].token);
    std::sort(positions.begin() + first, positions.end());
    for (int32_t j = n; j < n + generated; ++j) positions.push_back(j);
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  return {1, kv_heads, std::move(offsets), std::move(positions)};
}

}  // namespace dropkv::reference
