#include "eval/runner/drafts.h"

#include <algorithm>

#include "core/clock.h"
#include "llama/batch_decoder.h"
#include "llama/look_ahead.h"

namespace dropkv::eval {

using llama::Token;

namespace {

bool SameDraft(const baseline::Recipe& a, const baseline::Recipe& b) {
  if (a.rows.draft_rounds != b.rows.draft_rounds) return false;
  if (a.rows.draft_rounds > 1) return SameEviction(a, b);
  return SameEviction(baseline::DraftRecipe(a), baseline::DraftRecipe(b));
}

}  // namespace

size_t Drafts::Find(const Job& job) const {
  const baseline::Recipe& recipe = job.setting->recipe;
  const Budget budget = baseline::DraftBudget(recipe.rows, job.budget);
  const auto found = std::find_if(drafts_.begin(), drafts_.end(), [&](const Draft& draft) {
    return SameDraft(draft.recipe, recipe) && draft.budget == budget;
  });
  return found - drafts_.begin();
}

Status Drafts::Make(llama::Prefilled* prefilled, Engine* engine, std::span<const Job* const> jobs, int32_t batch) {
  for (const Job* job : jobs) {
    if (job->full() || job->setting->recipe.rows.draft == 0) continue;
    const baseline::Recipe& recipe = job->setting->recipe;
    const size_t index = Find(*job);
    if (index == drafts_.size())
      drafts_.push_back({recipe, baseline::DraftBudget(recipe.rows, job->budget), 0, {}, {}, false, 0});
    drafts_[index].most = std::max(drafts_[index].most, recipe.rows.draft);
  }
  const int32_t most = std::min(batch, llama::BatchDecoder::MaxSequences(*prefilled->model));
  for (int32_t round = 0; round < baseline::kMaxDraftRounds; ++round) {
    std::vector<Draft*> active;
    for (Draft& draft : drafts_) {
      if (draft.recipe.rows.draft_rounds <= round) continue;
      active.push_back(&draft);
    }
    DROPKV_RETURN_IF_ERROR(round == 0 ? CutFirst(prefilled, engine, active) : CutAgain(prefilled, engine, active));
    for (size_t first = 0; first < active.size(); first += most) {
      const auto part = std::span(active).subspan(first, std::min<size_t>(most, active.size() - first));
      DROPKV_RETURN_IF_ERROR(batch > 1 ? DecodeTogether(prefilled, part) : DecodeAlone(prefilled, part.front()));
    }
  }
  return Status::Ok();
}

// The caches that the first drafts come from.
Status Drafts::CutFirst(llama::Prefilled* prefilled, Engine* engine, std::span<Draft* const> drafts) {
  std::vector<baseline::Recipe> recipes;
  recipes.reserve(drafts.size());
  std::vector<llama::EvictJob> jobs;
  for (const Draft* draft : drafts) {
    recipes.push_back(baseline::DraftRecipe(draft->recipe));
    jobs.push_back({&recipes.back(), draft->budget});
  }
  Result<std::vector<llama::Evicted>> cut = llama::EvictAll(*prefilled, engine, jobs);
  if (!cut.ok()) return cut.status();
  for (size_t i = 0; i < drafts.size(); ++i) {
    llama::Evicted& evicted = (*cut)[i];
    drafts[i]->keep = std::move(evicted.keep);
    drafts[i]->seconds += evicted.score_seconds + evicted.report.certificate_s;
  }
  return Status::Ok();
}

// Those of a further round, each by the draft before it.
Status Drafts::CutAgain(llama::Prefilled* prefilled, Engine* engine, std::span<Draft* const> drafts) {
  for (Draft* draft : drafts) {
    const auto start = Clock::now();
    Result<llama::Evicted> cut = llama::EvictAsking(prefilled, engine, draft->recipe, draft->budget, draft->tokens);
    if (!cut.ok()) return cut.status();
    draft->keep = std::move(cut->keep);
    draft->tokens.clear();
    draft->ended = false;
    draft->seconds += SecondsSince(start);
  }
  return Status::Ok();
}

Status Drafts::DecodeAlone(llama::Prefilled* prefilled, Draft* draft) {
  const auto start = Clock::now();
  Result<std::unique_ptr<llama::Decoder>> decoder = llama::MakeCompactedDecoder(prefilled, draft->keep, draft->most);
  if (!decoder.ok()) return decoder.status();
  DROPKV_RETURN_IF_ERROR(llama::DraftTokens(*prefilled, draft->most, decoder->get(), &draft->tokens));
  draft->seconds += SecondsSince(start);
  return Status::Ok();
}

Status Drafts::DecodeTogether(llama::Prefilled* prefilled, std::span<Draft* const> drafts) {
  const auto start = Clock::now();
  std::vector<const KeepList*> lists;
  int32_t reserve = 1;
  for (const Draft* draft : drafts) {
    lists.push_back(&draft->keep);
    reserve = std::max(reserve, draft->most);
  }
  const Result<std::unique_ptr<llama::BatchDecoder>> decoder = llama::BatchDecoder::Create(prefilled, lists, reserve);
  if (!decoder.ok()) return decoder.status();
  std::vector<llama::BatchDecoder::Item> items;
  for (int32_t step = 0;; ++step) {
    std::vector<llama::BatchDecoder::Item> next;
    for (size_t i = 0, item = 0; i < drafts.size(); ++i) {
      Draft& draft = *drafts[i];
      if (draft.ended) continue;
      const std::span<const float> logits = step == 0 ? prefilled->logits : (*decoder)->logits(item++);
      draft.ended = !llama::AddDrafted(*prefilled->model, logits, draft.most, &draft.tokens);
      if (!draft.ended) next.push_back({static_cast<int32_t>(i), draft.tokens.back(), prefilled->size() + step, true});
    }
    items = std::move(next);
    if (items.empty()) break;
    DROPKV_RETURN_IF_ERROR((*decoder)->Step(items));
  }
  for (Draft* draft : drafts) draft->seconds += SecondsSince(start) / static_cast<double>(drafts.size());
  return Status::Ok();
}

std::span<const Token> Drafts::Of(const Job& job) const {
  if (job.full() || job.setting->recipe.rows.draft == 0) return {};
  const std::vector<Token>& tokens = drafts_[Find(job)].tokens;
  return std::span(tokens).first(std::min<size_t>(tokens.size(), job.setting->recipe.rows.draft));
}

double Drafts::Seconds(const Job& job) const { return Of(job).empty() ? 0 : drafts_[Find(job)].seconds; }

}  // namespace dropkv::eval
