// Many sequences decoded together against each one's own decoder: every architecture, cache type and attention route,
// lists of any form, uneven turns, sequences that drop out and that begin again.
#include "llama/batch_decoder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>

#include "core/parallel.h"
#include "llama/decoder.h"
#include "llama/decoder_test_case.h"
#include "llama/prefill.h"

namespace dropkv::llama {
namespace {

using Item = BatchDecoder::Item;
using Logits = std::vector<float>;

constexpr int32_t kReserve = 64;

// The same sums in another order: ggml multiplies a matrix by many rows in another way than by one. With a float32
// cache that is all (1e-6 was seen); one of f16 rounds keys and values that differ in their last bits to neighbours now
// and then (2e-4). gemma3's GELU is a table of f16 values, and its sliding layers are libllama's own (3e-3).
double Tolerance(const testing::TinyConfig& config, const PrefillOptions& options) {
  if (config.arch == testing::TinyArch::kGemma3) return 5e-3;
  return options.kv_type == DType::kF32 ? 1e-5 : 1e-3;
}

double Distance(std::span<const float> a, std::span<const float> b) {
  double largest = 1;
  double error = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max<double>(largest, std::abs(a[i]));
    const double difference = std::abs(a[i] - b[i]);
    error = std::isnan(difference) ? INFINITY : std::max(error, difference);
  }
  return error / largest;
}

class BatchDecoderTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() /
             (std::string("dropkv_batch_") + GetParam().name + std::to_string(::getpid()) + ".gguf"))
                .string();
    ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel(GetParam().config), path_).ok());
    Result<Model> model = Model::Load(path_, {.gpu_layers = 0});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::make_unique<Model>(std::move(*model));
    options_.threads = 1;
    options_.window = kWindow;
    options_.pool = &pool_;
  }
  void TearDown() override { std::filesystem::remove(path_); }

  Prefilled Prefill(int32_t tokens = kPrompt) {
    Result<Prefilled> prefilled = llama::Prefill(*model_, RandomTokens(tokens, 11), options_);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  KeepList Keep(const Prefilled& prefilled, int32_t shortest, int32_t longest, uint32_t seed) const {
    return RandomKeep(static_cast<int32_t>(prefilled.layers.size()), GetParam().config.kv_heads, kPrompt, shortest,
                      longest, seed);
  }

  std::unique_ptr<BatchDecoder> Make(Prefilled* prefilled, const std::vector<KeepList>& lists) {
    std::vector<const KeepList*> pointers;
    pointers.reserve(lists.size());
    for (const KeepList& keep : lists) pointers.push_back(&keep);
    Result<std::unique_ptr<BatchDecoder>> decoder = BatchDecoder::Create(prefilled, pointers, kReserve);
    EXPECT_TRUE(decoder.ok()) << decoder.status().message();
    return decoder.ok() ? std::move(*decoder) : nullptr;
  }

  // Logits behind every token of a text, from the list's own decoder.
  std::vector<Logits> Alone(Prefilled* prefilled, const KeepList& keep, std::span<const Token> text) {
    std::vector<Logits> logits;
    Result<std::unique_ptr<Decoder>> decoder = MakeRaggedDecoder(prefilled, keep, kReserve);
    EXPECT_TRUE(decoder.ok()) << decoder.status().message();
    for (size_t i = 0; decoder.ok() && i < text.size(); ++i) {
      EXPECT_TRUE((*decoder)->Feed(text.subspan(i, 1), kPrompt + static_cast<int32_t>(i)).ok());
      logits.emplace_back((*decoder)->logits().begin(), (*decoder)->logits().end());
    }
    return logits;
  }

  ThreadPool pool_{2};
  PrefillOptions options_;
  std::string path_;
  std::unique_ptr<Model> model_;
};

// Feeds sequences their texts in turns and compares what comes with what each one's own decoder gave.
class Play {
 public:
  Play(BatchDecoder* decoder, std::vector<std::vector<Token>> texts)
      : decoder_(decoder), texts_(std::move(texts)), at_(texts_.size(), 0) {}

