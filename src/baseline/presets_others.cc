#include <utility>

#include "baseline/presets.h"

namespace dropkv::baseline {
namespace {

// Nothing observed, pooled or protected.
Policy Bare(const char* name) { return {.name = name, .window = 0, .pool = kNoPooling}; }

Policy WithSinks(const char* name, int32_t sink) {
  return {.name = name, .window = 0, .pool = kNoPooling, .sink = sink};
}

Recipe Other(Policy policy, Scorer scorer, const char* signal, const char* source) {
  return {.policy = std::move(policy), .scorer = scorer, .signal = signal, .source = source, .tier = 2};
}

void AddAttentionSums(std::vector<Recipe>* recipes) {
  recipes->push_back(Other({.name = "h2o", .window = 8, .pool = kNoPooling}, Scorer::kAttentionSum,
                           "sum p over all rows", "KVCache-Factory H2O; arXiv 2306.14048"));
  Recipe official = Other(Bare("h2o-official"), Scorer::kAttentionSum, "sum p over all rows",
                          "FMInference/H2O, lm-eval variant: half of the budget is the latest tokens");
  official.recent_share = 0.5;
  recipes->push_back(std::move(official));
  recipes->push_back(Other(Bare("observed"), Scorer::kAttentionMean, "mean p over the rows that see the token",
                           "kvpress ObservedAttentionPress"));
  recipes->push_back(Other({.name = "tova", .window = 1, .pool = kNoPooling}, Scorer::kLastRow,
                           "p of the last row, mean over all heads", "kvpress TOVAPress; arXiv 2401.06104"));
  Recipe tova = Other({.name = "tova-official", .window = 1, .pool = kNoPooling}, Scorer::kLastRow,
                      "p of the last row, mean over all heads", "schwartz-lab-NLP/TOVA: the last token is not forced");
  tova.protect_window = false;
  recipes->push_back(std::move(tova));
}

void AddVatp(std::vector<Recipe>* recipes) {
  Recipe vatp = Other(WithSinks("vatp", 20), Scorer::kVatp, "sum p over all rows, times |v|_1",
                      "guozhiyu/vatp, H2O mode (there: MHA); half of the budget is the latest tokens");
  vatp.recent_share = 0.5;
  recipes->push_back(std::move(vatp));
  Recipe scissorhands = Other(WithSinks("vatp-scissorhands", 20), Scorer::kVatp, "mean p over 400 rows, times |v|_1",
                              "guozhiyu/vatp, Scissorhands mode (there: MHA)");
  scissorhands.block = 400;
  scissorhands.recent = 10;
  recipes->push_back(std::move(scissorhands));
}

// Neither queries nor attention.
void AddKeys(std::vector<Recipe>* recipes) {
  recipes->push_back(
      Other(*FindPreset("streaming"), Scorer::kRecency, "position", "kvpress StreamingLLMPress; arXiv 2309.17453"));
  recipes->push_back(Other(Bare("knorm"), Scorer::kKeyNorm, "-|k|", "kvpress KnormPress"));
  recipes->push_back(
      Other(Bare("keydiff"), Scorer::kKeyDiff, "-cos(k, mean k/|k|)", "kvpress KeyDiffPress; arXiv 2504.15364"));
  Recipe blocks = Other(Bare("keydiff-block"), Scorer::kKeyDiff, "-cos(k, mean k/|k|), 128 tokens a step",
                        "kvpress block_keydiff, the paper's form; arXiv 2504.15364");
  blocks.block = 128;
  recipes->push_back(std::move(blocks));
  Recipe lag = Other(WithSinks("lagkv", 4), Scorer::kLag, "spread of k, v in the range of the next 128, ranked",
                     "kvpress LagKVPress; arXiv 2504.04704");
  lag.block = 128;
  Recipe cross = lag;
  recipes->push_back(std::move(lag));
  cross.policy.name = "lagkv-cross";
  cross.cross = true;
  cross.signal = "spread of k, v in the range of the next 128, softmax";
  cross.source = "kvpress LagKVPress, cross_scoring; arXiv 2504.04704";
  recipes->push_back(std::move(cross));
}

void AddCur(std::vector<Recipe>* recipes) {
  const auto add = [&](const char* name, CurForm form, int32_t block, const char* signal, const char* source) {
    Recipe recipe = Other(WithSinks(name, 4), Scorer::kCur, signal, source);
    recipe.cur = form;
    recipe.block = block;
    recipes->push_back(std::move(recipe));
  };
  constexpr int32_t kLocal = 16;
  add("cur", CurForm::kProduct, kLocal, "|k|^2 |v|^2, each by its block of 16", "kvpress CURPress; arXiv 2509.15038");
  add("cur-key", CurForm::kKey, kLocal, "|k|^2 by its block of 16", "kvpress CURPress, key leverage");
  add("cur-value", CurForm::kValue, kLocal, "|v|^2 by its block of 16", "kvpress CURPress, value leverage");
  add("cur-mean", CurForm::kMean, kLocal, "(|k|^2 + |v|^2)/2, each by its block of 16", "kvpress CURPress, kv_avg");
  add("cur-global", CurForm::kProduct, 0, "|k|^2 |v|^2", "kvpress CURPress without the local window");
}

// Statistics of the prompt's queries.
void AddPrompt(std::vector<Recipe>* recipes) {
  Recipe expected = Other(WithSinks("expected", 4), Scorer::kExpected, "p of 512 queries to come, times |v|",
                          "kvpress ExpectedAttentionPress");
  expected.epsilon = 0;
  Recipe ada = expected;
  recipes->push_back(std::move(expected));
  ada.policy.name = "adakv-expected";
  ada.policy.heads = HeadRule::kAda;
  ada.epsilon = 1e-2;
  ada.signal = "(p of 512 queries to come + 0.01) |v|";
  ada.source = "kvpress AdaKVPress(ExpectedAttentionPress)";
  recipes->push_back(std::move(ada));

  Recipe compactor =
      Other({.name = "compactor", .window = 0, .pool = {PoolKind::kMean, 1, 1, false}, .sink = 8}, Scorer::kCompactor,
            "(1 - kept) leverage of k + local p |v|, z-scored", "kvpress CompactorPress; arXiv 2507.08143");
  compactor.recent = 4;
  compactor.block = 256;
  recipes->push_back(std::move(compactor));
  Recipe local = Other({.name = "noncausal", .window = 0, .pool = {PoolKind::kMean, 1, 1, false}},
                       Scorer::kLocalAttention, "local p |v|, z-scored", "kvpress NonCausalAttnPress");
  local.block = 256;
  recipes->push_back(std::move(local));
  recipes->push_back(Other(WithSinks("capkv", 4), Scorer::kCapKv, "w v' A^-1 v, A = 1 + sum w v v'",
                           "kvpress CAPKV; arXiv 2604.25975"));
}

void AddWindow(std::vector<Recipe>* recipes) {
  Recipe chunks = Other({.name = "chunkkv", .window = 64, .pool = PastMean(5)}, Scorer::kAttention,
                        "mean p over the window, chunks of 20", "kvpress ChunkKVPress over snapkv; arXiv 2502.00299");
  chunks.policy.signal = Signal::kAttention;
  chunks.chunk = 20;
  recipes->push_back(std::move(chunks));
  recipes->push_back(Other({.name = "finch", .window = 64, .pool = kNoPooling}, Scorer::kFinch,
                           "mean over the question of p times earlier keys",
                           "kvpress FinchPress; its window is the question, 64 stands in"));
  const auto add_obcache = [&](const char* name, ObCacheForm form, const char* signal) {
    Recipe recipe = Other({.name = name, .window = 64, .pool = PastMean(5)}, Scorer::kObCache, signal,
                          "OBCache, arXiv 2510.07651; derived, no public code; snapkv's window");
    recipe.obcache = form;
    recipes->push_back(std::move(recipe));
  };
  add_obcache("obcache", ObCacheForm::kJoint, "sum p^2 |v + z(v-a)|^2");
  add_obcache("obcache-value", ObCacheForm::kValue, "sum p^2 |v|^2");
  add_obcache("obcache-key", ObCacheForm::kKey, "sum p^2 z^2 |v-a|^2");

  Recipe defensive =
      Other({.name = "defensivekv", .window = 32, .pool = PastMean(5)}, Scorer::kDefensive,
            "max p over rows and group, share of |v W_O|_1", "FFY0/DefensiveKV; flat over the layer's heads");
  defensive.group = GroupRule::kMax;
  defensive.group_before_pool = false;
  defensive.flat_heads = true;
  Recipe layers = defensive;
  recipes->push_back(std::move(defensive));
  layers.policy.name = "layerdefensivekv";
  layers.layers = LayerRule::kFlat;
  layers.source = "FFY0/DefensiveKV; flat over the model";
  recipes->push_back(std::move(layers));

  Recipe cake = Other({.name = "cake", .window = 32, .pool = PastMean(5)}, Scorer::kVariance,
                      "mean p + 200 var p over the window", "antgroup/cakekv; layers by entropy and variance");
  cake.group_before_pool = false;
  cake.layers = LayerRule::kCake;
  recipes->push_back(std::move(cake));
}

}  // namespace

void AddTier2(std::vector<Recipe>* recipes) {
  AddAttentionSums(recipes);
  AddVatp(recipes);
  AddKeys(recipes);
  AddCur(recipes);
  AddPrompt(recipes);
  AddWindow(recipes);
  recipes->push_back(Other(*FindPreset("random"), Scorer::kRandom, "seeded random number",
                           "kvpress RandomPress, and the last 8 tokens (there: none)"));
}

}  // namespace dropkv::baseline
