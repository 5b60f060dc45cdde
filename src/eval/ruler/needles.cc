// Keys and values hidden in noise, in running text or among other keys and values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "eval/ruler/make_sample.h"
#include "eval/ruler/random_stream.h"

namespace dropkv::eval {
namespace {

constexpr uint32_t kDepths = 40;        // evenly spaced from 0 to 100 percent
constexpr int kAttempts = 16;           // draws until every value is in the prompt once
constexpr int64_t kShortestEssay = 16;  // words

double Depth(uint32_t step) { return std::round(100.0 * step / (kDepths - 1)); }

std::string DrawUuid(RandomStream& random) {
  const uint64_t high = (random.Bits() & ~0xF000ULL) | 0x4000;                         // version 4
  const uint64_t low = (random.Bits() & 0x3FFFFFFFFFFFFFFFULL) | (uint64_t{1} << 63);  // variant 1
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xFFFF, high & 0xFFFF, low >> 48,
                     low & 0xFFFFFFFFFFFFULL);
}

// Draws items that differ from each other.
class ItemSource {
 public:
  ItemSource(const WordLists& words, uint64_t key) : words_(words), random_(key) {}

  std::string Draw(Item item) {
    for (;;) {
      std::string drawn = DrawAny(item);
      if (seen_.insert(drawn).second) return drawn;
    }
  }

 private:
  std::string DrawAny(Item item) {
    if (item == Item::kUuid) return DrawUuid(random_);
    if (item == Item::kNumber) return std::to_string(1000000 + random_.Below(9000000));
    const std::string& adjective = words_.adjectives[random_.Below(static_cast<uint32_t>(words_.adjectives.size()))];
    const std::string& noun = words_.nouns[random_.Below(static_cast<uint32_t>(words_.nouns.size()))];
    return adjective + "-" + noun;
  }

  const WordLists& words_;
  RandomStream random_;
  std::unordered_set<std::string> seen_;
};

struct Needle {
  std::string key;
  std::string value;
};

class NeedlePrompt {
 public:
  NeedlePrompt(const SampleRequest& request, uint64_t key)
      : request_(request), shape_(request.task.needles), items_(request.corpus.words, DeriveKey(key, "items")) {
    RandomStream random(DeriveKey(key, "layout"));
    DrawNeedles(random);
    for (const uint32_t step : random.Distinct(static_cast<uint32_t>(needles_.size()), kDepths)) {
      depths_.push_back(Depth(step));
    }
    std::sort(depths_.begin(), depths_.end());
    if (shape_.hay == Hay::kEssay) {
      first_sentence_ = random.Below(static_cast<uint32_t>(request.corpus.essay.sentences()));
    }
  }

  FitLimits limits() const {
    FitLimits limits = StartLimits(request_);
    limits.smallest = shape_.hay == Hay::kEssay ? kShortestEssay : 1;
    limits.largest = int64_t{4} * request_.length;  // no word or line takes less than a quarter of a token
    if (shape_.hay == Hay::kNeedles && shape_.key == Item::kWord) {
      const WordLists& words = request_.corpus.words;  // half of all keys: the other half is what drawing needs
      limits.largest = std::min<int64_t>(
          limits.largest, static_cast<int64_t>(words.adjectives.size()) * static_cast<int64_t>(words.nouns.size()) / 2);
    }
    return limits;
  }

  Sample Render(int64_t size) {
    Sample sample = StartSample(request_);
    const bool one = shape_.queries * shape_.values == 1;
    const std::string kind = Kind(one);
    sample.context = fmt::format(
        "{} special magic {} hidden in the text below. Read the text and remember {}: you will be asked for {} "
        "later.\n",
        one ? "A" : "Some", kind + (one ? " is" : " are"), one ? "it" : "them", one ? "it" : "them");
    AppendHay(size, sample.context);
    const std::string query = Query();
    sample.question = fmt::format("{}{} for {}{}?", one ? shape::kValueQuestion : shape::kValuesQuestion, kind, query,
                                  shape::kMentioned);
    sample.prefix = fmt::format(" {}{} for {}{} {}", shape::kValue, kind, query, shape::kMentioned, one ? "is" : "are");
    for (const std::string& key : queries_) AddReferences(key, sample);
    return sample;
  }

