// Golden layers: inputs of one attention layer and what public implementations, and a float64 program written from
// docs/algorithm.md alone, computed from them. The files lie outside the tree; DROPKV_GOLDEN names their folder.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "dropkv/cache_view.h"
#include "dropkv/keep_list.h"
#include "io/safetensors.h"

namespace dropkv::testing {

// One file. Tensors are read by Doubles; a missing one fails the test.
class GoldenLayer {
 public:
  explicit GoldenLayer(const std::string& path);

  bool ok() const { return ok_; }
  int32_t query_heads() const { return query_heads_; }
  int32_t kv_heads() const { return kv_heads_; }
  int32_t tokens() const { return tokens_; }
  int32_t head_dim() const { return head_dim_; }
  const io::Safetensors& file() const { return *file_; }

  KvView View() const;
  AttentionSpec Attention() const;
  // By how much any logit may be off because AttentionSpec holds the scale as float32 and the golden programs as
  // float64; 0 where the scale is a power of two.
  double LogitError() const;
  // The last `window` prompt rows.
  ObservationRows Rows(int32_t window);

  std::vector<double> Doubles(const std::string& name) const;
  // Tensor names that begin with `prefix`.
  std::vector<std::string> Names(const std::string& prefix) const;

  // A [Hkv, kept] tensor of indices, or a [Hkv, n] mask, as a mask.
  std::vector<uint8_t> KeptMask(const std::string& name) const;

 private:
  std::unique_ptr<io::Safetensors> file_;
  bool ok_ = false;
  int32_t query_heads_ = 0;
  int32_t kv_heads_ = 0;
  int32_t tokens_ = 0;
  int32_t head_dim_ = 0;
  double scale_ = 0.0;
  double soft_cap_ = 0.0;
  std::vector<float> q_, k_, v_, sinks_;
  std::vector<int32_t> visible_;
};

// Golden files of the folder, without their extension; a placeholder where DROPKV_GOLDEN is unset.
std::vector<std::string> GoldenNames();

// Base of the tests: one parameter per file, skipped where there are none.
class GoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override;
  std::unique_ptr<GoldenLayer> layer_;
};

// List `layer` 0 of `keep` as a mask [Hkv, n].
std::vector<uint8_t> MaskOf(const KeepList& keep, int32_t n);

// Largest |a - b| over the largest |b|.
double RelativeError(const std::vector<double>& actual, const std::vector<double>& expected);

// "32" out of "dropkv.exact.w32.raw" with the marker ".w"; -1 where it is missing.
double NumberAfter(const std::string& name, const std::string& marker);

}  // namespace dropkv::testing
