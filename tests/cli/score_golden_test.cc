// `dropkv score` against the golden files: every policy they name, at every budget, from the arguments to the file that
// is written. Where the reference's choice is arbitrary (equal scores), only that is asked which is not.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "cli/score.h"
#include "golden/golden.h"
#include "io/safetensors.h"
#include "reference/reference.h"

namespace dropkv::cli {
namespace {

namespace fs = std::filesystem;
using testing::GoldenNames;
using testing::NumberAfter;

constexpr double kScoreError = 1e-5;   // float32 beside float64, of the tensor's largest value
constexpr double kCompatError = 1e-3;  // the expanded form cancels: sums in another order differ by this much
constexpr double kCertificateError = 1e-4;
constexpr double kUndoneError = 1e-4;  // angles in float32 there
constexpr double kTieBand = 1e-5;      // choices between scores this close are arbitrary
constexpr double kHuge = 1e30;         // stands for the largest float32, which marks CriticalKV's first stage

struct Output {
  std::vector<double> score;
  std::vector<double> mask;
  std::vector<double> error;
  std::vector<double> mass;
};

class ScoreGolden : public testing::GoldenTest {
 protected:
  void SetUp() override {
    GoldenTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    input_ = std::string(std::getenv("DROPKV_GOLDEN")) + "/" + GetParam() + ".safetensors";
    output_ =
        (fs::path(::testing::TempDir()) / ("dropkv_score_" + std::to_string(::getpid()) + ".safetensors")).string();
  }
  void TearDown() override {
    fs::remove(output_);
    fs::remove(output_ + ".in");
  }

  Output Run(std::vector<std::string> flags) {
    flags.insert(flags.begin(), {input_, "--out", output_, "--threads", "2"});
    ::testing::internal::CaptureStdout();
    const Status status = Score(flags);
    const std::string text = ::testing::internal::GetCapturedStdout();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(text.empty(), !status.ok());
    if (!status.ok()) return {};
    const Result<io::Safetensors> file = io::Safetensors::Open(output_);
    EXPECT_TRUE(file.ok()) << file.status().message();
    if (!file.ok()) return {};
    CheckKept(*file);
    return {*file->ReadDoubles("score"), *file->ReadDoubles("kept_mask"), *file->ReadDoubles("output_error"),
            *file->ReadDoubles("evicted_mass")};
  }

  // The two forms of what is kept say the same; lists ascend.
  void CheckKept(const io::Safetensors& file) {
    const std::vector<double> mask = *file.ReadDoubles("kept_mask");
    std::vector<double> rebuilt(mask.size(), 0.0);
    const std::vector<double> kept = *file.ReadDoubles("kept");
    std::vector<double> offsets;
    if (file.Find("kept_offsets") != nullptr) {
      offsets = *file.ReadDoubles("kept_offsets");
      EXPECT_EQ(file.Find("kept")->shape.size(), 1U);
    } else {
      ASSERT_EQ(file.Find("kept")->shape.size(), 2U);
      for (int32_t u = 0; u <= layer_->kv_heads(); ++u)
        offsets.push_back(static_cast<double>(u) * static_cast<double>(file.Find("kept")->shape[1]));
    }
    ASSERT_EQ(offsets.size(), static_cast<size_t>(layer_->kv_heads()) + 1);
    ASSERT_EQ(offsets.back(), static_cast<double>(kept.size()));
    for (int32_t u = 0; u < layer_->kv_heads(); ++u)
      for (auto i = static_cast<size_t>(offsets[u]); i < static_cast<size_t>(offsets[u + 1]); ++i) {
        if (i > static_cast<size_t>(offsets[u])) EXPECT_LT(kept[i - 1], kept[i]);
        rebuilt[static_cast<size_t>(u) * layer_->tokens() + static_cast<size_t>(kept[i])] = 1.0;
      }
    EXPECT_EQ(rebuilt, mask);
  }

