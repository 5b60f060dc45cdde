#include "baseline/presets.h"

#include <utility>

namespace dropkv::baseline {
namespace {

constexpr const char* kDropKvSignal = "sum (p/(1-p))^2 |a-v|^2";
constexpr const char* kAttentionSignal = "mean p over the window";

// The engine's preset of that name; both tables say the same.
Policy OfEngine(const char* name) { return *FindPreset(name); }

Recipe DropKv(Policy policy, const char* source) {
  return {.policy = std::move(policy), .scorer = Scorer::kDropKv, .signal = kDropKvSignal, .source = source};
}

Recipe Attention(Policy policy, const char* source) {
  policy.signal = Signal::kAttention;
  return {.policy = std::move(policy), .scorer = Scorer::kAttention, .signal = kAttentionSignal, .source = source};
}

// kvpress's SnapKV under another name: what its PyramidKV, AdaKV and CriticalKV are built on.
Recipe OverSnapKv(const char* name, const char* source) {
  Policy policy = OfEngine("snapkv");
  policy.name = name;
  return Attention(std::move(policy), source);
}

void AddDropKv(std::vector<Recipe>* recipes) {
  recipes->push_back({.policy = OfEngine("full"),
                      .scorer = Scorer::kFull,
                      .signal = "nothing is evicted",
                      .source = "the whole cache"});
  recipes->push_back(DropKv(OfEngine("dropkv"), "exact mode; window and pooling of the authors' repository"));
  recipes->push_back(DropKv(OfEngine("dropkv-w32"), "exact mode; window and pooling of kvpress PR 285"));
  recipes->push_back(DropKv(OfEngine("adadropkv"), "dropkv under AdaKV's rule K"));
  recipes->push_back(DropKv(OfEngine("dropkv-fwd"), "adadropkv, pooled towards what follows a hit; ours"));

  Recipe ahead = DropKv(OfEngine("adadropkv"), "adadropkv, also asked by what a small cache answers first; ours");
  ahead.policy.name = "dropkv-ahead";
  ahead.policy.pool = {PoolKind::kMean, 3, 20, false};
  ahead.rows.draft = 32;
  recipes->push_back(std::move(ahead));

  Recipe compat = DropKv(OfEngine("dropkv"), "AozhongZhang/DropKV: float32, expanded form");
  compat.policy.name = "dropkv-compat";
  compat.scorer = Scorer::kDropKvCompat;
  compat.epsilon = 1e-6;
  compat.signal = "sum (p/(1-p+1e-6))^2 |a-v|^2, expanded";
  recipes->push_back(std::move(compat));

  Recipe projected = DropKv(OfEngine("dropkv"), "dropkv on the projected output; ours");
  projected.policy.name = "dropkv-wo";
  projected.scorer = Scorer::kDropKvWo;
  projected.signal = "sum (p/(1-p))^2 |(a-v) W_O|^2";
  recipes->push_back(std::move(projected));
}

void AddSnapKv(std::vector<Recipe>* recipes) {
  recipes->push_back(Attention(OfEngine("snapkv"), "kvpress SnapKVPress; arXiv 2404.14469"));
  recipes->push_back(Attention({.name = "snapkv-official", .window = 32, .pool = PastMax(7)},
                               "FasterDecoding/SnapKV, LongBench settings, group mean (there: per query head)"));
  recipes->push_back(Attention({.name = "snapkv-kvcf", .window = 8, .pool = PastMax(7)},
                               "KVCache-Factory, per KV head (its default: per query head)"));

  // Its own snapkv cuts for the draft by 32 rows; what is cut then goes by 8 drafted ones, and the prompt's last 8
  // beside them, which alone are then protected.
  Recipe ahead = Attention({.name = "laq", .window = 32, .pool = {PoolKind::kMax, 3, 3, false}},
                           "noforit/Lookahead_Q-Cache (there: per query head); arXiv 2505.20334");
  ahead.rows = {.window = false, .draft = 8, .draft_budget = {}};
  ahead.protect_window = false;
  ahead.signal = "mean p over 8 drafted rows";
  recipes->push_back(std::move(ahead));
  Recipe joined = Attention({.name = "laq++", .window = 8, .pool = PastMax(7)},
                            "noforit/Lookahead_Q-Cache (there: per query head); arXiv 2505.20334");
  joined.rows = {.draft = 8, .draft_budget = {}, .draft_window = 32};
  joined.signal = "mean p over the window and 8 drafted rows";
  recipes->push_back(std::move(joined));

  Recipe pyramid = OverSnapKv("pyramidkv", "kvpress PyramidKVPress; arXiv 2406.02069");
  pyramid.layers = LayerRule::kPyramid;
  recipes->push_back(std::move(pyramid));

  Recipe original = Attention({.name = "pyramidkv-original", .window = 8, .pool = PastMax(7)},
                              "KVCache-Factory: whole numbers, window on top");
  original.layers = LayerRule::kPyramidOriginal;
  recipes->push_back(std::move(original));
}

void AddAdaptive(std::vector<Recipe>* recipes) {
  Recipe ada = OverSnapKv("adakv", "kvpress AdaKVPress (rule K) over snapkv; arXiv 2407.11550");
  ada.policy.heads = HeadRule::kAda;
  recipes->push_back(std::move(ada));

  Recipe official = Attention({.name = "adakv-official", .window = 32, .pool = PastMax(7), .heads = HeadRule::kAdaO},
                              "FFY0/AdaKV, its scripts' settings (rule O), group mean before pooling");
  recipes->push_back(std::move(official));

  Recipe critical = OverSnapKv("criticalkv", "kvpress CriticalKVPress over snapkv; arXiv 2502.03805");
  critical.critical = true;
  critical.signal = "mean p first, then (mean p + 1e-4) |v W_O|_1";
  Recipe critical_ada = critical;
  recipes->push_back(std::move(critical));
  critical_ada.policy.name = "criticaladakv";
  critical_ada.policy.heads = HeadRule::kAda;
  critical_ada.source = "kvpress CriticalAdaKVPress over snapkv; arXiv 2502.03805";
  recipes->push_back(std::move(critical_ada));
}

void AddProjection(std::vector<Recipe>* recipes) {
  Policy tokens{.name = "andpro", .window = 32, .pool = PastMean(5)};
  recipes->push_back({.policy = std::move(tokens),
                      .scorer = Scorer::kProjection,
                      .signal = "sum p <v,a>/|a|",
                      .source = "AnDPro token by token, the form that the DropKV paper describes"});
  Policy chunks{.name = "andpro_code", .window = 32, .pool = {PoolKind::kMax, 3, 3, false}, .sink = 4};
  recipes->push_back({.policy = std::move(chunks),
                      .scorer = Scorer::kProjectionCode,
                      .flat_heads = true,
                      .chunk = 4,
                      .signal = "sum over a chunk of <p v, sum of p v>",
                      .source = "MIRALab-USTC/LLM-AnDPro, commit dfc2617 (there: per query head)"});
  const auto add_caote = [&](const char* name, Scorer base, int32_t window, Pooling pool, const char* signal) {
    Policy policy{.name = name, .window = window, .pool = pool};
    recipes->push_back({.policy = std::move(policy),
                        .scorer = Scorer::kCaote,
                        .base = base,
                        .signal = signal,
                        .source = "CAOTE, arXiv 2504.14051; no public code, GQA and pooling are ours"});
  };
  add_caote("caote", Scorer::kAttention, 64, PastMean(5), "s/(1-s) |V s - v|, s: snapkv's, sum 1");
  add_caote("caote-h2o", Scorer::kAttentionSum, 8, kNoPooling, "s/(1-s) |V s - v|, s: h2o's, sum 1");
  add_caote("caote-tova", Scorer::kLastRow, 1, kNoPooling, "s/(1-s) |V s - v|, s: tova's, sum 1");
}

}  // namespace

void AddTier1(std::vector<Recipe>* recipes) {
  AddDropKv(recipes);
  AddSnapKv(recipes);
  AddAdaptive(recipes);
  AddProjection(recipes);
}

}  // namespace dropkv::baseline
