// What is read from a ROPE node against what ggml computes with it: both pairings, part of the dims, frequency factors,
// linear scaling and YaRN; then every query and key of the tiny models.
#include "llama/rope.h"

#include <ggml-backend.h>
#include <ggml.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>

#include "support/libllama.h"
#include "support/tiny_model.h"

namespace dropkv::llama {
namespace {

using baseline::Rope;
using testing::TinyArch;
using testing::TinyConfig;

constexpr int32_t kHeadDim = 48;
constexpr int32_t kHeads = 2;

struct RopeCase {
  const char* name;
  int mode = GGML_ROPE_TYPE_NEOX;
  int dims = kHeadDim;
  float base = 10000;
  float scale = 1;
  float extrapolation = 0;
  float attention = 1;
  bool factors = false;
};

void PrintTo(const RopeCase& c, std::ostream* out) { *out << c.name; }

// A graph of one rotation, computed on the CPU.
class RopeGraph {
 public:
  explicit RopeGraph(const RopeCase& c) : context_(ggml_init({1 << 20, nullptr, true}), ggml_free) {
    ggml_context* context = context_.get();
    x_ = ggml_new_tensor_3d(context, GGML_TYPE_F32, kHeadDim, kHeads, static_cast<int64_t>(kPositions.size()));
    positions_ = ggml_new_tensor_1d(context, GGML_TYPE_I32, static_cast<int64_t>(kPositions.size()));
    ggml_tensor* factors = c.factors ? ggml_new_tensor_1d(context, GGML_TYPE_F32, c.dims / 2) : nullptr;
    rope_ = ggml_rope_ext(context, x_, positions_, factors, c.dims, c.mode, 1024, c.base, c.scale, c.extrapolation,
                          c.attention, 32, 1);
    ggml_backend_load_all();
    backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context, backend_.get()));
    ggml_backend_tensor_set(positions_, kPositions.data(), 0, ggml_nbytes(positions_));
    std::mt19937 generator(3);
    std::vector<float> values(ggml_nelements(x_));
    for (float& value : values) value = static_cast<float>(generator() % 2001) / 1000 - 1;
    ggml_backend_tensor_set(x_, values.data(), 0, ggml_nbytes(x_));
    if (factors == nullptr) return;
    std::vector<float> divisors(c.dims / 2);
    for (float& divisor : divisors) divisor = 1 + static_cast<float>(generator() % 1000) / 250;
    ggml_backend_tensor_set(factors, divisors.data(), 0, ggml_nbytes(factors));
  }

  static const std::vector<int32_t> kPositions;

  ggml_context* context() const { return context_.get(); }
  ggml_tensor* rope() const { return rope_; }

  std::vector<float> Input() const { return Read(x_); }
  std::vector<float> Rotated() const {
    ggml_cgraph* graph = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph, rope_);
    EXPECT_EQ(ggml_backend_graph_compute(backend_.get(), graph), GGML_STATUS_SUCCESS);
    return Read(rope_);
  }

 private:
  static std::vector<float> Read(const ggml_tensor* tensor) {
    std::vector<float> values(ggml_nelements(tensor));
    ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
    return values;
  }

  std::unique_ptr<ggml_context, void (*)(ggml_context*)> context_;
  std::unique_ptr<ggml_backend, void (*)(ggml_backend*)> backend_{nullptr, ggml_backend_free};
  std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer*)> buffer_{nullptr, ggml_backend_buffer_free};
  ggml_tensor* x_ = nullptr;
  ggml_tensor* positions_ = nullptr;
  ggml_tensor* rope_ = nullptr;
};

const std::vector<int32_t> RopeGraph::kPositions = {0, 1, 5, 63, 1000, 4095};

// [tokens, heads, d] turned as `rope` says, or back.
std::vector<float> Turned(const Rope& rope, std::vector<float> x, const std::vector<int32_t>& positions, int32_t heads,
                          int32_t dim, bool undo) {
  for (size_t row = 0; row < positions.size() * heads; ++row)
    rope.Rotate(positions[row / heads], undo, x.data() + row * dim);
  return x;
}

void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance) << i;
}

class RopeTest : public ::testing::TestWithParam<RopeCase> {};

