#include "cli/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "cli/generate.h"
#include "cli/prompt.h"
#include "cli/run_options.h"
#include "cli/run_report.h"
#include "cli/terminal.h"
#include "core/clock.h"
#include "core/parallel.h"
#include "dropkv/engine.h"
#include "llama/decoder.h"
#include "llama/evict.h"
#include "llama/look_ahead.h"
#include "llama/prefill.h"

namespace dropkv::cli {
namespace {

using llama::Token;

// Tokens behind the prompt that a conversation on the terminal may take.
constexpr int32_t kConversation = 2048;

// One policy at one budget; `full` has one of its own.
struct Job {
  baseline::Recipe policy;
  std::string budget;
};

bool IsFull(const Job& job) { return job.policy.scorer == baseline::Scorer::kFull; }

std::vector<Job> Jobs(const RunOptions& options) {
  std::vector<Job> jobs;
  for (const baseline::Recipe& policy : options.policies) {
    if (policy.scorer == baseline::Scorer::kFull) {
      jobs.push_back({policy, "100%"});
      continue;
    }
    for (const std::string& budget : options.budgets) jobs.push_back({policy, budget});
  }
  return jobs;
}

class Runner {
 public:
  Runner(RunOptions options, llama::Model model, Engine engine)
      : options_(std::move(options)), model_(std::move(model)), engine_(std::move(engine)), jobs_(Jobs(options_)) {}

  Status Start();
  Status RunJobs();
  Status Interact();
  Status Report() const;

 private:
  void Say(std::string_view text) const;
  int32_t ContextLimit() const;  // tokens, prompt and answers together
  Status CheckLength(int32_t prompt_tokens) const;
  Status CheckDecodeWay(int32_t prompt_tokens) const;
  Status Prefill(std::vector<Token> tokens);
  Result<std::unique_ptr<llama::Decoder>> MakeDecoder(const Job& job, bool last, RunRecord* record);
  Result<std::unique_ptr<llama::Decoder>> Compacted(const Job& job, bool last, RunRecord* record);
  Status Answers(llama::Decoder* decoder, RunRecord* record);
  Status OneAnswer(const std::string& question, std::vector<float> logits, llama::Decoder* decoder,
                   llama::Sampler* sampler, int32_t* position, RunRecord* record);
  Status FeedTurn(const std::vector<Token>& tokens, llama::Decoder* decoder, int32_t* position,
                  std::vector<float>* logits);