  // counts: tokens of each sequence; they take turns, one token each, until all have theirs.
  Status Turn(std::vector<int32_t> counts) {
    items_.clear();
    for (bool any = true; any;) {
      any = false;
      for (int32_t i = 0; i < static_cast<int32_t>(counts.size()); ++i) {
        if (counts[i] == 0) continue;
        const int32_t at = at_[i]++;
        items_.push_back({i, texts_[i][at], kPrompt + at, true});
        any = --counts[i] > 0 || any;
      }
    }
    return decoder_->Step(items_);
  }
  Status Rewind(int32_t sequence) {
    at_[sequence] = 0;
    return decoder_->Rewind(sequence);
  }

  // Of the last turn, against alone[sequence][token].
  double Worst(const std::vector<std::vector<Logits>>& alone) const {
    double worst = 0;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Logits& expected = alone[items_[i].sequence][items_[i].position - kPrompt];
      worst = std::max(worst, Distance(expected, decoder_->logits(i)));
    }
    return worst;
  }
  std::vector<Logits> All() const {
    std::vector<Logits> all;
    for (size_t i = 0; i < items_.size(); ++i) all.emplace_back(decoder_->logits(i).begin(), decoder_->logits(i).end());
    return all;
  }

 private:
  BatchDecoder* decoder_;
  std::vector<std::vector<Token>> texts_;
  std::vector<int32_t> at_;
  std::vector<Item> items_;
};

std::vector<std::vector<Token>> Texts(size_t count, int32_t tokens) {
  std::vector<std::vector<Token>> texts;
  for (size_t i = 0; i < count; ++i) texts.push_back(RandomTokens(tokens, static_cast<uint32_t>(20 + i)));
  return texts;
}

TEST_P(BatchDecoderTest, EverySequenceEqualsItsOwnDecoder) {
  for (const bool flash : {false, true})
    for (const DType type : {DType::kF32, DType::kF16}) {
      SCOPED_TRACE(std::string(DTypeName(type)) + (flash ? ", flash attention" : ""));
      options_.flash_attention = flash;
      options_.kv_type = type;
      Prefilled prefilled = Prefill();
      const std::vector<KeepList> lists = {Keep(prefilled, 40, 40, 1), Keep(prefilled, kWindow, 60, 2),
                                           Keep(prefilled, kPrompt, kPrompt, 3), Keep(prefilled, 20, 90, 4)};
      const std::vector<std::vector<Token>> texts = Texts(lists.size(), kReserve);
      std::vector<std::vector<Logits>> alone;
      for (size_t i = 0; i < lists.size(); ++i) alone.push_back(Alone(&prefilled, lists[i], texts[i]));
      const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
      ASSERT_NE(decoder, nullptr);
      prefilled.context.reset();
      const double tolerance = Tolerance(GetParam().config, options_);
      Play play(decoder.get(), texts);
      // One token each; uneven turns; one sequence alone; more rows than a piece has; then two that outlive the others.
      std::vector<std::vector<int32_t>> turns = {{1, 1, 1, 1}, {5, 1, 0, 3}, {0, 0, 2, 0}, {20, 22, 21, 17}};
      for (int32_t i = 0; i < 30; ++i) turns.push_back({1, 0, 0, 1});
      for (const std::vector<int32_t>& turn : turns) {
        const Status status = play.Turn(turn);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_LE(play.Worst(alone), tolerance) << ::testing::PrintToString(turn);
      }
      ASSERT_TRUE(play.Rewind(1).ok());
      ASSERT_TRUE(play.Turn({1, 7, 0, 1}).ok());
      EXPECT_LE(play.Worst(alone), tolerance) << "a sequence began again beside others that went on";
    }
}

// The same batch with another list and another text in its midst: the others' logits stay bit for bit.
TEST_P(BatchDecoderTest, SequencesDoNotSeeEachOther) {
  for (const bool flash : {false, true}) {
    options_.flash_attention = flash;
    Prefilled prefilled = Prefill();
    std::vector<KeepList> lists = {Keep(prefilled, 40, 40, 1), Keep(prefilled, 10, 60, 2), Keep(prefilled, 20, 50, 3)};
    std::vector<std::vector<Token>> texts = Texts(3, kReserve);
    std::vector<Logits> logits[2];
    for (const bool other : {false, true}) {
      if (other) {
        lists[1] = Keep(prefilled, 30, 90, 7);
        texts[1] = RandomTokens(kReserve, 99);
      }
      const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
      ASSERT_NE(decoder, nullptr);
      Play play(decoder.get(), texts);
      for (int32_t i = 0; i < 30; ++i) {
        ASSERT_TRUE(play.Turn({1, 1, 1}).ok());
        for (const Logits& row : play.All()) logits[other].push_back(row);
      }
    }
    for (size_t i = 0; i < logits[0].size(); ++i)
      EXPECT_EQ(logits[0][i] == logits[1][i], i % 3 != 1) << "sequence " << i % 3 << ", token " << i / 3;
  }
}

