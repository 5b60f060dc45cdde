// Test files for `dropkv score`: a layer of random numbers, as somebody else would write it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/element.h"
#include "core/random.h"
#include "io/safetensors.h"

namespace dropkv::cli {

struct Array {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

struct LayerFile {
  std::map<std::string, Array> tensors;
  io::StringMap metadata;
  std::string dtype = "F32";

  LayerFile(int64_t hq, int64_t hkv, int64_t n, int64_t d, int64_t dv) {
    Add("q", {hq, n, d}, 2.0F);
    Add("k", {hkv, n, d}, 2.0F);
    Add("v", {hkv, n, dv}, 1.0F);
    Add("q_pre", {hq, n, d}, 2.0F);
    Add("k_pre", {hkv, n, d}, 2.0F);
    Add("wo", {hq * dv, hq * dv}, 1.0F);
    metadata = {{"scale", "0.5"}, {"rope_theta", "10000"}, {"layer", "1"}, {"layers", "4"}};
  }

  void Add(const std::string& name, std::vector<int64_t> shape, float scale) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    Array array{std::move(shape), {}};
    for (int64_t i = 0; i < count; ++i)
      array.values.push_back(scale * (RandomUniform(tensors.size() + 11, static_cast<uint64_t>(i)) - 0.5F));
    tensors[name] = std::move(array);
  }

  void Write(const std::string& path) const {
    std::map<std::string, std::vector<uint16_t>> halves;
    std::vector<io::TensorSource> sources;
    for (const auto& [name, array] : tensors) {
      if (dtype == "F32") {
        sources.push_back(io::MakeTensorSource(name, dtype, array.shape, array.values));
        continue;
      }
      std::vector<uint16_t>& half = halves[name];
      for (const float x : array.values) half.push_back(dtype == "F16" ? FloatToHalf(x) : FloatToBFloat(x));
      sources.push_back(io::MakeTensorSource(name, dtype, array.shape, half));
    }
    const Status status = io::WriteSafetensors(path, std::move(sources), metadata);
    ASSERT_TRUE(status.ok()) << status.message();
  }
};

}  // namespace dropkv::cli
