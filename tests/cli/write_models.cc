// dropkv_write_models FOLDER: the models and wrong files of the command line's tests.
#include <cstdio>
#include <string>
#include <utility>

#include "support/odd_models.h"
#include "support/tiny_model.h"

namespace dropkv::testing {
namespace {

Status WriteAll(const std::string& folder) {
  const std::pair<const char*, TinyConfig> tiny[] = {
      {"plain", {.arch = TinyArch::kLlama}},
      {"bos", {.arch = TinyArch::kLlama, .add_bos = true, .seed = 2}},
      {"chat", {.arch = TinyArch::kQwen2, .chat_template = kChatMlTemplate, .seed = 3}},
      {"sliding", {.arch = TinyArch::kGemma3, .layers = 4, .sliding_window = 64, .seed = 4}},
      {"short", {.arch = TinyArch::kLlama, .context = 128, .seed = 5}},
      // Slow enough to be interrupted.
      {"slow", {.arch = TinyArch::kLlama, .layers = 8, .heads = 8, .kv_heads = 4, .head_dim = 64, .seed = 6}},
  };
  for (const auto& [name, config] : tiny)
    DROPKV_RETURN_IF_ERROR(WriteTinyModel(MakeTinyModel(config), folder + "/" + name + ".gguf"));
  const std::pair<const char*, OddModel> odd[] = {
      {"recurrent", OddModel::kRecurrent},
      {"encoder_decoder", OddModel::kEncoderDecoder},
      {"latent", OddModel::kLatent},
      {"alibi", OddModel::kAlibi},
  };
  for (const auto& [name, kind] : odd) DROPKV_RETURN_IF_ERROR(WriteOddModel(kind, folder + "/" + name + ".gguf"));
  DROPKV_RETURN_IF_ERROR(WriteTruncated(folder + "/plain.gguf", 0.6, folder + "/truncated.gguf"));
  DROPKV_RETURN_IF_ERROR(WriteTruncated(folder + "/plain.gguf", 0.001, folder + "/truncated_early.gguf"));
  return WriteNotGguf(folder + "/text.gguf");
}

}  // namespace
}  // namespace dropkv::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: dropkv_write_models FOLDER\n");
    return 2;
  }
  const dropkv::Status status = dropkv::testing::WriteAll(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
