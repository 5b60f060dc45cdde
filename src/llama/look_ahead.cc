#include "llama/look_ahead.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/clock.h"

namespace dropkv::llama {
namespace {

class DelayedDecoder : public Decoder {
 public:
  DelayedDecoder(Prefilled* prefilled, int32_t delay, Cut cut)
      : prefilled_(prefilled), delay_(delay), cut_(std::move(cut)) {}

  Status Feed(std::span<const Token> tokens, int32_t position) override {
    // A whole turn is no answer: it is not asked, and finds the cache cut.
    const bool turn = tokens.size() > 1;
    if (after_ == nullptr && turn) DROPKV_RETURN_IF_ERROR(MakeCut());
    if (after_ != nullptr) {
      fed_after_ = true;
      return after_->Feed(tokens, position);
    }
    DROPKV_RETURN_IF_ERROR(Extend(prefilled_, tokens));
    const std::span<const float> logits = prefilled_->context->logits();
    logits_.assign(logits.begin(), logits.end());
    return prefilled_->generated < delay_ ? Status::Ok() : MakeCut();
  }
  std::span<const float> logits() const override { return fed_after_ ? after_->logits() : logits_; }
  Status Rewind() override { return after_ != nullptr ? after_->Rewind() : Retract(prefilled_); }
  std::string_view name() const override { return after_ != nullptr ? after_->name() : "full"; }

 private:
  Status MakeCut() {
    Result<std::unique_ptr<Decoder>> made = cut_();
    if (!made.ok()) return made.status();
    after_ = std::move(*made);
    return Status::Ok();
  }

  Prefilled* prefilled_;
  int32_t delay_;
  Cut cut_;
  std::vector<float> logits_;  // before the cut
  std::unique_ptr<Decoder> after_;
  bool fed_after_ = false;
};

}  // namespace

Status Extend(Prefilled* prefilled, std::span<const Token> tokens) {
  if (tokens.empty()) return Status::Ok();
  const int32_t rows = prefilled->rows();
  const auto after = static_cast<int64_t>(prefilled->generated + tokens.size());
  if (rows == 0) return {Code::kFailedPrecondition, "rows behind the prompt: the prefill captured no queries"};
  if (after > kMaxRows)
    return InvalidArgument("rows behind the prompt: expected at most " + std::to_string(kMaxRows) + ", got " +
                           std::to_string(after));
  prefilled->tap->set_recording(true);
  prefilled->tap->set_listener(prefilled->capture.get());
  DROPKV_RETURN_IF_ERROR(prefilled->context->Decode(tokens, prefilled->end()));
  prefilled->tap->set_listener(nullptr);
  prefilled->tap->set_recording(false);
  if (prefilled->generated == 0) prefilled->prompt_window_state = prefilled->window_state;
  prefilled->generated = static_cast<int32_t>(after);
  if (prefilled->window_state.empty()) return Status::Ok();
  Result<std::vector<uint8_t>> state = prefilled->context->State(0, prefilled->end(), true);
  if (!state.ok()) return state.status();
  prefilled->window_state = std::move(*state);
  return Status::Ok();
}

Status Retract(Prefilled* prefilled) {
  if (prefilled->generated == 0) return Status::Ok();
  prefilled->generated = 0;
  prefilled->window_state = std::move(prefilled->prompt_window_state);
  for (auto& [number, layer] : prefilled->tap->layers()) {
    layer.cells.resize(prefilled->size());
    prefilled->capture->Truncate(number, prefilled->rows(), int64_t{layer.query_heads} * layer.key_dim);
  }
  return ForgetBehind(prefilled);
}

bool AddDrafted(const Model& model, std::span<const float> logits, int32_t most, std::vector<Token>* tokens) {
  const auto best = static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  if (model.IsEndOfGeneration(best)) return false;
  tokens->push_back(best);
  return static_cast<int32_t>(tokens->size()) < most;
}

Status DraftTokens(const Prefilled& prefilled, int32_t most, Decoder* decoder, std::vector<Token>* tokens) {
  std::span<const float> logits = prefilled.logits;
  for (int32_t position = prefilled.size(); AddDrafted(*prefilled.model, logits, most, tokens); ++position) {
    DROPKV_RETURN_IF_ERROR(decoder->Feed(std::span(&tokens->back(), 1), position));
    logits = decoder->logits();
  }
  return Status::Ok();
}

Status CheckDraftBudget(const baseline::Recipe& recipe, const Budget& budget) {
  const Budget draft = baseline::DraftBudget(recipe.rows, budget);
  if (recipe.rows.draft == 0 || draft.fraction) return Status::Ok();  // shares are raised
  const baseline::Recipe cut = baseline::DraftRecipe(recipe);
  const Result<KeepCount> count = ResolveBudget(draft, cut, ProtectedTokens(cut), std::numeric_limits<int32_t>::max());
  return count.ok() ? Status::Ok() : Status(count.status().code(), "draft's " + count.status().message());
}

Result<Evicted> EvictAsking(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget,
                            std::span<const Token> tokens) {
  DROPKV_RETURN_IF_ERROR(Extend(prefilled, tokens));
  Result<Evicted> evicted = Evict(*prefilled, engine, recipe, budget);
  DROPKV_RETURN_IF_ERROR(Retract(prefilled));
  return evicted;
}

Result<DraftReport> Draft(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe, const Budget& budget) {
  DraftReport report;
  const auto start = Clock::now();
  const Budget kept = baseline::DraftBudget(recipe.rows, budget);
  for (int32_t round = 0; round < recipe.rows.draft_rounds; ++round) {
    const Result<Evicted> cut = round == 0 ? Evict(*prefilled, engine, baseline::DraftRecipe(recipe), kept)
                                           : EvictAsking(prefilled, engine, recipe, kept, report.tokens);
    if (!cut.ok()) return cut.status();
    Result<std::unique_ptr<Decoder>> decoder = MakeCompactedDecoder(prefilled, cut->keep, recipe.rows.draft);
    if (!decoder.ok()) return decoder.status();
    report.kv_bytes = prefilled->KvBytes(cut->keep.total());
    report.tokens.clear();
    DROPKV_RETURN_IF_ERROR(DraftTokens(*prefilled, recipe.rows.draft, decoder->get(), &report.tokens));
  }
  report.seconds = SecondsSince(start);
  return report;
}

Result<Evicted> EvictLookingAhead(Prefilled* prefilled, Engine* engine, const baseline::Recipe& recipe,
                                  const Budget& budget, DraftReport* draft) {
  if (recipe.rows.draft == 0) return Evict(*prefilled, engine, recipe, budget);
  const Result<KeepCount> count = ResolveBudget(budget, recipe, ProtectedTokens(recipe), prefilled->size());
  if (!count.ok()) return count.status();
  if (count->keep >= prefilled->size() || prefilled->layers.empty()) return Evict(*prefilled, engine, recipe, budget);
  Result<DraftReport> drafted = Draft(prefilled, engine, recipe, budget);
  if (!drafted.ok()) return drafted.status();
  const auto start = Clock::now();
  Result<Evicted> evicted = EvictAsking(prefilled, engine, recipe, budget, drafted->tokens);
  if (!evicted.ok()) return evicted;
  drafted->seconds += SecondsSince(start) - evicted->score_seconds - evicted->report.certificate_s;
  *draft = std::move(*drafted);
  return evicted;
}

std::unique_ptr<Decoder> MakeDelayedDecoder(Prefilled* prefilled, int32_t delay, Cut cut) {
  return std::make_unique<DelayedDecoder>(prefilled, delay, std::move(cut));
}

}  // namespace dropkv::llama
