// Which words are the most frequent: in a numbered list (cwe), in a coded text (fwe).
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "eval/ruler/make_sample.h"
#include "eval/ruler/random_stream.h"

namespace dropkv::eval {
namespace {

constexpr size_t kCommon = 10;
constexpr int32_t kLongLists = 4096;  // tokens from which the words come more often

struct Frequencies {
  size_t example_words;
  int example_common;
  int example_other;
  int common;
  int other;
};

Frequencies ListFrequencies(int32_t length) {
  return length < kLongLists ? Frequencies{20, 3, 1, 6, 1} : Frequencies{40, 10, 3, 30, 3};
}

// All words of the lists in the order in which this sample takes them.
std::vector<std::string_view> ShuffleWords(const WordLists& words, uint64_t key) {
  RandomStream random(key);
  std::vector<std::string_view> common(words.common.begin(), words.common.end());
  std::vector<std::string_view> further(words.further.begin(), words.further.end());
  random.Shuffle(common);
  random.Shuffle(further);
  common.insert(common.end(), further.begin(), further.end());
  return common;
}

// Words [first, first + count), the first ten of them `common` times, the others `other` times.
void WriteList(const std::vector<std::string_view>& words, size_t first, size_t count, int common, int other,
               uint64_t key, Sample& sample) {
  std::vector<std::string_view> entries;
  for (size_t i = 0; i < count; ++i) entries.insert(entries.end(), i < kCommon ? common : other, words[first + i]);
  RandomStream(key).Shuffle(entries);
  sample.context +=
      "Below is a numbered list of words, some of which appear more often than the others. Remember the ones that "
      "appear "
      "most often.\n";
  for (size_t i = 0; i < entries.size(); ++i) {
    sample.context += std::to_string(i + 1);
    sample.context += ". ";
    sample.context += entries[i];
    sample.context += i + 1 < entries.size() ? ' ' : '\n';
  }
  sample.question = fmt::format("{}What are the 10 most common words in the above list?", shape::kQuestion);
  sample.prefix = fmt::format(" {} The top 10 words that appear most often in the list are:", shape::kAnswer);
}

constexpr size_t kCodeLetters = 6;
constexpr size_t kAsked = 3;            // ranks 2, 3 and 4: the first is written as dots
constexpr int64_t kShortestText = 120;  // with fewer words the ranks are not apart
constexpr double kZeta2 = 1.6449340668482264;

std::vector<std::string> DrawCodeWords(size_t count, uint64_t key) {
  RandomStream random(key);
  std::vector<std::string> words = {"..."};
  std::unordered_set<std::string> seen;
  while (words.size() < count) {
    std::string word;
    for (size_t i = 0; i < kCodeLetters; ++i) word += static_cast<char>('a' + random.Below(26));
    if (seen.insert(word).second) words.push_back(std::move(word));
  }
  return words;
}

}  // namespace

Result<Sample> MakeCommonWords(const SampleRequest& request) {
  const Frequencies frequencies = ListFrequencies(request.length);
  const std::vector<std::string_view> words = ShuffleWords(request.corpus.words, DeriveKey(request.key, "words"));
  Sample shot;
  WriteList(words, 0, frequencies.example_words, frequencies.example_common, frequencies.example_other,
            DeriveKey(request.key, "example"), shot);
  std::string opening = shot.context + shot.question + shot.prefix;
  for (size_t i = 0; i < kCommon; ++i) opening += fmt::format(" {}. {}", i + 1, words[i]);
  opening += "\n";

  const size_t first = frequencies.example_words;
  const auto render = [&](int64_t size) {
    Sample sample = StartSample(request);
    sample.context = opening;
    WriteList(words, first, static_cast<size_t>(size), frequencies.common, frequencies.other,
              DeriveKey(request.key, "list"), sample);
    sample.references.assign(words.begin() + static_cast<std::ptrdiff_t>(first),
                             words.begin() + static_cast<std::ptrdiff_t>(first + kCommon));
    return sample;
  };
  FitLimits limits = StartLimits(request);
  limits.smallest = kCommon + 1;
  limits.largest = static_cast<int64_t>(words.size() - first);
  Result<Fitted> fitted = FitToLength(limits, render, request.count);
  if (!fitted.ok()) return fitted.status();
  if (fitted->size == limits.largest && fitted->tokens < LeastTokens(limits)) {
    return InvalidArgument(
        fmt::format("length {}: cwe needs more words than the {} of the word lists", request.length, words.size()));
  }
  return std::move(fitted->sample);
}

Result<Sample> MakeFrequentWords(const SampleRequest& request) {
  const auto vocabulary = static_cast<size_t>(std::max(10, (request.length - request.reserved) / 50));
  const std::vector<std::string> words = DrawCodeWords(vocabulary, DeriveKey(request.key, "words"));
  const auto render = [&](int64_t size) {
    std::vector<std::string_view> text;
    for (size_t rank = 1; rank <= words.size(); ++rank) {
      const double share = 1.0 / (static_cast<double>(rank) * static_cast<double>(rank) * kZeta2);
      text.insert(text.end(), static_cast<size_t>(static_cast<double>(size) * share), words[rank - 1]);
    }
    RandomStream(DeriveKey(request.key, "text")).Shuffle(text);
    Sample sample = StartSample(request);
    sample.context =
        "The text below is written in code words. Keep track of how often each code word appears, and find the three "
        "most "
        "frequent ones.";
    for (const std::string_view word : text) {
      sample.context += ' ';
      sample.context += word;
    }
    sample.context += '\n';
    sample.question = fmt::format(
        "{}Do not explain anything, and ignore the dots '....'. What are the three most frequent words in the coded "
        "text "
        "above?",
        shape::kQuestion);
    sample.prefix = fmt::format(" {} According to the coded text above, the three most frequently appeared words are:",
                                shape::kAnswer);
    sample.references.assign(words.begin() + 1, words.begin() + 1 + kAsked);
    return sample;
  };
  FitLimits limits = StartLimits(request);
  limits.smallest = kShortestText;
  limits.largest = int64_t{8} * request.length;
  Result<Fitted> fitted = FitToLength(limits, render, request.count);
  if (!fitted.ok()) return fitted.status();
  return std::move(fitted->sample);
}

}  // namespace dropkv::eval