  // Over the last `rows` rows, by the float64 reference.
  void ExpectCertificate(const Output& got, int32_t rows) {
    std::vector<int64_t> offsets{0};
    std::vector<int32_t> positions;
    for (size_t i = 0; i < got.mask.size(); ++i) {
      const auto token = static_cast<int32_t>(i % layer_->tokens());
      if (got.mask[i] != 0.0) positions.push_back(token);
      if (token == layer_->tokens() - 1) offsets.push_back(static_cast<int64_t>(positions.size()));
    }
    const KeepList keep(1, layer_->kv_heads(), offsets, positions);
    const reference::Certificate want =
        reference::Certify(layer_->View(), layer_->Rows(rows), layer_->Attention(), keep, 0);
    EXPECT_LE(testing::RelativeError(got.error, want.output_error), kCertificateError);
    EXPECT_LE(testing::RelativeError(got.mass, want.evicted_mass), kCertificateError);
  }

  int32_t Count(const std::vector<double>& mask, int32_t head) const {
    const auto first = mask.begin() + static_cast<std::ptrdiff_t>(head) * layer_->tokens();
    return static_cast<int32_t>(std::count(first, first + layer_->tokens(), 1.0));
  }

  // Padded scores of the policy that a name is built on, which its ties are found in; empty where the file has none.
  std::vector<double> BaseScores(const std::string& name) const {
    for (const std::string& candidate : std::vector{"score." + name, "score." + Base(name)})
      if (layer_->file().Find(candidate) != nullptr) return layer_->Doubles(candidate);
    return {};
  }

  // "ada0.2.knorm" -> "knorm", "critical.snapkv.w32.k5" -> "snapkv.w32.k5", "chunkkv.20.snapkv" -> "snapkv".
  static std::string Base(const std::string& name) {
    for (const char* base : {"snapkv.", "knorm"})
      if (const size_t at = name.find(base); at != std::string::npos) return name.substr(at);
    return name;
  }

  // What a chunk is worth: the mean over its tokens of the sum over heads. Chunks of equal worth are tied as a whole.
  std::vector<double> ChunkScores(const std::vector<double>& scores, size_t chunk) const {
    const auto n = static_cast<size_t>(layer_->tokens());
    std::vector<double> worth(scores.size(), 0.0);
    for (size_t first = 0; first < n; first += chunk) {
      const size_t count = std::min(chunk, n - first);
      double sum = 0;
      for (size_t i = 0; i < count * layer_->kv_heads(); ++i) sum += scores[i / count * n + first + i % count];
      for (size_t i = 0; i < count * layer_->kv_heads(); ++i)
        worth[i / count * n + first + i % count] = sum / static_cast<double>(count);
    }
    return worth;
  }

