// Score() and ParityScores() of every recipe that the comparison data name, against kvpress (float32) and the float64
// DropKV: from the name alone to the reference's own numbers, padding included.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "baseline/finch.h"
#include "baseline/parity.h"
#include "baseline/prompt_case.h"
#include "golden/golden.h"

namespace dropkv::baseline {
namespace {

using dropkv::testing::NumberAfter;
using dropkv::testing::RelativeError;

constexpr double kScoreError = 1e-5;   // of the largest score
constexpr double kCompatError = 1e-3;  // the expanded form cancels
constexpr float kSaturated = std::numeric_limits<float>::max();
constexpr double kDefaultRatio = 0.5;  // what score.streaming was computed at

class ScoreParityGolden : public dropkv::testing::GoldenTest {
 protected:
  // Everything that any recipe may ask for.
  Layer MakeLayer(const Recipe& recipe) {
    const int32_t d = layer_->head_dim();
    prompt_ = PromptCase{layer_->query_heads(), layer_->kv_heads(), layer_->tokens(), d, d};
    Layer layer;
    layer.kv = layer_->View();
    layer.attention = layer_->Attention();
    layer.rows = layer_->Rows(std::min(kMaxRows, layer_->tokens()));
    if (layer_->file().Find("q_pre") == nullptr) return layer;
    prompt_.q = TokenMajor("q");
    prompt_.q_pre = TokenMajor("q_pre");
    prompt_.k = Floats("k");
    prompt_.v = Floats("v");
    prompt_.attention = layer.attention;
    layer.rope = prompt_.rope = Rope::Standard(d, *layer_->file().Number("rope_theta"));
    statistics_ = prompt_.Gather(recipe, 37, &pool_);
    layer.statistics = &statistics_;
    wo_ = Floats("wo");
    layer.wo.columns = layer_->query_heads() * d;
    layer.wo.hidden = static_cast<int32_t>(wo_.size()) / layer.wo.columns;
    layer.wo.read_row = [this, columns = layer.wo.columns](int32_t row, float* out) {
      std::copy_n(wo_.data() + static_cast<int64_t>(row) * columns, columns, out);
    };
    return layer;
  }

  std::vector<float> Floats(const char* name) const {
    const std::vector<double> values = layer_->Doubles(name);
    return {values.begin(), values.end()};
  }
  std::vector<float> TokenMajor(const char* name) const {
    const std::vector<double> from = layer_->Doubles(name);
    std::vector<float> to;
    for (int32_t i = 0; i < layer_->tokens(); ++i)
      for (int32_t h = 0; h < layer_->query_heads(); ++h)
        for (int32_t x = 0; x < layer_->head_dim(); ++x)
          to.push_back(static_cast<float>(from[(int64_t{h} * layer_->tokens() + i) * layer_->head_dim() + x]));
    return to;
  }

