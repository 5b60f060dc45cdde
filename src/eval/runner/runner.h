// All samples of a run, in both question modes, at every policy and budget; rows that are there already are left out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dropkv/engine.h"
#include "dropkv/status.h"
#include "eval/runner/grid.h"
#include "eval/runner/pace.h"
#include "eval/runner/prompt.h"
#include "eval/runner/sample_run.h"
#include "eval/runner/store.h"
#include "eval/runner/suite.h"
#include "llama/model.h"

namespace dropkv::eval {

struct RunnerOptions {
  SampleOptions sample;
  std::vector<Setting> settings;
  std::vector<std::string> budgets;
  std::vector<bool> hidden;  // question modes
  int32_t context = 0;       // most tokens, prompt and answer; 0: what the model was trained for
  bool raw = false;
  bool skip_too_long = false;
  double time_limit = 0;  // seconds; 0: none
};

struct RunProgress {
  int32_t done = 0;  // samples; a sample with its question seen and hidden counts twice
  int32_t total = 0;
  int32_t job = 0;  // of the present sample
  int32_t jobs = 0;
  double seconds_left = 0;  // 0: not known yet
  const Sample* sample = nullptr;
};

struct RunOutcome {
  int32_t total = 0;  // samples that had rows missing
  int32_t done = 0;
  int32_t too_long = 0;  // left out
  bool out_of_time = false;
  bool stopped = false;
};

class Runner {
 public:
  static Result<Runner> Create(const llama::Model& model, Engine* engine, RunnerOptions options);

  // What can be refused is refused before the first prefill: prompts that the context does not hold, budgets that a
  // policy cannot go down to, rows of other prompts. `listener` is called before every sample and behind every row.
  Result<RunOutcome> Run(const std::vector<Item>& items, ResultStore* store,
                         const std::function<void(const RunProgress&)>& listener);

 private:
  // A sample in one question mode, with the jobs whose rows are missing.
  struct Unit {
    const Item* item = nullptr;
    bool hidden = false;
    int32_t tokens = 0;  // of the prompt
    std::vector<const Job*> jobs;
  };

  Runner(const llama::Model& model, Engine* engine, RunnerOptions options, PromptBuilder prompts)
      : model_(&model), engine_(engine), options_(std::move(options)), prompts_(std::move(prompts)) {}

  Prompt PromptOf(const Item& item, bool hidden) const;
  int32_t ContextLimit() const;
  Result<std::vector<Unit>> PlanUnits(const std::vector<Item>& items, const ResultStore& store, RunOutcome* outcome);
  Status CheckLength(const Sample& sample, const Prompt& prompt) const;
  Status RunUnit(const Unit& unit, ResultStore* store, RunProgress* progress,
                 const std::function<void(const RunProgress&)>& listener);
  bool stopped() const { return options_.sample.stop != nullptr && options_.sample.stop->load(); }

  const llama::Model* model_;
  Engine* engine_;
  RunnerOptions options_;
  PromptBuilder prompts_;
  std::vector<Job> jobs_;
  bool tested_ = false;  // the adapter, on this model
};

}  // namespace dropkv::eval
