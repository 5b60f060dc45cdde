// What a cache is fed behind the prompt, and what becomes of its logits. A course asks for tokens to be fed and is told
// the logits behind them, so that one decoder can follow one course, or many at once in a batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dropkv/status.h"
#include "eval/runner/fidelity.h"
#include "eval/runner/greedy.h"
#include "eval/runner/prompt.h"
#include "eval/sample.h"
#include "llama/batch_decoder.h"
#include "llama/decoder.h"
#include "llama/model.h"

namespace dropkv::eval {

// The full cache's answer, or a text's continuation: what the others are compared along.
struct Reference {
  std::vector<llama::Token> tokens;
  std::vector<std::vector<float>> logits;  // [step][vocab], before token `step`; empty: not compared. As far as asked.
};

// What all courses of a sample share.
struct CourseSample {
  const llama::Model* model = nullptr;
  const Sample* sample = nullptr;
  const Prompt* prompt = nullptr;
  bool ignore_end = false;
  int32_t fidelity = 0;                  // most tokens of the reference that are compared; 0: none
  int32_t prompt_tokens = 0;             // prefilled: the position behind them
  std::span<const float> prompt_logits;  // of the last of them, or of `begun`
  // Of the reference: decoded over the full cache before it was cut. The courses go on behind them.
  std::span<const llama::Token> begun;

  bool is_text() const { return !prompt->forced.empty(); }
  // The logits that a course begins with are the full cache's for every policy: they tell nothing.
  size_t first_compared() const { return begun.size() + (prompt->after.empty() ? 1 : 0); }
};

// The answer, and how far the distributions on the way are from the full cache's. As long as the answer is the full
// cache's own, they come with it; behind the first other token that answer is forced from the prompt's end on. A text
// has no answer: its continuation is forced.
class Course {
 public:
  // reference: of the full cache; null: this is the full cache's own course, which makes one. Both must stay.
  Course(const CourseSample& sample, const Reference* reference);

  Status Start();

  bool done() const { return pass_ == Pass::kDone; }
  // Where not done: tokens to be fed, and the position of the first of them; valid until Take.
  std::span<const llama::Token> next() const;
  int32_t position() const { return position_; }
  // Whether the cache must forget what it was fed before that.
  bool rewinds() const { return rewinds_; }

  // The logits behind the last token of next(), and the time that feeding them took.
  Status Take(std::span<const float> logits, double seconds);

  const GreedyAnswer& answer() const { return answer_; }
  const FidelityMean& fidelity() const { return mean_; }
  double seconds() const { return seconds_; }  // of the answer; what was forced behind it is not counted
  Reference TakeReference() { return std::move(made_); }

 private:
  enum class Pass { kAnswer, kForced, kDone };

  Status Begin();
  Status Step(std::span<const float> logits);
  Status StepAnswer(std::span<const float> logits);
  Status EndAnswer();
  Status StepForced(std::span<const float> logits);
  void Keep(std::span<const float> logits);
  Status Compare(std::span<const float> logits);

  const CourseSample* sample_;
  const Reference* reference_;
  Reference made_;
  GreedyAnswer answer_;
  FidelityMean mean_;
  Pass pass_ = Pass::kAnswer;
  bool in_answer_ = true;  // the answer is the reference's so far
  bool begins_ = false;    // the rest of the prompt comes next
  bool rewinds_ = false;
  size_t step_ = 0;      // tokens of the answer or the text so far
  size_t compared_ = 0;  // the first step that is not
  llama::Token token_ = 0;
  int32_t position_ = 0;
  double seconds_ = 0;
};

// Feeds a course to its end.
Status Follow(llama::Decoder* decoder, Course* course);

// The same for many at once: course i in sequence i. The time of a step is shared by the tokens fed in it. stop (may be
// null): set to true, it ends between two steps with kCancelled.
Status FollowAll(llama::BatchDecoder* decoder, std::span<Course> courses, const std::atomic<bool>* stop);

}  // namespace dropkv::eval
