// A model on a GPU against the same model on the CPU, and the decoders on the GPU against each other. Skipped where
// libllama finds no GPU.
//
// Models: a tiny one, and those of the folder $DROPKV_MODELS; a model that is not there is skipped. $DROPKV_TEST_MODEL
// picks one.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <random>

#include "llama/decoder.h"
#include "llama/evict.h"
#include "llama/prefill.h"
#include "llama/test_text.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

constexpr int32_t kAnswer = 24;

struct DeviceModel {
  const char* name;
  const char* file;  // empty: made here
  int32_t prompt;    // tokens
};

void PrintTo(const DeviceModel& model, std::ostream* out) { *out << model.name; }

constexpr DeviceModel kModels[] = {
    {"tiny", "", 600},
    {"smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 3000},
    {"qwen", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", 6000},
    {"gemma", "gemma-3-270m.Q4_K_M.gguf", 2000},
};

using Logits = std::vector<std::vector<float>>;

// Relative L2 over all steps.
double Distance(const Logits& a, const Logits& b) {
  double error = 0;
  double norm = 0;
  for (size_t step = 0; step < a.size(); ++step)
    for (size_t i = 0; i < a[step].size(); ++i) {
      const double difference = static_cast<double>(a[step][i]) - b[step][i];
      error += difference * difference;
      norm += static_cast<double>(a[step][i]) * a[step][i];
    }
  return std::sqrt(error / norm);
}

// Share of the first list's entries that the second one holds, over all layers and heads.
double Overlap(const KeepList& a, const KeepList& b) {
  int64_t same = 0;
  for (int32_t layer = 0; layer < a.layers(); ++layer)
    for (int32_t head = 0; head < a.kv_heads(); ++head) {
      const std::span<const int32_t> one = a.head(layer, head);
      const std::span<const int32_t> other = b.head(layer, head);
      std::vector<int32_t> both;
      std::set_intersection(one.begin(), one.end(), other.begin(), other.end(), std::back_inserter(both));
      same += static_cast<int64_t>(both.size());
    }
  return static_cast<double>(same) / static_cast<double>(a.total());
}

class DeviceTest : public ::testing::TestWithParam<DeviceModel> {
 protected:
  void SetUp() override {
    const char* only = std::getenv("DROPKV_TEST_MODEL");
    if (only != nullptr && GetParam().name != std::string(only)) GTEST_SKIP() << "DROPKV_TEST_MODEL is " << only;
    const bool tiny = std::string(GetParam().file).empty();
    if (tiny) {
      made_ =
          (std::filesystem::temp_directory_path() / ("dropkv_device_" + std::to_string(::getpid()) + ".gguf")).string();
      ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel({.head_dim = 64, .seed = 9}), made_).ok());
    }
    const char* folder = std::getenv("DROPKV_MODELS");
    if (!tiny && folder == nullptr) GTEST_SKIP() << "DROPKV_MODELS is not set";
    const std::string path = tiny ? made_ : (std::filesystem::path(folder) / GetParam().file).string();
    if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
    Result<Model> gpu = Model::Load(path);
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    if (gpu->device() == "CPU") GTEST_SKIP() << "libllama finds no GPU";
    gpu_.emplace(std::move(*gpu));
    Result<Model> cpu = Model::Load(path, {.gpu_layers = 0});
    ASSERT_TRUE(cpu.ok()) << cpu.status().message();
    EXPECT_EQ(cpu->device(), "CPU");
    cpu_.emplace(std::move(*cpu));
    Result<Engine> engine = Engine::Create();
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    engine_.emplace(std::move(*engine));
    tokens_ = tiny ? RandomTokens() : gpu_->Tokenize(HarbourText(400), true, false);
    tokens_.resize(GetParam().prompt + kAnswer);
  }
  void TearDown() override {
    if (!made_.empty()) std::filesystem::remove(made_);
  }

  static std::vector<Token> RandomTokens() {
    std::mt19937 generator(4);
    std::vector<Token> tokens(GetParam().prompt + kAnswer);
    for (Token& token : tokens) token = testing::kFirstByteToken + static_cast<Token>(generator() % 300);
    return tokens;
  }

  std::span<const Token> Prompt() const { return std::span<const Token>(tokens_).first(GetParam().prompt); }

  PrefillOptions Options(bool flash_attention) {
    PrefillOptions options;
    options.window = 0;
    options.flash_attention = flash_attention;
    options.reserve = kAnswer;
    options.pool = engine_->pool();
    for (const char* name : {"dropkv", "adadropkv", "snapkv", "expected"})
      options.recipes.push_back(*baseline::FindRecipe(name));
    return options;
  }

  static Prefilled Prefill(const Model& model, std::span<const Token> prompt, const PrefillOptions& options) {
    Result<Prefilled> prefilled = llama::Prefill(model, {prompt.begin(), prompt.end()}, options);
    EXPECT_TRUE(prefilled.ok()) << prefilled.status().message();
    return std::move(*prefilled);
  }

  // The logits behind each of the tokens that follow the prompt.
  Logits Forced(Result<std::unique_ptr<Decoder>> decoder) {
    Logits logits;
    EXPECT_TRUE(decoder.ok()) << decoder.status().message();
    for (int32_t i = 0; i < kAnswer; ++i) {
      const int32_t position = GetParam().prompt + i;
      EXPECT_TRUE((*decoder)->Feed(std::span<const Token>(tokens_).subspan(position, 1), position).ok());
      logits.emplace_back((*decoder)->logits().begin(), (*decoder)->logits().end());
    }
    name_ = (*decoder)->name();
    EXPECT_TRUE((*decoder)->Rewind().ok());
    return logits;
  }

  std::string made_;
  std::optional<Model> gpu_;
  std::optional<Model> cpu_;
  std::optional<Engine> engine_;
  std::vector<Token> tokens_;
  std::string name_;  // of the last decoder
};

