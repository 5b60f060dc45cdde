#include "eval/runner/course.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/clock.h"

namespace dropkv::eval {

using llama::Token;

Course::Course(const CourseSample& sample, const Reference* reference)
    : sample_(&sample),
      reference_(reference),
      answer_(*sample.model, *sample.sample, sample.ignore_end),
      compared_(sample.first_compared()) {
  answer_.Begin(sample.begun);
  if (sample.is_text()) pass_ = Pass::kForced;
}

Status Course::Start() {
  if (reference_ == nullptr && sample_->is_text()) made_.tokens = sample_->prompt->forced;
  return Begin();
}

// From where the cache was cut.
Status Course::Begin() {
  step_ = sample_->begun.size();
  position_ = sample_->prompt_tokens + static_cast<int32_t>(step_);
  begins_ = !sample_->prompt->after.empty();
  return begins_ ? Status::Ok() : Step(sample_->prompt_logits);
}

std::span<const Token> Course::next() const {
  return begins_ ? std::span<const Token>(sample_->prompt->after) : std::span(&token_, 1);
}

Status Course::Take(std::span<const float> logits, double seconds) {
  if (pass_ == Pass::kAnswer || sample_->is_text()) seconds_ += seconds;
  position_ += static_cast<int32_t>(next().size());
  begins_ = rewinds_ = false;
  return Step(logits);
}

// logits: before token step_.
Status Course::Step(std::span<const float> logits) {
  return pass_ == Pass::kAnswer ? StepAnswer(logits) : StepForced(logits);
}

Status Course::StepAnswer(std::span<const float> logits) {
  if (reference_ == nullptr) {
    Keep(logits);
  } else if (in_answer_ && step_ == compared_ && step_ < reference_->logits.size()) {
    DROPKV_RETURN_IF_ERROR(Compare(logits));
  }
  token_ = answer_.Take(logits);
  if (reference_ != nullptr)
    in_answer_ = in_answer_ && step_ < reference_->tokens.size() && reference_->tokens[step_] == token_;
  ++step_;
  return answer_.done() ? EndAnswer() : Status::Ok();
}

Status Course::EndAnswer() {
  if (reference_ == nullptr) made_.tokens = answer_.tokens();
  if (reference_ == nullptr || compared_ >= reference_->logits.size()) {
    pass_ = Pass::kDone;
    return Status::Ok();
  }
  pass_ = Pass::kForced;
  rewinds_ = true;
  return Begin();
}

Status Course::StepForced(std::span<const float> logits) {
  if (reference_ == nullptr) {
    Keep(logits);
  } else if (step_ == compared_) {
    DROPKV_RETURN_IF_ERROR(Compare(logits));
  }
  const Reference& reference = reference_ == nullptr ? made_ : *reference_;
  const size_t last = reference_ == nullptr ? made_.tokens.size() : reference_->logits.size() - 1;
  if (step_ >= last) {
    pass_ = Pass::kDone;
  } else {
    token_ = reference.tokens[step_++];
  }
  return Status::Ok();
}

void Course::Keep(std::span<const float> logits) {
  const bool asked = sample_->fidelity > 0 && step_ <= static_cast<size_t>(sample_->fidelity);
  if (!asked && !sample_->is_text()) return;
  std::vector<float>& kept = made_.logits.emplace_back();
  if (step_ >= sample_->first_compared()) kept.assign(logits.begin(), logits.end());
}

Status Course::Compare(std::span<const float> logits) {
  const TokenFidelity token = CompareLogits(reference_->logits[step_], logits);
  if (!std::isfinite(token.kl))
    return {Code::kInternal, fmt::format("the divergence from the full cache is not finite at token {}", step_)};
  mean_.Add(token);
  ++compared_;
  return Status::Ok();
}

Status Follow(llama::Decoder* decoder, Course* course) {
  DROPKV_RETURN_IF_ERROR(course->Start());
  while (!course->done()) {
    if (course->rewinds()) DROPKV_RETURN_IF_ERROR(decoder->Rewind());
    const auto start = Clock::now();
    DROPKV_RETURN_IF_ERROR(decoder->Feed(course->next(), course->position()));
    DROPKV_RETURN_IF_ERROR(course->Take(decoder->logits(), SecondsSince(start)));
  }
  return Status::Ok();
}

Status FollowAll(llama::BatchDecoder* decoder, std::span<Course> courses, const std::atomic<bool>* stop) {
  for (Course& course : courses) DROPKV_RETURN_IF_ERROR(course.Start());
  std::vector<llama::BatchDecoder::Item> items;
  std::vector<int32_t> fed;  // sequences of the step
  for (;;) {
    if (stop != nullptr && stop->load()) return {Code::kCancelled, "stopped on request"};
    items.clear();
    fed.clear();
    for (int32_t i = 0; i < static_cast<int32_t>(courses.size()); ++i) {
      const Course& course = courses[i];
      if (course.done()) continue;
      if (course.rewinds()) DROPKV_RETURN_IF_ERROR(decoder->Rewind(i));
      int32_t position = course.position();
      for (const Token token : course.next()) items.push_back({i, token, position++, false});
      items.back().logits = true;
      fed.push_back(i);
    }
    if (fed.empty()) return Status::Ok();
    const auto start = Clock::now();
    DROPKV_RETURN_IF_ERROR(decoder->Step(items));
    const double each = SecondsSince(start) / static_cast<double>(items.size());
    size_t end = 0;
    for (const int32_t i : fed) {
      const size_t count = courses[i].next().size();
      end += count;
      DROPKV_RETURN_IF_ERROR(courses[i].Take(decoder->logits(end - 1), each * static_cast<double>(count)));
    }
  }
}

}  // namespace dropkv::eval