  RunOptions options_;
  llama::Model model_;
  Engine engine_;
  std::optional<PromptBuilder> prompt_;  // points into options_ and model_
  std::vector<Job> jobs_;
  bool interactive_ = false;
  int32_t reserve_ = 0;  // cells for turns and answers behind the prompt
  llama::Prefilled prefilled_;
  RunSummary summary_;
  std::unique_ptr<llama::Decoder> last_decoder_;  // goes on in the interactive prompt
  std::optional<llama::Sampler> last_sampler_;
  int32_t last_position_ = 0;
};

void Runner::Say(std::string_view text) const {
  if (options_.json) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int32_t Runner::ContextLimit() const { return options_.context > 0 ? options_.context : model_.context_train(); }

Status Runner::CheckLength(int32_t prompt_tokens) const {
  const int32_t most = ContextLimit();
  if (prompt_tokens < most) return Status::Ok();
  return InvalidArgument("--ctx: the prompt has " + std::to_string(prompt_tokens) + " tokens, but the context holds " +
                         std::to_string(most) + " (prompt and answer together)");
}

Status Runner::Prefill(std::vector<Token> tokens) {
  DROPKV_RETURN_IF_ERROR(CheckLength(static_cast<int32_t>(tokens.size())));
  llama::PrefillOptions options;
  options.threads = options_.threads;
  options.flash_attention = options_.flash_attention;
  options.kv_type = options_.kv_type;
  options.window = 0;
  options.recipes = options_.policies;
  options.reserve = std::any_of(jobs_.begin(), jobs_.end(), IsFull) ? reserve_ : 0;
  options.pool = engine_.pool();
  options.cancel = &StopFlag();
  if (!std::all_of(jobs_.begin(), jobs_.end(), IsFull)) {
    const Result<llama::SelfTest> test = llama::RunSelfTest(model_, tokens, options);
    if (!test.ok()) return test.status();
    summary_.self_test_worst = test->worst;
  }
  auto progress = std::make_shared<Progress>("prefill", static_cast<int32_t>(tokens.size()), options_.json);
  options.progress = [progress](int32_t done) { progress->Update(done); };
  Result<llama::Prefilled> prefilled = llama::Prefill(model_, std::move(tokens), options);
  progress->Finish();
  if (!prefilled.ok()) return prefilled.status();
  prefilled_ = std::move(*prefilled);
  summary_.model = model_.name();
  summary_.device = model_.device();
  summary_.layers = model_.layers();
  summary_.sliding_layers = static_cast<int32_t>(prefilled_.sliding.size());
  summary_.prompt_tokens = prefilled_.size();
  summary_.hidden = options_.hidden;
  summary_.prefill_s = prefilled_.seconds;
  summary_.statistics_s = prefilled_.statistics_seconds;
  summary_.copy_s = prefilled_.copy_seconds;
  return Status::Ok();
}

// Said before the prefill, not after it. Heads and layers that share a budget differ unless it leaves them nothing to
// choose. kvpress's pyramid is one at large budgets only, so its lists tell.
Status Runner::CheckDecodeWay(int32_t prompt_tokens) const {
  using baseline::LayerRule;
  if (options_.decode != DecodeWay::kNative) return Status::Ok();
  for (const Job& job : jobs_) {
    const baseline::Recipe& policy = job.policy;
    const bool heads = model_.kv_heads() > 1 && (policy.flat_heads || policy.policy.heads != HeadRule::kUniform);
    const bool layers = policy.layers != LayerRule::kSame && policy.layers != LayerRule::kPyramid;
    if (IsFull(job) || !(heads || layers)) continue;
    const Result<Budget> budget = ParseBudget(job.budget);
    if (!budget.ok()) return budget.status();
    const int32_t smallest = llama::ProtectedTokens(policy);
    const Result<KeepCount> count = llama::ResolveBudget(*budget, policy, smallest, prompt_tokens);
    if (!count.ok()) return count.status();
    if (count->keep >= prompt_tokens || count->keep <= smallest) continue;
    const std::string rule = policy.flat_heads ? "flat" : std::string(HeadRuleName(policy.policy.heads));
    const std::string what =
        layers ? "the model's budget among its layers" : fmt::format("a layer's budget among them ({})", rule);
    return InvalidArgument(fmt::format(
        "--decode native: expected heads that all keep the same number of tokens, but {} shares {}; use {}--decode "
        "ragged",
        policy.name(), what, layers || policy.flat_heads ? "" : "--heads uniform or "));
  }
  return Status::Ok();
}

Status Runner::Start() {
  Result<PromptBuilder> prompt = PromptBuilder::Create(model_, options_);
  if (!prompt.ok()) return prompt.status();
  prompt_.emplace(std::move(*prompt));
  if (options_.questions.empty() && StdinIsTerminal() && !options_.json) {
    interactive_ = true;
    if (!options_.hidden) {
      Say("> ");
      std::string question;
      if (!std::getline(std::cin, question)) return {Code::kCancelled, "stopped on request"};
      options_.questions.push_back(question);
    }
  }
  if (options_.questions.empty() && !interactive_) options_.questions.emplace_back();
  DROPKV_RETURN_IF_ERROR(CheckPrompt(options_));
  const std::vector<std::string>& questions = options_.questions;
  std::vector<Token> tokens =
      options_.hidden ? prompt_->DocumentOnly() : prompt_->FirstTurn(questions.empty() ? "" : questions.front());
  DROPKV_RETURN_IF_ERROR(CheckDecodeWay(static_cast<int32_t>(tokens.size())));
  int64_t behind = interactive_ ? kConversation : 0;
  for (const std::string& question : questions)
    behind += static_cast<int64_t>(prompt_->NextTurn(question).size()) + options_.max_tokens + 1;
  const int64_t room = std::max<int64_t>(0, ContextLimit() - static_cast<int64_t>(tokens.size()));
  reserve_ = static_cast<int32_t>(std::min(behind, room));
  return Prefill(std::move(tokens));
}

// Scores, selects and compacts for one job. With the last one the full cache is freed.
Result<std::unique_ptr<llama::Decoder>> Runner::Compacted(const Job& job, bool last, RunRecord* record) {
  const Result<Budget> budget = ParseBudget(job.budget);
  if (!budget.ok()) return budget.status();
  if (jobs_.size() == 1) record->resident_before = ResidentBytes();
  Result<llama::Evicted> evicted = llama::EvictLookingAhead(&prefilled_, &engine_, job.policy, *budget, &record->draft);
  if (!evicted.ok()) return evicted.status();
  record->judged_by =
      job.policy.rows.delay > 0 ? prefilled_.generated : static_cast<int32_t>(record->draft.tokens.size());
  record->evict = evicted->report;
  record->score_s = evicted->score_seconds;
  record->output_error = evicted->output_error;
  record->evicted_mass = evicted->evicted_mass;
  record->certificate_rows = evicted->certificate_rows;
  record->warnings = evicted->warnings;
  const KeepList& keep = evicted->keep;
  if (!prefilled_.layers.empty()) {
    record->kept_min = keep.min_length();
    record->kept_mean = keep.mean_length();
    record->kept_max = keep.max_length();
    record->kv_bytes_after = prefilled_.KvBytes(keep.total());
  }
  const auto start = Clock::now();
  const bool native = options_.decode == DecodeWay::kNative ||
                      (options_.decode == DecodeWay::kAuto && (prefilled_.layers.empty() || keep.uniform()));
  Result<std::unique_ptr<llama::Decoder>> decoder = native ? llama::MakeNativeDecoder(&prefilled_, keep, reserve_)
                                                           : llama::MakeRaggedDecoder(&prefilled_, keep, reserve_);
  if (!decoder.ok()) return decoder.status();
  if (last) prefilled_.context.reset();
  record->compact_s = SecondsSince(start);
  if (jobs_.size() == 1) record->resident_after = ResidentBytes();
  return decoder;
}

// With delayed rows the cut comes while the answer is decoded.
Result<std::unique_ptr<llama::Decoder>> Runner::MakeDecoder(const Job& job, bool last, RunRecord* record) {
  if (IsFull(job)) return llama::MakeFullDecoder(&prefilled_);
  if (job.policy.rows.delay == 0) return Compacted(job, last, record);
  return llama::MakeDelayedDecoder(&prefilled_, job.policy.rows.delay,
                                   [this, &job, last, record] { return Compacted(job, last, record); });
}

Status Runner::FeedTurn(const std::vector<Token>& tokens, llama::Decoder* decoder, int32_t* position,
                        std::vector<float>* logits) {
  const int64_t end = *position + static_cast<int64_t>(tokens.size());
  if (end >= ContextLimit())
    return InvalidArgument("--ctx: with the next question there are " + std::to_string(end) +
                           " tokens, but the context holds " + std::to_string(ContextLimit()));
  DROPKV_RETURN_IF_ERROR(decoder->Feed(tokens, *position));
  *position += static_cast<int32_t>(tokens.size());
  logits->assign(decoder->logits().begin(), decoder->logits().end());
  return Status::Ok();
}

Status Runner::OneAnswer(const std::string& question, std::vector<float> logits, llama::Decoder* decoder,
                         llama::Sampler* sampler, int32_t* position, RunRecord* record) {
  if (record->turns.empty()) Say(fmt::format("\n--- {} {} ---\n", record->policy.name(), record->budget));
  if (!question.empty() && !interactive_) Say(fmt::format("? {}\n", question));
  if (!options_.prefix.empty()) Say(options_.prefix);
  Result<Answer> answer = Generate(model_, options_, ContextLimit(), std::move(logits), decoder, sampler, position,
                                   [&](std::string_view text) { Say(text); });
  if (!answer.ok()) return answer.status();
  Say("\n");
  record->turns.push_back({question, std::move(*answer)});
  return Status::Ok();
}

Status Runner::Answers(llama::Decoder* decoder, RunRecord* record) {
  last_sampler_.emplace(options_.temperature, options_.seed);
  last_position_ = prefilled_.size();
  std::vector<float> logits = prefilled_.logits;
  for (size_t i = 0; i < options_.questions.size(); ++i) {
    const std::string& question = options_.questions[i];
    if (options_.hidden) {
      if (i > 0) DROPKV_RETURN_IF_ERROR(decoder->Rewind());
      last_position_ = prefilled_.size();
      const std::vector<Token> tokens = prompt_->AfterDocument(question);
      // With --raw and no question nothing follows the document: its own logits give the first token.
      logits = prefilled_.logits;
      if (!tokens.empty()) DROPKV_RETURN_IF_ERROR(FeedTurn(tokens, decoder, &last_position_, &logits));
    } else if (i > 0) {
      std::vector<Token> tokens = prompt_->NextTurn(question);
      const Answer& previous = record->turns.back().answer;
      // An answer that was cut off has a last token that was shown but not fed.
      if (!previous.ended && !previous.tokens.empty()) tokens.insert(tokens.begin(), previous.tokens.back());
      DROPKV_RETURN_IF_ERROR(FeedTurn(tokens, decoder, &last_position_, &logits));
    }
    DROPKV_RETURN_IF_ERROR(OneAnswer(question, logits, decoder, &*last_sampler_, &last_position_, record));
  }
  return Status::Ok();
}

Status Runner::RunJobs() {
  summary_.runs.reserve(jobs_.size());  // a delayed cut writes into its record later
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const Job& job = jobs_[i];
    const bool last = i + 1 == jobs_.size();
    RunRecord& record = summary_.runs.emplace_back();
    record.policy = job.policy;
    record.budget = job.budget;
    record.kv_bytes_before = prefilled_.KvBytesFull();
    record.kept_min = record.kept_max = prefilled_.size();
    record.kept_mean = prefilled_.size();
    record.kv_bytes_after = record.kv_bytes_before;
    Result<std::unique_ptr<llama::Decoder>> decoder = MakeDecoder(job, last, &record);
    if (!decoder.ok()) return decoder.status();
    DROPKV_RETURN_IF_ERROR(Answers(decoder->get(), &record));
    record.decode = (*decoder)->name();
    if (!options_.expect.empty() && !record.turns.empty())
      record.verdict = Judge(options_.prefix + record.turns.front().answer.text, options_.expect);
    if (IsFull(job) && !last) DROPKV_RETURN_IF_ERROR((*decoder)->Rewind());
    if (!last) DROPKV_RETURN_IF_ERROR(llama::Retract(&prefilled_));
    last_decoder_ = std::move(*decoder);
  }
  return Status::Ok();
}

// Further questions from the terminal go to the last run's cache, until the end of input.
Status Runner::Interact() {
  if (!interactive_) return Status::Ok();
  RunRecord& record = summary_.runs.back();
  int32_t room = kConversation;
  std::string question;
  while (Say("> "), std::getline(std::cin, question)) {
    if (question.empty()) continue;
    std::vector<Token> tokens = options_.hidden ? prompt_->AfterDocument(question) : prompt_->NextTurn(question);
    if (options_.hidden) {
      DROPKV_RETURN_IF_ERROR(last_decoder_->Rewind());
      last_position_ = prefilled_.size();
      room = kConversation;
    } else if (!record.turns.empty() && !record.turns.back().answer.ended) {
      tokens.insert(tokens.begin(), record.turns.back().answer.tokens.back());
    }
    room -= static_cast<int32_t>(tokens.size()) + options_.max_tokens;
    if (room < 0)
      return {Code::kFailedPrecondition,
              "the conversation has used up its room of " + std::to_string(kConversation) + " tokens"};
    std::vector<float> logits;
    DROPKV_RETURN_IF_ERROR(FeedTurn(tokens, last_decoder_.get(), &last_position_, &logits));
    DROPKV_RETURN_IF_ERROR(
        OneAnswer(question, std::move(logits), last_decoder_.get(), &*last_sampler_, &last_position_, &record));
  }
  record.decode = last_decoder_->name();
  Say("\n");
  return Status::Ok();
}

Status Runner::Report() const {
  const std::string text = options_.json ? JsonText(summary_) : fmt::format("\n{}", TableText(summary_));
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return {Code::kIo, "cannot write to standard output"};
  return Status::Ok();
}

}  // namespace

Status Run(const std::vector<std::string>& arguments) {
  Result<std::optional<RunOptions>> options = ParseRun(arguments);
  if (!options.ok()) return options.status();
  if (!options->has_value()) {
    std::fputs(RunHelp().c_str(), stdout);
    return Status::Ok();
  }
  InstallStopHandler();
  Result<llama::Model> model = llama::Model::Load((*options)->model, {.gpu_layers = (*options)->gpu_layers});
  if (!model.ok()) return model.status();
  EngineOptions engine_options;
  engine_options.threads = (*options)->threads;
  Result<Engine> engine = Engine::Create(engine_options);
  if (!engine.ok()) return engine.status();
  Runner runner(std::move(**options), std::move(*model), std::move(*engine));
  DROPKV_RETURN_IF_ERROR(runner.Start());
  DROPKV_RETURN_IF_ERROR(runner.RunJobs());
  DROPKV_RETURN_IF_ERROR(runner.Interact());
  return runner.Report();
}

}  // namespace dropkv::cli
