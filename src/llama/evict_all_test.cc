// Grids of budgets and head rules, scored once: every preset, against evictions one by one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <random>

#include "llama/evict.h"
#include "llama/look_ahead.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using baseline::Recipe;

constexpr int32_t kPrompt = 300;

class EvictAllTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() / ("dropkv_evict_all_" + std::to_string(::getpid()) + ".gguf"))
                .string();
    ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel({.layers = 3}), path_).ok());
    Result<Model> model = Model::Load(path_, {.gpu_layers = 0});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::make_unique<Model>(std::move(*model));
    engine_.emplace(*Engine::Create({.threads = 2, .force_kernel = {}}));
    std::mt19937 generator(3);
    tokens_.resize(kPrompt + 8);
    for (Token& token : tokens_) token = testing::kFirstByteToken + static_cast<Token>(generator() % 300);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  Prefilled Prefill(std::vector<Recipe> recipes, int32_t window = 0) {
    PrefillOptions options;
    options.threads = 2;
    options.window = window;
    options.recipes = std::move(recipes);
    options.pool = engine_->pool();
    Result<Prefilled> prefilled = llama::Prefill(*model_, {tokens_.begin(), tokens_.begin() + kPrompt}, options);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  std::vector<Evicted> EvictTogether(const Prefilled& prefilled, std::span<const EvictJob> jobs) {
    Result<std::vector<Evicted>> all = EvictAll(prefilled, &*engine_, jobs);
    EXPECT_TRUE(all.ok()) << all.status().message();
    if (!all.ok()) return {};
    EXPECT_EQ(all->size(), jobs.size());
    for (size_t i = 0; i < all->size(); ++i) ExpectSameAsAlone(prefilled, jobs[i], (*all)[i]);
    return std::move(*all);
  }

  void ExpectSameAsAlone(const Prefilled& prefilled, const EvictJob& job, const Evicted& evicted) {
    SCOPED_TRACE(job.recipe->name() + " " + std::string(HeadRuleName(job.recipe->policy.heads)));
    const Result<Evicted> alone = Evict(prefilled, &*engine_, *job.recipe, job.budget);
    ASSERT_TRUE(alone.ok()) << alone.status().message();
    ASSERT_EQ(evicted.keep.layers(), alone->keep.layers());
    for (int32_t layer = 0; layer < alone->keep.layers(); ++layer)
      for (int32_t head = 0; head < alone->keep.kv_heads(); ++head)
        EXPECT_TRUE(std::ranges::equal(evicted.keep.head(layer, head), alone->keep.head(layer, head)));
    EXPECT_EQ(evicted.output_error, alone->output_error);
    EXPECT_EQ(evicted.evicted_mass, alone->evicted_mass);
    EXPECT_EQ(evicted.certificate_rows, alone->certificate_rows);
    EXPECT_EQ(evicted.warnings, alone->warnings);
    EXPECT_EQ(evicted.report.budget.keep, alone->report.budget.keep);
    EXPECT_EQ(evicted.report.budget.raised, alone->report.budget.raised);
    EXPECT_EQ(evicted.report.nonfinite_tokens, alone->report.nonfinite_tokens);
    EXPECT_EQ(evicted.report.dominant_tokens, alone->report.dominant_tokens);
    EXPECT_EQ(evicted.report.skipped_rows, alone->report.skipped_rows);
    EXPECT_EQ(evicted.report.kernel, alone->report.kernel);
  }

  std::string path_;
  std::unique_ptr<Model> model_;
  std::optional<Engine> engine_;
  std::vector<Token> tokens_;
};

std::array<Budget, 4> Budgets() {
  return {Budget::Fraction(0.6), Budget::Fraction(0.02), Budget::Tokens(200), Budget::Fraction(1)};
}

// Every head rule that a preset takes.
std::vector<Recipe> WithHeadRules(const Recipe& preset) {
  std::vector<Recipe> recipes;
  for (const HeadRule heads : {HeadRule::kUniform, HeadRule::kAda, HeadRule::kAdaO}) {
    Recipe recipe = preset;
    recipe.policy.heads = heads;
    if (heads == HeadRule::kUniform) recipe.policy.alpha = Policy{}.alpha;
    if (baseline::CheckRecipe(recipe).ok()) recipes.push_back(recipe);
  }
  return recipes;
}

std::vector<EvictJob> Grid(const std::vector<Recipe>& recipes) {
  std::vector<EvictJob> jobs;
  for (const Recipe& recipe : recipes)
    for (const Budget& budget : Budgets()) jobs.push_back({&recipe, budget});
  return jobs;
}

// Time spent on scoring, to the last digit the same: it was scored once.
double ScoringSeconds(const Evicted& evicted) { return evicted.report.attend_s + evicted.report.score_s; }

