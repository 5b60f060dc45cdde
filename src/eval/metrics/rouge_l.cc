#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eval/metrics/python_text.h"
#include "eval/metrics/single_metrics.h"

namespace dropkv::eval {
namespace {

// Python's 1000 frames, less the nine from eval.py down to the LCS and the one that ends the way back.
constexpr size_t kMaxSteps = 990;

using Sentence = std::vector<int32_t>;  // words by their numbers
using Numbers = std::unordered_map<std::u32string_view, int32_t>;

std::vector<Sentence> Sentences(std::u32string_view text, Numbers* numbers) {
  std::vector<Sentence> sentences;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(U'.', begin), text.size());
    if (end > begin) {
      Sentence& sentence = sentences.emplace_back();
      for (const std::u32string_view word : SplitWords(text.substr(begin, end - begin)))
        sentence.push_back(numbers->try_emplace(word, static_cast<int32_t>(numbers->size())).first->second);
      // The package keeps a sentence of white space as one empty word.
      if (sentence.empty())
        sentence.push_back(
            numbers->try_emplace(std::u32string_view(), static_cast<int32_t>(numbers->size())).first->second);
    }
    begin = end + 1;
  }
  return sentences;
}

// Marks the words of the LCS that the package's way back finds; false: it runs into the recursion limit.
bool MarkLcs(const Sentence& reference, const Sentence& prediction, std::vector<bool>* in_union) {
  const size_t rows = reference.size();
  const size_t columns = prediction.size();
  // Every step shortens one side by at most one word, so the table of two longer texts is not worth filling.
  if (std::min(rows, columns) > kMaxSteps) return false;
  const size_t width = columns + 1;
  std::vector<int32_t> length((rows + 1) * width, 0);
  for (size_t i = 1; i <= rows; ++i)
    for (size_t j = 1; j <= columns; ++j)
      length[i * width + j] = reference[i - 1] == prediction[j - 1]
                                  ? length[(i - 1) * width + j - 1] + 1
                                  : std::max(length[(i - 1) * width + j], length[i * width + j - 1]);

  size_t i = rows;
  size_t j = columns;
  for (size_t steps = 0; i > 0 && j > 0; ++steps) {
    if (steps == kMaxSteps) return false;
    if (reference[i - 1] == prediction[j - 1]) {
      in_union->at(static_cast<size_t>(reference[i - 1])) = true;
      --i;
      --j;
    } else if (length[(i - 1) * width + j] > length[i * width + j - 1]) {
      --i;
    } else {
      --j;
    }
  }
  return true;
}

size_t Marked(const std::vector<bool>& marks) {
  return static_cast<size_t>(std::count(marks.begin(), marks.end(), true));
}

size_t DistinctWords(const std::vector<Sentence>& sentences, size_t words) {
  std::vector<bool> seen(words, false);
  for (const Sentence& sentence : sentences)
    for (const int32_t word : sentence) seen.at(static_cast<size_t>(word)) = true;
  return Marked(seen);
}

}  // namespace

double RougeL(std::string_view prediction, std::string_view reference) {
  const std::u32string prediction_text = DecodeUtf8(prediction);
  const std::u32string reference_text = DecodeUtf8(reference);
  Numbers numbers;
  const std::vector<Sentence> predicted = Sentences(prediction_text, &numbers);
  const std::vector<Sentence> expected = Sentences(reference_text, &numbers);
  if (predicted.empty() || expected.empty()) return 0;

  std::vector<bool> in_union(numbers.size(), false);
  for (const Sentence& r : expected)
    for (const Sentence& p : predicted)
      if (!MarkLcs(r, p, &in_union)) return 0;

  const auto common = static_cast<double>(Marked(in_union));
  const double precision = common / static_cast<double>(DistinctWords(predicted, numbers.size()));
  const double recall = common / static_cast<double>(DistinctWords(expected, numbers.size()));
  return 2.0 * ((precision * recall) / (precision + recall + 1e-8));
}

}  // namespace dropkv::eval
