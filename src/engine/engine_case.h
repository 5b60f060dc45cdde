// What the engine's tests share: batches of layers made from a ScoreCase, and a run that returns everything.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/score_case.h"
#include "dropkv/engine.h"

namespace dropkv {

using cpu::CaseData;
using cpu::Content;
using cpu::ScoreCase;

inline Engine MakeEngine(int32_t threads, const std::string& kernel = {}) {
  Result<Engine> engine = Engine::Create({threads, kernel});
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return std::move(engine).value();
}

// candidates: the fewest that it has.
inline ScoreCase RandomCase(cpu::RandomStream& random, int32_t candidates) {
  ScoreCase c;
  c.kv_heads = 1 + random.Below(3);
  c.group = 1 + random.Below(4);
  c.generated = random.Below(3) == 0 ? 0 : 1 + random.Below(30);
  c.tokens = candidates + random.Below(200) + c.generated;
  // The generated tokens' alone, or more.
  c.rows = random.Below(3) == 0 && c.generated > 0 ? c.generated : 1 + random.Below(40);
  c.key_dim = 32 * (1 + random.Below(3));
  c.value_dim = 32 * (1 + random.Below(3));
  c.layout = static_cast<cpu::Layout>(random.Below(3));
  c.dtype = static_cast<DType>(random.Below(4));
  c.content = random.Below(4) == 0 ? Content::kNonFinite : Content::kNormal;
  c.soft_cap = random.Below(4) == 0 ? 5.0F : 0.0F;
  c.sinks = random.Below(3) == 0;
  c.any_visible = random.Below(2) == 0;
  c.weights = random.Below(2) == 0;
  c.cells = random.Below(2) == 0;
  return c;
}

inline Policy Preset(std::string_view name) { return *FindPreset(name); }

// Several layers with data of their own, and everything that a run returns.
struct Batch {
  std::vector<std::unique_ptr<CaseData>> data;
  std::vector<LayerInput> inputs;
  EvictShape shape;

  Batch(const ScoreCase& c, int32_t layers)
      : shape{layers, c.query_heads(), c.kv_heads, c.candidates(), c.key_dim, c.value_dim, c.generated} {
    for (int32_t layer = 0; layer < layers; ++layer) {
      data.push_back(std::make_unique<CaseData>(c, static_cast<uint64_t>(layer)));
      inputs.push_back(data.back()->input());
      inputs.back().layer_index = layer;
    }
  }
};

struct Outcome {
  KeepList keep;
  EvictReport report;
  std::vector<float> scores, raw, error, mass;
};

inline Outcome RunBatch(Engine& engine, const Batch& batch, const Policy& policy, const Budget& budget,
                        bool certificate = true) {
  const Result<Plan> plan = engine.MakePlan(batch.shape, policy, budget);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  Outcome outcome;
  const size_t heads = static_cast<size_t>(batch.shape.layers) * batch.shape.kv_heads;
  outcome.scores.resize(heads * batch.shape.tokens);
  outcome.raw.resize(outcome.scores.size());
  outcome.error.resize(static_cast<size_t>(batch.shape.layers) * batch.shape.query_heads);
  outcome.mass.resize(outcome.error.size());
  std::vector<std::byte> workspace(plan->workspace_bytes, std::byte{0xFF});
  const EvictOutput output{outcome.scores.data(), outcome.raw.data(), certificate ? outcome.error.data() : nullptr,
                           certificate ? outcome.mass.data() : nullptr};
  Result<KeepList> keep = engine.Run(*plan, batch.inputs, workspace, output, &outcome.report);
  EXPECT_TRUE(keep.ok()) << keep.status().message();
  if (keep.ok()) outcome.keep = std::move(keep).value();
  EXPECT_LE(outcome.keep.total(), plan->max_kept);
  return outcome;
}

inline void ExpectSameLists(const KeepList& a, const KeepList& b) {
  ASSERT_EQ(a.layers(), b.layers());
  ASSERT_EQ(a.kv_heads(), b.kv_heads());
  for (int32_t layer = 0; layer < a.layers(); ++layer)
    for (int32_t head = 0; head < a.kv_heads(); ++head)
      EXPECT_TRUE(std::ranges::equal(a.head(layer, head), b.head(layer, head))) << layer << " " << head;
}

// Tokens whose pooled score is farther from every competitor for the last place than the errors allow must be kept, or
// evicted, as in exact arithmetic. pooled, bound [n] of one head; candidates are the tokens before `end`.
inline void ExpectDecided(std::span<const int32_t> kept, const std::vector<double>& pooled,
                          const std::vector<double>& bound, int32_t end, int32_t places) {
  int32_t undecided = 0;
  for (int32_t j = 0; j < end; ++j) {
    int32_t may_beat = 0;
    int32_t must_beat = 0;
    for (int32_t i = 0; i < end; ++i) {
      if (i == j) continue;
      may_beat += pooled[i] + bound[i] >= pooled[j] - bound[j] ? 1 : 0;
      must_beat += pooled[i] - bound[i] > pooled[j] + bound[j] ? 1 : 0;
    }
    const bool is_kept = std::ranges::binary_search(kept, j);
    EXPECT_TRUE(is_kept || may_beat >= places) << "token " << j;
    EXPECT_TRUE(!is_kept || must_beat < places) << "token " << j;
    undecided += may_beat >= places && must_beat < places ? 1 : 0;
  }
  EXPECT_LT(undecided, std::max(4, end / 5)) << "the test decides too little";
}

}  // namespace dropkv
