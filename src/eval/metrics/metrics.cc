#include "eval/metrics/metrics.h"

#include <algorithm>
#include <cstddef>

#include "eval/metrics/single_metrics.h"

namespace dropkv::eval {
namespace {

double AgainstOne(const Sample& sample, std::string_view answer, std::string_view reference) {
  switch (sample.metric) {
    case Metric::kF1:
      return F1Score(answer, reference);
    case Metric::kRougeL:
      return RougeL(answer, reference);
    case Metric::kClassification:
      return ClassificationScore(answer, reference, sample.classes);
    case Metric::kRetrieval:
      return RetrievalScore(answer, reference);
    case Metric::kCount:
      return CountScore(answer, reference);
    case Metric::kEditSimilarity:
      return EditSimilarity(answer, reference);
    case Metric::kStringMatchAll:
    case Metric::kStringMatchPart:
      break;
  }
  return 0;
}

std::string_view FirstLine(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  return text.substr(0, text.find('\n'));
}

}  // namespace

double ScoreAnswer(const Sample& sample, std::string_view answer) {
  if (sample.first_line) answer = FirstLine(answer);
  if (sample.metric == Metric::kStringMatchAll) return StringMatchAll(answer, sample.references);
  if (sample.metric == Metric::kStringMatchPart) return StringMatchPart(answer, sample.references);
  double best = 0;
  for (const std::string& reference : sample.references) best = std::max(best, AgainstOne(sample, answer, reference));
  return best;
}

}  // namespace dropkv::eval
