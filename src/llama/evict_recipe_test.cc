// Every preset through prefill, eviction and decode on tiny models: counts, lists against those of the captured tensors
// alone, and statistics gathered in pieces against those of one piece.
#include "llama/evict_recipe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>

#include "baseline/allocate.h"
#include "core/element.h"
#include "llama/decoder.h"
#include "llama/evict.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using baseline::LayerRule;
using baseline::Recipe;
using baseline::Scorer;
using testing::TinyArch;
using testing::TinyConfig;
using testing::TinyModel;

struct Case {
  const char* name;
  TinyConfig config;
  bool halves;  // how its RoPE pairs dims
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const Case kCases[] = {
    {"llama", {.arch = TinyArch::kLlama, .layers = 3}, false},
    {"qwen2", {.arch = TinyArch::kQwen2, .heads = 6, .kv_heads = 3, .head_dim = 16, .embedding = 96, .seed = 2}, true},
    {"qwen3", {.arch = TinyArch::kQwen3, .rope_base = 1e6F, .seed = 3}, true},
    {"gemma3", {.arch = TinyArch::kGemma3, .layers = 4, .sliding_window = 24, .seed = 4}, true},
};

std::vector<std::vector<int32_t>> Lists(const KeepList& keep) {
  std::vector<std::vector<int32_t>> lists;
  for (int32_t layer = 0; layer < keep.layers(); ++layer)
    for (int32_t head = 0; head < keep.kv_heads(); ++head)
      lists.emplace_back(keep.head(layer, head).begin(), keep.head(layer, head).end());
  return lists;
}

// A layer's tensors, copied out of what the prefill left: keys and values head-major in float32, W_O and the rotary
// frequencies from the model that was written.
struct CopiedLayer {
  std::vector<float> k;
  std::vector<float> v;
  std::vector<float> wo;
  std::vector<int32_t> visible;
  baseline::PromptStatistics statistics;
  baseline::Layer layer;
};

class EvictRecipeTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    tiny_ = testing::MakeTinyModel(GetParam().config);
    path_ = (std::filesystem::temp_directory_path() /
             (std::string("dropkv_recipe_") + GetParam().name + std::to_string(::getpid()) + ".gguf"))
                .string();
    ASSERT_TRUE(testing::WriteTinyModel(tiny_, path_).ok());
    Result<Model> model = Model::Load(path_, {.gpu_layers = 0});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::make_unique<Model>(std::move(*model));
    Result<Engine> engine = Engine::Create({.threads = 2, .force_kernel = {}});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_.emplace(std::move(*engine));
    std::mt19937 generator(11);
    tokens_.resize(400);
    for (Token& token : tokens_) token = testing::kFirstByteToken + static_cast<Token>(generator() % 300);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  PrefillOptions Options() {
    PrefillOptions options;
    options.threads = 2;
    options.window = 0;
    options.kv_type = DType::kF32;
    options.flash_attention = false;
    options.recipes.assign(baseline::Recipes().begin(), baseline::Recipes().end());
    options.pool = engine_->pool();
    return options;
  }

