// Rows of W_O from files of several types against the tensor that was written, and the files that have none.
#include "llama/weights.h"

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using testing::NamedTensor;
using testing::TinyModel;

constexpr const char* kName = "blk.1.attn_output.weight";

class OutputWeightsTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  // Only the second layer's W_O, in the given type; parts > 1: as the first of so many files.
  void Write(ggml_type type, uint16_t parts = 1, const char* second = nullptr) {
    const NamedTensor& wo = model_.tensors.at(kName);
    const std::unique_ptr<ggml_context, void (*)(ggml_context*)> context(ggml_init({1 << 20, nullptr, false}),
                                                                         ggml_free);
    ggml_tensor* tensor = ggml_new_tensor_2d(context.get(), type, wo.shape[0], wo.shape[1]);
    ggml_quantize_chunk(type, wo.data.data(), tensor->data, 0, wo.shape[1], wo.shape[0], nullptr);
    ggml_set_name(tensor, kName);
    const std::unique_ptr<gguf_context, void (*)(gguf_context*)> file(gguf_init_empty(), gguf_free);
    // Tensors before and behind it, so that its offset is not zero.
    for (const char* name : {"a", second != nullptr ? second : "z"}) {
      ggml_tensor* other = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 7);
      ggml_set_name(other, name);
      gguf_add_tensor(file.get(), other);
      if (name[0] == 'a') gguf_add_tensor(file.get(), tensor);
    }
    if (parts > 1) gguf_set_val_u16(file.get(), "split.count", parts);
    ASSERT_TRUE(gguf_write_to_file(file.get(), path_.c_str(), false));
  }

  OutputWeights Open() {
    Result<OutputWeights> weights = OutputWeights::Open(path_);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return std::move(*weights);
  }

  int32_t columns() const { return static_cast<int32_t>(model_.tensors.at(kName).shape[0]); }

  TinyModel model_ = testing::MakeTinyModel({});
  std::string path_ =
      (std::filesystem::temp_directory_path() / ("dropkv_weights_" + std::to_string(::getpid()) + ".gguf")).string();
};

TEST_F(OutputWeightsTest, RowsOfEveryType) {
  const NamedTensor& wo = model_.tensors.at(kName);
  const float largest = *std::max_element(wo.data.begin(), wo.data.end());
  // Half a step of the type's numbers near the largest one.
  const std::pair<ggml_type, float> types[] = {{GGML_TYPE_F32, 0},
                                               {GGML_TYPE_F16, 0x1p-11F * largest},
                                               {GGML_TYPE_BF16, 0x1p-8F * largest},
                                               {GGML_TYPE_Q8_0, largest / 127},
                                               {GGML_TYPE_Q4_1, largest / 12}};
  for (const auto& [type, tolerance] : types) {
    SCOPED_TRACE(ggml_type_name(type));
    Write(type);
    Result<baseline::OutputProjection> projection = Open().Layer(1, columns());  // outlives its OutputWeights
    ASSERT_TRUE(projection.ok()) << projection.status().message();
    ASSERT_EQ(projection->columns, wo.shape[0]);
    ASSERT_EQ(projection->hidden, wo.shape[1]);
    std::vector<float> row(projection->columns);
    double error = 0;
    for (int32_t i = 0; i < projection->hidden; ++i) {
      projection->read_row(i, row.data());
      for (int32_t j = 0; j < projection->columns; ++j) {
        const float difference = std::abs(row[j] - wo.data[i * projection->columns + j]);
        ASSERT_LE(difference, tolerance) << i << ", " << j;
        error += difference;
      }
    }
    EXPECT_EQ(error == 0, type == GGML_TYPE_F32);
  }
}

TEST_F(OutputWeightsTest, RowsFromSeveralThreads) {
  Write(GGML_TYPE_Q8_0);
  const Result<baseline::OutputProjection> projection = Open().Layer(1, columns());
  ASSERT_TRUE(projection.ok());
  const auto read = [&](std::vector<float>* all) {
    all->resize(static_cast<size_t>(projection->hidden) * projection->columns);
    for (int32_t i = 0; i < projection->hidden; ++i)
      projection->read_row(i, all->data() + static_cast<size_t>(i) * projection->columns);
  };
  std::vector<float> got[4];
  std::vector<std::thread> threads;
  for (std::vector<float>& all : got) threads.emplace_back(read, &all);
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& all : got) EXPECT_EQ(all, got[0]);
}

TEST_F(OutputWeightsTest, SaysWhatIsMissing) {
  const auto message = [&](int32_t layer, int32_t columns) {
    const Result<baseline::OutputProjection> projection = Open().Layer(layer, columns);
    EXPECT_FALSE(projection.ok());
    EXPECT_EQ(projection.status().code(), Code::kUnsupported);
    return projection.status().message();
  };
  Write(GGML_TYPE_F16);
  EXPECT_NE(message(0, columns()).find("'blk.0.attn_output.weight'"), std::string::npos);
  EXPECT_EQ(message(0, columns()).find("parts"), std::string::npos);
  EXPECT_NE(message(1, 32).find("expected 32 columns, got 128"), std::string::npos);
  Write(GGML_TYPE_F16, 3);
  EXPECT_NE(message(0, columns()).find("one of 3 parts"), std::string::npos);
  EXPECT_TRUE(Open().Layer(1, columns()).ok());
  Write(GGML_TYPE_F16, 1, "blk.1.attn_output.scale");
  EXPECT_NE(message(1, columns()).find("'blk.1.attn_output.scale'"), std::string::npos);
}

TEST_F(OutputWeightsTest, RefusesFilesThatItCannotRead) {
  EXPECT_EQ(OutputWeights::Open(path_ + ".nowhere").status().code(), Code::kIo);
  Write(GGML_TYPE_F32);
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) / 2);
  EXPECT_EQ(OutputWeights::Open(path_).status().code(), Code::kIo);
  std::ofstream(path_) << "no model";
  EXPECT_EQ(OutputWeights::Open(path_).status().code(), Code::kIo);
}

}  // namespace
}  // namespace dropkv::llama
