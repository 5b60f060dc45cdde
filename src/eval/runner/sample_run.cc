#include "eval/runner/sample_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/clock.h"
#include "eval/metrics/metrics.h"
#include "llama/evict.h"
#include "llama/look_ahead.h"

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
  const auto answer = static_cast<int32_t>(prompt_->forced.empty() ? sample_->max_tokens : prompt_->forced.size());
  options.reserve = static_cast<int32_t>(prompt_->after.size()) + answer + 1;
  options.cancel = &cancel_;
  options.progress = [this](int32_t /*done*/) {
    if (options_.stop != nullptr && options_.stop->load()) cancel_ = true;
  };
  Result<llama::Prefilled> prefilled = llama::Prefill(*model_, prompt_->tokens, options);
  if (!prefilled.ok()) return prefilled.status();
  prefilled_ = std::move(*prefilled);
  // From here on a stop waits for the row, or for a batch's step.
  cancel_ = false;
  course_ = {model_, sample_, prompt_, options_.ignore_end, options_.fidelity, prefilled_.size(), prefilled_.logits,
             {}};
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

void SampleRun::FillIn(const Course& course, Row* row) const {
  row->decode_s = course.seconds();
  row->kl = course.fidelity().kl();
  row->top1 = course.fidelity().top1();
  if (course_.is_text()) {
    row->answer_tokens = static_cast<int32_t>(prompt_->forced.size());
    row->score = row->full() ? 1 : row->top1.value_or(0);
    return;
  }
  row->answer_tokens = static_cast<int32_t>(course.answer().tokens().size());
  row->answer = course.answer().text();
  row->score = ScoreAnswer(*sample_, row->answer);
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
  Course course(course_, nullptr);
  DROPKV_RETURN_IF_ERROR(Follow(decoder->get(), &course));
  FillIn(course, &row);
  reference_ = course.TakeReference();
  row.decode = (*decoder)->name();
  DROPKV_RETURN_IF_ERROR((*decoder)->Rewind());
  full_ = row;
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
  if (recipe.rows.generated() > 0) row->rows = baseline::RowsText(recipe.rows, recipe.policy.window);
  row->pool = PoolName(recipe);
  row->heads = HeadsName(recipe);
  row->kept = KeptOfLayers(keep);
  return Status::Ok();
}

Status SampleRun::Draft(std::span<const Job* const> jobs) {
  return drafts_.Make(&prefilled_, engine_, jobs, options_.batch);
}

// The tokens whose rows judge beside the window's.
std::span<const Token> SampleRun::Behind(const Job& job) const {
  const baseline::RowSources& rows = job.setting->recipe.rows;
  if (rows.draft > 0) return drafts_.Of(job);
  const auto count = std::min<size_t>(rows.delay + rows.oracle, reference_.tokens.size());
  return std::span(reference_.tokens).first(count);
}

std::span<const Token> SampleRun::KeptBehind(const Job& job) const {
  return job.setting->recipe.rows.delay > 0 ? Behind(job) : std::span<const Token>();
}

// Makes prefilled_ one that is extended by these tokens and no others.
Status SampleRun::Extend(std::span<const Token> tokens, double* seconds) {
  if (std::ranges::equal(tokens, behind_)) return Status::Ok();
  const auto start = Clock::now();
  DROPKV_RETURN_IF_ERROR(llama::Retract(&prefilled_));
  behind_.assign(tokens.begin(), tokens.end());
  DROPKV_RETURN_IF_ERROR(llama::Extend(&prefilled_, behind_));
  if (!tokens.empty()) {
    const std::span<const float> logits = prefilled_.context->logits();
    behind_logits_.assign(logits.begin(), logits.end());
  }
  *seconds += SecondsSince(start);
  return Status::Ok();
}

bool SampleRun::SharesScores(const Job& a, const Job& b) const {
  return !a.full() && !b.full() && llama::SharesScores(a.setting->recipe, b.setting->recipe) &&
         std::ranges::equal(Behind(a), Behind(b));
}

// Of what the budget asks for.
int64_t SampleRun::ListBytes(const Job& job) const {
  if (prefilled_.layers.empty()) return 0;
  const int32_t kv_heads = prefilled_.tap->layers().at(prefilled_.layers.front()).kv_heads;
  const auto lists = static_cast<int64_t>(prefilled_.layers.size()) * kv_heads;
  return lists * AskedTokens(job.budget, prefilled_.size()) * static_cast<int64_t>(sizeof(int32_t));
}

Status SampleRun::EvictAhead(const Job& job, std::span<const Job* const> later) {
  std::vector<const Job*> together{&job};
  int64_t bytes = ListBytes(job);
  for (const Job* other : later) {
    if (!SharesScores(job, *other)) continue;
    bytes += ListBytes(*other);
    if (bytes > kReadyBytes) break;
    together.push_back(other);
  }
  double extend_s = 0;
  DROPKV_RETURN_IF_ERROR(Extend(Behind(job), &extend_s));
  std::vector<llama::EvictJob> asked;
  asked.reserve(together.size());
  for (const Job* each : together) asked.push_back({&each->setting->recipe, each->budget});
  Result<std::vector<llama::Evicted>> evicted = llama::EvictAll(prefilled_, engine_, asked);
  // Jobs fail in their own turn: the rows before them are kept.
  if (!evicted.ok() && together.size() > 1) return EvictAhead(job, {});
  if (!evicted.ok()) return evicted.status();
  for (size_t i = 0; i < together.size(); ++i) ready_.push_back({together[i], std::move((*evicted)[i]), extend_s});
  return Status::Ok();
}

