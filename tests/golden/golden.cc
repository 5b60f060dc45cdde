#include "golden/golden.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>

namespace dropkv::testing {
namespace {

constexpr const char* kVariable = "DROPKV_GOLDEN";
constexpr const char* kExtension = ".safetensors";
constexpr const char* kNone = "none";

}  // namespace

GoldenLayer::GoldenLayer(const std::string& path) {
  Result<io::Safetensors> file = io::Safetensors::Open(path);
  EXPECT_TRUE(file.ok()) << file.status().message();
  if (!file.ok()) return;
  file_ = std::make_unique<io::Safetensors>(std::move(*file));
  const auto number = [&](const char* key, double missing) {
    const Result<double> value = file_->Number(key);
    return value.ok() ? *value : missing;
  };
  query_heads_ = static_cast<int32_t>(number("hq", 0));
  kv_heads_ = static_cast<int32_t>(number("hkv", 0));
  tokens_ = static_cast<int32_t>(number("n", 0));
  head_dim_ = static_cast<int32_t>(number("d", 0));
  scale_ = number("scale", 0.0);
  soft_cap_ = number("soft_cap", 0.0);
  const auto floats = [&](const char* name, size_t heads) {
    const Result<std::vector<float>> values = file_->ReadFloats(name);
    EXPECT_TRUE(values.ok()) << values.status().message();
    EXPECT_EQ(values.ok() ? values->size() : 0, heads * tokens_ * head_dim_) << name;
    return values.ok() ? *values : std::vector<float>();
  };
  q_ = floats("q", query_heads_);
  k_ = floats("k", kv_heads_);
  v_ = floats("v", kv_heads_);
  if (file_->Find("sinks") != nullptr) sinks_ = *file_->ReadFloats("sinks");
  ok_ = !q_.empty() && !k_.empty() && !v_.empty() && (sinks_.empty() || sinks_.size() == size_t(query_heads_));
  EXPECT_TRUE(ok_) << path;
}

KvView GoldenLayer::View() const {
  KvView view{kv_heads_, tokens_, head_dim_, head_dim_, {}, {}, nullptr};
  view.k = {k_.data(), DType::kF32, static_cast<int64_t>(tokens_) * head_dim_, head_dim_, 1};
  view.v = {v_.data(), DType::kF32, static_cast<int64_t>(tokens_) * head_dim_, head_dim_, 1};
  return view;
}

AttentionSpec GoldenLayer::Attention() const {
  return {static_cast<float>(scale_), static_cast<float>(soft_cap_), sinks_.empty() ? nullptr : sinks_.data()};
}

double GoldenLayer::LogitError() const {
  const auto largest_norm = [&](const std::vector<float>& vectors) {
    double largest = 0.0;
    for (size_t first = 0; first < vectors.size(); first += head_dim_) {
      double sum = 0.0;
      for (int32_t c = 0; c < head_dim_; ++c) sum += std::pow(vectors[first + c], 2.0);
      largest = std::max(largest, std::sqrt(sum));
    }
    return largest;
  };
  return std::abs(static_cast<float>(scale_) - scale_) * largest_norm(q_) * largest_norm(k_);
}

ObservationRows GoldenLayer::Rows(int32_t window) {
  visible_.resize(window);
  std::iota(visible_.begin(), visible_.end(), tokens_ - window + 1);
  const float* first = q_.data() + static_cast<size_t>(tokens_ - window) * head_dim_;
  return {first, static_cast<int64_t>(tokens_) * head_dim_, head_dim_, query_heads_, window, visible_.data()};
}

std::vector<double> GoldenLayer::Doubles(const std::string& name) const {
  Result<std::vector<double>> values = file_->ReadDoubles(name);
  EXPECT_TRUE(values.ok()) << values.status().message();
  return values.ok() ? std::move(*values) : std::vector<double>();
}

std::vector<std::string> GoldenLayer::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : file_->tensors())
    if (name.starts_with(prefix)) names.push_back(name);
  return names;
}

std::vector<uint8_t> GoldenLayer::KeptMask(const std::string& name) const {
  const std::vector<double> values = Doubles(name);
  const size_t count = static_cast<size_t>(kv_heads_) * tokens_;
  if (file_->Find(name)->dtype == "U8") {
    EXPECT_EQ(values.size(), count) << name;
    return {values.begin(), values.end()};
  }
  std::vector<uint8_t> mask(count, 0);
  const size_t kept = values.size() / kv_heads_;
  for (size_t i = 0; i < values.size(); ++i) mask[i / kept * tokens_ + static_cast<size_t>(values[i])] = 1;
  return mask;
}

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names;
  const char* folder = std::getenv(kVariable);
  std::error_code error;
  if (folder != nullptr)
    for (const auto& entry : std::filesystem::directory_iterator(folder, error))
      if (entry.path().extension() == kExtension) names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  if (names.empty()) names.emplace_back(kNone);
  return names;
}

void GoldenTest::SetUp() {
  const char* folder = std::getenv(kVariable);
  if (folder == nullptr) GTEST_SKIP() << kVariable << " is unset: it names the folder of the golden files";
  ASSERT_NE(GetParam(), kNone) << kVariable << " names a folder without " << kExtension << " files: " << folder;
  layer_ = std::make_unique<GoldenLayer>(std::string(folder) + "/" + GetParam() + kExtension);
  ASSERT_TRUE(layer_->ok());
}

std::vector<uint8_t> MaskOf(const KeepList& keep, int32_t n) {
  std::vector<uint8_t> mask(static_cast<size_t>(keep.kv_heads()) * n, 0);
  for (int32_t u = 0; u < keep.kv_heads(); ++u)
    for (const int32_t j : keep.head(0, u)) mask[static_cast<size_t>(u) * n + j] = 1;
  return mask;
}

double RelativeError(const std::vector<double>& actual, const std::vector<double>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  if (actual.size() != expected.size()) return INFINITY;
  double error = 0.0;
  double largest = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(actual[i] - expected[i]);
    if (!(difference <= error)) error = difference;  // a NaN stays
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0.0 ? error / largest : error;
}

double NumberAfter(const std::string& name, const std::string& marker) {
  const size_t at = name.find(marker);
  return at == std::string::npos ? -1.0 : std::strtod(name.c_str() + at + marker.size(), nullptr);
}

}  // namespace dropkv::testing
