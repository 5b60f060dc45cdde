#include "eval/runner/sample_run.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "core/clock.h"
#include "eval/metrics/metrics.h"
#include "eval/runner/greedy.h"
#include "llama/evict.h"

namespace dropkv::eval {

using llama::Token;

namespace {

std::vector<std::string> Warnings(const EvictReport& report, const std::vector<std::string>& of_selection) {
  std::vector<std::string> warnings = of_selection;
  if (report.budget.raised)
    warnings.push_back(
        fmt::format("the budget was raised to {} tokens per KV head, which are always kept", report.budget.keep));
  if (report.nonfinite_tokens > 0)
    warnings.push_back(fmt::format("{} tokens were kept for NaN or infinity", report.nonfinite_tokens));
  if (report.skipped_rows > 0)
    warnings.push_back(fmt::format("{} query rows with NaN or infinity judged nothing", report.skipped_rows));
  return warnings;
}

}  // namespace

llama::PrefillOptions MakePrefillOptions(const SampleOptions& options, Engine* engine) {
  llama::PrefillOptions prefill;
  prefill.threads = options.threads;
  prefill.flash_attention = options.flash_attention;
  prefill.kv_type = options.kv_type;
  prefill.window = 0;
  prefill.recipes = options.recipes;
  prefill.pool = engine->pool();
  return prefill;
}

Status SampleRun::Prefill() {
  llama::PrefillOptions options = MakePrefillOptions(options_, engine_);
  const auto answer = static_cast<int32_t>(is_text() ? prompt_->forced.size() : sample_->max_tokens);
  options.reserve = static_cast<int32_t>(prompt_->after.size()) + answer + 1;
  options.cancel = &cancel_;
  options.progress = [this](int32_t /*done*/) {
    if (options_.stop != nullptr && options_.stop->load()) cancel_ = true;
  };
  Result<llama::Prefilled> prefilled = llama::Prefill(*model_, prompt_->tokens, options);
  if (!prefilled.ok()) return prefilled.status();
  prefilled_ = std::move(*prefilled);
  // From here on a stop waits for the row.
  cancel_ = false;
  return Status::Ok();
}

Row SampleRun::EmptyRow() const {
  Row row;
  row.suite = sample_->suite;
  row.task = sample_->task;
  row.category = sample_->category;
  row.id = sample_->id;
  row.length = sample_->length;
  row.depths = sample_->depths;
  row.prompt_hash = PromptHash(*prompt_);
  row.prompt_tokens = prefilled_.size();
  row.hidden = hidden_;
  row.prefill_s = prefilled_.seconds + prefilled_.statistics_seconds + prefilled_.copy_seconds;
  return row;
}

Status SampleRun::Begin(llama::Decoder* decoder, std::vector<float>* logits, int32_t* position) const {
  *position = prefilled_.size();
  *logits = prefilled_.logits;
  if (prompt_->after.empty()) return Status::Ok();
  DROPKV_RETURN_IF_ERROR(decoder->Feed(prompt_->after, *position));
  *position += static_cast<int32_t>(prompt_->after.size());
  logits->assign(decoder->logits().begin(), decoder->logits().end());
  return Status::Ok();
}

Status SampleRun::Compare(size_t step, std::span<const float> logits, FidelityMean* mean) const {
  const TokenFidelity token = CompareLogits(full_logits_[step], logits);
  if (!std::isfinite(token.kl))
    return {Code::kInternal, fmt::format("the divergence from the full cache is not finite at token {}", step)};
  mean->Add(token);
  return Status::Ok();
}

// Compares steps [from, to), each behind the full cache's own tokens.
Status SampleRun::Force(size_t from, size_t to, llama::Decoder* decoder, FidelityMean* mean) const {
  std::vector<float> logits;
  int32_t position = 0;
  DROPKV_RETURN_IF_ERROR(Begin(decoder, &logits, &position));
  for (size_t step = 0; step < to; ++step) {
    if (step > 0) {
      DROPKV_RETURN_IF_ERROR(decoder->Feed(std::span(&forced_[step - 1], 1), position++));
      logits.assign(decoder->logits().begin(), decoder->logits().end());
    }
    if (step >= from) DROPKV_RETURN_IF_ERROR(Compare(step, logits, mean));
  }
  return Status::Ok();
}

// The answer, its score, and how far the distributions on the way are from the full cache's. As long as the answer is
// the full cache's own, they come with it; behind the first other token that answer is forced.
Status SampleRun::Answer(bool full, llama::Decoder* decoder, Row* row) {
  std::vector<float> logits;
  int32_t position = 0;
  const auto start = Clock::now();
  DROPKV_RETURN_IF_ERROR(Begin(decoder, &logits, &position));
  FidelityMean mean;
  Status compared;
  bool on_path = true;
  size_t next = first_compared();
  const auto listener = [&](size_t step, std::span<const float> step_logits, Token token) {
    if (full) {
      const bool wanted = step >= first_compared() && step <= static_cast<size_t>(options_.fidelity);
      if (options_.fidelity > 0 && wanted) full_logits_.emplace_back(step_logits.begin(), step_logits.end());
      if (options_.fidelity > 0 && step < first_compared()) full_logits_.emplace_back();
      return;
    }
    if (on_path && step == next && step < full_logits_.size() && compared.ok()) {
      compared = Compare(step, step_logits, &mean);
      ++next;
    }
    on_path = on_path && step < forced_.size() && forced_[step] == token;
  };
  Result<eval::Answer> answer =
      DecodeGreedily(*model_, *sample_, options_.ignore_end, logits, position, decoder, listener);
  if (!answer.ok()) return answer.status();
  row->decode_s = SecondsSince(start);
  DROPKV_RETURN_IF_ERROR(compared);
  row->answer_tokens = static_cast<int32_t>(answer->tokens.size());
  row->answer = std::move(answer->text);
  row->score = ScoreAnswer(*sample_, row->answer);
  if (full) {
    forced_ = std::move(answer->tokens);
    return Status::Ok();
  }
  if (next < full_logits_.size()) {
    DROPKV_RETURN_IF_ERROR(decoder->Rewind());
    DROPKV_RETURN_IF_ERROR(Force(next, full_logits_.size(), decoder, &mean));
  }
  row->kl = mean.kl();
  row->top1 = mean.top1();
  return Status::Ok();
}

Status SampleRun::FollowText(bool full, llama::Decoder* decoder, Row* row) {
  const auto start = Clock::now();
  const size_t steps = prompt_->forced.size() + 1;
  if (!full) {
    FidelityMean mean;
    DROPKV_RETURN_IF_ERROR(Force(first_compared(), steps, decoder, &mean));
    row->kl = mean.kl();
    row->top1 = mean.top1();
    row->score = mean.top1().value_or(0);
  } else {
    forced_ = prompt_->forced;
    full_logits_.assign(1, {});
    int32_t position = prefilled_.size();
    for (const Token& token : forced_) {
      DROPKV_RETURN_IF_ERROR(decoder->Feed(std::span(&token, 1), position++));
      full_logits_.emplace_back(decoder->logits().begin(), decoder->logits().end());
    }
    row->score = 1;
  }
  row->decode_s = SecondsSince(start);
  row->answer_tokens = static_cast<int32_t>(forced_.size());
  return Status::Ok();
}

Result<Row> SampleRun::Full() {
  Row row = EmptyRow();
  row.setting = row.policy = "full";
  row.budget = "100%";
  row.pool = std::string("1");
  row.heads = "uniform";
  const int32_t n = prefilled_.size();
  row.kept.assign(prefilled_.layers.size(), {n, static_cast<double>(n), n});
  Result<std::unique_ptr<llama::Decoder>> decoder = llama::MakeFullDecoder(&prefilled_);
  if (!decoder.ok()) return decoder.status();
  full_logits_.clear();
  DROPKV_RETURN_IF_ERROR(is_text() ? FollowText(true, decoder->get(), &row) : Answer(true, decoder->get(), &row));
  row.decode = (*decoder)->name();
  DROPKV_RETURN_IF_ERROR((*decoder)->Rewind());
  return row;
}

Status SampleRun::Describe(const Job& job, const KeepList& keep, const EvictReport& report, Row* row) const {
  const int32_t n = prefilled_.size();
  if (prefilled_.layers.empty())
    return {Code::kFailedPrecondition,
            fmt::format("{} at {}: nothing was evicted: the prompt of {} tokens lies inside the model's sliding window",
                        job.name(), job.text, n)};
  DROPKV_RETURN_IF_ERROR(CheckKept(job, report.budget.keep, n, keep));
  const baseline::Recipe& recipe = job.setting->recipe;
  row->setting = job.setting->name;
  row->policy = recipe.name();
  row->budget = job.text;
  row->window = recipe.policy.window;
  row->pool = PoolName(recipe);
  row->heads = HeadsName(recipe);
  row->kept = KeptOfLayers(keep);
  return Status::Ok();
}

Result<Row> SampleRun::Evicted(const Job& job) {
  const Result<llama::Evicted> evicted = llama::Evict(prefilled_, engine_, job.setting->recipe, job.budget);
  if (!evicted.ok()) return evicted.status();
  Row row = EmptyRow();
  DROPKV_RETURN_IF_ERROR(Describe(job, evicted->keep, evicted->report, &row));
  if (!std::isfinite(evicted->output_error))
    return Status(Code::kInternal, fmt::format("{} at {}: the output error is not finite", job.name(), job.text));
  row.output_error = evicted->output_error;
  row.score_s = evicted->score_seconds;
  row.warnings = Warnings(evicted->report, evicted->warnings);
  const auto start = Clock::now();
  const int32_t reserve = prefilled_.options.reserve;
  Result<std::unique_ptr<llama::Decoder>> decoder = evicted->keep.uniform()
                                                        ? MakeNativeDecoder(&prefilled_, evicted->keep, reserve)
                                                        : MakeRaggedDecoder(&prefilled_, evicted->keep, reserve);
  if (!decoder.ok()) return decoder.status();
  row.compact_s = SecondsSince(start);
  DROPKV_RETURN_IF_ERROR(is_text() ? FollowText(false, decoder->get(), &row) : Answer(false, decoder->get(), &row));
  row.decode = (*decoder)->name();
  return row;
}

}  // namespace dropkv::eval
