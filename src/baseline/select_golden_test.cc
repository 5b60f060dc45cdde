// Budgets and kept tokens against kvpress (float32), from kvpress's own scores: so the two may differ in the choice
// among equal scores only. Ratios are the share REMOVED.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "baseline/allocate.h"
#include "baseline/critical.h"
#include "baseline/layer_budgets.h"
#include "baseline/parity.h"
#include "baseline/projection_norm.h"
#include "golden/golden.h"

namespace dropkv::baseline {
namespace {

using dropkv::testing::NumberAfter;

constexpr double kFloatError = 1e-5;  // between float32 and double products

// "snapkv.w32.k5" out of "kept.snapkv.w32.k5@0.5"; empty where a name is none of a recipe.
std::string RecipeName(const std::string& tensor) {
  std::string name = tensor.substr(0, tensor.find('@'));
  for (const char* prefix : {"score.", "kept.", "mask."})
    if (name.starts_with(prefix)) return name.substr(name.find('.') + 1);
  if (!name.starts_with("dropkv.") || name.ends_with(".out") || name.ends_with(".lse")) return {};
  for (const char* suffix : {".kept", ".adamask"})
    if (name.ends_with(suffix)) name.resize(name.size() - std::string(suffix).size());
  return name;
}

class SelectGolden : public dropkv::testing::GoldenTest {
 protected:
  void SetUp() override {
    GoldenTest::SetUp();
    if (!IsSkipped() && layer_ != nullptr && layer_->Names("score.").empty())
      GTEST_SKIP() << "this file holds DropKV scores only";
  }

  int32_t tokens() const { return layer_->tokens(); }
  size_t elements() const { return static_cast<size_t>(layer_->kv_heads()) * tokens(); }

  // The reference's scores, padding included, and what it protects; `scores.score` without the padding.
  LayerScores Scores(const Recipe& recipe, const std::string& name, std::vector<float>* padded) const {
    LayerScores scores;
    scores.kv_heads = layer_->kv_heads();
    scores.tokens = tokens();
    scores.score = layer_->Doubles("score." + name);
    padded->assign(scores.score.begin(), scores.score.end());
    const int32_t last = recipe.protect_window ? recipe.policy.window : 0;
    for (int32_t j = 0; j < tokens(); ++j) {
      const bool inside = j < recipe.policy.sink || j >= tokens() - last;
      const bool partition = recipe.scorer == Scorer::kLag && scores.score[j] == 1.0;
      scores.is_protected.push_back(inside || partition ? 1 : 0);
      for (int32_t u = 0; u < scores.kv_heads && scores.is_protected[j] != 0; ++u)
        scores.score[static_cast<size_t>(u) * tokens() + j] = 0.0;
      // The reference's scores of StreamingLLM are those of one ratio.
      for (int32_t u = 0; u < scores.kv_heads && recipe.scorer == Scorer::kRecency; ++u)
        scores.score[static_cast<size_t>(u) * tokens() + j] = j;
    }
    return scores;
  }

  std::vector<uint8_t> Mask(const Recipe& recipe, const LayerScores& scores, double removed) const {
    const Result<Selection> selection =
        Select(recipe, std::span(&scores, 1), tokens() * (1 - removed), false, 1 - removed);
    EXPECT_TRUE(selection.ok()) << selection.status().message();
    return selection.ok() ? dropkv::testing::MaskOf(selection->keep, tokens()) : std::vector<uint8_t>(elements());
  }

  int64_t Count(const std::vector<uint8_t>& mask, int32_t head) const {
    const auto first = mask.begin() + static_cast<std::ptrdiff_t>(head) * tokens();
    return std::count(first, first + tokens(), 1);
  }

  // Same tokens in places first .. end - 1, or others of the same values (within `error`, relative).
  static void ExpectEqualButForTies(const std::vector<uint8_t>& ours, const std::vector<uint8_t>& theirs,
                                    const std::vector<float>& values, size_t first, size_t end, double error) {
    std::vector<double> only_ours;
    std::vector<double> only_theirs;
    for (size_t at = first; at < end; ++at) {
      if (ours[at] > theirs[at]) only_ours.push_back(values[at]);
      if (ours[at] < theirs[at]) only_theirs.push_back(values[at]);
    }
    std::sort(only_ours.begin(), only_ours.end());
    std::sort(only_theirs.begin(), only_theirs.end());
    ASSERT_EQ(only_ours.size(), only_theirs.size());
    for (size_t i = 0; i < only_ours.size(); ++i)
      EXPECT_LE(std::abs(only_ours[i] - only_theirs[i]), error * std::abs(only_theirs[i])) << only_ours[i];
  }