Status SampleRun::Evict(const Job& job, std::span<const Job* const> later) {
  const auto find = [&] { return std::ranges::find(ready_, &job, &Ready::job); };
  if (find() == ready_.end()) DROPKV_RETURN_IF_ERROR(EvictAhead(job, later));
  const auto found = find();
  const double draft_s = drafts_.Seconds(job) + found->extend_s;
  llama::Evicted evicted = std::move(found->evicted);
  ready_.erase(found);
  Row row = EmptyRow();
  if (job.setting->recipe.rows.generated() > 0) row.draft_s = draft_s;
  DROPKV_RETURN_IF_ERROR(Describe(job, evicted.keep, evicted.report, &row));
  if (!std::isfinite(evicted.output_error))
    return {Code::kInternal, fmt::format("{} at {}: the output error is not finite", job.name(), job.text)};
  row.output_error = evicted.output_error;
  row.score_s = evicted.score_seconds;
  row.warnings = Warnings(evicted.report, evicted.warnings);
  begun_.assign(KeptBehind(job).begin(), KeptBehind(job).end());
  const bool answered = !begun_.empty() && begun_.size() == reference_.tokens.size() && !course_.is_text();
  if (!answered) pending_bytes_ += prefilled_.KvBytes(evicted.keep.total());
  pending_.push_back({std::move(row), std::move(evicted.keep), answered});
  return Status::Ok();
}

bool SampleRun::ends_batch(const Job& job) const {
  if (pending_.empty()) return false;
  if (job.full() || !std::ranges::equal(KeptBehind(job), begun_)) return true;
  const int32_t most = std::min(options_.batch, llama::BatchDecoder::MaxSequences(*model_));
  return static_cast<int32_t>(pending_.size()) >= most ||
         pending_bytes_ >= std::max(kBatchBytes, prefilled_.KvBytesFull());
}

Result<std::vector<Row>> SampleRun::Decode() {
  double unused = 0;
  DROPKV_RETURN_IF_ERROR(Extend(begun_, &unused));
  CourseSample course = course_;
  course.begun = begun_;
  if (!begun_.empty()) course.prompt_logits = behind_logits_;
  if (options_.batch > 1) {
    DROPKV_RETURN_IF_ERROR(DecodeBatch(course));
  } else {
    for (Pending& pending : pending_)
      if (!pending.answered) DROPKV_RETURN_IF_ERROR(DecodeAlone(course, &pending));
  }
  std::vector<Row> rows;
  for (Pending& pending : pending_) {
    if (pending.answered) AnswerInFull(&pending.row);
    rows.push_back(std::move(pending.row));
  }
  pending_.clear();
  pending_bytes_ = 0;
  begun_.clear();
  return rows;
}

// The answer ended before the cut.
void SampleRun::AnswerInFull(Row* row) const {
  row->answer = full_.answer;
  row->answer_tokens = full_.answer_tokens;
  row->score = full_.score;
  row->decode_s = full_.decode_s;
  row->decode = full_.decode;
}

Status SampleRun::DecodeAlone(const CourseSample& sample, Pending* pending) {
  const auto start = Clock::now();
  Result<std::unique_ptr<llama::Decoder>> decoder =
      llama::MakeCompactedDecoder(&prefilled_, pending->keep, prefilled_.options.reserve);
  if (!decoder.ok()) return decoder.status();
  pending->row.compact_s = SecondsSince(start);
  Course course(sample, &reference_);
  DROPKV_RETURN_IF_ERROR(Follow(decoder->get(), &course));
  FillIn(course, &pending->row);
  pending->row.decode = (*decoder)->name();
  return Status::Ok();
}

// A single list too: which rows are missing makes no difference to how they are decoded.
Status SampleRun::DecodeBatch(const CourseSample& sample) {
  std::vector<const KeepList*> lists;
  std::vector<Course> courses;
  std::vector<Row*> rows;
  for (Pending& pending : pending_) {
    if (pending.answered) continue;
    lists.push_back(&pending.keep);
    courses.emplace_back(sample, &reference_);
    rows.push_back(&pending.row);
  }
  if (lists.empty()) return Status::Ok();
  const auto start = Clock::now();
  const Result<std::unique_ptr<llama::BatchDecoder>> decoder =
      llama::BatchDecoder::Create(&prefilled_, lists, prefilled_.options.reserve);
  if (!decoder.ok()) return decoder.status();
  const double each = SecondsSince(start) / static_cast<double>(lists.size());
  DROPKV_RETURN_IF_ERROR(FollowAll(decoder->get(), courses, options_.stop));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i]->compact_s = each;
    rows[i]->decode = (*decoder)->name();
    FillIn(courses[i], rows[i]);
  }
  return Status::Ok();
}

}  // namespace dropkv::eval
