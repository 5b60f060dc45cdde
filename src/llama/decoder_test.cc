// Decoding from a compacted cache against the float64 reference that attends to exactly the kept entries: every
// architecture, cache type and attention route, both decoders, further turns, and a rewind.
#include "llama/decoder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/parallel.h"
#include "llama/decoder_test_case.h"
#include "llama/prefill.h"
#include "support/reference_model.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using testing::ReferenceModel;
using testing::TinyArch;
using testing::TinyConfig;
using testing::TinyModel;

// As a share of the largest logit, for our own attention: with an f32 cache and no flash attention only float32 sums
// differ; with either, the native prefill rounds queries and weights to f16. gemma3's GELU is a table of f16 values in
// ggml. q8_0 has 8 bits.
double Tolerance(const TinyConfig& config, const PrefillOptions& options) {
  if (options.kv_type == DType::kQ8_0) return 6e-2;
  const bool exact = options.kv_type == DType::kF32 && !options.flash_attention;
  return exact && config.arch != TinyArch::kGemma3 ? 1e-5 : 5e-3;
}

class DecoderTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    tiny_ = testing::MakeTinyModel(GetParam().config);
    path_ = (std::filesystem::temp_directory_path() /
             (std::string("dropkv_decoder_") + GetParam().name + std::to_string(::getpid()) + ".gguf"))
                .string();
    ASSERT_TRUE(testing::WriteTinyModel(tiny_, path_).ok());
    // The tolerances are those of float32 products, which a GPU rounds to fewer bits.
    Result<Model> model = Model::Load(path_, {.gpu_layers = 0});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::make_unique<Model>(std::move(*model));
    tokens_ = RandomTokens(kPrompt + 16, 11);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  Prefilled Prefill(const PrefillOptions& options) {
    Result<Prefilled> prefilled = llama::Prefill(*model_, {tokens_.begin(), tokens_.begin() + kPrompt}, options);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  std::span<const Token> Tokens(int32_t from, int32_t count) const {
    return std::span<const Token>(tokens_).subspan(from, count);
  }

  // A reference that holds the prompt, of which `keep` is left.
  ReferenceModel Reference(const Prefilled& prefilled, const KeepList& keep) {
    ReferenceModel reference(tiny_, prefilled.options.kv_type == DType::kF16);
    reference.Decode(Tokens(0, kPrompt));
    reference.Keep(keep, prefilled.layers);
    return reference;
  }

  // slack: for libllama's own attention, whose float32 sums over the head's dimensions are its own affair.
  void ExpectClose(std::span<const float> ours, const std::vector<double>& reference, const PrefillOptions& options,
                   const std::string& what, double slack = 1) {
    ASSERT_EQ(ours.size(), reference.size());
    double largest = 0;
    double error = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      largest = std::max(largest, std::abs(reference[i]));
      const double difference = std::abs(ours[i] - reference[i]);
      error = std::isnan(difference) ? INFINITY : std::max(error, difference);
    }
    EXPECT_LE(error, slack * Tolerance(GetParam().config, options) * std::max(1.0, largest))
        << what << ", largest logit " << largest;
  }

  TinyModel tiny_;
  std::string path_;
  std::unique_ptr<Model> model_;
  std::vector<Token> tokens_;
};

std::vector<PrefillOptions> Routes() {
  std::vector<PrefillOptions> routes;
  for (const bool flash : {false, true})
    for (const DType type : {DType::kF32, DType::kF16}) {
      PrefillOptions options;
      options.threads = 2;
      options.window = kWindow;
      options.flash_attention = flash;
      options.kv_type = type;
      routes.push_back(options);
    }
  return routes;
}

std::string Name(const PrefillOptions& options) {
  return std::string(DTypeName(options.kv_type)) + (options.flash_attention ? ", flash attention" : "");
}