TEST_P(BatchDecoderTest, RewindForgetsWhatWasFed) {
  Prefilled prefilled = Prefill();
  const std::vector<KeepList> lists = {Keep(prefilled, 40, 40, 1), Keep(prefilled, 10, 60, 2)};
  const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
  ASSERT_NE(decoder, nullptr);
  const int64_t bytes = decoder->used_bytes();
  Play play(decoder.get(), Texts(2, kReserve));
  std::vector<Logits> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    ASSERT_TRUE(play.Turn({5, 30}).ok());
    EXPECT_GT(decoder->used_bytes(), bytes);
    ASSERT_TRUE(play.Turn({1, 1}).ok());
    const std::vector<Logits> logits = play.All();
    if (first.empty()) first = logits;
    // Sliding layers find the window again in other cells and add up in their order.
    const double tolerance = GetParam().config.sliding_window > 0 ? 5e-3 : 0;
    for (size_t i = 0; i < logits.size(); ++i) EXPECT_LE(Distance(first[i], logits[i]), tolerance) << repeat;
    for (const int32_t sequence : {0, 1}) ASSERT_TRUE(play.Rewind(sequence).ok());
    EXPECT_EQ(decoder->used_bytes(), bytes);
  }
}

TEST_P(BatchDecoderTest, UnwantedLogitsChangeNothing) {
  Prefilled prefilled = Prefill();
  const std::vector<KeepList> lists = {Keep(prefilled, 40, 40, 1), Keep(prefilled, 10, 60, 2)};
  const std::vector<Token> text = RandomTokens(4, 5);
  std::vector<Logits> last;
  for (const bool all : {true, false}) {
    const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
    ASSERT_NE(decoder, nullptr);
    std::vector<Item> items;
    for (int32_t i = 0; i < 4; ++i)
      for (int32_t sequence = 0; sequence < 2; ++sequence) items.push_back({sequence, text[i], kPrompt + i, all});
    items[5].logits = items[7].logits = true;
    ASSERT_TRUE(decoder->Step(items).ok());
    for (const size_t item : {5, 7}) last.emplace_back(decoder->logits(item).begin(), decoder->logits(item).end());
  }
  // The output layer multiplies fewer rows, perhaps in another way.
  EXPECT_LE(Distance(last[0], last[2]), 1e-5);
  EXPECT_LE(Distance(last[1], last[3]), 1e-5);
  EXPECT_GT(Distance(last[0], last[1]), 1e-3);
}

// Enough bytes for the pool's threads; and a cache read through host copies, as a device's is.
TEST_P(BatchDecoderTest, NeitherThreadsNorCopiesChangeBits) {
  for (const bool flash : {false, true}) {
    options_.flash_attention = flash;
    options_.kv_type = DType::kF32;
    std::vector<Logits> first;
    for (const int32_t threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      options_.pool = &pool;
      options_.threads = threads;
      options_.copy_cache = threads == 5;
      Prefilled prefilled = Prefill();
      std::vector<KeepList> lists;
      for (uint32_t i = 0; i < 12; ++i) lists.push_back(Keep(prefilled, kPrompt - 20, kPrompt, i));
      const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
      ASSERT_NE(decoder, nullptr);
      Play play(decoder.get(), Texts(lists.size(), 4));
      ASSERT_TRUE(play.Turn(std::vector<int32_t>(lists.size(), 2)).ok());
      if (first.empty()) first = play.All();
      EXPECT_EQ(play.All(), first) << threads << " threads, flash attention " << flash;
    }
  }
}

