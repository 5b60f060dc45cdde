// Scores a made-up cache of one layer, keeps 10% of it and compacts it in place.
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <random>
#include <utility>
#include <vector>

#include "dropkv/engine.h"

namespace {

constexpr int kQueryHeads = 8, kKvHeads = 2, kTokens = 2000, kDim = 64;

std::vector<float> Normal(size_t count, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(bits);
  return values;
}

// Gives the value, or ends the program with the message.
template <typename T>
T Need(dropkv::Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::cerr << result.status().message() << "\n";
  std::exit(1);
}

}  // namespace

int main() {
  using dropkv::Budget, dropkv::DType;
  const dropkv::Policy policy = Need(dropkv::FindPreset("adadropkv"));
  auto keys = Normal(size_t{kKvHeads} * kTokens * kDim, 1);
  auto values = Normal(size_t{kKvHeads} * kTokens * kDim, 2);
  const auto queries = Normal(size_t{kQueryHeads} * policy.window * kDim, 3);
  std::vector<int> visible(policy.window);  // the window is the last tokens of the prompt
  for (int i = 0; i < policy.window; ++i) visible[i] = kTokens - policy.window + i + 1;

  const dropkv::MutableKvTensor k{keys.data(), DType::kF32, kTokens * kDim, kDim, 1};  // [Hkv, n, d]
  const dropkv::MutableKvTensor v{values.data(), DType::kF32, kTokens * kDim, kDim, 1};
  const dropkv::MutableKvView cache{kKvHeads, kTokens, kDim, kDim, k, v};
  dropkv::LayerInput layer;
  layer.kv = cache;
  layer.rows = {queries.data(), policy.window * kDim, kDim, kQueryHeads, policy.window, visible.data()};
  layer.attention.scale = 0.125F;  // 1 / sqrt(kDim)
  auto engine = Need(dropkv::Engine::Create());
  const auto plan =
      Need(engine.MakePlan({1, kQueryHeads, kKvHeads, kTokens, kDim, kDim}, policy, Budget::Fraction(0.1)));
  std::vector<std::byte> workspace(plan.workspace_bytes);
  dropkv::EvictReport report;
  const auto keep = Need(engine.Run(plan, {&layer, 1}, workspace, {}, &report));
  const dropkv::Status compacted = dropkv::CompactInPlace(cache, nullptr, keep, 0);
  std::cout << "kernel " << report.kernel << ": the two heads keep " << keep.head(0, 0).size() << " and "
            << keep.head(0, 1).size() << " of " << kTokens << " tokens\n";
  return compacted.ok() && keep.total() == 2 * report.budget.keep ? 0 : 1;
}