// Two single tokens, a turn of five tokens at once, and one more.
void FeedAll(Decoder* decoder, ReferenceModel* reference, std::span<const Token> tokens,
             const std::function<void(const std::vector<double>&, const char*)>& check) {
  int32_t at = 0;
  for (const int32_t count : {1, 1, 5, 1}) {
    const std::span<const Token> piece = tokens.subspan(at, count);
    const Status status = decoder->Feed(piece, kPrompt + at);
    ASSERT_TRUE(status.ok()) << status.message();
    check(reference->Decode(piece), count == 1 ? "one token" : "five tokens");
    at += count;
  }
}

TEST_P(DecoderTest, RaggedEqualsReference) {
  ThreadPool pool(2);
  for (PrefillOptions options : Routes()) {
    options.pool = &pool;
    Prefilled prefilled = Prefill(options);
    const int32_t heads = GetParam().config.kv_heads;
    const KeepList keep = RandomKeep(static_cast<int32_t>(prefilled.layers.size()), heads, kPrompt, kWindow, 60, 5);
    ReferenceModel reference = Reference(prefilled, keep);
    Result<std::unique_ptr<Decoder>> decoder = MakeRaggedDecoder(&prefilled, keep, 16);
    ASSERT_TRUE(decoder.ok()) << decoder.status().message();
    prefilled.context.reset();
    FeedAll(decoder->get(), &reference, Tokens(kPrompt, 8), [&](const std::vector<double>& expected, const char* what) {
      ExpectClose((*decoder)->logits(), expected, options, Name(options) + ", " + what);
    });
    if (options.flash_attention) {
      EXPECT_EQ((*decoder)->name(), "ragged replace") << Name(options);
    }
  }
}

TEST_P(DecoderTest, NativeEqualsReference) {
  for (const PrefillOptions& options : Routes()) {
    Prefilled prefilled = Prefill(options);
    const int32_t heads = GetParam().config.kv_heads;
    const KeepList keep = RandomKeep(static_cast<int32_t>(prefilled.layers.size()), heads, kPrompt, 40, 40, 6);
    ReferenceModel reference = Reference(prefilled, keep);
    Result<std::unique_ptr<Decoder>> decoder = MakeNativeDecoder(&prefilled, keep, 16);
    ASSERT_TRUE(decoder.ok()) << decoder.status().message();
    prefilled.context.reset();
    FeedAll(decoder->get(), &reference, Tokens(kPrompt, 8), [&](const std::vector<double>& expected, const char* what) {
      ExpectClose((*decoder)->logits(), expected, options, Name(options) + ", " + what, 2);
    });
  }
}

TEST_P(DecoderTest, QuantisedCacheEqualsReference) {
  if (GetParam().config.head_dim % 32 != 0) GTEST_SKIP() << "q8_0 needs a head size that is a multiple of 32";
  PrefillOptions options;
  options.threads = 2;
  options.window = kWindow;
  options.kv_type = DType::kQ8_0;
  Prefilled prefilled = Prefill(options);
  const int32_t layers = static_cast<int32_t>(prefilled.layers.size());
  const KeepList keep = RandomKeep(layers, GetParam().config.kv_heads, kPrompt, 40, 40, 7);
  for (const bool native : {true, false}) {
    ReferenceModel reference = Reference(prefilled, keep);
    Result<std::unique_ptr<Decoder>> decoder =
        native ? MakeNativeDecoder(&prefilled, keep, 16) : MakeRaggedDecoder(&prefilled, keep, 16);
    ASSERT_TRUE(decoder.ok()) << decoder.status().message();
    FeedAll(decoder->get(), &reference, Tokens(kPrompt, 8), [&](const std::vector<double>& expected, const char* what) {
      ExpectClose((*decoder)->logits(), expected, options, Name(options) + (native ? " native, " : " ragged, ") + what);
    });
  }
}

