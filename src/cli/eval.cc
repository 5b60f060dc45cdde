#include "cli/eval.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

#include "cli/eval_options.h"
#include "cli/eval_report.h"
#include "cli/terminal.h"
#include "dropkv/engine.h"
#include "eval/report/report.h"
#include "eval/runner/record.h"
#include "eval/runner/runner.h"
#include "eval/runner/suite.h"
#include "io/sha256.h"
#include "llama/model.h"

namespace dropkv::cli {
namespace {

// LongBench's own limit for models of 32K tokens; below it the answer and the template need room.
constexpr int32_t kLongBenchLength = 31500;
constexpr int32_t kLongBenchReserve = 512 + 128;

// A line on standard error: redrawn on a terminal behind every row, elsewhere one for every sample.
class ProgressLine {
 public:
  void Update(const eval::RunProgress& progress) {
    const std::string left =
        progress.seconds_left > 0 ? ", " + eval::DurationText(progress.seconds_left) + " left" : "";
    const std::string text =
        fmt::format("sample {} / {} ({}{}), row {} / {}{}", progress.done + 1, progress.total, progress.sample->task,
                    LengthText(*progress.sample), progress.job, progress.jobs, left);
    if (terminal_) {
      fmt::print(stderr, "\r\033[K{}", text);
      std::fflush(stderr);
    } else if (progress.job == progress.jobs) {
      fmt::print(stderr, "{}\n", text);
    }
  }
  void Finish() const {
    if (terminal_) std::fputs("\r\033[K", stderr);
  }

 private:
  static std::string LengthText(const eval::Sample& sample) {
    return sample.length > 0 ? fmt::format(" at {}", sample.length) : "";
  }

