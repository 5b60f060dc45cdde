// The float64 reference model against libllama, before any of our own code comes between: prefill, decode, decode after
// an eviction that libllama can do itself, and every tensor that the reference hands out.
#include "support/reference_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "core/element.h"
#include "ggml-backend.h"
#include "support/libllama.h"

namespace dropkv::testing {
namespace {

constexpr int32_t kPrompt = 90;
constexpr int32_t kDecoded = 6;

struct Case {
  const char* name;
  TinyConfig config;
};

// Sliding layers see fewer tokens than the prompt has. Six heads on two KV heads: groups of three.
const Case kCases[] = {
    {"llama", {.arch = TinyArch::kLlama}},
    {"llama_groups_of_three", {.arch = TinyArch::kLlama, .heads = 6, .kv_heads = 2, .head_dim = 16, .embedding = 64}},
    {"llama_no_groups", {.arch = TinyArch::kLlama, .layers = 3, .heads = 2, .kv_heads = 2, .rope_base = 500000}},
    {"qwen2", {.arch = TinyArch::kQwen2, .seed = 2}},
    {"qwen3", {.arch = TinyArch::kQwen3, .seed = 3}},
    {"gemma3", {.arch = TinyArch::kGemma3, .layers = 4, .sliding_window = 24, .seed = 4}},
    {"gemma3_no_window", {.arch = TinyArch::kGemma3, .seed = 5}},
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Allowed error, as a share of the largest logit. With an f32 cache and no flash attention only float32 sums differ.
// gemma3's GELU is a table of f16 values in ggml, and an f16 cache also rounds the queries to f16 (11 bits each).
double Tolerance(const TinyConfig& config, bool f16_cache) {
  return f16_cache || config.arch == TinyArch::kGemma3 ? 5e-3 : 1e-5;
}

std::vector<int32_t> RandomTokens(int32_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> out(count);
  for (int32_t& token : out) token = kFirstByteToken + static_cast<int32_t>(generator() % 300);
  return out;
}

template <typename A, typename B>
double LargestDifference(const A& a, const B& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  return largest;
}

double Scale(const std::vector<double>& logits) {
  double largest = 0;
  for (const double x : logits) largest = std::max(largest, std::abs(x));
  return largest;
}

// A tiny model in libllama and as a reference.
class ReferenceModelTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    tiny_ = MakeTinyModel(GetParam().config);
    const auto path = std::filesystem::path(::testing::TempDir()) / (std::string("ref_") + GetParam().name + ".gguf");
    ASSERT_TRUE(WriteTinyModel(tiny_, path.string()).ok());
    model_ = LoadModel(path.string());
    ASSERT_NE(model_, nullptr);
    tokens_ = RandomTokens(kPrompt + kDecoded, GetParam().config.seed);
  }

  std::span<const int32_t> Prompt() const { return std::span(tokens_).first(kPrompt); }
  std::span<const int32_t> Token(int32_t i) const { return std::span(tokens_).subspan(kPrompt + i, 1); }

  ContextPtr NewContext(bool f16_cache) const {
    const ggml_type type = f16_cache ? GGML_TYPE_F16 : GGML_TYPE_F32;
    return ContextPtr(llama_init_from_model(model_.get(), PlainContext(256, type, false)));
  }

  void ExpectSameLogits(const std::vector<double>& expected, const std::vector<float>& actual, bool f16_cache,
                        const char* what) const {
    ASSERT_FALSE(actual.empty()) << what << ": libllama failed";
    EXPECT_LE(LargestDifference(expected, actual), Tolerance(tiny_.config, f16_cache) * Scale(expected)) << what;
  }

  TinyModel tiny_;
  ModelPtr model_;
  std::vector<int32_t> tokens_;
};

TEST_P(ReferenceModelTest, PrefillAndDecodeAreLibllamas) {
  for (const bool f16_cache : {false, true}) {
    SCOPED_TRACE(f16_cache ? "f16" : "f32");
    const ContextPtr context = NewContext(f16_cache);
    ReferenceModel reference(tiny_, f16_cache);
    ExpectSameLogits(reference.Decode(Prompt()), DecodeTokens(context.get(), Prompt()), f16_cache, "prefill");
    for (int32_t i = 0; i < kDecoded; ++i) {
      ExpectSameLogits(reference.Decode(Token(i)), DecodeTokens(context.get(), Token(i)), f16_cache, "decode");
    }
    EXPECT_EQ(reference.position(), kPrompt + kDecoded);
  }
}

// libllama can remove cells, the same for all heads and layers: the one kind of eviction that it does by itself.
TEST_P(ReferenceModelTest, DecodeAfterEvictionIsLibllamas) {
  for (const bool f16_cache : {false, true}) {
    SCOPED_TRACE(f16_cache ? "f16" : "f32");
    const ContextPtr context = NewContext(f16_cache);
    ReferenceModel reference(tiny_, f16_cache);
    const std::vector<double> full = reference.Decode(Prompt());
    DecodeTokens(context.get(), Prompt());
    std::vector<int32_t> kept;
    for (int32_t j = 0; j < kPrompt; ++j) {
      if (j % 3 == 0 || j >= kPrompt - 4) {
        kept.push_back(j);
      } else {
        ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context.get()), 0, j, j + 1));
      }
    }
    const TinyConfig& c = tiny_.config;
    std::vector<int64_t> offsets = {0};
    std::vector<int32_t> positions;
    for (int32_t list = 0; list < c.layers * c.kv_heads; ++list) {
      positions.insert(positions.end(), kept.begin(), kept.end());
      offsets.push_back(static_cast<int64_t>(positions.size()));
    }
    ReferenceModel unchanged = reference;
    reference.Keep(KeepList(c.layers, c.kv_heads, offsets, positions));
    for (int32_t i = 0; i < kDecoded; ++i) {
      const std::vector<double> expected = reference.Decode(Token(i));
      ExpectSameLogits(expected, DecodeTokens(context.get(), Token(i)), f16_cache, "decode");
      EXPECT_GT(LargestDifference(expected, unchanged.Decode(Token(i))), 0.02 * Scale(full)) << "eviction must show";
    }
  }
}