TEST_P(DeviceTest, SelfTestPasses) {
  for (const bool flash : {false, true})
    for (const DType type : {DType::kF16, DType::kF32, DType::kQ8_0}) {
      if (type == DType::kQ8_0 && !flash) continue;
      PrefillOptions options = Options(flash);
      options.kv_type = type;
      options.recipes.clear();
      for (const Model* model : {&*cpu_, &*gpu_}) {
        const Result<SelfTest> test = RunSelfTest(*model, Prompt(), options);
        EXPECT_TRUE(test.ok()) << test.status().message();
        if (!test.ok()) continue;
        std::printf("%s, %s, cache %s, flash attention %d: self-test overall %.2g, worst %.2g of %ld nodes\n",
                    GetParam().name, model->device().c_str(), std::string(DTypeName(type)).c_str(), flash,
                    test->overall, test->worst, static_cast<long>(test->nodes));
      }
    }
}

TEST_P(DeviceTest, PoliciesKeepWhatTheyKeepOnTheCpu) {
  const PrefillOptions options = Options(true);
  const Prefilled cpu = Prefill(*cpu_, Prompt(), options);
  const Prefilled gpu = Prefill(*gpu_, Prompt(), options);
  std::printf("%s: prefill %.2f s on the CPU, %.3f s on the GPU, statistics %.3f s, copy %.4f s\n", GetParam().name,
              cpu.seconds, gpu.seconds, gpu.statistics_seconds, gpu.copy_seconds);
  ASSERT_EQ(cpu.layers, gpu.layers);
  EXPECT_LT(cpu.copy_seconds, 1e-3);
  for (const baseline::Recipe& recipe : options.recipes) {
    const Result<Evicted> on_cpu = Evict(cpu, &*engine_, recipe, *ParseBudget("10%"));
    const Result<Evicted> on_gpu = Evict(gpu, &*engine_, recipe, *ParseBudget("10%"));
    ASSERT_TRUE(on_cpu.ok()) << on_cpu.status().message();
    ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().message();
    const double overlap = Overlap(on_cpu->keep, on_gpu->keep);
    std::printf("%s, %s at 10%%: same tokens %.4f, output error %.4f on the CPU, %.4f on the GPU, score %.3f s\n",
                GetParam().name, recipe.name().c_str(), overlap, on_cpu->output_error, on_gpu->output_error,
                on_gpu->score_seconds);
    EXPECT_EQ(on_cpu->keep.total(), on_gpu->keep.total());
    EXPECT_GT(overlap, 0.9) << recipe.name();
    EXPECT_NEAR(on_gpu->output_error / on_cpu->output_error, 1, 0.05) << recipe.name();
    EXPECT_NEAR(on_gpu->evicted_mass / on_cpu->evicted_mass, 1, 0.05) << recipe.name();
  }
}

// Uniform lists go through both decoders: the same rows, libllama's attention here, ours there. Quantised weights make
// 0.05 of any rounding; how far libllama's own two routes lie apart is the yardstick.
TEST_P(DeviceTest, DecodersAgree) {
  Logits full[2];
  double ours[2];
  double unevicted[2];
  for (const bool flash : {false, true}) {
    const PrefillOptions options = Options(flash);
    Prefilled prefilled = Prefill(*gpu_, Prompt(), options);
    if (prefilled.layers.empty()) GTEST_SKIP() << "every layer slides";
    const Result<Evicted> evicted = Evict(prefilled, &*engine_, options.recipes.front(), *ParseBudget("10%"));
    ASSERT_TRUE(evicted.ok()) << evicted.status().message();
    const KeepList all = KeepList::All(evicted->keep.layers(), evicted->keep.kv_heads(), prefilled.size());
    const Logits native = Forced(MakeNativeDecoder(&prefilled, evicted->keep, kAnswer));
    const Logits ragged = Forced(MakeRaggedDecoder(&prefilled, evicted->keep, kAnswer));
    EXPECT_EQ(name_, "ragged stop");
    const Logits everything = Forced(MakeRaggedDecoder(&prefilled, all, kAnswer));
    full[flash] = Forced(MakeFullDecoder(&prefilled));
    ours[flash] = Distance(native, ragged);
    unevicted[flash] = Distance(full[flash], everything);
    const double evicting = Distance(full[flash], native);
    std::printf("%s, flash attention %d: native to ragged %.2g, nothing evicted %.2g, eviction itself %.2g\n",
                GetParam().name, flash, ours[flash], unevicted[flash], evicting);
    EXPECT_LT(ours[flash], 0.25 * evicting);
  }
  const double yardstick = Distance(full[0], full[1]);
  std::printf("%s: libllama's two routes %.2g\n", GetParam().name, yardstick);
  for (const bool flash : {false, true}) {
    EXPECT_LT(ours[flash], 2 * yardstick) << flash;
    EXPECT_LT(unevicted[flash], 2 * yardstick) << flash;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceTest, ::testing::ValuesIn(kModels),
                         [](const ::testing::TestParamInfo<DeviceModel>& info) { return info.param.name; });

}  // namespace
}  // namespace dropkv::llama
