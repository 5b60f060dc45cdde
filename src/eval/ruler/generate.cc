#include <fmt/format.h>

#include <algorithm>

#include "eval/ruler/make_sample.h"
#include "eval/ruler/random_stream.h"
#include "eval/ruler/ruler.h"

namespace dropkv::eval {
namespace {

constexpr int32_t kMostTemplateTokens = 1 << 20;
constexpr int32_t kLongest = 1 << 27;  // tokens: what follows from it still fits an int32_t

Status CheckOptions(const RulerOptions& options, const TokenCounter& count) {
  if (!count) return InvalidArgument("token counter: expected one, got none");
  if (options.tasks.empty()) return InvalidArgument(fmt::format("tasks: expected some of {}", RulerTaskList()));
  for (auto task = options.tasks.begin(); task != options.tasks.end(); ++task) {
    if (FindRulerTask(*task) == nullptr) {
      return Status(Code::kNotFound, fmt::format("task {}: there are {}", *task, RulerTaskList()));
    }
    if (std::find(options.tasks.begin(), task, *task) != task) {
      return InvalidArgument(fmt::format("tasks: {} is named twice", *task));
    }
  }
  if (options.lengths.empty()) return InvalidArgument("lengths: expected one at least");
  for (auto length = options.lengths.begin(); length != options.lengths.end(); ++length) {
    if (*length <= 0 || *length > kLongest) {
      return InvalidArgument(fmt::format("length {}: expected 1 to {} tokens", *length, kLongest));
    }
    if (std::find(options.lengths.begin(), length, *length) != length) {
      return InvalidArgument(fmt::format("lengths: {} is named twice", *length));
    }
  }
  if (options.samples <= 0) return InvalidArgument(fmt::format("samples: expected 1 or more, got {}", options.samples));
  if (options.template_tokens < 0 || options.template_tokens > kMostTemplateTokens) {
    return InvalidArgument(
        fmt::format("template tokens: expected 0 to {}, got {}", kMostTemplateTokens, options.template_tokens));
  }
  return {};
}

CorpusParts NeededParts(const RulerOptions& options) {
  CorpusParts parts;
  for (const std::string& name : options.tasks) {
    const RulerTask& task = *FindRulerTask(name);
    const bool needles = task.kind == RulerKind::kNeedles;
    parts.essay |= needles && task.needles.hay == Hay::kEssay;
    parts.words |= task.kind == RulerKind::kCommonWords || (needles && task.needles.key == Item::kWord);
    parts.qa_1 |= name == "qa_1";
    parts.qa_2 |= name == "qa_2";
  }
  return parts;
}

Status CheckQuestions(const RulerOptions& options, const Corpus& corpus) {
  for (const std::string& task : options.tasks) {
    if (FindRulerTask(task)->kind != RulerKind::kQuestions) continue;
    const size_t questions = (task == "qa_1" ? corpus.qa_1 : corpus.qa_2).questions.size();
    if (static_cast<size_t>(options.samples) > questions) {
      return InvalidArgument(fmt::format("samples: {} has {} questions with an answer, {} were asked for", task,
                                         questions, options.samples));
    }
  }
  return {};
}

Result<Sample> MakeSample(const SampleRequest& request) {
  switch (request.task.kind) {
    case RulerKind::kNeedles:
      return MakeNeedles(request);
    case RulerKind::kVariables:
      return MakeVariables(request);
    case RulerKind::kCommonWords:
      return MakeCommonWords(request);
    case RulerKind::kFrequentWords:
      return MakeFrequentWords(request);
    case RulerKind::kQuestions:
      return MakeQuestion(request);
  }
  return Status(Code::kInternal, "a task of no kind");
}

}  // namespace

Sample StartSample(const SampleRequest& request) {
  Sample sample;
  sample.suite = "ruler";
  sample.task = request.task.name;
  sample.id = std::to_string(request.index);
  sample.length = request.length;
  sample.metric = request.task.metric;
  sample.max_tokens = request.task.max_tokens;
  return sample;
}

FitLimits StartLimits(const SampleRequest& request) {
  FitLimits limits;
  limits.length = request.length;
  limits.reserved = request.reserved;
  return limits;
}

Result<RulerSet> GenerateRuler(const RulerOptions& options, const TokenCounter& count) {
  DROPKV_RETURN_IF_ERROR(CheckOptions(options, count));
  const Result<Corpus> corpus = LoadCorpus(options.data, NeededParts(options));
  if (!corpus.ok()) return corpus.status();
  DROPKV_RETURN_IF_ERROR(CheckQuestions(options, *corpus));
  RulerSet set{{}, corpus->essay_name, corpus->files};
  for (const std::string& name : options.tasks) {
    const RulerTask& task = *FindRulerTask(name);
    const uint64_t task_key = DeriveKey(options.seed, name);
    for (const int32_t length : options.lengths) {
      const uint64_t length_key = DeriveKey(task_key, static_cast<uint64_t>(length));
      for (int32_t index = 0; index < options.samples; ++index) {
        Result<Sample> sample = MakeSample({task, *corpus, count, length, task.max_tokens + options.template_tokens,
                                            index, task_key, DeriveKey(length_key, static_cast<uint64_t>(index))});
        if (!sample.ok()) return sample.status();
        set.samples.push_back(std::move(*sample));
      }
    }
  }
  return set;
}

}  // namespace dropkv::eval
