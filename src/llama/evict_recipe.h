// Eviction by a recipe that the engine does not know, and what both ways of evicting share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "baseline/allocate.h"
#include "baseline/recipe.h"
#include "dropkv/engine.h"
#include "llama/evict.h"
#include "llama/prefill.h"

namespace dropkv::llama {

// Of the layers that see the whole prompt; there must be one.
EvictShape ShapeOf(const Prefilled& prefilled);

// Views of the layers that see the whole prompt and what was generated behind it, with rows that were captured.
class LayerInputs {
 public:
  // window: rows of the prompt's end, of a shorter prompt all; row i of them sees n - rows + i + 1 tokens. generated:
  // and those of the tokens behind it, each of which sees those before it. Errors: fewer captured.
  static Result<LayerInputs> Make(const Prefilled& prefilled, int32_t window, bool generated);

  // What a policy with this window and these sources is to be judged by: where nothing was generated, its window.
  static Result<LayerInputs> Make(const Prefilled& prefilled, const baseline::Recipe& recipe);

  std::span<const LayerInput> layers() const { return layers_; }
  int32_t rows() const { return static_cast<int32_t>(visible_.size()); }

 private:
  std::vector<int32_t> visible_;
  std::vector<LayerInput> layers_;
};

struct Certificate {
  explicit Certificate(size_t heads) : error(heads), mass(heads) {}
  std::vector<float> error;  // [layers, Hq]
  std::vector<float> mass;   // [layers, Hq]
};

// A job and what becomes of it.
struct EvictTask {
  const EvictJob* job;
  Certificate certificate;
  Evicted evicted;
};

// Measures the tasks' lists over all captured rows, in one pass; adds an even share of its time to every report.
Status Certify(const Prefilled& prefilled, Engine* engine, std::span<EvictTask* const> tasks);

// What the scorers read of layer prefilled.layers[i]; `input` is that layer's, with the window's rows.
Result<baseline::Layer> RecipeLayer(const Prefilled& prefilled, const baseline::Recipe& recipe, int32_t number,
                                    const LayerInput& input);

// An internal error unless the lists hold exactly the tokens that the budgets say: per head where heads are uniform,
// per layer where they share, in all where the layers do. Rules that round for themselves (ada-o, whole chunks) are
// held to bounds only. scores: of every layer; none of their protected tokens may be missing where the budget has room.
Status CheckCounts(const baseline::Recipe& recipe, std::span<const baseline::LayerScores> scores,
                   const baseline::Selection& selection);

// tasks: of recipes that share scores, or a single one.
Status EvictByRecipe(const Prefilled& prefilled, Engine* engine, std::span<EvictTask* const> tasks);

}  // namespace dropkv::llama