// After a rewind the same text gives the same bits; so do two decoders made one after the other from one prefill.
TEST_P(DecoderTest, RewindForgetsWhatWasFed) {
  PrefillOptions options;
  options.threads = 2;
  options.window = kWindow;
  options.reserve = 32;
  Prefilled prefilled = Prefill(options);
  const int32_t layers = static_cast<int32_t>(prefilled.layers.size());
  const KeepList keep = RandomKeep(layers, GetParam().config.kv_heads, kPrompt, 40, 40, 8);
  using Maker = std::function<Result<std::unique_ptr<Decoder>>()>;
  const Maker makers[] = {[&] { return MakeFullDecoder(&prefilled); },
                          [&] { return MakeNativeDecoder(&prefilled, keep, 16); },
                          [&] { return MakeRaggedDecoder(&prefilled, keep, 16); }};
  for (const Maker& make : makers) {
    std::vector<float> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      Result<std::unique_ptr<Decoder>> decoder = make();
      ASSERT_TRUE(decoder.ok()) << decoder.status().message();
      for (int again = 0; again < 2; ++again) {
        ASSERT_TRUE((*decoder)->Feed(Tokens(kPrompt, 5), kPrompt).ok());
        ASSERT_TRUE((*decoder)->Feed(Tokens(kPrompt + 5, 1), kPrompt + 5).ok());
        const std::span<const float> logits = (*decoder)->logits();
        if (first.empty()) first.assign(logits.begin(), logits.end());
        EXPECT_TRUE(std::equal(first.begin(), first.end(), logits.begin())) << (*decoder)->name() << " " << again;
        ASSERT_TRUE((*decoder)->Rewind().ok());
      }
    }
  }
}

// A cache read and written through host copies, as a device's is, gives the bits of one that is host memory itself.
TEST_P(DecoderTest, HostCopyGivesTheSameBits) {
  for (PrefillOptions options : Routes()) {
    std::vector<std::vector<float>> answers[2];
    for (const bool copy : {false, true}) {
      options.copy_cache = copy;
      Prefilled prefilled = Prefill(options);
      const int32_t layers = static_cast<int32_t>(prefilled.layers.size());
      const KeepList keep = RandomKeep(layers, GetParam().config.kv_heads, kPrompt, 40, 40, 10);
      for (const auto& make : {MakeNativeDecoder, MakeRaggedDecoder}) {
        Result<std::unique_ptr<Decoder>> decoder = make(&prefilled, keep, 16);
        ASSERT_TRUE(decoder.ok()) << decoder.status().message();
        for (const int32_t from : {0, 5}) {
          ASSERT_TRUE((*decoder)->Feed(Tokens(kPrompt + from, from == 0 ? 5 : 1), kPrompt + from).ok());
          answers[copy].emplace_back((*decoder)->logits().begin(), (*decoder)->logits().end());
        }
      }
    }
    EXPECT_EQ(answers[0], answers[1]) << Name(options);
  }
}

TEST_P(DecoderTest, GpuLayersNeedAGpu) {
  const Result<Model> model = Model::Load(path_, {.gpu_layers = 1});
  if (model.ok()) GTEST_SKIP() << "there is one: " << model->device();
  EXPECT_EQ(model.status().message().find("--gpu-layers: expected 0"), 0) << model.status().message();
}

TEST_P(DecoderTest, NativeRefusesRaggedLists) {
  PrefillOptions options;
  options.window = kWindow;
  Prefilled prefilled = Prefill(options);
  const int32_t layers = static_cast<int32_t>(prefilled.layers.size());
  const KeepList keep = RandomKeep(layers, GetParam().config.kv_heads, kPrompt, 10, 60, 9);
  if (keep.uniform()) GTEST_SKIP() << "one list only";
  const Result<std::unique_ptr<Decoder>> decoder = MakeNativeDecoder(&prefilled, keep, 16);
  ASSERT_FALSE(decoder.ok());
  EXPECT_NE(decoder.status().message().find("--decode native"), std::string::npos);
}

TEST_P(DecoderTest, SelfTestPassesOnEveryRoute) {
  for (const PrefillOptions& options : Routes()) {
    const Result<SelfTest> test = RunSelfTest(*model_, Tokens(0, kPrompt), options);
    ASSERT_TRUE(test.ok()) << Name(options) << ": " << test.status().message();
    EXPECT_GT(test->nodes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DecoderTest, ::testing::ValuesIn(Cases()),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace dropkv::llama
