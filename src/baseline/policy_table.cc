#include "baseline/policy_table.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

namespace dropkv::baseline {
namespace {

constexpr const char* kNothing = "-";

// "0.2", "20", "1.05": no zeros at the end.
std::string Number(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

std::string Join(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts)
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  return text.empty() ? kNothing : text;
}

std::string NeedsText(const Recipe& recipe) {
  const Needs needs = NeedsOf(recipe);
  const bool positions =
      recipe.scorer == Scorer::kFull || recipe.scorer == Scorer::kRecency || recipe.scorer == Scorer::kRandom;
  const bool keys = !positions && !(recipe.scorer == Scorer::kCur && recipe.cur == CurForm::kValue);
  return Join({needs.window_queries ? "window q" : "", recipe.rows.generated() > 0 ? "generated q" : "",
               needs.all_queries ? "all q" : "", needs.pre_rope_queries ? "all q before RoPE" : "", keys ? "k" : "",
               needs.pre_rope_keys ? "k before RoPE" : "", needs.values ? "v" : "",
               needs.output_projection ? "W_O" : ""});
}

// "8", or "8 + 4" with rows of generated tokens.
std::string RowsCell(const Recipe& recipe) {
  if (!JudgesByRows(recipe)) return kNothing;
  const RowSources& rows = recipe.rows;
  std::string text = std::to_string(rows.window ? recipe.policy.window : 0);
  return rows.generated() > 0 ? text.append(" + ").append(std::to_string(rows.generated())) : text;
}

std::string ProtectedText(const Recipe& recipe) {
  const int32_t last = ProtectedLast(recipe);
  if (recipe.scorer == Scorer::kFull) return "all";
  if (recipe.scorer == Scorer::kProjectionCode) return "first chunk, last " + std::to_string(last);
  return Join({recipe.policy.sink > 0 ? "first " + std::to_string(recipe.policy.sink) : "",
               last > 0 ? "last " + std::to_string(last) : "", recipe.recent_share > 0 ? "latest half" : "",
               recipe.scorer == Scorer::kLag ? "last block" : ""});
}

std::string LayerText(const Recipe& recipe) {
  switch (recipe.layers) {
    case LayerRule::kPyramid:
      return "pyramid";
    case LayerRule::kPyramidOriginal:
      return "pyramid + window";
    case LayerRule::kCake:
      return "CAKE's layers";
    case LayerRule::kSame:
    case LayerRule::kFlat:
      break;
  }
  return {};
}

std::string AllocatorText(const Recipe& recipe) {
  if (recipe.scorer == Scorer::kFull) return kNothing;
  std::string heads(HeadRuleName(recipe.policy.heads));
  if (recipe.policy.heads != HeadRule::kUniform) heads.append(" ").append(Number(recipe.policy.alpha));
  if (recipe.flat_heads) heads = recipe.layers == LayerRule::kFlat ? "flat (model)" : "flat (layer)";
  return Join({heads, recipe.critical ? "two stages" : "",
               recipe.chunk > 0 ? "chunks of " + std::to_string(recipe.chunk) : "", LayerText(recipe)});
}

std::string ScoreCost(const Recipe& recipe) {
  const Scorer scorer = recipe.scorer == Scorer::kCaote ? recipe.base : recipe.scorer;
  switch (scorer) {
    case Scorer::kFull:
    case Scorer::kRecency:
    case Scorer::kRandom:
      return {};
    case Scorer::kAttentionSum:
    case Scorer::kAttentionMean:
      return "n^2 d";
    case Scorer::kVatp:
      return recipe.block > 0 ? std::to_string(recipe.block) + " n d" : "n^2 d";
    case Scorer::kExpected:
    case Scorer::kCapKv:
      return "n d^2";
    case Scorer::kCompactor:
      return "n d (" + std::to_string(recipe.block) + " + " + std::to_string(recipe.sketch) + ")";
    case Scorer::kLocalAttention:
      return "n d " + std::to_string(recipe.block);
    case Scorer::kKeyNorm:
    case Scorer::kLag:
    case Scorer::kCur:
    case Scorer::kLastRow:
      return "n d";
    case Scorer::kKeyDiff:
      return recipe.block > 0 ? "n d kept/" + std::to_string(recipe.block) : "n d";
    case Scorer::kDropKvWo:
      return "w n d^2 + d^2 D";
    default:
      return "w n d";
  }
}

std::string CostText(const Recipe& recipe) {
  const bool norms = NeedsOf(recipe).output_projection && recipe.scorer != Scorer::kDropKvWo;
  const std::string score = ScoreCost(recipe);
  if (!norms) return score.empty() ? kNothing : score;
  return score.empty() ? "n d D" : score + " + n d D";
}

// Behind the last character no spaces.
std::string Line(const std::vector<std::string>& cells, const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    line += cells[i];
    line.append(widths[i] - cells[i].size() + 2, ' ');
  }
  line.resize(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// A bar would end a table's cell, a star would begin emphasis.
std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|' || c == '*' || c == '_' || c == '<' || c == '>') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

constexpr const char* kIntroduction = R"(# Policies

Every policy is a row of one table in the program: what is scored, how the score is pooled, what is kept by its place, how
heads and layers share the budget. This page is what `dropkv policies --markdown` prints; `dropkv policies` prints the
table for a terminal, and `dropkv policies NAME ...` what a name means.

## Names

`--policy` takes a preset of the table, and names made from one:

| name | meaning |
| --- | --- |
| `ada-NAME`, `ada0.3.NAME` | AdaKV's rule K: a floor of alpha (0.2, or the number) of the budget for every head, the rest by the layer's scores |
| `ada-o-NAME` | rule O, the original AdaKV's: shares of the layer's order, drawn towards uniform |
| `critical-NAME` | CriticalKV: half of the budget by NAME's score, the rest by that score times the length of the projected value |
| `criticalada-NAME`, `criticalada0.3.NAME` | the same with heads that share by rule K |
| `chunk-NAME`, `chunkkv.10.NAME` | ChunkKV: chunks of 20 tokens (or of that many), the same in all heads |
| `NAME.w32.k5` | settings behind points, in any number |

| setting | meaning |
| --- | --- |
| `wN`, `sinkN`, `recentN` | observation window; first tokens and last tokens that are always kept |
| `kN`, `meanN`, `maxN`, `meanB+F`, `raw` | pooling: width, kind and width, B before and F after a hit, none |
| `compat` | DropKV in the published float32 arithmetic |
| `lagN`, `cross` | LagKV: the lag; softmax instead of ranks |
| `epsX` | what is added to the score (expected attention, CriticalKV) or to 1 - p (compat) |
| `nocov`, `novnorm`, `futureN` | expected attention: without covariance, without the values' norms; positions to come |
| `key`, `value`, `kv_avg`, `global` | CUR: which norms; no local blocks. `key` and `value` for OBCache too |
| `blockN`, `chunkN`, `rowsN`, `sketchN` | tokens of a block (CUR, KeyDiff), of a chunk (Compactor, ChunkKV, AnDPro), rows (VATP), columns of the sketch |
| `gammaX`, `betaX`, `exactbias`, `seedN` | CAKE's weight of the variance; the pyramid's slope; DefensiveKV's mass on the window itself; random |

## Presets that share a method's name

Public implementations of one method differ; each has its own name here, so that none is taken for another.

- SnapKV: `snapkv` is kvpress (window 64, mean 5), `snapkv-official` the authors' LongBench settings (32, maximum 7),
  `snapkv-kvcf` KVCache-Factory's (8, maximum 7). The last two choose per query head there; here per KV head.
- Lookahead Q-Cache: `laq` and `laq++` cut the cache as `snapkv-official` would, to what the run keeps, and decode 8 tokens
  from that. `laq` then cuts the full cache by those tokens' queries alone and protects nothing; `laq++` by them and the last
  8 of the prompt, which it protects. There the queries are those of the small cache's decoding and see the prompt alone; here
  the drafted tokens pass once more over the full cache, and see each other too.
- PyramidKV: `pyramidkv` is kvpress (real numbers, the window inside the budget; where the last layer's share would be below
  the window every layer gets the same, at 5% below 25600 tokens), `pyramidkv-original` KVCache-Factory (whole numbers, the
  window on top).
- AdaKV: two rules. `adakv` is rule K (kvpress), `adakv-official` rule O (the authors').
- DropKV: `dropkv` is exact. `dropkv-compat` is the arithmetic of the authors' repository, which can evict a token that holds
  nearly all the attention. Their kvpress version has window 32 and mean 7: `dropkv-w32`.
- AnDPro: `andpro` is the token-wise form that the DropKV paper describes; `andpro_code` is what the public code computes:
  chunks of 4, pooled weights, unnormalised anchors, one order over the heads.
- H2O: `h2o` sums attention and keeps a window, `h2o-official` keeps the latest tokens as half of the budget, `observed`
  divides by the number of rows that see the token and protects nothing.
- TOVA: `tova` always keeps the last token (kvpress), `tova-official` does not.
- KeyDiff: `keydiff` looks at all keys at once, `keydiff-block` 128 at a time as the paper does.
- VATP: `vatp` is its H2O mode, `vatp-scissorhands` its mode of the last 400 rows.
- `random` keeps the last 8 tokens beside the random ones; kvpress's protects none.

CAOTE, OBCache and `dropkv-wo` have no public code; the rows say what is ours.

Protected tokens are kept by their place, never by a score, and a budget below them is raised to them. The references pad
scores instead, and below that budget keep an arbitrary part.

## Table

Cost: multiply-adds per query head, the largest term alone: n tokens, window w, head size d, hidden size D. Needs: what is
read beside positions; "window q" are the queries of the window, "generated q" those of tokens decoded behind the prompt, W\_O
is the output projection. Window: the rows that judge, of the prompt and, behind a plus, of generated tokens.
)";

}  // namespace

PolicyRow RowOf(const Recipe& recipe) {
  const std::string pooling = PoolingText(recipe.policy.pool);
  return {.name = recipe.name(),
          .signal = recipe.signal,
          .needs = NeedsText(recipe),
          .window = RowsCell(recipe),
          .pooling = pooling == "none" ? kNothing : pooling,
          .is_protected = ProtectedText(recipe),
          .allocator = AllocatorText(recipe),
          .cost = CostText(recipe),
          .source = recipe.source};
}

std::string PolicyTableText(std::span<const Recipe> recipes) {
  std::vector<std::vector<std::string>> lines = {
      {"policy", "window", "pooling", "protected", "heads, layers", "needs"}};
  for (const Recipe& recipe : recipes) {
    const PolicyRow row = RowOf(recipe);
    lines.push_back({row.name, row.window, row.pooling, row.is_protected, row.allocator, row.needs});
  }
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  std::string text = Line(lines.front(), widths);
  for (size_t i = 0; i < recipes.size(); ++i) {
    const PolicyRow row = RowOf(recipes[i]);
    text += Line(lines[i + 1], widths);
    text += "    " + row.signal + (row.cost == kNothing ? "" : "  [" + row.cost + "]") + "\n    " + row.source + "\n";
  }
  return text;
}

std::string PolicyTableMarkdown(std::span<const Recipe> recipes) {
  std::string text =
      "| policy | signal | needs | window | pooling | protected | heads, layers | cost | source |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Recipe& recipe : recipes) {
    const PolicyRow row = RowOf(recipe);
    text += "| `" + row.name + "` |";
    for (const std::string& cell :
         {row.signal, row.needs, row.window, row.pooling, row.is_protected, row.allocator, row.cost, row.source})
      text.append(" ").append(Escaped(cell)).append(" |");
    text += "\n";
  }
  return text;
}

std::string PolicyDocument() {
  std::string text = kIntroduction;
  for (const int tier : {1, 2}) {
    std::vector<Recipe> recipes;
    for (const Recipe& recipe : Recipes())
      if (recipe.tier == tier) recipes.push_back(recipe);
    text += tier == 1 ? "\n### Tier 1: DropKV and what it is compared with\n\n" : "\n### Tier 2: others\n\n";
    text += PolicyTableMarkdown(recipes);
  }
  return text;
}

}  // namespace dropkv::baseline