  std::string input_;
  std::string output_;
};

std::string NameOf(const std::string& tensor, const std::string& prefix) {
  return tensor.substr(prefix.size(), tensor.find('@') - prefix.size());
}

std::string RatioOf(const std::string& tensor, const std::string& otherwise) {
  const size_t at = tensor.find('@');
  return at == std::string::npos ? otherwise : tensor.substr(at + 1);
}

bool AreTied(double a, double b) { return std::abs(a - b) <= kTieBand * std::max(std::abs(a), std::abs(b)); }

std::vector<double> HeadOf(const std::vector<double>& all, int32_t head, int32_t n) {
  const auto first = all.begin() + std::min(all.size(), static_cast<size_t>(head) * n);
  return {first, first + (all.empty() ? 0 : n)};
}

// Tokens that only one of the two masks keeps must have scores in one tie band.
void ExpectSameKept(const std::vector<double>& got, const std::vector<double>& want,
                    const std::vector<double>& scores) {
  ASSERT_EQ(got.size(), want.size());
  double least = INFINITY;
  double greatest = -INFINITY;
  int32_t differ = 0;
  for (size_t j = 0; j < got.size(); ++j) {
    if (got[j] == want[j]) continue;
    ++differ;
    if (scores.empty()) continue;
    least = std::min(least, scores[j]);
    greatest = std::max(greatest, scores[j]);
  }
  if (differ == 0) return;
  EXPECT_FALSE(scores.empty()) << differ << " tokens differ";
  EXPECT_TRUE(AreTied(least, greatest)) << differ << " tokens differ, with scores " << least << " to " << greatest;
}

TEST_P(ScoreGolden, Scores) {
  std::map<std::string, double> errors;
  for (const std::string& tensor : layer_->Names("score.")) {
    const std::string name = NameOf(tensor, "score.");
    SCOPED_TRACE(tensor);
    const Output got = Run({"--policy", name, "--parity", "--compression-ratio", RatioOf(tensor, "0.5")});
    const std::vector<double> want = layer_->Doubles(tensor);
    ASSERT_EQ(got.score.size(), want.size());
    const std::vector<double> base = BaseScores(Base(name));
    double error = 0;
    double largest = 0;
    int32_t first_stage = 0;
    for (size_t j = 0; j < want.size(); ++j) {
      first_stage += (got.score[j] > kHuge ? 1 : 0) - (want[j] > kHuge ? 1 : 0);
      // Which of the tied window tokens fill the first stage is arbitrary.
      if (got.score[j] > kHuge && want[j] > kHuge) continue;
      if (got.score[j] > kHuge || want[j] > kHuge) {
        ASSERT_TRUE(AreTied(base[j], *std::max_element(base.begin(), base.end()))) << "token " << j;
        continue;
      }
      error = std::max(error, std::abs(got.score[j] - want[j]));
      largest = std::max(largest, std::abs(want[j]));
    }
    EXPECT_EQ(first_stage, 0);
    EXPECT_LE(error, kScoreError * largest);
    errors[tensor] = error / largest;
  }
  for (const auto& [tensor, error] : errors) RecordProperty(tensor, std::to_string(error));
  if (std::getenv("DROPKV_VERBOSE") != nullptr)
    for (const auto& [tensor, error] : errors) std::printf("%-40s %.2e\n", tensor.c_str(), error);
  EXPECT_EQ(errors.empty(), GetParam().starts_with("synthetic"));
}

TEST_P(ScoreGolden, KeptTokens) {
  for (const std::string& tensor : layer_->Names("kept.")) {
    SCOPED_TRACE(tensor);
    const std::string name = NameOf(tensor, "kept.");
    const Output got = Run({"--policy", name, "--compression-ratio", RatioOf(tensor, "")});
    const std::vector<uint8_t> mask = layer_->KeptMask(tensor);
    const std::vector<double> want(mask.begin(), mask.end());
    ASSERT_EQ(got.mask.size(), want.size());
    const bool below_window = Count(want, 0) < NumberAfter(name, ".w");
    const bool chunks = name.starts_with("chunkkv.");
    const int32_t n = layer_->tokens();
    std::vector<double> scores = BaseScores(name);
    if (chunks) scores = ChunkScores(scores, static_cast<size_t>(NumberAfter(name, "chunkkv.")));
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
      if (!chunks) EXPECT_EQ(Count(got.mask, u), Count(want, u));
      // Which window tokens fill CriticalKV's first stage is arbitrary, and so are the others then.
      if (name.starts_with("critical.") && below_window) continue;
      ExpectSameKept(HeadOf(got.mask, u, n), HeadOf(want, u, n), HeadOf(scores, u, n));
    }
  }
}

TEST_P(ScoreGolden, AdaptiveMasks) {
  for (const std::string& tensor : layer_->Names("mask.")) {
    SCOPED_TRACE(tensor);
    const std::string name = NameOf(tensor, "mask.");
    const Output got = Run({"--policy", name, "--compression-ratio", RatioOf(tensor, "")});
    const std::vector<double> want = layer_->Doubles(tensor);
    ASSERT_EQ(got.mask.size(), want.size());
    EXPECT_EQ(std::count(got.mask.begin(), got.mask.end(), 1.0), std::count(want.begin(), want.end(), 1.0));
    const int32_t keep = static_cast<int32_t>(layer_->tokens() * (1.0 - std::stod(RatioOf(tensor, ""))));
    const double alpha = std::stod(name.substr(name.find_first_of("0123456789")));
    for (int32_t u = 0; u < layer_->kv_heads(); ++u)
      EXPECT_GE(Count(got.mask, u), static_cast<int32_t>(keep * alpha)) << "head " << u;
    if (keep < NumberAfter(name, ".w")) continue;  // all kept are window tokens, and which ones is arbitrary
    ExpectSameKept(got.mask, want, name.starts_with("critical") ? std::vector<double>() : BaseScores(name));
  }
}

TEST_P(ScoreGolden, DropKvScores) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("dropkv.")) {
    const bool compat = tensor.starts_with("dropkv.compat.");
    if (tensor.find('@') != std::string::npos || tensor.ends_with(".out") || tensor.ends_with(".lse")) continue;
    SCOPED_TRACE(tensor);
    const Output got = Run({"--policy", tensor, "--budget", "50%"});
    const double error = testing::RelativeError(got.score, layer_->Doubles(tensor));
    EXPECT_LE(error, compat ? kCompatError : kScoreError);
    if (std::getenv("DROPKV_VERBOSE") != nullptr) std::printf("%-40s %.2e\n", tensor.c_str(), error);
    ++compared;
  }
  EXPECT_GE(compared, 8);
}

