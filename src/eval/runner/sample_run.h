// One sample in one question mode: prefilled once, then answered from the full cache and from every evicted one.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dropkv/engine.h"
#include "dropkv/status.h"
#include "eval/row.h"
#include "eval/runner/fidelity.h"
#include "eval/runner/grid.h"
#include "eval/runner/prompt.h"
#include "llama/decoder.h"
#include "llama/model.h"
#include "llama/prefill.h"

namespace dropkv::eval {

struct SampleOptions {
  std::vector<baseline::Recipe> recipes;  // all that may be applied
  DType kv_type = DType::kF16;
  bool flash_attention = true;
  int32_t threads = 0;
  bool ignore_end = false;
  int32_t fidelity = 0;                     // most tokens of the full cache's answer that are forced; 0: not measured
  const std::atomic<bool>* stop = nullptr;  // ends a prefill; rows are finished
};

llama::PrefillOptions MakePrefillOptions(const SampleOptions& options, Engine* engine);

class SampleRun {
 public:
  // All but `options` must outlive the run.
  SampleRun(const llama::Model& model, Engine* engine, const SampleOptions& options, const Sample& sample,
            const Prompt& prompt, bool hidden)
      : model_(&model), engine_(engine), options_(options), sample_(&sample), prompt_(&prompt), hidden_(hidden) {}

  Status Prefill();

  // The full cache's row; before every Evicted.
  Result<Row> Full();
  Result<Row> Evicted(const Job& job);

 private:
  Row EmptyRow() const;
  Status Describe(const Job& job, const KeepList& keep, const EvictReport& report, Row* row) const;

  // Feeds what follows the prompt; *logits then give the first token of the answer, at *position.
  Status Begin(llama::Decoder* decoder, std::vector<float>* logits, int32_t* position) const;

  Status Answer(bool full, llama::Decoder* decoder, Row* row);
  Status Force(size_t from, size_t to, llama::Decoder* decoder, FidelityMean* mean) const;
  Status FollowText(bool full, llama::Decoder* decoder, Row* row);
  Status Compare(size_t step, std::span<const float> logits, FidelityMean* mean) const;

  bool is_text() const { return !prompt_->forced.empty(); }
  // The prompt's own logits are the full cache's for every policy: they tell nothing.
  size_t first_compared() const { return prompt_->after.empty() ? 1 : 0; }

  const llama::Model* model_;
  Engine* engine_;
  SampleOptions options_;
  const Sample* sample_;
  const Prompt* prompt_;
  bool hidden_;
  std::atomic<bool> cancel_ = false;
  llama::Prefilled prefilled_;
  std::vector<llama::Token> forced_;             // the full cache's answer, or the text's continuation
  std::vector<std::vector<float>> full_logits_;  // [step][vocab], before token `step` of it; empty: not compared
};

}  // namespace dropkv::eval