  Prefilled Prefill(int32_t n, const PrefillOptions& options) {
    Result<Prefilled> prefilled = llama::Prefill(*model_, {tokens_.begin(), tokens_.begin() + n}, options);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  // Statistics of one layer from the captured queries of the whole prompt, added at once.
  baseline::PromptStatistics AtOnce(const Prefilled& prefilled, int32_t number, const baseline::Rope& rope,
                                    const KvView& kv) {
    baseline::StatisticsPlan plan;
    for (const Recipe& recipe : prefilled.options.recipes) plan.Add(recipe);
    const LayerInfo& info = prefilled.tap->layers().at(number);
    baseline::PromptStatistics statistics(plan, info.query_heads, info.kv_heads, prefilled.size(), info.key_dim);
    const Status status = statistics.Add(kv, info.Attention(), rope, prefilled.capture->queries(number).data(), nullptr,
                                         0, prefilled.size(), engine_->pool());
    EXPECT_TRUE(status.ok()) << status.message();
    return statistics;
  }

  std::unique_ptr<CopiedLayer> Copy(const Prefilled& prefilled, int32_t number);
  KeepList FromCopies(const Recipe& recipe, const std::vector<std::unique_ptr<CopiedLayer>>& copies, int32_t kept);
  void DecodeSome(Prefilled* prefilled, const KeepList& keep, const std::string& name);
  static void CheckCount(const Recipe& recipe, const Evicted& evicted, int32_t n, const Budget& budget);

  TinyModel tiny_;
  std::string path_;
  std::unique_ptr<Model> model_;
  std::optional<Engine> engine_;
  std::vector<Token> tokens_;
};

std::unique_ptr<CopiedLayer> EvictRecipeTest::Copy(const Prefilled& prefilled, int32_t number) {
  auto copy = std::make_unique<CopiedLayer>();
  LayerInfo& info = prefilled.tap->layers().at(number);
  const Result<KvView> view = info.View(info.cells);
  EXPECT_TRUE(view.ok());
  const int32_t n = view->tokens;
  const auto flat = [&](const KvTensor& tensor, int32_t dims, std::vector<float>* out) {
    for (int32_t head = 0; head < view->kv_heads; ++head)
      for (int32_t token = 0; token < n; ++token)
        for (int32_t dim = 0; dim < dims; ++dim)
          out->push_back(LoadElement(
              tensor.data, tensor.dtype,
              head * tensor.head_stride + view->cells[token] * tensor.token_stride + dim * tensor.dim_stride));
    return KvTensor{out->data(), DType::kF32, int64_t{n} * dims, dims, 1};
  };
  baseline::Layer& layer = copy->layer;
  layer.kv = {view->kv_heads, n, view->key_dim, view->value_dim, {}, {}, nullptr};
  layer.kv.k = flat(view->k, view->key_dim, &copy->k);
  layer.kv.v = flat(view->v, view->value_dim, &copy->v);
  layer.attention = info.Attention();
  layer.rope = baseline::Rope::Standard(view->key_dim, tiny_.config.rope_base);
  layer.rope.halves = GetParam().halves;
  layer.index = number;
  copy->statistics = AtOnce(prefilled, number, layer.rope, layer.kv);
  layer.statistics = &copy->statistics;
  const testing::NamedTensor& wo = tiny_.tensors.at("blk." + std::to_string(number) + ".attn_output.weight");
  layer.wo.columns = static_cast<int32_t>(wo.shape[0]);
  layer.wo.hidden = static_cast<int32_t>(wo.shape[1]);
  layer.wo.read_row = [&wo](int32_t row, float* out) {
    std::copy_n(wo.data.begin() + row * wo.shape[0], wo.shape[0], out);
  };
  for (int32_t i = 0; i < n; ++i) copy->visible.push_back(i + 1);
  const int64_t row_stride = int64_t{info.query_heads} * info.key_dim;
  layer.rows = {
      prefilled.capture->queries(number).data(), info.key_dim, row_stride, info.query_heads, n, copy->visible.data()};
  return copy;
}

// The last `window` of the rows, as a scorer wants them.
baseline::Layer WithWindow(const CopiedLayer& copy, int32_t window) {
  baseline::Layer layer = copy.layer;
  const int32_t skipped = layer.rows.rows - window;
  layer.rows.q += skipped * layer.rows.row_stride;
  layer.rows.visible += skipped;
  layer.rows.rows = window;
  return layer;
}

KeepList EvictRecipeTest::FromCopies(const Recipe& recipe, const std::vector<std::unique_ptr<CopiedLayer>>& copies,
                                     int32_t kept) {
  std::vector<baseline::LayerScores> scores;
  for (const auto& copy : copies) {
    const baseline::Layer layer = WithWindow(*copy, std::max(1, recipe.policy.window));
    Result<baseline::LayerScores> scored =
        baseline::Score(recipe, layer, baseline::ShareOf(kept, layer.kv.tokens), nullptr);
    EXPECT_TRUE(scored.ok()) << recipe.name() << ": " << scored.status().message();
    scores.push_back(std::move(*scored));
  }
  Result<baseline::Selection> selection = baseline::Select(recipe, scores, kept, true);
  EXPECT_TRUE(selection.ok()) << recipe.name() << ": " << selection.status().message();
  return std::move(selection->keep);
}

void EvictRecipeTest::DecodeSome(Prefilled* prefilled, const KeepList& keep, const std::string& name) {
  Result<std::unique_ptr<Decoder>> decoder =
      keep.uniform() ? MakeNativeDecoder(prefilled, keep, 8) : MakeRaggedDecoder(prefilled, keep, 8);
  ASSERT_TRUE(decoder.ok()) << name << ": " << decoder.status().message();
  const std::span<const Token> next = std::span<const Token>(tokens_).subspan(prefilled->size(), 3);
  for (int32_t i = 0; i < 3; ++i) {
    const Status status = (*decoder)->Feed(next.subspan(i, 1), prefilled->size() + i);
    ASSERT_TRUE(status.ok()) << name << ": " << status.message();
  }
  const std::span<const float> logits = (*decoder)->logits();
  EXPECT_TRUE(std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); })) << name;
}

