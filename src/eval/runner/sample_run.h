// One sample in one question mode: prefilled once, then answered from the full cache and from every evicted one, those
// in batches.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "dropkv/engine.h"
#include "dropkv/keep_list.h"
#include "dropkv/status.h"
#include "eval/row.h"
#include "eval/runner/course.h"
#include "eval/runner/drafts.h"
#include "eval/runner/grid.h"
#include "eval/runner/prompt.h"
#include "llama/decoder.h"
#include "llama/evict.h"
#include "llama/model.h"
#include "llama/prefill.h"

namespace dropkv::eval {

struct SampleOptions {
  std::vector<baseline::Recipe> recipes;  // all that may be applied
  DType kv_type = DType::kF16;
  bool flash_attention = true;
  int32_t threads = 0;
  bool ignore_end = false;
  int32_t fidelity = 0;  // most tokens of the full cache's answer that are forced; 0: not measured
  int32_t batch = 1;     // most keep lists that are decoded together; 1: each by a decoder of its own
  const std::atomic<bool>* stop = nullptr;  // ends a prefill and a batch; other rows are finished
};

// A batch takes no further keep list when its rows take so many bytes, or as many as the full cache if that is more.
inline constexpr int64_t kBatchBytes = int64_t{1} << 30;

// Most bytes of keep lists that wait for their turn.
inline constexpr int64_t kReadyBytes = int64_t{1} << 28;

llama::PrefillOptions MakePrefillOptions(const SampleOptions& options, Engine* engine);

class SampleRun {
 public:
  // All but `options` must outlive the run.
  SampleRun(const llama::Model& model, Engine* engine, const SampleOptions& options, const Sample& sample,
            const Prompt& prompt, bool hidden)
      : model_(&model), engine_(engine), options_(options), sample_(&sample), prompt_(&prompt), hidden_(hidden) {}

  Status Prefill();

  // The full cache's row; before every other one.
  Result<Row> Full();

  // Decodes what these jobs draft; before they are evicted for.
  Status Draft(std::span<const Job* const> jobs);
  // Evicts for a job, whose row comes with Decode. `later` are to come behind it: those that share its scores are
  // scored with it, and wait for their turn.
  Status Evict(const Job& job, std::span<const Job* const> later);
  // Whether what was evicted is to be decoded before this job is evicted for: the batch is full, or another one's.
  bool ends_batch(const Job& job) const;
  // The rows of what was evicted, in that order.
  Result<std::vector<Row>> Decode();

 private:
  struct Pending {
    Row row;
    KeepList keep;
    bool answered = false;  // within the delay, by the full cache
  };

  // What was evicted ahead of its turn.
  struct Ready {
    const Job* job;
    llama::Evicted evicted;
    double extend_s;
  };

  Row EmptyRow() const;
  Status Describe(const Job& job, const KeepList& keep, const EvictReport& report, Row* row) const;
  std::span<const llama::Token> Behind(const Job& job) const;
  std::span<const llama::Token> KeptBehind(const Job& job) const;
  Status Extend(std::span<const llama::Token> tokens, double* seconds);
  bool SharesScores(const Job& a, const Job& b) const;
  int64_t ListBytes(const Job& job) const;
  Status EvictAhead(const Job& job, std::span<const Job* const> later);
  Status DecodeAlone(const CourseSample& sample, Pending* pending);
  Status DecodeBatch(const CourseSample& sample);
  void AnswerInFull(Row* row) const;
  void FillIn(const Course& course, Row* row) const;

  const llama::Model* model_;
  Engine* engine_;
  SampleOptions options_;
  const Sample* sample_;
  const Prompt* prompt_;
  bool hidden_;
  std::atomic<bool> cancel_ = false;
  llama::Prefilled prefilled_;
  CourseSample course_;  // of every course, once the prompt is prefilled
  Reference reference_;  // of the full cache
  Row full_;             // its row
  Drafts drafts_;
  std::vector<llama::Token> behind_;  // tokens that prefilled_ is extended by
  std::vector<float> behind_logits_;  // of the last of them
  std::vector<llama::Token> begun_;   // of what is pending: kept tokens of the delay
  std::vector<Ready> ready_;
  std::vector<Pending> pending_;
  int64_t pending_bytes_ = 0;
};

}  // namespace dropkv::eval