  void ExpectHeadsEqualButForTies(const std::vector<uint8_t>& ours, const std::vector<uint8_t>& theirs,
                                  const std::vector<float>& values, double error) const {
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
      SCOPED_TRACE("head " + std::to_string(u));
      const size_t first = static_cast<size_t>(u) * tokens();
      ExpectEqualButForTies(ours, theirs, values, first, first + tokens(), error);
    }
  }

  std::vector<double> Norms() const {
    const std::vector<float> wo = *layer_->file().ReadFloats("wo");
    const int32_t columns = layer_->query_heads() * layer_->head_dim();
    ThreadPool pool(1);
    const OutputProjection projection{static_cast<int32_t>(wo.size() / columns), columns, [&](int32_t row, float* out) {
                                        std::copy_n(wo.data() + static_cast<size_t>(row) * columns, columns, out);
                                      }};
    return ProjectedNorms(layer_->View(), projection, &pool);
  }
};

TEST_P(SelectGolden, EveryNameIsARecipe) {
  std::set<std::string> names;
  for (const std::string& tensor : layer_->Names("")) names.insert(RecipeName(tensor));
  names.erase("");
  EXPECT_GE(names.size(), 30U);
  for (const std::string& name : names) {
    const Result<Recipe> recipe = FindRecipe(name);
    EXPECT_TRUE(recipe.ok()) << recipe.status().message();
    if (recipe.ok() && name != "cap") EXPECT_EQ(recipe->name(), name);
  }
}

TEST_P(SelectGolden, KeptTokens) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("kept.")) {
    const std::string name = RecipeName(tensor);
    if (layer_->file().Find("score." + name) == nullptr) continue;
    SCOPED_TRACE(tensor);
    const Recipe recipe = *FindRecipe(name);
    std::vector<float> padded;
    const LayerScores scores = Scores(recipe, name, &padded);
    const double removed = NumberAfter(tensor, "@");
    if (recipe.scorer == Scorer::kRecency) padded = PaddedScores(recipe, scores, removed);
    ExpectHeadsEqualButForTies(Mask(recipe, scores, removed), layer_->KeptMask(tensor), padded, 0.0);
    ++compared;
  }
  EXPECT_GE(compared, 36);
}

TEST_P(SelectGolden, AdaptiveHeads) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("mask.ada")) {
    SCOPED_TRACE(tensor);
    const std::string name = RecipeName(tensor);
    const Recipe recipe = *FindRecipe(name);
    std::vector<float> padded;
    const LayerScores scores = Scores(recipe, recipe.scorer == Scorer::kKeyNorm ? "knorm" : "snapkv.w32.k5", &padded);
    const double removed = NumberAfter(tensor, "@");
    const std::vector<uint8_t> ours = Mask(recipe, scores, removed);
    ExpectEqualButForTies(ours, layer_->KeptMask(tensor), padded, 0, elements(), 0.0);
    const auto kept = static_cast<int32_t>(tokens() * (1 - removed));
    for (int32_t u = 0; u < layer_->kv_heads(); ++u)
      EXPECT_GE(Count(ours, u), static_cast<int32_t>(kept * recipe.policy.alpha));
    ++compared;
  }
  EXPECT_EQ(compared, 8);
}

// Which of the equal scores of the window fill the first stage is left to chance: they are checked as a set.
TEST_P(SelectGolden, CriticalStages) {
  constexpr float kFirst = std::numeric_limits<float>::max();
  const Recipe recipe = *FindRecipe("critical.snapkv.w32.k5");
  std::vector<float> padded;
  LayerScores scores = Scores(recipe, "snapkv.w32.k5", &padded);
  scores.projected_norm = Norms();
  int compared = 0;
  for (const std::string& tensor : layer_->Names("score.critical.")) {
    SCOPED_TRACE(tensor);
    const double share = 1 - NumberAfter(tensor, "@");
    const auto kept = static_cast<int32_t>(tokens() * share);
    const auto first_count = static_cast<int32_t>(share * tokens() * recipe.first_stage);
    const CriticalStages stages = FindCritical(recipe, scores, padded, kept, first_count);
    const std::vector<double> theirs = layer_->Doubles(tensor);
    std::vector<uint8_t> their_first;
    double largest = 0.0;
    for (const double value : theirs) {
      their_first.push_back(value == kFirst ? 1 : 0);
      if (value != kFirst) largest = std::max(largest, value);
    }
    ExpectHeadsEqualButForTies(stages.first, their_first, padded, 0.0);
    for (size_t at = 0; at < elements(); ++at) {
      if (stages.first[at] != 0) EXPECT_EQ(stages.value[at], kFirst);
      if (stages.first[at] == 0 && their_first[at] == 0)
        EXPECT_NEAR(stages.value[at], theirs[at], kFloatError * largest) << at;
    }
    EXPECT_EQ(stages.budget, std::vector<int32_t>(layer_->kv_heads(), kept));
    if (kept < recipe.policy.window) continue;  // then which window tokens stay is left to chance too
    const std::vector<float> values(theirs.begin(), theirs.end());
    ExpectHeadsEqualButForTies(Mask(recipe, scores, 1 - share),
                               layer_->KeptMask("kept." + tensor.substr(tensor.find('.') + 1)), values, kFloatError);
    ++compared;
  }
  EXPECT_GE(compared, tokens() < 107 ? 1 : 2);
}

