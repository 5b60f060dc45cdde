#include "cli/score.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/score_case.h"
#include "io/safetensors.h"
#include "reference/reference.h"

namespace dropkv::cli {
namespace {

namespace fs = std::filesystem;

class ScoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("dropkv_score_" + std::to_string(::getpid()) + "_" +
                                                ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
    input_ = (folder_ / "in.safetensors").string();
    output_ = (folder_ / "out.safetensors").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Standard output in text_.
  Status Call(std::vector<std::string> flags) {
    flags.insert(flags.begin(), {input_, "--out", output_, "--threads", "1"});
    ::testing::internal::CaptureStdout();
    Status status = Score(flags);
    text_ = ::testing::internal::GetCapturedStdout();
    return status;
  }

  io::Safetensors Run(const LayerFile& file, const std::vector<std::string>& flags) {
    file.Write(input_);
    const Status status = Call(flags);
    EXPECT_TRUE(status.ok()) << status.message();
    Result<io::Safetensors> result = io::Safetensors::Open(status.ok() ? output_ : input_);
    EXPECT_TRUE(result.ok());
    return std::move(*result);
  }

  // An error that holds `parts`, nothing on standard output and no file left.
  void ExpectError(const std::vector<std::string>& flags, const std::vector<std::string>& parts,
                   Code code = Code::kInvalidArgument) {
    fs::remove(output_);
    const Status status = Call(flags);
    EXPECT_EQ(status.code(), code) << status.message();
    for (const std::string& part : parts)
      EXPECT_NE(status.message().find(part), std::string::npos) << part << " in: " << status.message();
    EXPECT_EQ(text_, "");
    const auto files = std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
    EXPECT_EQ(files, fs::exists(input_) ? 1 : 0);
  }

  void ExpectFileError(const std::function<void(LayerFile&)>& damage, const std::string& policy,
                       const std::vector<std::string>& parts) {
    LayerFile file(4, 2, 40, 8, 8);
    damage(file);
    file.Write(input_);
    ExpectError({"--policy", policy}, parts);
  }

  fs::path folder_;
  std::string input_;
  std::string output_;
  std::string text_;
};

TEST_F(ScoreTest, EveryPresetRunsAndFillsTheBudget) {
  const LayerFile file(4, 2, 400, 8, 8);
  for (const baseline::Recipe& recipe : baseline::Recipes())
    for (const bool parity : {false, true}) {
      if (recipe.rows.generated() > 0) continue;  // no file holds its rows
      SCOPED_TRACE(recipe.name());
      std::vector<std::string> flags{"--policy", recipe.name(), "--budget", "50%"};
      if (parity) flags.emplace_back("--parity");
      const io::Safetensors out = Run(file, flags);
      EXPECT_EQ(out.Find("score")->shape, (std::vector<int64_t>{2, 400}));
      EXPECT_EQ(out.Find("kept_mask")->shape, (std::vector<int64_t>{2, 400}));
      const std::vector<double> mask = *out.ReadDoubles("kept_mask");
      const auto kept = static_cast<double>(std::count(mask.begin(), mask.end(), 1.0));
      const bool shares = recipe.layers != baseline::LayerRule::kSame;  // its layers get different shares
      if (recipe.scorer == baseline::Scorer::kFull) {
        EXPECT_EQ(kept, 800);
      } else if (!shares) {
        EXPECT_NEAR(kept, 400, recipe.chunk > 0 ? 40 : recipe.policy.heads == HeadRule::kAdaO ? 2 : 0);
      }
      const std::vector<double> error = *out.ReadDoubles("output_error");
      ASSERT_EQ(error.size(), 4U);
      for (const double x : error) EXPECT_EQ(x == 0.0, recipe.scorer == baseline::Scorer::kFull) << x;
    }
}

TEST_F(ScoreTest, TheWindowsQueriesAreEnough) {
  LayerFile file(4, 2, 40, 8, 8);
  const std::vector<std::string> flags{"--policy", "dropkv", "--budget", "12"};
  const std::vector<double> want = *Run(file, flags).ReadDoubles("score");
  Array window{{4, 8, 8}, {}};
  for (int64_t h = 0; h < 4; ++h) {
    const auto end = file.tensors["q"].values.begin() + (h + 1) * 40 * 8;
    window.values.insert(window.values.end(), end - 8 * 8, end);
  }
  file.tensors.erase("q");
  file.tensors["q_window"] = window;
  const io::Safetensors got = Run(file, flags);
  EXPECT_EQ(*got.ReadDoubles("score"), want);
  EXPECT_EQ(got.Find("output_error")->shape, std::vector<int64_t>{4});
  ExpectError({"--policy", "snapkv"},
              {"in.safetensors", "policy snapkv", "last 40 rows", "q_window has 8", "--window"});
  ExpectError({"--policy", "h2o"}, {"policy h2o", "q [Hq, n, d]", "q_window alone"});
}

TEST_F(ScoreTest, TakesHalvesAndABatchAxis) {
  LayerFile file(4, 2, 40, 8, 8);
  for (auto& [name, array] : file.tensors)
    for (float& x : array.values) x = std::round(x * 64.0F) / 64.0F;  // exact in all three
  const std::vector<double> want = *Run(file, {"--policy", "snapkv-kvcf"}).ReadDoubles("score");
  EXPECT_GT(*std::max_element(want.begin(), want.end()), 0.0);
  for (const char* dtype : {"F16", "BF16"}) {
    LayerFile half = file;
    half.dtype = dtype;
    for (const char* name : {"q", "k", "v"}) half.tensors[name].shape.insert(half.tensors[name].shape.begin(), 1);
    EXPECT_EQ(*Run(half, {"--policy", "snapkv-kvcf"}).ReadDoubles("score"), want) << dtype;
  }
}

// Sizes that the kernels do not take: padded with zeros, or by the reference.
TEST_F(ScoreTest, OddShapesAgreeWithTheReference) {
  struct Shape {
    int32_t hq, hkv, d, dv;
  };
  for (const auto& [hq, hkv, d, dv] :
       {Shape{4, 2, 6, 10}, {2, 2, 1, 3}, {2, 1, 264, 8}, {34, 2, 8, 8}, {2, 1, 20, 300}}) {
    SCOPED_TRACE(::testing::Message() << hq << " " << hkv << " " << d << " " << dv);
    const LayerFile file(hq, hkv, 40, d, dv);
    const io::Safetensors out = Run(file, {"--policy", "dropkv.w8.raw", "--budget", "30%"});
    const KvTensor k{file.tensors.at("k").values.data(), DType::kF32, int64_t{40} * d, d, 1};
    const KvTensor v{file.tensors.at("v").values.data(), DType::kF32, int64_t{40} * dv, dv, 1};
    const KvView view{hkv, 40, d, dv, k, v, nullptr};
    std::vector<int32_t> visible;
    for (int32_t i = 33; i <= 40; ++i) visible.push_back(i);
    const float* q = file.tensors.at("q").values.data() + int64_t{32} * d;
    const ObservationRows rows{q, int64_t{40} * d, d, hq, 8, visible.data()};
    const AttentionSpec spec{0.5F, 0.0F, nullptr};
    const reference::Scores want = reference::Score(view, rows, spec, *FindPreset("dropkv"), 0);
    const std::vector<double> got = *out.ReadDoubles("score");
    for (size_t j = 0; j < got.size(); ++j) ASSERT_NEAR(got[j], want.raw[j], 1e-4 * want.raw[j]) << j;
    std::vector<int32_t> positions;
    for (const double position : *out.ReadDoubles("kept")) positions.push_back(static_cast<int32_t>(position));
    std::vector<int64_t> offsets;
    for (int32_t u = 0; u <= hkv; ++u) offsets.push_back(int64_t{u} * 12);
    ASSERT_EQ(positions.size(), static_cast<size_t>(offsets.back()));
    const reference::Certificate moved = reference::Certify(view, rows, spec, KeepList(1, hkv, offsets, positions), 0);
    const std::vector<double> error = *out.ReadDoubles("output_error");
    for (int32_t h = 0; h < hq; ++h) EXPECT_NEAR(error[h], moved.output_error[h], 1e-4) << h;
  }
  LayerFile(2, 1, 40, 264, 8).Write(input_);
  ExpectError({"--policy", "tova"}, {"policy tova", "at most 256", "264"}, Code::kUnsupported);
  ExpectError({"--policy", "knorm"}, {"policy knorm", "at most 256", "264"}, Code::kUnsupported);
  LayerFile(2, 1, 40, 6, 8).Write(input_);
  ExpectError({"--policy", "lagkv.lag8"}, {"multiples of 8", "got 6 and 8"}, Code::kUnsupported);
}

TEST_F(ScoreTest, QueriesAreNotNeededWhereKeysSayAll) {
  LayerFile file(34, 2, 40, 8, 8);
  EXPECT_NE(Run(file, {"--policy", "knorm"}).Find("output_error"), nullptr);
  file.tensors.erase("q");
  file.tensors.erase("q_pre");
  file.tensors.erase("wo");
  const io::Safetensors out = Run(file, {"--policy", "knorm"});
  EXPECT_EQ(out.Find("output_error"), nullptr);
  EXPECT_EQ(out.Find("kept")->shape, (std::vector<int64_t>{2, 4}));
  EXPECT_NE(text_.find("no queries"), std::string::npos);
}

TEST_F(ScoreTest, FlagsOverrideMetadata) {
  LayerFile file(4, 2, 40, 8, 8);
  const auto score = [&](const std::vector<std::string>& more) {
    std::vector<std::string> flags{"--policy", "dropkv"};
    flags.insert(flags.end(), more.begin(), more.end());
    return *Run(file, flags).ReadDoubles("score");
  };
  const std::vector<double> half = score({});
  EXPECT_EQ(score({"--scale", "0.5"}), half);
  EXPECT_NE(score({"--scale", "0.25"}), half);
  EXPECT_NE(score({"--soft-cap", "0.5"}), half);
  file.metadata["soft_cap"] = "0.5";
  const std::vector<double> capped = score({});
  EXPECT_NE(capped, half);
  EXPECT_EQ(score({"--soft-cap", "0"}), half);
  file.metadata.clear();
  EXPECT_EQ(score({"--scale", "0.5"}), half);
  EXPECT_EQ(text_.find("1/sqrt(d)"), std::string::npos);
  EXPECT_EQ(score({}), score({"--scale", "0.353553390593"}));
  score({});
  EXPECT_NE(text_.find("1/sqrt(d)"), std::string::npos);
}

// It protects, and no more: somebody may have expected queries to be looked at.
TEST_F(ScoreTest, AWindowWithoutQueriesIsSaid) {
  const LayerFile file(4, 2, 40, 8, 8);
  const io::Safetensors out = Run(file, {"--policy", "knorm", "--window", "4", "--budget", "5"});
  for (int32_t head = 0; head < 2; ++head)
    for (int32_t j = 36; j < 40; ++j) EXPECT_EQ(out.ReadDoubles("kept_mask")->at(head * 40 + j), 1.0);
  EXPECT_NE(text_.find("window: policy knorm looks at no queries; its window of 4 only protects"), std::string::npos);
  Run(file, {"--policy", "h2o", "--window", "4"});
  EXPECT_EQ(text_.find("looks at no queries"), std::string::npos);
}

TEST_F(ScoreTest, PyramidsDependOnTheLayer) {
  LayerFile file(4, 2, 300, 8, 8);
  const auto kept = [&](const std::string& layer) {
    return Run(file, {"--policy", "pyramidkv.w8", "--budget", "50%", "--layer", layer}).Find("kept")->shape[1];
  };
  EXPECT_GT(kept("0"), 200);
  EXPECT_LT(kept("3"), 100);
  ExpectError({"--policy", "pyramidkv", "--layer", "4"}, {"--layer", "0 to 3", "got 4"});
  file.metadata.erase("layers");
  file.Write(input_);
  ExpectError({"--policy", "pyramidkv"}, {"pyramidkv", "layers"});
}

TEST_F(ScoreTest, CompressionRatioCountsAsTheReferencesDo) {
  const LayerFile file(4, 2, 100, 8, 8);
  const auto kept = [&](const std::vector<std::string>& flags) { return Run(file, flags).Find("kept")->shape[1]; };
  EXPECT_EQ(kept({"--policy", "knorm", "--compression-ratio", "0.9"}), 9);  // 1 - 0.9 is below 0.1
  EXPECT_EQ(kept({"--policy", "knorm", "--budget", "10%"}), 10);
  EXPECT_EQ(kept({"--policy", "snapkv", "--compression-ratio", "0.9"}), 9);  // below the window of 64
  EXPECT_EQ(kept({"--policy", "snapkv", "--budget", "10%"}), 64);
  EXPECT_NE(text_.find("64 of 100"), std::string::npos);
  EXPECT_NE(text_.find("raised"), std::string::npos);
}

TEST_F(ScoreTest, JsonIsOneObject) {
  const LayerFile file(4, 2, 40, 8, 8);
  Run(file, {"--policy", "adadropkv", "--budget", "50%", "--json"});
  const nlohmann::json json = nlohmann::json::parse(text_);
  EXPECT_EQ(json["policy"], "adadropkv");
  EXPECT_EQ(json["kept"]["mean"], 20.0);
  EXPECT_EQ(json["kept"]["per_head"].size(), 2U);
  EXPECT_EQ(json["output_error"]["per_head"].size(), 4U);
  EXPECT_EQ(json["certificate_rows"], 8);
}

TEST_F(ScoreTest, NamesWhatTheFileLacks) {
  const auto without = [](const std::vector<std::string>& names) {
    return [names](LayerFile& file) {
      for (const std::string& name : names) file.tensors.erase(name);
    };
  };
  ExpectFileError(without({"k"}), "dropkv", {"tensor 'k': missing"});
  ExpectFileError(without({"v"}), "dropkv", {"tensor 'v': missing"});
  ExpectFileError(without({"q"}), "dropkv", {"policy dropkv needs", "q [Hq, n, d]", "neither"});
  ExpectFileError(without({"q"}), "observed", {"policy observed needs", "q [Hq, n, d]", "none"});
  ExpectFileError(without({"wo"}), "criticalkv", {"policy criticalkv needs wo"});
  const auto no_rope = [](const std::vector<std::string>& names) {
    return [names](LayerFile& file) {
      for (const std::string& name : names) file.tensors.erase(name);
      file.metadata.erase("rope_theta");
    };
  };
  ExpectFileError(no_rope({"q_pre"}), "expected", {"policy expected needs rope_theta", "q_pre"});
  ExpectFileError(no_rope({}), "capkv", {"policy capkv needs rope_theta", "--rope-theta"});
  ExpectFileError(no_rope({"k_pre"}), "compactor", {"policy compactor needs k_pre"});
}

TEST_F(ScoreTest, NamesWhatDoesNotFit) {
  const auto shape = [](const char* name, const std::vector<int64_t>& extents) {
    return [=](LayerFile& file) { file.Add(name, extents, 1.0F); };
  };
  ExpectFileError(shape("v", {2, 39, 8}), "knorm", {"tensor 'v'", "n 40", "[2, 39, 8]"});
  ExpectFileError(shape("v", {1, 40, 8}), "knorm", {"tensor 'v'", "Hkv 2"});
  ExpectFileError(shape("k", {2, 40}), "knorm", {"tensor 'k'", "[Hkv, n, d]", "[2, 40]"});
  ExpectFileError(shape("k", {2, 40, 8, 1}), "knorm", {"tensor 'k'", "[2, 40, 8, 1]"});
  ExpectFileError(shape("k", {2, 0, 8}), "knorm", {"tensor 'k'", "[2, 0, 8]"});
  ExpectFileError(shape("q", {4, 41, 8}), "knorm", {"tensor 'q'", "n 40", "[4, 41, 8]"});
  ExpectFileError(shape("q", {4, 40, 16}), "knorm", {"tensor 'q'", "d 8"});
  ExpectFileError(shape("q", {3, 40, 8}), "knorm", {"tensor 'q'", "multiple of the 2 KV heads", "got 3"});
  ExpectFileError(shape("q_pre", {2, 40, 8}), "knorm", {"tensor 'q_pre'", "4 query heads as in 'q'", "got 2"});
  ExpectFileError(shape("q_window", {4, 41, 8}), "knorm", {"tensor 'q_window'", "[4, 41, 8]"});
  ExpectFileError(shape("k_pre", {2, 40, 4}), "knorm", {"tensor 'k_pre'", "shape of 'k'"});
  ExpectFileError(shape("wo", {32, 33}), "knorm", {"tensor 'wo'", "[32, 33]"});
  ExpectFileError(shape("wo", {32, 64}), "knorm", {"tensor 'wo'", "4 query heads", "got 8"});
  ExpectFileError(shape("sinks", {2}), "knorm", {"tensor 'sinks'", "4 query heads", "got 2"});
  const auto metadata = [](const char* key, const char* value) {
    return [=](LayerFile& file) { file.metadata[key] = value; };
  };
  ExpectFileError(metadata("scale", "x"), "knorm", {"'scale'", "number", "'x'"});
  ExpectFileError(metadata("scale", "-1"), "knorm", {"'scale'", "above 0", "'-1'"});
  ExpectFileError(metadata("scale", "nan"), "knorm", {"'scale'"});
  ExpectFileError(metadata("layers", "1.5"), "knorm", {"'layers'", "whole number", "'1.5'"});
  ExpectFileError(metadata("layer", "7"), "knorm", {"0 to 3", "7"});
  ExpectFileError([](LayerFile& file) { file.Add("sinks", {4}, 1.0F), file.tensors["sinks"].values[1] = NAN; }, "knorm",
                  {"tensor 'sinks'", "finite"});
}

TEST_F(ScoreTest, NamesTheFlag) {
  LayerFile(4, 2, 40, 8, 8).Write(input_);
  ExpectError({}, {"--policy", "dropkv policies"});
  ExpectError({"--policy", "snap"}, {"--policy", "snapkv", "\"snap\""}, Code::kNotFound);
  ExpectError({"--policy", "snapkv.w0"}, {"window", "got 0"});
  for (const auto& [flag, value] : std::map<std::string, std::string>{{"--window", "0"},
                                                                      {"--pool", "4"},
                                                                      {"--sink", "-1"},
                                                                      {"--heads", "x"},
                                                                      {"--alpha", "2"},
                                                                      {"--seed", "-1"},
                                                                      {"--budget", "0.1"},
                                                                      {"--compression-ratio", "1"},
                                                                      {"--scale", "0"},
                                                                      {"--rope-theta", "nan"},
                                                                      {"--soft-cap", "-1"},
                                                                      {"--layer", "-1"},
                                                                      {"--layers", "0"}})
    ExpectError({"--policy", "snapkv", flag, value}, {flag});
  ExpectError({"--policy", "knorm", "--budget", "10%", "--compression-ratio", "0.9"},
              {"--budget, --compression-ratio"});
  ExpectError({"--policy", "knorm", "--pool", "5"}, {"--pool", "knorm"});
  ExpectError({"--policy", "snapkv", "--alpha", "0.2"}, {"--alpha", "snapkv", "--heads ada"});
  ExpectError({"--policy", "andpro_code", "--heads", "uniform"}, {"--heads", "andpro_code"});
  ExpectError({"--policy", "streaming", "--window", "4"}, {"--window", "streaming"});
  ExpectError({"--policy", "full", "--sink", "4"}, {"--sink", "full"});
  ExpectError({"--policy", "snapkv", "--seed", "4"}, {"--seed", "snapkv", "random"});
  ExpectError({"--policy", "knorm", "--bugdet", "5%"}, {"--bugdet", "--help"});
  ExpectError({"--policy", "dropkv", "--budget", "4"}, {"--budget", "at least 8", "got 4"});
  output_ = input_;
  EXPECT_NE(Call({"--policy", "knorm"}).message().find("--out: expected another file"), std::string::npos);
}

TEST_F(ScoreTest, AnErrorLeavesAnOldOutputAlone) {
  LayerFile(4, 2, 40, 8, 8).Write(input_);
  std::ofstream(output_) << "old";
  EXPECT_FALSE(Call({"--policy", "snapkv", "--window", "50", "--budget", "20"}).ok());
  fs::resize_file(input_, fs::file_size(input_) - 1);
  const Status truncated = Call({"--policy", "knorm"});
  EXPECT_EQ(truncated.code(), Code::kInvalidArgument);
  EXPECT_NE(truncated.message().find("cut off"), std::string::npos) << truncated.message();
  fs::remove(input_);
  EXPECT_EQ(Call({"--policy", "knorm"}).code(), Code::kNotFound);
  std::ifstream stream(output_);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), "old");
}