// What the rules say about the lists' lengths, counted anew.
void EvictRecipeTest::CheckCount(const Recipe& recipe, const Evicted& evicted, int32_t n, const Budget& budget) {
  SCOPED_TRACE(recipe.name());
  const KeepList& keep = evicted.keep;
  const int32_t asked = static_cast<int32_t>(*budget.fraction * n + 1e-6);
  const int32_t kept = evicted.report.budget.keep;
  EXPECT_GE(kept, std::min(n, std::max(asked, ProtectedTokens(recipe))));
  if (recipe.scorer != Scorer::kLag && recipe.scorer != Scorer::kProjectionCode) {
    EXPECT_EQ(kept, std::min(n, std::max(asked, ProtectedTokens(recipe))));
  }
  for (const std::vector<int32_t>& list : Lists(keep)) {
    EXPECT_TRUE(std::is_sorted(list.begin(), list.end()));
    EXPECT_EQ(std::adjacent_find(list.begin(), list.end()), list.end());
    ASSERT_FALSE(list.empty());
    EXPECT_GE(list.front(), 0);
    EXPECT_LT(list.back(), n);
  }
  const int64_t heads = int64_t{keep.layers()} * keep.kv_heads();
  if (recipe.chunk > 0) {
    EXPECT_LE(std::abs(keep.mean_length() - kept), recipe.chunk);
  } else if (recipe.policy.heads == HeadRule::kAdaO) {
    EXPECT_LE(std::abs(keep.mean_length() - kept), 1);
  } else if (recipe.layers == LayerRule::kPyramid || recipe.layers == LayerRule::kPyramidOriginal) {
    EXPECT_LE(std::abs(keep.mean_length() - kept), keep.max_length() == keep.min_length() ? 0 : 0.1 * kept);
  } else {
    EXPECT_EQ(keep.total(), kept * heads);
  }
  const bool shares = recipe.flat_heads || recipe.policy.heads != HeadRule::kUniform || recipe.chunk > 0 ||
                      recipe.layers != LayerRule::kSame;
  EXPECT_TRUE(shares || keep.uniform());
}

