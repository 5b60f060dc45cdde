// Lists of wrong lengths, and models and caches that lack what a policy reads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "llama/evict_recipe.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using baseline::LayerRule;
using baseline::Recipe;

// libllama multiplies queries, keys and values by a matrix of its own before it quantises a cache of such heads.
TEST(Needs, ARotatedCacheIsRefusedByName) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("dropkv_rotated_" + std::to_string(::getpid()) + ".gguf")).string();
  ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel({.head_dim = 64, .seed = 8}), path).ok());
  const Result<Model> model = Model::Load(path, {.gpu_layers = 0});
  ASSERT_TRUE(model.ok()) << model.status().message();
  const std::vector<Token> tokens(100, testing::kFirstByteToken);
  for (const DType type : {DType::kF16, DType::kQ8_0})
    for (const char* name :
         {"expected", "capkv", "compactor", "criticalkv", "defensivekv", "dropkv-wo", "h2o", "cur"}) {
      PrefillOptions options;
      options.threads = 1;
      options.kv_type = type;
      options.recipes = {*baseline::FindRecipe(name)};
      const baseline::Needs needs = baseline::NeedsOf(options.recipes.front());
      const bool hidden = needs.pre_rope_keys || needs.pre_rope_queries || needs.output_projection;
      const Result<Prefilled> prefilled = Prefill(*model, tokens, options);
      const Result<SelfTest> test = RunSelfTest(*model, tokens, options);
      const bool refused = type == DType::kQ8_0 && hidden;
      ASSERT_EQ(prefilled.ok(), !refused) << name << ": " << prefilled.status().message();
      ASSERT_EQ(test.ok(), !refused) << name << ": " << test.status().message();
      for (const Status& status : {prefilled.status(), test.status()}) {
        if (!refused) continue;
        EXPECT_EQ(status.code(), Code::kUnsupported);
        EXPECT_NE(status.message().find(std::string("policy ") + name), std::string::npos) << status.message();
        EXPECT_NE(status.message().find("--kv f16"), std::string::npos) << status.message();
      }
    }
  std::filesystem::remove(path);
}

TEST(Needs, AModelFileThatIsGoneIsAnError) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("dropkv_gone_" + std::to_string(::getpid()) + ".gguf")).string();
  ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel({}), path).ok());
  const Result<Model> model = Model::Load(path, {.gpu_layers = 0});
  ASSERT_TRUE(model.ok()) << model.status().message();
  std::filesystem::remove(path);
  PrefillOptions options;
  options.recipes = {*baseline::FindRecipe("criticalkv")};
  const Result<Prefilled> prefilled = Prefill(*model, std::vector<Token>(100, testing::kFirstByteToken), options);
  ASSERT_FALSE(prefilled.ok());
  EXPECT_EQ(prefilled.status().code(), Code::kIo);
}

Recipe Uniform() { return *baseline::FindRecipe("knorm"); }

// Lists that are not what the budget says are an internal error.
TEST(CheckCounts, FindsEveryWrongCount) {
  const auto scores = [](int32_t layers) {
    baseline::LayerScores layer;
    layer.kv_heads = 2;
    layer.tokens = 10;
    layer.is_protected.assign(10, 0);
    return std::vector<baseline::LayerScores>(layers, layer);
  };
  const auto select = [](std::vector<int64_t> offsets, std::vector<int32_t> positions, std::vector<int32_t> keep) {
    baseline::Selection selection;
    const auto layers = static_cast<int32_t>(keep.size());
    selection.keep = KeepList(layers, 2, std::move(offsets), std::move(positions));
    selection.budgets.keep = std::move(keep);
    return selection;
  };
  const std::vector<baseline::LayerScores> one = scores(1);
  EXPECT_TRUE(CheckCounts(Uniform(), one, select({0, 2, 4}, {1, 2, 3, 4}, {2})).ok());
  EXPECT_EQ(CheckCounts(Uniform(), one, select({0, 2, 4}, {1, 2, 3, 4}, {3})).code(), Code::kInternal);
  EXPECT_EQ(CheckCounts(Uniform(), one, select({0, 1, 4}, {1, 2, 3, 4}, {2})).code(), Code::kInternal);
  Recipe ada = Uniform();
  ada.policy.heads = HeadRule::kAda;
  EXPECT_TRUE(CheckCounts(ada, one, select({0, 1, 4}, {1, 2, 3, 4}, {2})).ok());
  EXPECT_EQ(CheckCounts(ada, one, select({0, 1, 3}, {1, 2, 3}, {2})).code(), Code::kInternal);
  std::vector<baseline::LayerScores> kept = scores(1);
  kept[0].is_protected[9] = 1;
  const Status lost = CheckCounts(ada, kept, select({0, 1, 4}, {9, 2, 3, 4}, {2}));
  EXPECT_EQ(lost.code(), Code::kInternal);
  EXPECT_NE(lost.message().find("head 1 lost the protected token 9"), std::string::npos) << lost.message();
  Recipe flat = Uniform();
  flat.layers = LayerRule::kFlat;
  flat.flat_heads = true;
  const std::vector<baseline::LayerScores> two = scores(2);
  baseline::Selection selection = select({0, 1, 4, 4, 5}, {1, 2, 3, 4, 5}, {2, 2});
  selection.budgets.total = 5;
  EXPECT_TRUE(CheckCounts(flat, two, selection).ok());
  selection.budgets.total = 6;
  EXPECT_EQ(CheckCounts(flat, two, selection).code(), Code::kInternal);
}

}  // namespace
}  // namespace dropkv::llama