TEST_P(BatchDecoderTest, AsManySequencesAsLibllamaHas) {
  Prefilled prefilled = Prefill();
  const int32_t most = BatchDecoder::MaxSequences(*model_);
  EXPECT_EQ(most, GetParam().config.sliding_window > 0 ? 255 : 256);
  const KeepList keep = Keep(prefilled, 10, 60, 1);
  const KeepList other = Keep(prefilled, 40, 40, 2);
  std::vector<const KeepList*> lists(most, &keep);
  lists.back() = &other;
  const Result<std::unique_ptr<BatchDecoder>> decoder = BatchDecoder::Create(&prefilled, lists, 2);
  ASSERT_TRUE(decoder.ok()) << decoder.status().message();
  EXPECT_EQ((*decoder)->sequences(), most);
  const std::vector<Token> text = RandomTokens(1, 5);
  std::vector<Item> items;
  items.reserve(most);
  for (int32_t i = 0; i < most; ++i) items.push_back({i, text[0], kPrompt, i == 0 || i == most - 1});
  const Status status = (*decoder)->Step(items);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_LE(Distance(Alone(&prefilled, keep, text)[0], (*decoder)->logits(0)), Tolerance(GetParam().config, options_));
  EXPECT_LE(Distance(Alone(&prefilled, other, text)[0], (*decoder)->logits(most - 1)),
            Tolerance(GetParam().config, options_));
  lists.push_back(&keep);
  const Result<std::unique_ptr<BatchDecoder>> more = BatchDecoder::Create(&prefilled, lists, 2);
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(more.status().message(),
            "lists: expected 1 to " + std::to_string(most) + ", got " + std::to_string(most + 1));
}

TEST_P(BatchDecoderTest, RefusesWhatDoesNotGoOn) {
  Prefilled prefilled = Prefill();
  const std::vector<KeepList> lists = {Keep(prefilled, 40, 40, 1), Keep(prefilled, 10, 60, 2)};
  const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, lists);
  ASSERT_NE(decoder, nullptr);
  const auto refusal = [&](const std::vector<Item>& items) { return decoder->Step(items).message(); };
  const int32_t vocabulary = model_->vocab_size();
  EXPECT_EQ(refusal({}), "items: expected at least one, got none");
  EXPECT_EQ(refusal({{2, 20, kPrompt}}), "items[0].sequence: expected 0 to 1, got 2");
  EXPECT_EQ(refusal({{0, vocabulary, kPrompt}}),
            "items[0].token: expected 0 to " + std::to_string(vocabulary - 1) + ", got " + std::to_string(vocabulary));
  EXPECT_EQ(refusal({{1, 20, kPrompt}, {0, 20, kPrompt}, {1, 20, kPrompt}}),
            "items[2].position: expected 151, got 150");
  EXPECT_EQ(decoder->Rewind(2).message(), "sequence: expected 0 to 1, got 2");
  Result<std::unique_ptr<BatchDecoder>> none = BatchDecoder::Create(&prefilled, {}, 2);
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("lists: expected 1 to "), std::string::npos);
  // Nothing of that was fed.
  Play play(decoder.get(), Texts(2, 4));
  ASSERT_TRUE(play.Turn({1, 1}).ok());
  EXPECT_LE(play.Worst({Alone(&prefilled, lists[0], Texts(2, 4)[0]), Alone(&prefilled, lists[1], Texts(2, 4)[1])}),
            Tolerance(GetParam().config, options_));
}

TEST_P(BatchDecoderTest, APromptInsideTheWindow) {
  if (GetParam().config.sliding_window == 0) GTEST_SKIP() << "no sliding window";
  Prefilled prefilled = Prefill(20);
  const KeepList keep;
  const KeepList* list = &keep;
  const Result<std::unique_ptr<BatchDecoder>> decoder = BatchDecoder::Create(&prefilled, std::span(&list, 1), 2);
  ASSERT_FALSE(decoder.ok());
  EXPECT_EQ(decoder.status().code(), Code::kFailedPrecondition);
}

TEST_P(BatchDecoderTest, AStopEndsIt) {
  std::atomic<bool> stop = false;
  options_.cancel = &stop;
  Prefilled prefilled = Prefill();
  const std::unique_ptr<BatchDecoder> decoder = Make(&prefilled, {Keep(prefilled, 40, 40, 1)});
  ASSERT_NE(decoder, nullptr);
  const Item item = {0, 20, kPrompt, true};
  stop = true;
  EXPECT_EQ(decoder->Step(std::span(&item, 1)).code(), Code::kCancelled);
  stop = false;
  EXPECT_EQ(decoder->Step(std::span(&item, 1)).code(), Code::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Models, BatchDecoderTest, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace dropkv::llama