// Queries and keys at the products that libllama computes, and the attention outputs.
struct Captured {
  std::map<std::string, std::vector<float>> q;    // by node name: [token][head][d]
  std::map<std::string, std::vector<float>> k;    // [KV head][cell][d]
  std::map<std::string, std::vector<float>> out;  // [token][head][d]
  int64_t cells = 0;
};

// The elements of `tensor` in the order of dimensions slowest .. fastest as given.
std::vector<float> ReadStrided(const ggml_tensor* tensor, int slow, int middle) {
  std::vector<char> bytes(ggml_nbytes(tensor));
  ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
  std::vector<float> out;
  for (int64_t i = 0; i < tensor->ne[slow]; ++i) {
    for (int64_t j = 0; j < tensor->ne[middle]; ++j) {
      const auto* row = bytes.data() + i * tensor->nb[slow] + j * tensor->nb[middle];
      const size_t old = out.size();
      out.resize(old + tensor->ne[0]);
      std::memcpy(out.data() + old, row, tensor->ne[0] * sizeof(float));
    }
  }
  return out;
}

bool Capture(ggml_tensor* tensor, bool ask, void* user) {
  auto* captured = static_cast<Captured*>(user);
  const std::string name = tensor->name;
  const bool product = tensor->op == GGML_OP_MUL_MAT && name.starts_with("kq-");
  const bool output = name.starts_with("kqv_out-");
  if (ask) return product || output;
  if (product) {
    captured->q[name.substr(3)] = ReadStrided(tensor->src[1], 1, 2);
    captured->k[name.substr(3)] = ReadStrided(tensor->src[0], 2, 1);
    captured->cells = tensor->src[0]->ne[1];
  }
  if (output) captured->out[name.substr(8)] = ReadStrided(tensor, 2, 1);
  return true;
}

std::vector<double> Flatten(const std::vector<std::vector<double>>& rows) {
  std::vector<double> out;
  for (const std::vector<double>& row : rows) out.insert(out.end(), row.begin(), row.end());
  return out;
}

TEST_P(ReferenceModelTest, TracesAreLibllamasTensors) {
  Captured captured;
  llama_context_params params = PlainContext(256, GGML_TYPE_F32, false);
  params.cb_eval = Capture;
  params.cb_eval_user_data = &captured;
  const ContextPtr context(llama_init_from_model(model_.get(), params));
  ASSERT_NE(context, nullptr);
  const std::vector<int32_t> rows(tokens_.begin(), tokens_.begin() + 20);
  ASSERT_FALSE(DecodeTokens(context.get(), rows).empty());

  ReferenceModel reference(tiny_);
  reference.Decode(rows);
  const TinyConfig& c = tiny_.config;
  const double tolerance = 5 * Tolerance(c, false);  // absolute, of numbers of size 1 to 5
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    const std::string name = std::to_string(layer);
    std::vector<double> queries = Flatten(reference.trace(layer).queries);
    // gemma3 scales the queries before the product, the others the product.
    const double scale = c.arch == TinyArch::kGemma3 ? 1 / std::sqrt(static_cast<double>(c.head_dim)) : 1;
    for (double& x : queries) x *= scale;
    EXPECT_LE(LargestDifference(queries, captured.q[name]), tolerance);
    EXPECT_LE(LargestDifference(Flatten(reference.trace(layer).outputs), captured.out[name]), tolerance);
    for (int32_t head = 0; head < c.kv_heads; ++head) {
      const std::vector<double> keys = Flatten(reference.cache(layer, head).keys);
      const float* cells = captured.k[name].data() + head * captured.cells * c.head_dim;
      EXPECT_LE(LargestDifference(keys, std::vector<float>(cells, cells + keys.size())), tolerance);
    }
  }
}

