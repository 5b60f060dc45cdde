#include "eval/runner/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "llama/prefill.h"

namespace dropkv::eval {
namespace {

std::string NameOf(const Sample& sample) {
  return fmt::format("sample {} of {}{}", sample.id, sample.task,
                     sample.length > 0 ? fmt::format(" at {}", sample.length) : "");
}

Status Named(const Sample& sample, const Status& status) {
  if (status.ok() || status.code() == Code::kCancelled) return status;
  return {status.code(), NameOf(sample) + ": " + status.message()};
}

int32_t AnswerTokens(const Sample& sample, const Prompt& prompt) {
  return prompt.forced.empty() ? sample.max_tokens : static_cast<int32_t>(prompt.forced.size());
}

bool AsksTheAnswer(const Job* job) {
  return !job->full() && job->setting->recipe.rows.delay + job->setting->recipe.rows.oracle > 0;
}

std::string KeyOf(const Sample& sample, const Job& job, bool hidden) {
  Row row;
  row.suite = sample.suite;
  row.task = sample.task;
  row.id = sample.id;
  row.length = sample.length;
  row.setting = job.name();
  row.budget = job.text;
  row.hidden = hidden;
  return RowKey(row);
}

}  // namespace

Result<Runner> Runner::Create(const llama::Model& model, Engine* engine, RunnerOptions options) {
  Result<PromptBuilder> prompts = PromptBuilder::Create(model, options.raw);
  if (!prompts.ok()) return prompts.status();
  Runner runner(model, engine, std::move(options), std::move(*prompts));
  runner.options_.sample.recipes.clear();
  for (const Setting& setting : runner.options_.settings) runner.options_.sample.recipes.push_back(setting.recipe);
  Result<std::vector<Job>> jobs = MakeJobs(runner.options_.settings, runner.options_.budgets);
  if (!jobs.ok()) return jobs.status();
  runner.jobs_ = std::move(*jobs);
  return runner;
}

Prompt Runner::PromptOf(const Item& item, bool hidden) const {
  return item.is_text() ? item.window : prompts_.Build(item.sample, hidden);
}

int32_t Runner::ContextLimit() const { return options_.context > 0 ? options_.context : model_->context_train(); }

Status Runner::CheckLength(const Sample& sample, const Prompt& prompt) const {
  const auto tokens = static_cast<int64_t>(prompt.tokens.size() + prompt.after.size());
  const int32_t answer = AnswerTokens(sample, prompt);
  if (tokens + answer <= ContextLimit()) return Status::Ok();
  return InvalidArgument(
      fmt::format("{}: {} tokens and an answer of up to {}, but the context holds {} (--skip-too-long leaves such "
                  "samples out, --ctx sets the limit)",
                  NameOf(sample), tokens, answer, ContextLimit()));
}

Result<std::vector<Runner::Unit>> Runner::PlanUnits(const std::vector<Item>& items, const ResultStore& store,
                                                    RunOutcome* outcome) {
  std::vector<Unit> units;
  for (const Item& item : items) {
    for (const bool hidden : options_.hidden) {
      const Prompt prompt = PromptOf(item, hidden);
      const Status fits = CheckLength(item.sample, prompt);
      if (!fits.ok() && !options_.skip_too_long) return fits;
      if (!fits.ok()) {
        ++outcome->too_long;
        continue;
      }
      if (prompt.tokens.empty()) return InvalidArgument(NameOf(item.sample) + ": the prompt is empty");
      Unit unit{&item, hidden, static_cast<int32_t>(prompt.tokens.size()), {}};
      const std::string hash = PromptHash(prompt);
      for (const Job& job : jobs_) {
        DROPKV_RETURN_IF_ERROR(Named(item.sample, CheckRoom(job, unit.tokens)));
        const std::string* there = store.Find(KeyOf(item.sample, job, hidden));
        if (there != nullptr && *there != hash)
          return InvalidArgument(fmt::format("--out: {}: its results there come from another prompt (hash {}, now {})",
                                             NameOf(item.sample), *there, hash));
        if (there == nullptr) unit.jobs.push_back(&job);
      }
      if (!unit.jobs.empty()) units.push_back(std::move(unit));
    }
  }
  return units;
}

Status Runner::RunUnit(const Unit& unit, ResultStore* store, RunProgress* progress,
                       const std::function<void(const RunProgress&)>& listener) {
  const Sample& sample = unit.item->sample;
  const Prompt prompt = PromptOf(*unit.item, unit.hidden);
  if (!tested_ && !options_.settings.empty()) {
    const Result<llama::SelfTest> test =
        llama::RunSelfTest(*model_, prompt.tokens, MakePrefillOptions(options_.sample, engine_));
    if (!test.ok()) return test.status();
    tested_ = true;
  }
  SampleRun run(*model_, engine_, options_.sample, sample, prompt, unit.hidden);
  DROPKV_RETURN_IF_ERROR(Named(sample, run.Prefill()));
  // Others are compared with the full cache's answer, or ask its rows: where its own row is there, it is decoded once
  // more.
  const bool compared = options_.sample.fidelity > 0 || unit.item->is_text();
  const bool full_again = !unit.jobs.front()->full() && (compared || std::ranges::any_of(unit.jobs, AsksTheAnswer));
  if (full_again) {
    const Result<Row> row = run.Full();
    if (!row.ok()) return Named(sample, row.status());
  }
  DROPKV_RETURN_IF_ERROR(Named(sample, run.Draft(unit.jobs)));
  const auto append = [&](const Result<std::vector<Row>>& rows) {
    if (!rows.ok()) return Named(sample, rows.status());
    for (const Row& row : *rows) {
      DROPKV_RETURN_IF_ERROR(store->Append(row));
      ++progress->job;
      if (listener) listener(*progress);
    }
    return Status::Ok();
  };
  for (size_t i = 0; i < unit.jobs.size(); ++i) {
    const Job* job = unit.jobs[i];
    if (stopped()) return {Code::kCancelled, "stopped on request"};
    if (job->full()) {
      const Result<Row> row = run.Full();
      DROPKV_RETURN_IF_ERROR(
          append(row.ok() ? Result(std::vector<Row>{*row}) : Result<std::vector<Row>>(row.status())));
      continue;
    }
    if (run.ends_batch(*job)) DROPKV_RETURN_IF_ERROR(append(run.Decode()));
    DROPKV_RETURN_IF_ERROR(Named(sample, run.Evict(*job, std::span(unit.jobs).subspan(i + 1))));
  }
  return append(run.Decode());
}

Result<RunOutcome> Runner::Run(const std::vector<Item>& items, ResultStore* store,
                               const std::function<void(const RunProgress&)>& listener) {
  RunOutcome outcome;
  const Result<std::vector<Unit>> units = PlanUnits(items, *store, &outcome);
  if (!units.ok()) return units.status();
  outcome.total = static_cast<int32_t>(units->size());
  int64_t tokens_left = 0;
  for (const Unit& unit : *units) tokens_left += unit.tokens;
  Pace pace;
  const auto start = Clock::now();
  for (const Unit& unit : *units) {
    outcome.stopped = stopped();
    // The first sample always runs: nothing is known of its time, and a run that does nothing would never end a grid.
    outcome.out_of_time = options_.time_limit > 0 && outcome.done > 0 &&
                          SecondsSince(start) + pace.Estimate(unit.tokens) > options_.time_limit;
    if (outcome.stopped || outcome.out_of_time) break;
    RunProgress progress{
        outcome.done,      outcome.total, 0, static_cast<int32_t>(unit.jobs.size()), pace.Estimate(tokens_left),
        &unit.item->sample};
    if (listener) listener(progress);
    const auto began = Clock::now();
    const Status status = RunUnit(unit, store, &progress, listener);
    if (status.code() == Code::kCancelled) {
      outcome.stopped = true;
      break;
    }
    if (!status.ok()) return status;
    pace.Add(unit.tokens, SecondsSince(began));
    tokens_left -= unit.tokens;
    ++outcome.done;
  }
  return outcome;
}

}  // namespace dropkv::eval