TEST_P(EvictRecipeTest, EveryPresetRunsAndKeepsItsCount) {
  constexpr int32_t kTokens = 300;
  for (const bool flash : {false, true}) {
    PrefillOptions options = Options();
    options.flash_attention = flash;
    options.kv_type = flash ? DType::kF16 : DType::kF32;
    Prefilled prefilled = Prefill(kTokens, options);
    for (const Recipe& recipe : options.recipes) {
      if (recipe.scorer == Scorer::kFull) continue;
      double errors[2] = {};
      for (const bool half : {false, true}) {
        const Budget budget = Budget::Fraction(half ? 0.5 : 0.3);
        const Result<Evicted> evicted = Evict(prefilled, &*engine_, recipe, budget);
        ASSERT_TRUE(evicted.ok()) << recipe.name() << ": " << evicted.status().message();
        CheckCount(recipe, *evicted, kTokens, budget);
        EXPECT_EQ(evicted->certificate_rows, 64);
        EXPECT_GT(evicted->evicted_mass, 0) << recipe.name();
        EXPECT_LT(evicted->evicted_mass, 1) << recipe.name();
        errors[half] = evicted->output_error;
        if (!half) DecodeSome(&prefilled, evicted->keep, recipe.name());
      }
      EXPECT_GT(errors[1], 0) << recipe.name();
      EXPECT_GT(errors[0], 0.5 * errors[1]) << recipe.name();
    }
    const Result<Evicted> all = Evict(prefilled, &*engine_, options.recipes.back(), Budget::Fraction(1));
    ASSERT_TRUE(all.ok());
    EXPECT_EQ(all->output_error, 0);
  }
}

TEST_P(EvictRecipeTest, StatisticsOfPiecesEqualThoseOfOne) {
  PrefillOptions options = Options();
  options.window = 128;
  options.ubatch = 37;
  const Prefilled prefilled = Prefill(128, options);
  ASSERT_NE(prefilled.statistics, nullptr);
  for (const int32_t number : prefilled.sliding) EXPECT_EQ(prefilled.statistics->find(number), nullptr);
  for (const int32_t number : prefilled.layers) {
    const baseline::PromptStatistics* pieces = prefilled.statistics->find(number);
    ASSERT_NE(pieces, nullptr);
    EXPECT_TRUE(pieces->complete());
    LayerInfo& info = prefilled.tap->layers().at(number);
    const Result<KvView> view = info.View(info.cells);
    const baseline::PromptStatistics whole = AtOnce(prefilled, number, info.rope, *view);
    const auto expect_near = [](const std::vector<double>& a, const std::vector<double>& b) {
      ASSERT_EQ(a.size(), b.size());
      ASSERT_FALSE(a.empty());
      double largest = 0;
      for (const double x : b) largest = std::max(largest, std::abs(x));
      EXPECT_GT(largest, 0);
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-6 * largest);
    };
    expect_near(pieces->column_sums(), whole.column_sums());
    expect_near(pieces->recent_sums(), whole.recent_sums());
    expect_near(pieces->mean(), whole.mean());
    expect_near(pieces->covariance(), whole.covariance());
    ASSERT_FALSE(pieces->plan().local.empty());
    for (const auto& span : pieces->plan().local) expect_near(pieces->local(span), whole.local(span));
  }
}

TEST_P(EvictRecipeTest, ListsEqualThoseOfTheCapturedTensors) {
  constexpr int32_t kTokens = 128;
  PrefillOptions options = Options();
  options.window = kTokens;
  options.ubatch = 50;
  const Prefilled prefilled = Prefill(kTokens, options);
  std::vector<std::unique_ptr<CopiedLayer>> copies;
  for (const int32_t number : prefilled.layers) copies.push_back(Copy(prefilled, number));
  int32_t compared = 0;
  for (const Recipe& recipe : options.recipes) {
    if (recipe.scorer == Scorer::kFull) continue;
    const Result<Evicted> evicted = Evict(prefilled, &*engine_, recipe, Budget::Fraction(0.6));
    ASSERT_TRUE(evicted.ok()) << recipe.name() << ": " << evicted.status().message();
    const KeepList expected = FromCopies(recipe, copies, evicted->report.budget.keep);
    EXPECT_EQ(Lists(evicted->keep), Lists(expected)) << recipe.name();
    ++compared;
  }
  EXPECT_GT(compared, 40);
}