// Lists that differ between layers and heads, against attention over exactly the named entries, from the rows that the
// reference handed out before the eviction.
TEST_P(ReferenceModelTest, RaggedListsAreFollowedPerHead) {
  const TinyConfig& c = tiny_.config;
  ReferenceModel reference(tiny_);
  reference.Decode(Prompt());
  const ReferenceModel before = reference;
  std::mt19937 generator(9);
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> positions;
  for (int32_t list = 0; list < c.layers * c.kv_heads; ++list) {
    for (int32_t j = 0; j < kPrompt; ++j) {
      if (generator() % (2 + list) == 0 || j == kPrompt - 1) positions.push_back(j);
    }
    offsets.push_back(static_cast<int64_t>(positions.size()));
  }
  const KeepList keep(c.layers, c.kv_heads, offsets, positions);
  reference.Keep(keep);
  reference.Decode(Token(0));
  const int32_t group = c.heads / c.kv_heads;
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    for (int32_t head = 0; head < c.heads; ++head) {
      const HeadCache& old = before.cache(layer, head / group);
      const HeadCache& now = reference.cache(layer, head / group);
      std::vector<std::vector<double>> keys, values;
      for (const int32_t j : keep.head(layer, head / group)) {
        if (c.Slides(layer) && j <= kPrompt - c.sliding_window) continue;
        keys.push_back(old.keys[j]);
        values.push_back(old.values[j]);
      }
      keys.push_back(now.keys.back());
      values.push_back(now.values.back());
      const double* q = reference.trace(layer).queries[0].data() + head * c.head_dim;
      std::vector<double> expected(c.head_dim);
      double sum = 0;
      for (size_t j = 0; j < keys.size(); ++j) {
        double logit = 0;
        for (int32_t i = 0; i < c.head_dim; ++i) logit += q[i] * keys[j][i];
        const double weight = std::exp(logit / std::sqrt(static_cast<double>(c.head_dim)));
        sum += weight;
        for (int32_t i = 0; i < c.head_dim; ++i) expected[i] += weight * values[j][i];
      }
      const double* actual = reference.trace(layer).outputs[0].data() + head * c.head_dim;
      for (int32_t i = 0; i < c.head_dim; ++i) EXPECT_NEAR(expected[i] / sum, actual[i], 1e-12);
    }
  }
}

TEST_P(ReferenceModelTest, AttentionIsNeitherUniformNorOneHot) {
  ReferenceModel reference(tiny_);
  reference.Decode(Prompt());
  for (int32_t layer = 0; layer < GetParam().config.layers; ++layer) {
    double entropy = 0;
    const std::vector<double>& last = reference.trace(layer).entropies.back();
    for (const double e : last) entropy += e / static_cast<double>(last.size());
    const double tokens = std::exp(entropy);  // that share the weight
    const TinyConfig& c = GetParam().config;
    EXPECT_GT(tokens, 2.5);
    EXPECT_LT(tokens, 0.75 * (c.Slides(layer) ? c.sliding_window : kPrompt));
  }
}

TEST(ReferenceModel, HalfCacheHoldsHalves) {
  const TinyModel tiny = MakeTinyModel({});
  ReferenceModel halves(tiny, true);
  ReferenceModel floats(tiny, false);
  const std::vector<int32_t> tokens = RandomTokens(10, 1);
  halves.Decode(tokens);
  floats.Decode(tokens);
  int32_t rounded = 0;
  for (int32_t head = 0; head < 2; ++head) {
    for (auto rows : {&HeadCache::keys, &HeadCache::values}) {
      const std::vector<double> expected = Flatten(floats.cache(0, head).*rows);  // layer 0 has the same input in both
      const std::vector<double> actual = Flatten(halves.cache(0, head).*rows);
      for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_EQ(actual[i], HalfToFloat(FloatToHalf(static_cast<float>(expected[i]))));
        rounded += actual[i] != expected[i] ? 1 : 0;
      }
    }
  }
  EXPECT_GT(rounded, 1200) << "of 1280";
}

TEST(ReferenceModel, KeepTouchesOnlyTheNamedLayers) {
  const TinyModel tiny = MakeTinyModel({.layers = 3});
  ReferenceModel reference(tiny);
  reference.Decode(RandomTokens(10, 1));
  const std::vector<int32_t> layers = {2};
  reference.Keep(KeepList(1, 2, {0, 2, 5}, {3, 9, 1, 8, 9}), layers);
  EXPECT_EQ(reference.cache(2, 0).positions, (std::vector<int32_t>{3, 9}));
  EXPECT_EQ(reference.cache(2, 1).positions, (std::vector<int32_t>{1, 8, 9}));
  EXPECT_EQ(reference.cache(0, 0).positions.size(), 10U);
  EXPECT_EQ(reference.cache(1, 1).positions.size(), 10U);
}

INSTANTIATE_TEST_SUITE_P(Models, ReferenceModelTest, ::testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace dropkv::testing