TEST_P(RopeTest, EqualsGgml) {
  const RopeGraph graph(GetParam());
  const Result<Rope> rope = ReadRope(graph.rope());
  ASSERT_TRUE(rope.ok()) << rope.status().message();
  EXPECT_EQ(rope->dims, GetParam().dims);
  EXPECT_EQ(rope->halves, GetParam().mode == GGML_ROPE_TYPE_NEOX);
  const std::vector<float> rotated = graph.Rotated();
  EXPECT_NE(rotated, graph.Input());
  // ggml's float32 angles are off by a few units in the last place of up to 4,095.
  ExpectNear(Turned(*rope, graph.Input(), RopeGraph::kPositions, kHeads, kHeadDim, false), rotated, 1e-3);
  ExpectNear(Turned(*rope, rotated, RopeGraph::kPositions, kHeads, kHeadDim, true), graph.Input(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, RopeTest,
    ::testing::Values(RopeCase{"halves"}, RopeCase{"neighbours", GGML_ROPE_TYPE_NORMAL},
                      RopeCase{"half_of_the_dims", GGML_ROPE_TYPE_NEOX, kHeadDim / 2},
                      RopeCase{"half_of_the_dims_neighbours", GGML_ROPE_TYPE_NORMAL, kHeadDim / 2, 500},
                      RopeCase{"factors", GGML_ROPE_TYPE_NORMAL, kHeadDim, 500000, 1, 0, 1, true},
                      RopeCase{"linear", GGML_ROPE_TYPE_NEOX, kHeadDim, 10000, 0.25F},
                      RopeCase{"magnitude", GGML_ROPE_TYPE_NEOX, kHeadDim, 10000, 1, 0, 1.19F},
                      RopeCase{"yarn", GGML_ROPE_TYPE_NEOX, kHeadDim, 10000, 0.125F, 1},
                      RopeCase{"yarn_everything", GGML_ROPE_TYPE_NORMAL, kHeadDim / 2, 1e6F, 0.25F, 0.7F, 1.1F, true}),
    [](const ::testing::TestParamInfo<RopeCase>& info) { return info.param.name; });

TEST(ReadRope, RefusesPositionsOfSections) {
  const RopeGraph graph({.name = "vision"});
  graph.rope()->op_params[2] = GGML_ROPE_TYPE_MROPE;
  const Result<Rope> rope = ReadRope(graph.rope());
  ASSERT_FALSE(rope.ok());
  EXPECT_EQ(rope.status().code(), Code::kUnsupported);
}

TEST(FindQuerySource, WalksThroughViewsAndFactors) {
  const RopeGraph graph({.name = "walk"});
  ggml_context* context = graph.context();
  ggml_tensor* q = ggml_permute(context, ggml_scale(context, graph.rope(), 0.5F), 0, 2, 1, 3);
  EXPECT_EQ(FindQuerySource(ggml_cont(context, q)).rope, graph.rope());
  EXPECT_FALSE(FindQuerySource(q).rotated);

  ggml_tensor* product = ggml_mul(context, graph.rope(), graph.rope());
  EXPECT_EQ(FindQuerySource(product).rope, nullptr);
  EXPECT_EQ(FindQuerySource(product).other, product);

  ggml_tensor* hadamard = ggml_new_tensor_2d(context, GGML_TYPE_F32, kHeadDim, kHeadDim);
  ggml_tensor* projected = ggml_mul_mat(context, hadamard, graph.rope());
  EXPECT_EQ(FindQuerySource(projected).other, projected);
  ggml_set_input(hadamard);
  EXPECT_EQ(FindQuerySource(projected).rope, graph.rope());
  EXPECT_TRUE(FindQuerySource(projected).rotated);
}

// Stops at every node of a real graph; a rotation may overwrite its input, which is therefore copied before.
struct Watcher {
  int32_t nodes = 0;
  double worst = 0;
  std::vector<float> input;

  static bool Callback(ggml_tensor* node, bool ask, void* user_data) {
    auto* watcher = static_cast<Watcher*>(user_data);
    if (node->op != GGML_OP_ROPE) return true;
    if (ask)
      watcher->input = Rows(node->src[0]);
    else
      watcher->Compare(node);
    return true;
  }

  // [tokens, heads, d]
  static std::vector<float> Rows(const ggml_tensor* x) {
    std::vector<float> rows;
    for (int64_t token = 0; token < x->ne[2]; ++token)
      for (int64_t head = 0; head < x->ne[1]; ++head) {
        const char* row = static_cast<const char*>(x->data) + token * x->nb[2] + head * x->nb[1];
        rows.insert(rows.end(), reinterpret_cast<const float*>(row), reinterpret_cast<const float*>(row) + x->ne[0]);
      }
    return rows;
  }

  void Compare(const ggml_tensor* node) {
    ++nodes;
    const Result<Rope> rope = ReadRope(node);
    ASSERT_TRUE(rope.ok()) << rope.status().message();
    std::vector<int32_t> positions(node->src[1]->ne[0]);
    ggml_backend_tensor_get(node->src[1], positions.data(), 0, ggml_nbytes(node->src[1]));
    const std::vector<float> rotated = Rows(node);
    ASSERT_NE(rotated, input);
    const std::vector<float> undone =
        Turned(*rope, rotated, positions, static_cast<int32_t>(node->ne[1]), static_cast<int32_t>(node->ne[0]), true);
    for (size_t i = 0; i < input.size(); ++i)
      worst = std::max(worst, static_cast<double>(std::abs(input[i] - undone[i])));
  }
};

TEST(ReadRope, UndoesEveryRotationOfTheTinyModels) {
  const TinyConfig configs[] = {
      {.arch = TinyArch::kLlama},
      {.arch = TinyArch::kQwen2, .seed = 2},
      {.arch = TinyArch::kQwen3, .rope_base = 1e6F, .seed = 3},
      {.arch = TinyArch::kGemma3, .layers = 4, .sliding_window = 24, .seed = 4},
  };
  const std::string path =
      (std::filesystem::temp_directory_path() / ("dropkv_rope_" + std::to_string(::getpid()) + ".gguf")).string();
  for (const TinyConfig& config : configs) {
    ASSERT_TRUE(testing::WriteTinyModel(testing::MakeTinyModel(config), path).ok());
    const testing::ModelPtr model = testing::LoadModel(path);
    Watcher watcher;
    llama_context_params params = testing::PlainContext(512, GGML_TYPE_F32, false);
    params.cb_eval = &Watcher::Callback;
    params.cb_eval_user_data = &watcher;
    const testing::ContextPtr context(llama_init_from_model(model.get(), params));
    ASSERT_NE(context, nullptr);
    std::vector<int32_t> tokens(200);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(3 + i % 250);
    ASSERT_FALSE(testing::DecodeTokens(context.get(), tokens).empty());
    EXPECT_EQ(watcher.nodes, 2 * config.layers);
    EXPECT_LT(watcher.worst, 2e-4) << "architecture " << static_cast<int>(config.arch);
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace dropkv::llama