// Damaged files are scored or refused; a refused one leaves nothing behind.
TEST_F(ScoreTest, SurvivesDamagedFiles) {
  LayerFile(4, 2, 24, 8, 8).Write(input_);
  std::ifstream stream(input_, std::ios::binary);
  const std::string original(std::istreambuf_iterator<char>(stream), {});
  uint64_t header = 0;
  std::memcpy(&header, original.data(), sizeof header);
  int refused = 0;
  int scored = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    std::string bytes = original;
    const auto below = [&](uint64_t count, uint64_t draw) {
      return static_cast<size_t>(static_cast<double>(RandomUniform(seed, draw)) * static_cast<double>(count));
    };
    for (uint64_t change = 0; change <= below(3, 0); ++change) {
      const bool in_header = below(4, 10 + change) != 0;
      const size_t at = in_header ? 8 + below(header, 20 + change) : 8 + header + below(bytes.size() - 8 - header, 30);
      bytes[at] = in_header ? "0123456789[],"[below(13, 40 + change)] : static_cast<char>(below(256, 50 + change));
    }
    std::ofstream(input_, std::ios::binary) << bytes;
    const char* const policies[] = {"dropkv", "expected", "compactor", "criticalkv", "lagkv.lag4", "cake"};
    fs::remove(output_);
    const Status status = Call({"--policy", policies[seed % std::size(policies)], "--budget", "50%"});
    EXPECT_EQ(fs::exists(output_), status.ok()) << seed;
    (status.ok() ? scored : refused) += 1;
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(scored, 40);
}

TEST_F(ScoreTest, TokensThatAreNoNumbersAreKept) {
  LayerFile file(4, 2, 40, 8, 8);
  file.tensors["k"].values[int64_t{5} * 8 + 3] = NAN;
  file.tensors["v"].values[int64_t{47} * 8] = INFINITY;
  for (const char* policy : {"dropkv", "knorm", "h2o", "lagkv.lag8"}) {
    const std::vector<double> mask = *Run(file, {"--policy", policy, "--budget", "50%"}).ReadDoubles("kept_mask");
    EXPECT_EQ(mask[5], 1.0) << policy;
    EXPECT_EQ(mask[47], 1.0) << policy;
    EXPECT_NE(text_.find("2 tokens with NaN or Inf"), std::string::npos) << text_;
  }
}

}  // namespace
}  // namespace dropkv::cli
