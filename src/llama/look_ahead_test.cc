// Rows of tokens behind the prompt: extended prefills against prefills of the whole, evictions that ask them, drafts
// that leave nothing behind, delayed cuts.
#include "llama/look_ahead.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <random>

#include "llama/evict_recipe.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using baseline::Recipe;
using testing::TinyArch;
using testing::TinyConfig;

constexpr int32_t kPrompt = 150;
constexpr int32_t kBehind = 6;

struct Case {
  const char* name;
  TinyConfig config;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> Cases() {
  return {
      {"llama", {.arch = TinyArch::kLlama, .layers = 3}},
      {"qwen2", {.arch = TinyArch::kQwen2, .heads = 6, .kv_heads = 3, .head_dim = 16, .embedding = 96, .seed = 2}},
      {"gemma3", {.arch = TinyArch::kGemma3, .layers = 4, .sliding_window = 24, .seed = 4}},
  };
}

Recipe Preset(const char* name, int32_t draft) {
  Recipe recipe = *baseline::FindRecipe(name);
  recipe.policy.window = 8;
  recipe.rows.draft = draft;
  return recipe;
}

std::vector<std::vector<int32_t>> Lists(const KeepList& keep) {
  std::vector<std::vector<int32_t>> lists;
  for (int32_t layer = 0; layer < keep.layers(); ++layer)
    for (int32_t head = 0; head < keep.kv_heads(); ++head)
      lists.emplace_back(keep.head(layer, head).begin(), keep.head(layer, head).end());
  return lists;
}

double Distance(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
    largest = std::max(largest, std::fabs(static_cast<double>(b[i])));
  }
  return worst / largest;
}

class LookAheadTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() /
             (std::string("dropkv_look_ahead_") + GetParam().name + std::to_string(::getpid()) + ".gguf"))
                .string();
    ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel(GetParam().config), path_).ok());
    Result<Model> model = Model::Load(path_, {.gpu_layers = 0});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::make_unique<Model>(std::move(*model));
    Result<Engine> engine = Engine::Create({.threads = 2, .force_kernel = {}});
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_.emplace(std::move(*engine));
    std::mt19937 generator(11);
    tokens_.resize(kPrompt + 32);
    for (Token& token : tokens_) token = testing::kFirstByteToken + static_cast<Token>(generator() % 300);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  // Float32 all through, so that two ways to the same tokens differ by the order of sums alone.
  Prefilled Prefill(int32_t n, const std::vector<Recipe>& recipes, int32_t reserve = 40) {
    PrefillOptions options;
    options.threads = 2;
    options.window = 0;
    options.kv_type = DType::kF32;
    options.flash_attention = false;
    options.recipes = recipes;
    options.reserve = reserve;
    options.pool = engine_->pool();
    Result<Prefilled> prefilled = llama::Prefill(*model_, {tokens_.begin(), tokens_.begin() + n}, options);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  std::span<const Token> Behind(int32_t count, int32_t from = 0) const {
    return std::span(tokens_).subspan(kPrompt + from, count);
  }

  // Logits behind the prompt and `count` fed tokens.
  std::vector<float> Feed(Decoder* decoder, int32_t count, int32_t position, int32_t from = 0) const {
    for (int32_t i = 0; i < count; ++i) {
      const Status status = decoder->Feed(Behind(1, from + i), position + i);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    return {decoder->logits().begin(), decoder->logits().end()};
  }

  std::vector<float> FullLogits(Prefilled* prefilled, int32_t count) const {
    const Result<std::unique_ptr<Decoder>> full = MakeFullDecoder(prefilled);
    std::vector<float> logits = Feed(full->get(), count, prefilled->end());
    EXPECT_TRUE((*full)->Rewind().ok());
    return logits;
  }

  // A sliding window that is written back lies in other cells: its sums have another order. All else has the same bits.
  static void ExpectSame(const std::vector<float>& a, const std::vector<float>& b) {
    if (GetParam().config.sliding_window == 0) {
      EXPECT_EQ(a, b);
    } else {
      EXPECT_LT(Distance(a, b), 1e-5);
    }
  }

  std::string path_;
  std::unique_ptr<Model> model_;
  std::optional<Engine> engine_;
  std::vector<Token> tokens_;
};

INSTANTIATE_TEST_SUITE_P(Models, LookAheadTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// Queries, keys and values of the rows behind the prompt are those of a prompt that ends with them.
TEST_P(LookAheadTest, ExtendedRowsAreThoseOfTheWholePrompt) {
  Recipe wide = Preset("dropkv", 0);
  wide.policy.window = 8 + kBehind;
  const Prefilled whole = Prefill(kPrompt + kBehind, {wide});
  Prefilled prefilled = Prefill(kPrompt, {Preset("dropkv", kBehind)});
  ASSERT_TRUE(Extend(&prefilled, Behind(4)).ok());
  ASSERT_TRUE(Extend(&prefilled, Behind(kBehind - 4, 4)).ok());
  EXPECT_EQ(prefilled.generated, kBehind);
  EXPECT_LT(Distance(prefilled.context->logits(), whole.logits), 1e-4);
  const Result<LayerInputs> ours = LayerInputs::Make(prefilled, 8, true);
  const Result<LayerInputs> theirs = LayerInputs::Make(whole, 8 + kBehind, false);
  ASSERT_TRUE(ours.ok() && theirs.ok());
  ASSERT_FALSE(ours->layers().empty());
  for (size_t i = 0; i < ours->layers().size(); ++i) {
    const LayerInput& a = ours->layers()[i];
    const LayerInput& b = theirs->layers()[i];
    ASSERT_EQ(a.rows.rows, 8 + kBehind);
    ASSERT_EQ(a.kv.tokens, b.kv.tokens);
    for (int32_t row = 0; row < a.rows.rows; ++row) EXPECT_EQ(a.rows.visible[row], b.rows.visible[row]);
    const size_t count = static_cast<size_t>(a.rows.rows) * a.rows.row_stride;
    EXPECT_LT(Distance({a.rows.q, count}, {b.rows.q, count}), 1e-4);
    for (int32_t token = 0; token < a.kv.tokens; ++token) {
      const auto row = [&](const KvTensor& t, const int32_t* cells) {
        return std::span(static_cast<const float*>(t.data) + cells[token] * t.token_stride,
                         static_cast<size_t>(a.kv.kv_heads) * a.kv.key_dim);
      };
      EXPECT_LT(Distance(row(a.kv.k, a.kv.cells), row(b.kv.k, b.kv.cells)), 1e-4) << "token " << token;
    }
  }
}

// What lies behind the prompt as tokens of the prompt that its window protects, or as generated ones: the same choice.
TEST_P(LookAheadTest, KeepsWhatAPromptWithThoseTokensKeeps) {
  for (const char* name : {"dropkv", "snapkv", "adadropkv", "caote", "obcache"}) {
    Recipe wide = Preset(name, 0);
    wide.policy.pool = {PoolKind::kMean, 0, 0, wide.policy.pool.past_only};
    Recipe recipe = wide;
    wide.policy.window = 8 + kBehind;
    wide.policy.alpha = recipe.policy.alpha = wide.policy.heads == HeadRule::kUniform ? 0.2 : 0.0;
    const Prefilled whole = Prefill(kPrompt + kBehind, {wide});
    Prefilled prefilled = Prefill(kPrompt, {recipe});
    ASSERT_TRUE(Extend(&prefilled, Behind(kBehind)).ok());
    const Result<Evicted> ours = Evict(prefilled, &*engine_, recipe, Budget::Tokens(40));
    const Result<Evicted> theirs = Evict(whole, &*engine_, wide, Budget::Tokens(40 + kBehind));
    ASSERT_TRUE(ours.ok()) << name << ": " << ours.status().message();
    ASSERT_TRUE(theirs.ok()) << name << ": " << theirs.status().message();
    EXPECT_EQ(Lists(prefilled.WithGenerated(ours->keep)), Lists(theirs->keep)) << name;
  }
}

TEST_P(LookAheadTest, RetractLeavesThePrefillAsItWas) {
  const Recipe recipe = Preset("adadropkv", 0);
  Prefilled prefilled = Prefill(kPrompt, {recipe});
  const Result<Evicted> before = Evict(prefilled, &*engine_, recipe, Budget::Fraction(0.2));
  const std::vector<float> logits = FullLogits(&prefilled, 3);
  ASSERT_TRUE(before.ok());
  ASSERT_TRUE(Extend(&prefilled, Behind(8, 10)).ok());
  const Result<Evicted> between = Evict(prefilled, &*engine_, recipe, Budget::Fraction(0.2));
  ASSERT_TRUE(between.ok()) << between.status().message();
  ASSERT_TRUE(Retract(&prefilled).ok());
  const Result<Evicted> after = Evict(prefilled, &*engine_, recipe, Budget::Fraction(0.2));
  ASSERT_TRUE(after.ok()) << after.status().message();
  EXPECT_EQ(Lists(before->keep), Lists(after->keep));
  EXPECT_NE(Lists(before->keep), Lists(between->keep));  // eight rows more that judge
  EXPECT_EQ(before->output_error, after->output_error);
  ExpectSame(FullLogits(&prefilled, 3), logits);
}

// A draft changes later tokens through the kept set alone: forced upon a prefill that never drafted, it gives the same
// bits.
TEST_P(LookAheadTest, ADraftActsThroughTheKeptSetAlone) {
  for (const char* name : {"dropkv", "adadropkv"}) {
    const Recipe recipe = Preset(name, 6);
    Prefilled drafted = Prefill(kPrompt, {recipe});
    DraftReport report;
    const Result<Evicted> evicted = EvictLookingAhead(&drafted, &*engine_, recipe, Budget::Fraction(0.2), &report);
    ASSERT_TRUE(evicted.ok()) << evicted.status().message();
    EXPECT_EQ(report.tokens.size(), 6U);
    EXPECT_GT(report.kv_bytes, 0);
    EXPECT_LT(report.kv_bytes, drafted.KvBytesFull());
    EXPECT_EQ(drafted.generated, 0);
    Prefilled plain = Prefill(kPrompt, {recipe});
    EXPECT_NE(Lists(Evict(plain, &*engine_, recipe, Budget::Fraction(0.2))->keep), Lists(evicted->keep));
    std::vector<float> logits[2];
    for (Prefilled* prefilled : {&drafted, &plain}) {
      Result<std::unique_ptr<Decoder>> decoder = MakeCompactedDecoder(prefilled, evicted->keep, 16);
      ASSERT_TRUE(decoder.ok()) << decoder.status().message();
      logits[prefilled == &plain] = Feed(decoder->get(), 4, kPrompt);
    }
    ExpectSame(logits[0], logits[1]);
    ExpectSame(FullLogits(&drafted, 3), FullLogits(&plain, 3));
  }
}

// The draft is what the cut cache answers, as anybody would decode it.
TEST_P(LookAheadTest, DraftsWhatTheCutCacheAnswers) {
  Recipe recipe = Preset("dropkv", 5);
  recipe.rows.draft_budget = Budget::Tokens(30);
  Prefilled prefilled = Prefill(kPrompt, {recipe});
  const Result<DraftReport> draft = Draft(&prefilled, &*engine_, recipe, Budget::Tokens(99));
  ASSERT_TRUE(draft.ok()) << draft.status().message();
  const Result<Evicted> cut = Evict(prefilled, &*engine_, Preset("dropkv", 0), Budget::Tokens(30));
  Result<std::unique_ptr<Decoder>> decoder = MakeCompactedDecoder(&prefilled, cut->keep, 16);
  std::span<const float> logits = prefilled.logits;
  std::vector<Token> expected;
  for (int32_t i = 0; i < 5; ++i) {
    expected.push_back(static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    ASSERT_TRUE((*decoder)->Feed(std::span(&expected.back(), 1), kPrompt + i).ok());
    logits = (*decoder)->logits();
  }
  EXPECT_EQ(draft->tokens, expected);
}

// A second round drafts from the cache that the first draft's rows cut.
TEST_P(LookAheadTest, ASecondRoundDraftsFromTheBetterCache) {
  Recipe recipe = Preset("dropkv", 5);
  recipe.rows.draft_budget = Budget::Tokens(30);
  Prefilled prefilled = Prefill(kPrompt, {recipe});
  const Result<DraftReport> first = Draft(&prefilled, &*engine_, recipe, Budget::Tokens(99));
  ASSERT_TRUE(first.ok()) << first.status().message();
  recipe.rows.draft_rounds = 2;
  const Result<DraftReport> second = Draft(&prefilled, &*engine_, recipe, Budget::Tokens(99));
  ASSERT_TRUE(second.ok()) << second.status().message();
  EXPECT_EQ(prefilled.generated, 0);
  const Result<Evicted> cut = EvictAsking(&prefilled, &*engine_, recipe, Budget::Tokens(30), first->tokens);
  ASSERT_TRUE(cut.ok()) << cut.status().message();
  Result<std::unique_ptr<Decoder>> decoder = MakeCompactedDecoder(&prefilled, cut->keep, 16);
  std::vector<Token> expected;
  ASSERT_TRUE(DraftTokens(prefilled, 5, decoder->get(), &expected).ok());
  EXPECT_EQ(second->tokens, expected);
}

// Until the cut the logits are the full cache's; with everything kept they are so behind it too.
TEST_P(LookAheadTest, ADelayedCutComesAfterSoManyTokens) {
  const Recipe recipe = Preset("dropkv", 0);
  Prefilled plain = Prefill(kPrompt, {recipe});
  for (const double share : {0.2, 1.0}) {
    Prefilled prefilled = Prefill(kPrompt, {recipe});
    int32_t cuts = 0;
    std::unique_ptr<Decoder> delayed = MakeDelayedDecoder(&prefilled, 3, [&]() -> Result<std::unique_ptr<Decoder>> {
      ++cuts;
      EXPECT_EQ(prefilled.generated, 3);
      Result<Evicted> evicted = Evict(prefilled, &*engine_, recipe, Budget::Fraction(share));
      if (!evicted.ok()) return evicted.status();
      return MakeCompactedDecoder(&prefilled, evicted->keep, 16);
    });
    const std::vector<float> early = Feed(delayed.get(), 2, kPrompt);
    ExpectSame(early, FullLogits(&plain, 2));
    EXPECT_EQ(cuts, 0);
    EXPECT_EQ(delayed->name(), "full");
    ExpectSame(Feed(delayed.get(), 1, kPrompt + 2, 2), FullLogits(&plain, 3));
    EXPECT_EQ(cuts, 1);
    const std::vector<float> late = Feed(delayed.get(), 3, kPrompt + 3, 3);
    const double distance = Distance(late, FullLogits(&plain, 6));
    EXPECT_EQ(cuts, 1);
    if (share == 1.0) EXPECT_LT(distance, 1e-4);
    if (share < 1.0) EXPECT_GT(distance, 1e-4);
  }
}

// A further turn is no answer: it finds the cache cut.
TEST_P(LookAheadTest, AWholeTurnEndsTheDelay) {
  const Recipe recipe = Preset("dropkv", 0);
  Prefilled prefilled = Prefill(kPrompt, {recipe});
  int32_t judged_by = -1;
  std::unique_ptr<Decoder> delayed = MakeDelayedDecoder(&prefilled, 30, [&]() -> Result<std::unique_ptr<Decoder>> {
    judged_by = prefilled.generated;
    return MakeCompactedDecoder(&prefilled, Evict(prefilled, &*engine_, recipe, Budget::Fraction(0.3))->keep, 16);
  });
  Feed(delayed.get(), 2, kPrompt);
  ASSERT_TRUE(delayed->Feed(Behind(5, 2), kPrompt + 2).ok());
  EXPECT_EQ(judged_by, 2);
}

TEST_P(LookAheadTest, RefusesWhatItCannotAsk) {
  const auto message = [](const Status& status) { return status.message(); };
  Prefilled none = Prefill(kPrompt, {*baseline::FindRecipe("full")});
  EXPECT_NE(message(Extend(&none, Behind(1))).find("captured no queries"), std::string::npos);
  Prefilled prefilled = Prefill(kPrompt, {Preset("dropkv", 0)}, 200);
  const std::vector<Token> many(kMaxRows + 1, tokens_[0]);
  EXPECT_NE(message(Extend(&prefilled, many)).find("expected at most 128, got 129"), std::string::npos);
  EXPECT_EQ(prefilled.generated, 0);
}

}  // namespace
}  // namespace dropkv::llama
