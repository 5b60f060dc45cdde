// Which recipes are scored alike, whatever is kept: what the predicates say against the scores themselves.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "baseline/prompt_case.h"

namespace dropkv::baseline {
namespace {

constexpr int32_t kRows = 128;

// A layer with everything that any preset reads.
class WholeLayer {
 public:
  WholeLayer() : statistics_(Fill().Gather(EveryPlan())) {
    for (int32_t i = 0; i < kRows; ++i) visible_.push_back(case_.tokens - kRows + i + 1);
    cpu::RandomStream random(5);
    wo_.resize(static_cast<size_t>(kHidden) * columns());
    for (float& x : wo_) x = random.Normal();
  }

  Layer MakeLayer() const {
    Layer layer = case_.MakeLayer(&statistics_);
    const int64_t row = int64_t{case_.query_heads} * case_.key_dim;
    layer.rows = {
        case_.q.data() + (case_.tokens - kRows) * row, case_.key_dim, row, case_.query_heads, kRows, visible_.data()};
    layer.wo.hidden = kHidden;
    layer.wo.columns = columns();
    layer.wo.read_row = [this](int32_t r, float* out) {
      std::copy_n(wo_.data() + static_cast<int64_t>(r) * columns(), columns(), out);
    };
    return layer;
  }

 private:
  static constexpr int32_t kHidden = 24;

  int32_t columns() const { return case_.query_heads * case_.value_dim; }
  PromptCase& Fill() {
    case_.tokens = 300;
    case_.rope = Rope::Standard(case_.key_dim, 1e4);
    return case_.Fill();
  }
  static StatisticsPlan EveryPlan() {
    StatisticsPlan plan;
    for (const Recipe& recipe : Recipes()) plan.Add(recipe);
    return plan;
  }