// The fast path: the engine's own run of the preset, bit for bit.
TEST_P(EvictRecipeTest, EnginePresetsRunOnTheEngine) {
  for (const Policy& policy : Presets()) {
    if (policy.signal == Signal::kFull) continue;
    PrefillOptions options = Options();
    options.window = std::max(policy.window, kCertificateRows);
    options.recipes.clear();
    const Prefilled prefilled = Prefill(200, options);
    const Result<LayerInputs> inputs = LayerInputs::Make(prefilled, policy.window, false);
    ASSERT_TRUE(inputs.ok());
    const Result<Plan> plan = engine_->MakePlan(ShapeOf(prefilled), policy, Budget::Fraction(0.4));
    ASSERT_TRUE(plan.ok());
    std::vector<std::byte> workspace(plan->workspace_bytes);
    std::vector<float> error(static_cast<size_t>(plan->shape.layers) * plan->shape.query_heads);
    EvictReport report;
    const Result<KeepList> keep =
        engine_->Run(*plan, inputs->layers(), workspace, {.output_error = error.data()}, &report);
    ASSERT_TRUE(keep.ok()) << keep.status().message();
    const Result<Recipe> recipe = baseline::FindRecipe(policy.name);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    const Result<Evicted> evicted = Evict(prefilled, &*engine_, *recipe, Budget::Fraction(0.4));
    ASSERT_TRUE(evicted.ok()) << evicted.status().message();
    EXPECT_EQ(Lists(evicted->keep), Lists(*keep)) << policy.name;
    if (policy.window < kCertificateRows) continue;
    double sum = 0;
    for (const float e : error) sum += e;
    EXPECT_EQ(evicted->output_error, sum / static_cast<double>(error.size())) << policy.name;
  }
}

TEST_P(EvictRecipeTest, SaysWhatThePrefillDidNotCapture) {
  PrefillOptions options = Options();
  options.recipes.clear();
  options.window = 8;
  const Prefilled prefilled = Prefill(200, options);
  for (const char* name : {"h2o", "expected", "compactor", "defensivekv", "snapkv"}) {
    const Result<Recipe> recipe = baseline::FindRecipe(name);
    ASSERT_TRUE(recipe.ok());
    const Result<Evicted> evicted = Evict(prefilled, &*engine_, *recipe, Budget::Fraction(0.5));
    ASSERT_FALSE(evicted.ok()) << name;
    EXPECT_EQ(evicted.status().code(), Code::kFailedPrecondition) << evicted.status().message();
  }
}

TEST_P(EvictRecipeTest, RefusesBudgetsBelowWhatIsProtected) {
  PrefillOptions options = Options();
  const Prefilled prefilled = Prefill(300, options);
  for (const auto& [name, smallest] : std::map<std::string, int32_t>{{"compactor", 12}, {"lagkv", 172}, {"tova", 1}}) {
    const Result<Recipe> recipe = baseline::FindRecipe(name);
    ASSERT_TRUE(recipe.ok());
    const Result<Evicted> enough = Evict(prefilled, &*engine_, *recipe, Budget::Tokens(smallest));
    ASSERT_TRUE(enough.ok()) << enough.status().message();
    EXPECT_EQ(enough->keep.min_length(), smallest);
    if (smallest == 1) continue;
    const Result<Evicted> evicted = Evict(prefilled, &*engine_, *recipe, Budget::Tokens(smallest - 1));
    ASSERT_FALSE(evicted.ok()) << name;
    EXPECT_EQ(evicted.status().code(), Code::kInvalidArgument);
    EXPECT_NE(evicted.status().message().find(name), std::string::npos) << evicted.status().message();
    const Result<Evicted> raised = Evict(prefilled, &*engine_, *recipe, Budget::Fraction(0.01));
    ASSERT_TRUE(raised.ok());
    EXPECT_TRUE(raised->report.budget.raised);
    EXPECT_EQ(raised->keep.min_length(), smallest);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EvictRecipeTest, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace dropkv::llama