TEST_P(SelectGolden, CriticalAdaptiveHeads) {
  int compared = 0;
  const std::vector<double> norms = Norms();
  for (const std::string& tensor : layer_->Names("mask.criticalada")) {
    SCOPED_TRACE(tensor);
    const Recipe recipe = *FindRecipe(RecipeName(tensor));
    std::vector<float> padded;
    LayerScores scores = Scores(recipe, recipe.scorer == Scorer::kKeyNorm ? "knorm" : "snapkv.w32.k5", &padded);
    scores.projected_norm = norms;
    const double removed = NumberAfter(tensor, "@");
    const auto kept = static_cast<int32_t>(tokens() * (1 - removed));
    const std::vector<uint8_t> ours = Mask(recipe, scores, removed);
    const std::vector<uint8_t> theirs = layer_->KeptMask(tensor);
    EXPECT_EQ(std::count(ours.begin(), ours.end(), 1), int64_t{layer_->kv_heads()} * kept);
    EXPECT_EQ(std::count(theirs.begin(), theirs.end(), 1), int64_t{layer_->kv_heads()} * kept);
    if (kept < recipe.policy.window) continue;
    const CriticalStages stages = FindCritical(recipe, scores, padded, kept, 0);
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) EXPECT_EQ(Count(theirs, u), stages.budget[u]) << "head " << u;
    ExpectHeadsEqualButForTies(ours, theirs, stages.value, kFloatError);
    ++compared;
  }
  EXPECT_GE(compared, 6);
}

TEST_P(SelectGolden, Chunks) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("kept.chunkkv.")) {
    SCOPED_TRACE(tensor);
    const Recipe recipe = *FindRecipe(RecipeName(tensor));
    std::vector<float> padded;
    const LayerScores scores = Scores(recipe, "snapkv.w32.k5", &padded);
    const std::vector<uint8_t> ours = Mask(recipe, scores, NumberAfter(tensor, "@"));
    const std::vector<uint8_t> theirs = layer_->KeptMask(tensor);
    std::vector<uint8_t> our_chunks;
    std::vector<uint8_t> their_chunks;
    std::vector<float> means;
    for (int32_t first = 0; first < tokens(); first += recipe.chunk) {
      const int32_t end = std::min(tokens(), first + recipe.chunk);
      double sum = 0.0;
      for (int32_t u = 0; u < layer_->kv_heads(); ++u)
        for (int32_t j = first; j < end; ++j) {
          const size_t at = static_cast<size_t>(u) * tokens() + j;
          sum += padded[at];
          ASSERT_EQ(ours[at], ours[first]) << "a chunk is kept whole, in all heads";
        }
      our_chunks.push_back(ours[first]);
      their_chunks.push_back(theirs[first]);
      means.push_back(static_cast<float>(sum / (end - first)));
    }
    // float32 sums of equal window scores: chunks inside the window tie up to rounding.
    ExpectEqualButForTies(our_chunks, their_chunks, means, 0, means.size(), 1e-6);
    ++compared;
  }
  EXPECT_EQ(compared, 2);
}

TEST_P(SelectGolden, PyramidBudgets) {
  const Recipe recipe = *FindRecipe("pyramid.w8");
  const auto number = [&](const std::string& key) {
    const Result<double> value = layer_->file().Number(key);
    EXPECT_TRUE(value.ok()) << value.status().message();
    return value.ok() ? *value : -1.0;
  };
  int compared = 0;
  for (const auto& [key, value] : layer_->file().metadata()) {
    if (!key.starts_with("pyramid.w8.budget@")) continue;
    const Result<int32_t> share =
        LayerShare(recipe, static_cast<int32_t>(number("layer")), static_cast<int32_t>(number("layers")), tokens(),
                   tokens() * (1 - NumberAfter(key, "@")));
    ASSERT_TRUE(share.ok()) << share.status().message();
    EXPECT_EQ(*share, number(key)) << key;
    ++compared;
  }
  EXPECT_EQ(compared, 2);
}

INSTANTIATE_TEST_SUITE_P(Files, SelectGolden, ::testing::ValuesIn(dropkv::testing::GoldenNames()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace dropkv::baseline
