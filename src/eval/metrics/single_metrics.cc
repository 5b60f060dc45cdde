#include "eval/metrics/single_metrics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "eval/metrics/python_text.h"

namespace dropkv::eval {
namespace {

// How many of the references, in lower case, are in the prediction.
size_t Found(std::string_view prediction, std::span<const std::string> references) {
  std::u32string text(Strip(DecodeUtf8(prediction)));
  for (char32_t& c : text)
    if (c < 0x20) c = U'\n';
  const std::u32string lower = Lower(Strip(text));
  return static_cast<size_t>(std::count_if(references.begin(), references.end(), [&](const std::string& reference) {
    return lower.find(Lower(DecodeUtf8(reference))) != std::u32string::npos;
  }));
}

bool IsAsciiPunctuation(char32_t c) {
  return (c >= 0x21 && c <= 0x2f) || (c >= 0x3a && c <= 0x40) || (c >= 0x5b && c <= 0x60) || (c >= 0x7b && c <= 0x7e);
}

bool IsArticle(std::u32string_view word) { return word == U"a" || word == U"an" || word == U"the"; }

std::u32string NormalizeAnswer(std::string_view answer) {
  std::u32string text = Lower(DecodeUtf8(answer));
  std::erase_if(text, IsAsciiPunctuation);
  std::u32string normal;
  normal.reserve(text.size());
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && IsWord(text[end])) ++end;
    const std::u32string_view word = std::u32string_view(text).substr(begin, end - begin);
    if (IsArticle(word))
      normal.push_back(U' ');
    else
      normal.append(word);
    if (end < text.size()) normal.push_back(text[end]);
    begin = end + 1;
  }
  return normal;
}

std::vector<std::u32string_view> DigitRuns(std::u32string_view text) {
  std::vector<std::u32string_view> runs;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && IsDigit(text[end])) ++end;
    if (end > begin) runs.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return runs;
}

double ShareEqual(std::string_view prediction, std::u32string_view number) {
  const std::u32string text = DecodeUtf8(prediction);
  const std::vector<std::u32string_view> runs = DigitRuns(text);
  if (runs.empty()) return 0;
  return static_cast<double>(std::count(runs.begin(), runs.end(), number)) / static_cast<double>(runs.size());
}

std::string_view FirstCodeLine(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  while (true) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (line.find_first_of("`#") == std::string_view::npos && line.find("//") == std::string_view::npos) return line;
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
}

// Length of the longest common subsequence.
size_t CommonLength(std::u32string_view a, std::u32string_view b) {
  std::vector<size_t> row(b.size() + 1, 0);
  for (const char32_t c : a) {
    size_t diagonal = 0;
    for (size_t j = 0; j < b.size(); ++j)
      diagonal = std::exchange(row[j + 1], c == b[j] ? diagonal + 1 : std::max(row[j], row[j + 1]));
  }
  return row.back();
}

}  // namespace

double StringMatchAll(std::string_view prediction, std::span<const std::string> references) {
  if (references.empty()) return 0;
  return static_cast<double>(Found(prediction, references)) / static_cast<double>(references.size());
}

double StringMatchPart(std::string_view prediction, std::span<const std::string> references) {
  return Found(prediction, references) > 0 ? 1 : 0;
}

double F1Score(std::string_view prediction, std::string_view reference) {
  const std::u32string prediction_text = NormalizeAnswer(prediction);
  const std::u32string reference_text = NormalizeAnswer(reference);
  const std::vector<std::u32string_view> predicted = SplitWords(prediction_text);
  const std::vector<std::u32string_view> expected = SplitWords(reference_text);
  std::map<std::u32string_view, int64_t> left;
  for (const std::u32string_view word : expected) ++left[word];
  const auto common = static_cast<double>(std::count_if(predicted.begin(), predicted.end(), [&](auto word) {
    const auto found = left.find(word);
    return found != left.end() && found->second-- > 0;
  }));
  if (common == 0) return 0;
  const double precision = common / static_cast<double>(predicted.size());
  const double recall = common / static_cast<double>(expected.size());
  return (2 * precision * recall) / (precision + recall);
}

double ClassificationScore(std::string_view prediction, std::string_view reference,
                           std::span<const std::string> classes) {
  std::vector<std::string_view> found;
  for (const std::string& name : classes)
    if (prediction.find(name) != std::string_view::npos) found.push_back(name);
  for (size_t i = 0; i < found.size(); ++i) {
    const std::string_view name = found[i];
    if (name != reference && reference.find(name) != std::string_view::npos)
      found.erase(std::find(found.begin(), found.end(), name));
  }
  const bool right = std::find(found.begin(), found.end(), reference) != found.end();
  return right ? 1.0 / static_cast<double>(found.size()) : 0;
}

double RetrievalScore(std::string_view prediction, std::string_view reference) {
  constexpr std::u32string_view kLabel = U"Paragraph ";
  const std::u32string text = DecodeUtf8(reference);
  for (size_t at = text.find(kLabel); at != std::u32string::npos; at = text.find(kLabel, at + 1)) {
    const size_t begin = at + kLabel.size();
    size_t end = begin;
    while (end < text.size() && IsDigit(text[end])) ++end;
    if (end > begin) return ShareEqual(prediction, std::u32string_view(text).substr(begin, end - begin));
  }
  return 0;
}

double CountScore(std::string_view prediction, std::string_view reference) {
  return ShareEqual(prediction, DecodeUtf8(reference));
}

double EditSimilarity(std::string_view prediction, std::string_view reference) {
  const std::u32string line = DecodeUtf8(FirstCodeLine(prediction));
  const std::u32string expected = DecodeUtf8(reference);
  if (line == expected) return 1;
  if (line.empty() || expected.empty()) return 0;
  const size_t total = line.size() + expected.size();
  const auto distance = static_cast<double>(total - 2 * CommonLength(line, expected));
  return std::nearbyint(100 * (1.0 - distance / static_cast<double>(total))) / 100;
}

}  // namespace dropkv::eval