  bool terminal_ = isatty(STDERR_FILENO) == 1;
};

Result<eval::Suite> Load(const EvalOptions& options, const llama::Model& model) {
  const Result<eval::PromptBuilder> prompts = eval::PromptBuilder::Create(model, options.raw);
  if (!prompts.ok()) return prompts.status();
  eval::SuiteOptions suite;
  suite.suite = options.suite;
  suite.tasks = options.tasks;
  suite.lengths = options.lengths;
  suite.samples = options.samples;
  suite.seed = options.seed;
  suite.data = options.data;
  suite.max_length = options.max_length;
  suite.forced = options.fidelity;
  suite.template_tokens = prompts->template_tokens();
  return eval::LoadSuite(suite, model);
}

Result<eval::RunRecord> MakeRecord(const EvalOptions& options, const llama::Model& model, const eval::Suite& suite) {
  eval::RunRecord record;
  record.model = model.name();
  record.model_file = std::filesystem::path(options.model).filename().string();
  Result<std::string> hash = io::Sha256File(options.model);
  if (!hash.ok()) return Status(hash.status().code(), "--model: " + hash.status().message());
  record.model_sha256 = std::move(*hash);
  std::error_code error;
  record.model_bytes = static_cast<int64_t>(std::filesystem::file_size(options.model, error));
  record.libllama = eval::LlamaVersion();
  record.dropkv_version = eval::DropKvVersion();
  record.machine = fmt::format("{}; model on {}", eval::Machine(), model.device());
  record.command = options.command;
  record.chat_template = !options.raw && model.has_chat_template() ? "model's" : "none";
  record.haystack = suite.haystack;
  record.data = suite.data;
  record.options = RecordedOptions(options);
  record.kv_type = std::string(DTypeName(options.kv_type));
  record.flash_attention = options.flash_attention;
  record.threads = options.threads;
  record.batch = options.batch;
  record.seed = options.seed;
  record.samples = options.samples;
  for (const eval::Item& item : suite.items) {
    const auto add = [](auto* list, const auto& value) {
      if (std::find(list->begin(), list->end(), value) == list->end()) list->push_back(value);
    };
    add(&record.tasks, item.sample.task);
    if (item.sample.length > 0) add(&record.lengths, item.sample.length);
  }
  for (const eval::Setting& setting : options.settings) record.settings.push_back(setting.name);
  record.budgets = options.budgets;
  for (const bool hidden : options.hidden) record.questions.emplace_back(hidden ? "hidden" : "seen");
  record.started = eval::Now();
  return record;
}

// Before the first row: a folder with other results is refused as it is.
Status Record(const EvalOptions& options, const llama::Model& model, const eval::Suite& suite,
              const eval::ResultStore& store) {
  Result<eval::RunRecord> record = MakeRecord(options, model, suite);
  if (!record.ok()) return record.status();
  const Result<std::optional<eval::RunRecord>> before = eval::ReadRecord(options.out);
  if (!before.ok()) return before.status();
  if (store.rows() == 0) return eval::WriteRecord(options.out, *record);
  if (!before->has_value())
    return InvalidArgument("--out: " + options.out + " holds rows without a run.json that says where they come from");
  const Result<eval::RunRecord> merged = eval::MergeRecords(options.out, **before, *record);
  return merged.ok() ? eval::WriteRecord(options.out, *merged) : merged.status();
}

eval::RunnerOptions MakeRunnerOptions(const EvalOptions& options) {
  eval::RunnerOptions runner;
  runner.sample.kv_type = options.kv_type;
  runner.sample.flash_attention = options.flash_attention;
  runner.sample.threads = options.threads;
  runner.sample.ignore_end = options.ignore_eos;
  runner.sample.fidelity = options.fidelity;
  runner.sample.batch = options.batch;
  runner.sample.stop = &StopFlag();
  runner.settings = options.settings;
  runner.budgets = options.budgets;
  runner.hidden = options.hidden;
  runner.context = options.context;
  runner.raw = options.raw;
  runner.skip_too_long = options.skip_too_long;
  runner.time_limit = options.time_limit;
  return runner;
}

Status Finish(const EvalOptions& options, const eval::RunOutcome& outcome) {
  if (outcome.too_long > 0) fmt::print(stderr, "{} samples too long for the context were left out\n", outcome.too_long);
  if (outcome.stopped)
    return {Code::kCancelled, fmt::format("stopped on request, {} of {} samples done; the same command goes on there",
                                          outcome.done, outcome.total)};
  const Result<eval::Results> results = eval::ReadResults({options.out});
  if (!results.ok()) return results.status();
  const std::string report = eval::TerminalReport(*results);
  std::fwrite(report.data(), 1, report.size(), stdout);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return {Code::kIo, "cannot write to standard output"};
  if (outcome.out_of_time)
    fmt::print(stderr, "unfinished: {} of {} samples done within --time; the same command goes on there\n",
               outcome.done, outcome.total);
  return Status::Ok();
}

}  // namespace

Status Eval(const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments.front() == "report") return EvalReport({arguments.begin() + 1, arguments.end()});
  Result<std::optional<EvalOptions>> parsed = ParseEval(arguments);
  if (!parsed.ok()) return parsed.status();
  if (!parsed->has_value()) {
    std::fputs(EvalHelp().c_str(), stdout);
    return Status::Ok();
  }
  EvalOptions& options = **parsed;
  InstallStopHandler();
  const Result<llama::Model> model = llama::Model::Load(options.model, {.gpu_layers = options.gpu_layers});
  if (!model.ok()) return model.status();
  if (options.suite == "longbench" && options.max_length == 0) {
    const int32_t context = options.context > 0 ? options.context : model->context_train();
    options.max_length = std::clamp(context - kLongBenchReserve, 1, kLongBenchLength);
  }
  const Result<eval::Suite> suite = Load(options, *model);
  if (!suite.ok()) return suite.status();
  for (const std::string& remark : suite->remarks) fmt::print(stderr, "{}\n", remark);
  EngineOptions engine_options;
  engine_options.threads = options.threads;
  Result<Engine> engine = Engine::Create(engine_options);
  if (!engine.ok()) return engine.status();
  Result<eval::Runner> runner = eval::Runner::Create(*model, &*engine, MakeRunnerOptions(options));
  if (!runner.ok()) return runner.status();
  Result<eval::ResultStore> store = eval::ResultStore::Open(options.out);
  if (!store.ok()) return store.status();
  if (store->cut_bytes() > 0) fmt::print(stderr, "the last row of {}/results.jsonl was unfinished\n", options.out);
  DROPKV_RETURN_IF_ERROR(Record(options, *model, *suite, *store));
  ProgressLine line;
  const Result<eval::RunOutcome> outcome =
      runner->Run(suite->items, &*store, [&](const eval::RunProgress& progress) { line.Update(progress); });
  line.Finish();
  return outcome.ok() ? Finish(options, *outcome) : outcome.status();
}

}  // namespace dropkv::cli
