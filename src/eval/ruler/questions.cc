// A question about one or more documents among many.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "eval/ruler/make_sample.h"
#include "eval/ruler/random_stream.h"

namespace dropkv::eval {
namespace {

constexpr size_t kLookAhead = 256;  // documents among which one that fills the rest is looked for
constexpr int kFills = 8;

// The documents in the order in which they are taken: gold, then those of the question's group, then the others.
std::vector<uint32_t> OrderDocuments(const QaSet& set, const QaQuestion& question, uint64_t key) {
  RandomStream random(key);
  std::vector<bool> taken(set.documents.size());
  std::vector<uint32_t> order = question.gold;
  for (const uint32_t gold : question.gold) taken[gold] = true;
  std::vector<uint32_t> all(set.documents.size());
  std::iota(all.begin(), all.end(), 0U);
  for (const std::vector<uint32_t>* from : {&set.groups[question.group], &std::as_const(all)}) {
    std::vector<uint32_t> more;
    for (const uint32_t document : *from) {
      if (!taken[document]) more.push_back(document);
      taken[document] = true;
    }
    random.Shuffle(more);
    order.insert(order.end(), more.begin(), more.end());
  }
  return order;
}

class QuestionPrompt {
 public:
  explicit QuestionPrompt(const SampleRequest& request)
      : request_(request), set_(request.task.name == "qa_1" ? request.corpus.qa_1 : request.corpus.qa_2) {
    std::vector<uint32_t> questions(set_.questions.size());
    std::iota(questions.begin(), questions.end(), 0U);
    RandomStream(DeriveKey(request.task_key, "questions")).Shuffle(questions);
    question_ = &set_.questions[questions[static_cast<size_t>(request.index)]];
    order_ = OrderDocuments(set_, *question_, DeriveKey(request.key, "documents"));
  }

  Result<Sample> Make() {
    FitLimits limits = StartLimits(request_);
    limits.smallest = static_cast<int64_t>(question_->gold.size());
    limits.largest = std::max<int64_t>(limits.smallest, request_.length);
    Result<Fitted> fitted = FitToLength(
        limits, [&](int64_t size) { return Render(size); }, request_.count);
    if (!fitted.ok()) return fitted.status();
    DROPKV_RETURN_IF_ERROR(Fill(limits, *fitted));
    return std::move(fitted->sample);
  }

 private:
  // Where there are not enough documents, those that are not gold come again.
  uint32_t Document(size_t i) const {
    if (i < order_.size()) return order_[i];
    const size_t gold = question_->gold.size();
    return order_[gold + (i - gold) % (order_.size() - gold)];
  }

  Sample Render(int64_t size) const {
    const bool repeatable = order_.size() > question_->gold.size();
    const size_t count = repeatable ? static_cast<size_t>(size) : std::min(static_cast<size_t>(size), order_.size());
    std::vector<std::pair<uint64_t, uint32_t>> shown;  // by a random rank that does not change with the size
    for (size_t i = 0; i < count; ++i) {
      shown.emplace_back(RandomBits(DeriveKey(request_.key, "ranks"), i), Document(i));
    }
    std::sort(shown.begin(), shown.end());
    constexpr std::string_view kInstruction =
        "the given documents only. Give me nothing but the answer, in as few words as possible.\n\n";
    Sample sample = StartSample(request_);
    sample.context = fmt::format("{}from {}The documents are these.\n\n", shape::kDocumentQuestion, kInstruction);
    for (size_t i = 0; i < shown.size(); ++i) {
      sample.context += fmt::format("Document {}:\n", i + 1);
      sample.context += set_.documents[shown[i].second];
      sample.context += "\n\n";
    }
    sample.question =
        fmt::format("{}from {}{}{}", shape::kDocumentQuestion, kInstruction, shape::kQuestion, question_->text);
    sample.prefix = fmt::format(" {}", shape::kAnswer);
    sample.references = question_->answers;
    return sample;
  }

  // The next document was too long for the rest: takes a shorter one in its place.
  Status Fill(const FitLimits& limits, Fitted& fitted) {
    const double bytes_per_token =
        static_cast<double>(fitted.sample.context.size()) / std::max(1.0, static_cast<double>(fitted.tokens));
    for (int fill = 0; fill < kFills && fitted.tokens < LeastTokens(limits); ++fill) {
      const auto room = static_cast<size_t>((limits.length - limits.reserved - fitted.tokens) * bytes_per_token * 0.9);
      const auto size = static_cast<size_t>(fitted.size);
      size_t best = order_.size();
      for (size_t i = size; i < std::min(order_.size(), size + kLookAhead); ++i) {
        const size_t bytes = set_.documents[order_[i]].size() + std::string_view("Document 100:\n\n\n").size();
        if (bytes <= room && (best == order_.size() || bytes > set_.documents[order_[best]].size())) best = i;
      }
      if (best == order_.size()) break;
      std::swap(order_[size], order_[best]);
      Sample sample = Render(fitted.size + 1);
      const Result<int32_t> tokens = CountTokens(sample, request_.count);
      if (!tokens.ok()) return tokens.status();
      if (*tokens > limits.length - limits.reserved) break;
      fitted = {std::move(sample), fitted.size + 1, *tokens};
    }
    return {};
  }

  const SampleRequest& request_;
  const QaSet& set_;
  const QaQuestion* question_;
  std::vector<uint32_t> order_;
};

}  // namespace

Result<Sample> MakeQuestion(const SampleRequest& request) { return QuestionPrompt(request).Make(); }

}  // namespace dropkv::eval