  PromptCase prompt_;
  PromptStatistics statistics_;
  std::vector<float> wo_;
  ThreadPool pool_{2};
};

std::vector<double> Unprotected(const LayerScores& scores, const std::vector<double>& values) {
  std::vector<double> entries;
  for (size_t at = 0; at < values.size(); ++at)
    if (scores.is_protected[at % scores.tokens] == 0) entries.push_back(values[at]);
  return entries;
}

// CriticalKV's first stage may take any of equal tokens: as many must be saturated in every head, those that differ
// must be ties among the padded scores, and all others must agree.
void ExpectSameStages(const std::vector<float>& got, const std::vector<double>& want, const std::vector<float>& padded,
                      int32_t n) {
  std::vector<double> got_others;
  std::vector<double> want_others;
  for (size_t first = 0; first < got.size(); first += n) {
    int32_t surplus = 0;
    float least = kSaturated;
    float greatest = -kSaturated;
    for (size_t at = first; at < first + n; ++at) {
      const bool got_max = got[at] == kSaturated;
      const bool want_max = static_cast<float>(want[at]) == kSaturated;
      surplus += static_cast<int32_t>(got_max) - static_cast<int32_t>(want_max);
      if (got_max != want_max) {
        least = std::min(least, padded[at]);
        greatest = std::max(greatest, padded[at]);
      } else if (!got_max) {
        got_others.push_back(got[at]);
        want_others.push_back(want[at]);
      }
    }
    EXPECT_EQ(surplus, 0);
    if (greatest > least) EXPECT_LE(greatest - least, kScoreError * std::abs(greatest));
  }
  EXPECT_FALSE(want_others.empty());
  EXPECT_LE(RelativeError(got_others, want_others), kScoreError);
}

TEST_P(ScoreParityGolden, PaddedScoresOfEveryRecipe) {
  for (const std::string& tensor : layer_->Names("score.")) {
    SCOPED_TRACE(tensor);
    const std::string name = tensor.substr(6, tensor.find('@') - 6);
    const double ratio = std::max(kDefaultRatio, NumberAfter(tensor, "@"));
    const Result<Recipe> recipe = FindRecipe(name);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    const Result<LayerScores> scores = Score(*recipe, MakeLayer(*recipe), 1.0 - ratio, &pool_);
    ASSERT_TRUE(scores.ok()) << scores.status().message();
    const Result<std::vector<float>> values = ParityScores(*recipe, *scores, ratio);
    ASSERT_TRUE(values.ok()) << values.status().message();
    const std::vector<double> expected = layer_->Doubles(tensor);
    if (recipe->critical) {
      ExpectSameStages(*values, expected, PaddedScores(*recipe, *scores, ratio), layer_->tokens());
    } else {
      EXPECT_LE(RelativeError({values->begin(), values->end()}, expected), kScoreError);
      // Padding may be far above the scores: those once more by their own largest.
      EXPECT_LE(RelativeError(Unprotected(*scores, {values->begin(), values->end()}), Unprotected(*scores, expected)),
                kScoreError);
    }
  }
}

// Raw and pooled scores of the exact mode, in float64 from a program written from the text alone.
TEST_P(ScoreParityGolden, DropKv) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("dropkv.")) {
    const bool other = tensor.ends_with(".out") || tensor.ends_with(".lse");
    if (other || tensor.find('@') != std::string::npos) continue;
    SCOPED_TRACE(tensor);
    const Result<Recipe> recipe = FindRecipe(tensor);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    const Result<LayerScores> scores = Score(*recipe, MakeLayer(*recipe), 0.5, &pool_);
    ASSERT_TRUE(scores.ok()) << scores.status().message();
    const double bound = recipe->scorer == Scorer::kDropKvCompat ? kCompatError : kScoreError;
    EXPECT_LE(RelativeError(scores->score, layer_->Doubles(tensor)), bound);
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

TEST_P(ScoreParityGolden, FinchKeysAtTheirRanks) {
  for (const std::string& tensor : layer_->Names("finch.w16.keys@")) {
    SCOPED_TRACE(tensor);
    const std::vector<double> kept = layer_->Doubles("kept.finch.w16@" + tensor.substr(tensor.find('@') + 1));
    const std::vector<double> expected = layer_->Doubles(tensor);
    const Layer layer = MakeLayer(*FindRecipe("finch.w16"));
    const size_t count = kept.size() / layer_->kv_heads();
    std::vector<double> got;
    for (int32_t head = 0; head < layer_->kv_heads(); ++head) {
      const std::vector<int32_t> positions(kept.begin() + static_cast<int64_t>(head * count),
                                           kept.begin() + static_cast<int64_t>((head + 1) * count));
      const std::vector<float> keys = RenumberedKeys(layer.kv, layer.rope, head, positions);
      got.insert(got.end(), keys.begin(), keys.end());
    }
    EXPECT_LE(RelativeError(got, expected), kScoreError);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, ScoreParityGolden, ::testing::ValuesIn(dropkv::testing::GoldenNames()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
                           return name;
                         });

}  // namespace
}  // namespace dropkv::baseline
