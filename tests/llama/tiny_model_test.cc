// The files of tests/support load in libllama, tokenize any text, and are refused where they should be.
#include "support/tiny_model.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/libllama.h"
#include "support/odd_models.h"

namespace dropkv::testing {
namespace {

std::string PathOf(const std::string& name) { return (std::filesystem::path(::testing::TempDir()) / name).string(); }

std::string Write(const TinyConfig& config, const std::string& name) {
  const std::string path = PathOf(name);
  const Status status = WriteTinyModel(MakeTinyModel(config), path);
  EXPECT_TRUE(status.ok()) << status.message();
  return path;
}

std::string Bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

TEST(TinyModel, HasTheShapesOfItsConfig) {
  TinyConfig config{.layers = 3, .heads = 6, .kv_heads = 2, .head_dim = 16, .embedding = 96, .context = 2048};
  for (const TinyArch arch : {TinyArch::kLlama, TinyArch::kQwen2, TinyArch::kQwen3, TinyArch::kGemma3}) {
    config.arch = arch;
    config.sliding_window = arch == TinyArch::kGemma3 ? 64 : 0;
    const ModelPtr model = LoadModel(Write(config, "shapes.gguf"));
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(llama_model_n_layer(model.get()), 3);
    EXPECT_EQ(llama_model_n_head(model.get()), 6);
    EXPECT_EQ(llama_model_n_head_kv(model.get()), 2);
    EXPECT_EQ(llama_model_n_embd(model.get()), 96);
    EXPECT_EQ(llama_model_n_ctx_train(model.get()), 2048);
    EXPECT_EQ(llama_model_n_swa(model.get()), config.sliding_window);
    EXPECT_EQ(llama_vocab_n_tokens(llama_model_get_vocab(model.get())), config.vocabulary);
  }
}

TEST(TinyModel, SameSeedSameBytes) {
  const std::string first = Bytes(Write({.seed = 5}, "seed_a.gguf"));
  EXPECT_EQ(first, Bytes(Write({.seed = 5}, "seed_b.gguf")));
  EXPECT_NE(first, Bytes(Write({.seed = 6}, "seed_c.gguf")));
}

TEST(TinyModel, AnyTextHasTokensAndComesBack) {
  const ModelPtr model = LoadModel(Write({}, "text.gguf"));
  ASSERT_NE(model, nullptr);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  const std::string text = "The other one: 42 + \xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\t\n{}";
  std::vector<llama_token> tokens(text.size() + 8);
  const int32_t count = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                       static_cast<int32_t>(tokens.size()), true, false);
  ASSERT_GT(count, 0);
  EXPECT_LT(count, static_cast<int32_t>(text.size())) << "pairs such as \"th\" are one token";
  std::string back(4 * text.size(), '\0');
  const int32_t length =
      llama_detokenize(vocab, tokens.data(), count, back.data(), static_cast<int32_t>(back.size()), false, false);
  ASSERT_GT(length, 0);
  back.resize(length);
  EXPECT_EQ(back, text);
}

TEST(TinyModel, ControlTokensAndTemplate) {
  const ModelPtr model = LoadModel(Write({.add_bos = true, .chat_template = kChatMlTemplate}, "chat.gguf"));
  ASSERT_NE(model, nullptr);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  const std::string text = "<|im_start|>a<|im_end|>";
  std::vector<llama_token> tokens(32);
  tokens.resize(llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(), 32, true, true));
  ASSERT_EQ(tokens.size(), 4U);
  EXPECT_EQ(tokens[0], kBosToken);
  EXPECT_EQ(tokens[1], kImStartToken);
  EXPECT_EQ(tokens[3], kImEndToken);
  EXPECT_STREQ(llama_model_chat_template(model.get(), nullptr), kChatMlTemplate);
  const llama_chat_message message{"user", "hi"};
  std::string prompt(256, '\0');
  prompt.resize(llama_chat_apply_template(kChatMlTemplate, &message, 1, true, prompt.data(), 256));
  EXPECT_EQ(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(llama_model_chat_template(LoadModel(Write({}, "no_chat.gguf")).get(), nullptr), nullptr);
}

struct OddCase {
  OddModel kind;
  bool recurrent;
  bool encoder;
};

TEST(OddModels, LoadAndSayWhatTheyAre) {
  const OddCase cases[] = {{OddModel::kRecurrent, true, false},
                           {OddModel::kEncoderDecoder, false, true},
                           {OddModel::kLatent, false, false},
                           {OddModel::kAlibi, false, false}};
  for (const OddCase& odd : cases) {
    SCOPED_TRACE(static_cast<int>(odd.kind));
    const std::string path = PathOf("odd.gguf");
    ASSERT_TRUE(WriteOddModel(odd.kind, path).ok());
    const ModelPtr model = LoadModel(path);
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(llama_model_is_recurrent(model.get()), odd.recurrent);
    EXPECT_EQ(llama_model_has_encoder(model.get()), odd.encoder);
    if (odd.encoder) continue;  // needs an encoded input before it decodes
    const ContextPtr context(llama_init_from_model(model.get(), PlainContext(256, GGML_TYPE_F32, false)));
    ASSERT_NE(context, nullptr);
    const std::vector<int32_t> tokens = {7, 8, 9};
    EXPECT_FALSE(DecodeTokens(context.get(), tokens).empty());
  }
}

TEST(BrokenFiles, DoNotLoad) {
  const std::string whole = Write({}, "whole.gguf");
  ASSERT_NE(LoadModel(whole), nullptr);
  for (const double share : {0.0, 0.001, 0.05, 0.5, 0.99}) {
    const std::string path = PathOf("part.gguf");
    ASSERT_TRUE(WriteTruncated(whole, share, path).ok());
    EXPECT_EQ(LoadModel(path), nullptr) << share;
  }
  ASSERT_TRUE(WriteNotGguf(PathOf("text_file.gguf")).ok());
  EXPECT_EQ(LoadModel(PathOf("text_file.gguf")), nullptr);
  EXPECT_EQ(WriteNotGguf(PathOf("no/such/folder/x.gguf")).code(), Code::kIo);
  EXPECT_EQ(WriteTruncated(PathOf("absent.gguf"), 0.5, PathOf("part.gguf")).code(), Code::kIo);
}

}  // namespace
}  // namespace dropkv::testing
