// Selection of one layer's tokens: time, and tokens a second. Arguments: tokens, rule (0 uniform, 1 ada, 2 ada-o).
#include <benchmark/benchmark.h>

#include <vector>

#include "core/random.h"
#include "cpu/select.h"

namespace dropkv::cpu {
namespace {

void SelectLayer(benchmark::State& state) {
  constexpr int32_t kHeads = 8;
  const auto n = static_cast<int32_t>(state.range(0));
  Policy policy;
  policy.heads = static_cast<HeadRule>(state.range(1));
  const KeepCount budget{n / 20, false};
  std::vector<float> scores(static_cast<size_t>(kHeads) * n);
  for (size_t i = 0; i < scores.size(); ++i) {  // many magnitudes, as squared probabilities have
    const float x = RandomUniform(1, i) * RandomUniform(2, i);
    scores[i] = x * x * x;
  }
  const std::vector<uint8_t> flags(scores.size(), 0);
  std::vector<std::byte> workspace(SelectWorkspaceBytes(policy, budget, kHeads, n));
  std::vector<int32_t> positions(MaxSelected(policy, budget, kHeads, n));
  std::vector<int32_t> counts(kHeads);
  const SelectInput input{kHeads, n, &policy, budget, scores.data(), scores.data(), flags.data()};
  for (auto _ : state) {
    if (!Select(input, workspace, counts.data(), positions.data()).ok()) state.SkipWithError("select failed");
    benchmark::DoNotOptimize(positions.data());
  }
  state.SetItemsProcessed(state.iterations() * kHeads * n);
}

BENCHMARK(SelectLayer)
    ->ArgNames({"tokens", "rule"})
    ->ArgsProduct({{4096, 131072}, {0, 1, 2}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace dropkv::cpu
