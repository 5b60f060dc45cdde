// Tokens behind the prompt whose queries judge it too: delayed and drafted rows (docs/algorithm.md, "Observation
// rows").
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "baseline/recipe.h"
#include "dropkv/engine.h"
#include "llama/decoder.h"
#include "llama/evict.h"
#include "llama/prefill.h"

namespace dropkv::llama {

// Decodes `tokens` over the full cache, at prefilled->end() and on, and captures their queries: from now on an eviction
// asks them as well and every decoder keeps them. The context's logits are those of the last one. Errors: a context
// without room (PrefillOptions::reserve), more rows than kMaxRows, no rows captured in the prefill; after one of
// libllama's, or a stop, the prefill is of no further use.
Status Extend(Prefilled* prefilled, std::span<const Token> tokens);

// Takes back every token that Extend decoded. What the context knows is again what it knew after the prefill.
Status Retract(Prefilled* prefilled);

struct DraftReport {
  double seconds = 0;         // cutting, compacting, decoding
  int64_t kv_bytes = 0;       // of the cache that was drafted from, beside the full one
  std::vector<Token> tokens;  // the most likely ones; fewer than asked for where an end-of-generation token came first
};

// An error where a draft beside a run of this budget keeps fewer tokens than its cut protects. Known before a prefill.
Status CheckDraftBudget(const baseline::Recipe& recipe, const Budget& budget);

// Adds the most likely token to a draft; false: it would end the generation and was left out, or there are `most` now.
bool AddDrafted(const Model& model, std::span<const float> logits, int32_t most, std::vector<Token>* tokens);

// Drafts behind the prompt over `decoder`, which has been fed nothing yet.
Status DraftTokens(const Prefilled& prefilled, int32_t most, Decoder* decoder, std::vector<Token>* tokens);

// Drafts recipe.rows.draft tokens from the cache cut to DraftBudget(recipe.rows, budget). Leaves nothing behind.
// `prefilled` must not be extended.
Result<DraftReport> Draft(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget);

// Evict of evict.h with these tokens' rows beside those of recipe.rows, or instead of them. Leaves nothing behind.
// `prefilled` must not be extended.
Result<Evicted> EvictAsking(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget,
                            std::span<const Token> tokens);

// Evict of evict.h, asked by what recipe.rows says: drafts, asks the drafted rows too and takes them back. `draft` gets
// the report; untouched without drafted rows, and where no token can be evicted. A prefill that Extend has extended is
// judged by those tokens as it is.
Result<Evicted> EvictLookingAhead(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe,
                                  const Budget& budget, DraftReport* draft);

// Over the full cache until `delay` tokens are fed, or several at once after the first; then over what `cut` makes of
// `prefilled`, which has been extended by them. Rewind goes back to the cut where it has been made.
using Cut = std::function<Result<std::unique_ptr<Decoder>>()>;
std::unique_ptr<Decoder> MakeDelayedDecoder(Prefilled* prefilled, int32_t delay, Cut cut);

}  // namespace dropkv::llama