  PromptCase case_;
  PromptStatistics statistics_;
  std::vector<int32_t> visible_;
  std::vector<float> wo_;
};

// The last rows are the window's.
LayerScores ScoreOf(const Recipe& recipe, Layer layer, double keep_fraction) {
  const int32_t skipped = kRows - std::max(1, recipe.policy.window);
  layer.rows.q += skipped * layer.rows.row_stride;
  layer.rows.visible += skipped;
  layer.rows.rows -= skipped;
  Result<LayerScores> scores = Score(recipe, layer, keep_fraction, nullptr);
  EXPECT_TRUE(scores.ok()) << recipe.name() << ": " << scores.status().message();
  return scores.ok() ? std::move(*scores) : LayerScores{};
}

bool Same(const LayerScores& a, const LayerScores& b) {
  return a.score == b.score && a.is_protected == b.is_protected && a.projected_norm == b.projected_norm &&
         a.entropy == b.entropy && a.variance == b.variance && a.first_stage == b.first_stage &&
         a.nonfinite_tokens == b.nonfinite_tokens && a.forced == b.forced;
}

TEST(SharedScores, BudgetsMatterToThoseThatReadThem) {
  const WholeLayer whole;
  int32_t reading = 0;
  for (const Recipe& recipe : Recipes()) {
    const LayerScores few = ScoreOf(recipe, whole.MakeLayer(), 0.25);
    const LayerScores many = ScoreOf(recipe, whole.MakeLayer(), 0.75);
    EXPECT_EQ(Same(few, many), !ReadsBudget(recipe)) << recipe.name();
    reading += ReadsBudget(recipe) ? 1 : 0;
  }
  EXPECT_GE(reading, 2);
}

TEST(SharedScores, PresetsThatShareAreScoredAlike) {
  const WholeLayer whole;
  const std::span<const Recipe> recipes = Recipes();
  std::vector<LayerScores> scores;
  for (const Recipe& recipe : recipes) scores.push_back(ScoreOf(recipe, whole.MakeLayer(), 0.5));
  int32_t shared = 0;
  for (size_t i = 0; i < recipes.size(); ++i)
    for (size_t j = 0; j < recipes.size(); ++j) {
      EXPECT_EQ(SameScores(recipes[i], recipes[j]), SameScores(recipes[j], recipes[i]));
      if (i == j) {
        EXPECT_EQ(SameScores(recipes[i], recipes[j]), !ReadsBudget(recipes[i]));
      } else if (SameScores(recipes[i], recipes[j])) {
        EXPECT_TRUE(Same(scores[i], scores[j])) << recipes[i].name() << " " << recipes[j].name();
        ++shared;
      }
    }
  EXPECT_GT(shared, 0);
  EXPECT_TRUE(SameScores(*FindRecipe("dropkv"), *FindRecipe("adadropkv")));
  EXPECT_TRUE(SameScores(*FindRecipe("knorm"), *FindRecipe("ada-knorm")));
  EXPECT_FALSE(SameScores(*FindRecipe("snapkv"), *FindRecipe("critical-snapkv")));
}

using Change = std::function<void(Recipe&)>;

TEST(SharedScores, OnlyWhatSelectReadsMayDiffer) {
  const Recipe plain;
  const std::vector<Change> selects = {
      [](Recipe& r) { r.policy.name = "another"; },      [](Recipe& r) { r.policy.heads = HeadRule::kAda; },
      [](Recipe& r) { r.policy.alpha = 0.7; },           [](Recipe& r) { r.flat_heads = true; },
      [](Recipe& r) { r.layers = LayerRule::kPyramid; }, [](Recipe& r) { r.pyramid_beta = 3; },
      [](Recipe& r) { r.first_stage = 0.25; },           [](Recipe& r) { r.recent_share = 0.5; },
      [](Recipe& r) { r.source = "elsewhere"; },         [](Recipe& r) { r.tier = 2; },
  };
  const std::vector<Change> scores = {
      [](Recipe& r) { r.scorer = Scorer::kAttention; },
      [](Recipe& r) { r.base = Scorer::kLastRow; },
      [](Recipe& r) { r.group = GroupRule::kSum; },
      [](Recipe& r) { r.group_before_pool = false; },
      [](Recipe& r) { r.policy.window = 9; },
      [](Recipe& r) { r.policy.sink = 4; },
      [](Recipe& r) { r.policy.seed = 1; },
      [](Recipe& r) { r.policy.pool.kind = PoolKind::kMax; },
      [](Recipe& r) { r.policy.pool.before = 1; },
      [](Recipe& r) { r.policy.pool.after = 1; },
      [](Recipe& r) { r.policy.pool.past_only = true; },
      [](Recipe& r) { r.rows.delay = 1; },
      [](Recipe& r) { r.rows.window = false; },
      [](Recipe& r) { r.protect_window = false; },
      [](Recipe& r) { r.recent = 4; },
      [](Recipe& r) { r.layers = LayerRule::kCake; },
      [](Recipe& r) { r.critical = true; },
      [](Recipe& r) { r.epsilon = 0.5; },
      [](Recipe& r) { r.chunk = 4; },
      [](Recipe& r) { r.block = 4; },
      [](Recipe& r) { r.future = 4; },
      [](Recipe& r) { r.covariance = false; },
      [](Recipe& r) { r.value_norm = false; },
      [](Recipe& r) { r.cross = true; },
      [](Recipe& r) { r.exact_bias = true; },
      [](Recipe& r) { r.gamma = 4; },
      [](Recipe& r) { r.sketch = 4; },
      [](Recipe& r) { r.cur = CurForm::kKey; },
      [](Recipe& r) { r.obcache = ObCacheForm::kKey; },
  };
  for (const bool alike : {true, false}) {
    const std::vector<Change>& changes = alike ? selects : scores;
    for (size_t i = 0; i < changes.size(); ++i) {
      Recipe changed;
      changes[i](changed);
      EXPECT_EQ(SameScores(plain, changed), alike) << i;
      EXPECT_EQ(SameScores(changed, plain), alike) << i;
    }
  }
}

// The tokens behind the prompt are the layer's; how a recipe came to them is not read.
TEST(SharedScores, RowsOfTheSameTokensAreTheSame) {
  Recipe drafted;
  drafted.rows.draft = 8;
  Recipe other = drafted;
  other.rows.draft_budget = Budget::Tokens(64);
  EXPECT_TRUE(SameScores(drafted, other));
  other.rows = {.oracle = 8};
  EXPECT_TRUE(SameScores(drafted, other));
  EXPECT_FALSE(SameScores(drafted, Recipe{}));
}

}  // namespace
}  // namespace dropkv::baseline