TEST_P(ScoreGolden, DropKvKeptTokens) {
  int compared = 0;
  for (const std::string& tensor : layer_->Names("dropkv.exact.")) {
    const size_t list = std::min(tensor.find(".kept@budget"), tensor.find(".adamask@budget"));
    if (list == std::string::npos) continue;
    SCOPED_TRACE(tensor);
    const std::string name = tensor.substr(0, list);
    std::vector<std::string> flags{"--policy", name, "--budget",
                                   std::to_string(100.0 * NumberAfter(tensor, "@budget")) + "%"};
    if (const double sink = NumberAfter(tensor, ".sink"); sink >= 0)
      flags.insert(flags.end(), {"--sink", std::to_string(static_cast<int32_t>(sink))});
    if (tensor.find(".adamask@") != std::string::npos) flags.insert(flags.end(), {"--heads", "ada", "--alpha", "0.2"});
    const Output got = Run(flags);
    const std::vector<uint8_t> mask = layer_->KeptMask(tensor);
    const std::vector<double> want(mask.begin(), mask.end());
    const std::vector<double> scores = layer_->Doubles(name);
    const int32_t n = layer_->tokens();
    if (tensor.find(".adamask@") != std::string::npos) {
      ExpectSameKept(got.mask, want, scores);
    } else {
      for (int32_t u = 0; u < layer_->kv_heads(); ++u) {
        EXPECT_EQ(Count(got.mask, u), Count(want, u));
        ExpectSameKept(HeadOf(got.mask, u, n), HeadOf(want, u, n), HeadOf(scores, u, n));
      }
    }
    ExpectCertificate(got, static_cast<int32_t>(NumberAfter(tensor, ".w")));
    ++compared;
  }
  EXPECT_GE(compared, 48);
}

// Without q_pre the rotation of q is undone.
TEST_P(ScoreGolden, UndoesTheRotation) {
  std::vector<io::TensorSource> sources;
  std::map<std::string, std::vector<float>> values;
  for (const char* name : {"q", "k", "v"}) {
    values[name] = *layer_->file().ReadFloats(name);
    sources.push_back(io::MakeTensorSource(name, "F32", layer_->file().Find(name)->shape, values[name]));
  }
  const std::string copy = output_ + ".in";
  ASSERT_TRUE(io::WriteSafetensors(copy, sources, layer_->file().metadata()).ok());
  input_ = copy;
  for (const char* tensor : {"score.expected", "score.expected.novnorm", "score.cap"}) {
    if (layer_->file().Find(tensor) == nullptr) continue;
    const Output got = Run({"--policy", NameOf(tensor, "score."), "--parity", "--compression-ratio", "0.5"});
    EXPECT_LE(testing::RelativeError(got.score, layer_->Doubles(tensor)), kUndoneError) << tensor;
  }
}

TEST_P(ScoreGolden, PyramidBudgets) {
  for (const auto& [key, value] : layer_->file().metadata()) {
    if (!key.starts_with("pyramid.")) continue;
    SCOPED_TRACE(key);
    const std::string name = key.substr(0, key.find(".budget"));
    const Output got = Run({"--policy", name, "--compression-ratio", RatioOf(key, "")});
    for (int32_t u = 0; u < layer_->kv_heads(); ++u) EXPECT_EQ(Count(got.mask, u), std::stoi(value));
  }
}

INSTANTIATE_TEST_SUITE_P(Files, ScoreGolden, ::testing::ValuesIn(GoldenNames()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace dropkv::cli