  // The values may stand in the text or inside each other by chance.
  bool ValuesStandOnce(const Sample& sample) const {
    const std::string prompt = sample.context + sample.question + sample.prefix;
    return std::all_of(needles_.begin(), needles_.end(), [&](const Needle& needle) {
      const size_t at = prompt.find(needle.value);
      return at != std::string::npos && prompt.find(needle.value, at + 1) == std::string::npos;
    });
  }

 private:
  void DrawNeedles(RandomStream& random) {
    std::vector<std::string> keys;
    for (int32_t k = 0; k < shape_.keys; ++k) {
      keys.push_back(items_.Draw(shape_.key));
      for (int32_t v = 0; v < shape_.values; ++v) needles_.push_back({keys.back(), items_.Draw(shape_.value)});
    }
    random.Shuffle(needles_);
    random.Shuffle(keys);
    queries_.assign(keys.begin(), keys.begin() + shape_.queries);
  }

  std::string Kind(bool one) const {
    return fmt::format("{}{}", shape_.value == Item::kUuid ? "uuid" : "number", one ? "" : "s");
  }

  std::string Line(const std::string& key, const std::string& value) const {
    return fmt::format("One of the special magic {} for {} is: {}.", Kind(false), key, value);
  }

  std::string Query() const {
    if (queries_.size() == 1) return queries_[0];
    std::string query;
    for (size_t i = 0; i + 1 < queries_.size(); ++i) query += queries_[i] + ", ";
    return query + "and " + queries_.back();
  }

  void AddReferences(const std::string& key, Sample& sample) const {
    for (size_t i = 0; i < needles_.size(); ++i) {
      if (needles_[i].key != key) continue;
      sample.references.push_back(needles_[i].value);
      sample.depths.push_back(depths_[i]);
    }
  }

  std::vector<std::string_view> Hays(int64_t size) {
    if (shape_.hay == Hay::kEssay) return request_.corpus.essay.Take(first_sentence_, size);
    const auto count = static_cast<size_t>(size);
    if (shape_.hay == Hay::kNoise) return std::vector<std::string_view>(count, kNoiseLine);
    while (other_lines_.size() < count) {
      const std::string key = items_.Draw(shape_.key);
      other_lines_.push_back(Line(key, items_.Draw(shape_.value)));
    }
    std::vector<std::string_view> lines(other_lines_.begin(), other_lines_.end());
    lines.resize(count);
    return lines;
  }

  void AppendHay(int64_t size, std::string& context) {
    const std::vector<std::string_view> hays = Hays(size);
    const char between = shape_.hay == Hay::kEssay ? ' ' : '\n';
    size_t needle = 0;
    for (size_t i = 0; i <= hays.size(); ++i) {
      while (needle < needles_.size() &&
             i == static_cast<size_t>(static_cast<double>(hays.size()) * depths_[needle] / 100)) {
        context += Line(needles_[needle].key, needles_[needle].value);
        context += between;
        ++needle;
      }
      if (i == hays.size()) break;
      context += hays[i];
      context += between;
    }
    context.back() = '\n';
  }

  const SampleRequest& request_;
  const NeedleShape& shape_;
  ItemSource items_;
  std::vector<Needle> needles_;  // in the order of the prompt
  std::vector<double> depths_;   // of each
  std::vector<std::string> queries_;
  std::vector<std::string> other_lines_;  // needles that nobody asks for
  size_t first_sentence_ = 0;
};

}  // namespace

Result<Sample> MakeNeedles(const SampleRequest& request) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    NeedlePrompt prompt(request, DeriveKey(request.key, static_cast<uint64_t>(attempt)));
    const FitLimits limits = prompt.limits();
    Result<Fitted> fitted = FitToLength(
        limits, [&](int64_t size) { return prompt.Render(size); }, request.count);
    if (!fitted.ok()) return fitted.status();
    if (fitted->size == limits.largest && fitted->tokens < LeastTokens(limits)) {
      return InvalidArgument(
          fmt::format("length {}: {} needs more keys than the word lists make; {} lines have {} tokens", request.length,
                      request.task.name, fitted->size, fitted->tokens));
    }
    if (prompt.ValuesStandOnce(fitted->sample)) return std::move(fitted->sample);
  }
  return Status(Code::kInternal, fmt::format("{}, length {}, sample {}: the values stand in the haystack as well",
                                             request.task.name, request.length, request.index));
}

}  // namespace dropkv::eval