TEST_F(EvictAllTest, EveryPresetAtEveryBudgetAndHeadRule) {
  const Prefilled prefilled = Prefill({baseline::Recipes().begin(), baseline::Recipes().end()});
  for (const Recipe& preset : baseline::Recipes()) {
    if (preset.scorer == baseline::Scorer::kFull) continue;
    const std::vector<Recipe> recipes = WithHeadRules(preset);
    ASSERT_FALSE(recipes.empty()) << preset.name();
    const std::vector<EvictJob> jobs = Grid(recipes);
    const std::vector<Evicted> all = EvictTogether(prefilled, jobs);
    ASSERT_EQ(all.size(), jobs.size());
    for (size_t i = 0; i < jobs.size(); ++i) {
      const bool evicts = baseline::RunsOnEngine(preset) || all[i].keep.min_length() < kPrompt;
      if (evicts && SharesScores(preset, *jobs[i].recipe)) {
        EXPECT_EQ(ScoringSeconds(all[i]), ScoringSeconds(all[0])) << preset.name() << " " << i;
      }
    }
  }
}

// Policies of all kinds in one call, in any order, over rows that are the certificate's or fewer.
TEST_F(EvictAllTest, MixedJobsKeepTheirOrder) {
  std::vector<Recipe> recipes;
  for (const char* name : {"snapkv", "compactor", "dropkv", "h2o", "adadropkv", "pyramidkv", "ada-snapkv", "streaming"})
    recipes.push_back(*baseline::FindRecipe(name));
  for (const int32_t window : {0, 128}) {
    const Prefilled prefilled = Prefill(recipes, window);
    std::vector<EvictJob> jobs;
    for (const Budget& budget : Budgets())
      for (const Recipe& recipe : recipes) jobs.push_back({&recipe, budget});
    const std::vector<Evicted> all = EvictTogether(prefilled, jobs);
    ASSERT_EQ(all.size(), jobs.size());
    EXPECT_EQ(ScoringSeconds(all[2]), ScoringSeconds(all[4]));
    EXPECT_EQ(ScoringSeconds(all[0]), ScoringSeconds(all[8]));
  }
}

TEST_F(EvictAllTest, GeneratedRows) {
  for (const bool window : {true, false}) {
    std::vector<Recipe> recipes;
    for (const char* name : {"dropkv", "adadropkv", "pyramidkv", "tova"}) {
      recipes.push_back(*baseline::FindRecipe(name));
      recipes.back().rows.window = window;
      recipes.back().rows.delay = 8;
    }
    Prefilled prefilled = Prefill(recipes);
    ASSERT_TRUE(Extend(&prefilled, std::span(tokens_).subspan(kPrompt, 8)).ok());
    const std::vector<EvictJob> jobs = Grid(recipes);
    const std::vector<Evicted> all = EvictTogether(prefilled, jobs);
    ASSERT_EQ(all.size(), jobs.size());
    EXPECT_EQ(ScoringSeconds(all[0]), ScoringSeconds(all[7]));
  }
}

TEST_F(EvictAllTest, ErrorsAreThoseOfTheJobAlone) {
  const std::vector<Recipe> recipes = {*baseline::FindRecipe("dropkv"), *baseline::FindRecipe("lagkv"),
                                       *baseline::FindRecipe("h2o")};
  const Prefilled prefilled = Prefill({recipes[0], recipes[1]});
  const EvictJob wrong[] = {
      {&recipes[0], Budget::Tokens(3)},     // below the window
      {&recipes[1], Budget::Tokens(100)},   // below what is found to be protected
      {&recipes[2], Budget::Fraction(0.5)}  // statistics that are not there
  };
  for (const EvictJob& job : wrong) {
    const Status alone = Evict(prefilled, &*engine_, *job.recipe, job.budget).status();
    ASSERT_FALSE(alone.ok());
    const EvictJob jobs[] = {{&recipes[0], Budget::Fraction(0.5)}, {&recipes[1], Budget::Fraction(0.9)}, job};
    const Status together = EvictAll(prefilled, &*engine_, jobs).status();
    EXPECT_EQ(together.code(), alone.code());
    EXPECT_EQ(together.message(), alone.message());
  }
  const Result<std::vector<Evicted>> none = EvictAll(prefilled, &*engine_, {});
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->empty());
}

TEST_F(EvictAllTest, SharesScoresWhereOneEngineScoresBoth) {
  const auto shares = [](const char* a, const char* b) {
    return SharesScores(*baseline::FindRecipe(a), *baseline::FindRecipe(b));
  };
  EXPECT_TRUE(shares("dropkv", "adadropkv"));
  EXPECT_TRUE(shares("snapkv", "ada-snapkv"));
  EXPECT_TRUE(shares("h2o", "ada-h2o"));
  EXPECT_FALSE(shares("snapkv", "pyramidkv"));  // the engine's scores and the baselines': not the same bits
  EXPECT_FALSE(shares("compactor", "compactor"));
  EXPECT_FALSE(shares("dropkv", "snapkv"));
}

}  // namespace
}  // namespace dropkv::llama
