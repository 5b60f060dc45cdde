#include "llama/rope.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string>
#include <vector>

namespace dropkv::llama {
namespace {

// op_params of GGML_OP_ROPE, by index; floats share the array with integers.
enum RopeParam : int {
  kDims = 1,
  kMode = 2,
  kOriginalContext = 4,
  kBase = 5,
  kScale = 6,
  kExtrapolation = 7,
  kAttention = 8,
  kBetaFast = 9,
  kBetaSlow = 10,
};

float FloatParam(const ggml_tensor* node, RopeParam param) {
  float value = 0;
  std::memcpy(&value, &node->op_params[param], sizeof(value));
  return value;
}

bool KeepsDirection(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
    case GGML_OP_CONT:
    case GGML_OP_CPY:
    case GGML_OP_DUP:
    case GGML_OP_SCALE:
      return true;
    default:
      return false;
  }
}

// A matrix that is an input of the graph. A device gets a copy of it, which only the name tells from a weight's.
bool IsRotation(const ggml_tensor* matrix) {
  return (matrix->flags & GGML_TENSOR_FLAG_INPUT) != 0 || std::strstr(matrix->name, "attn_inp_k_rot") != nullptr;
}

// The pair at which a rotation of the original context's length makes `turns` turns (YaRN, Peng et al. 2023).
double PairOfTurns(const ggml_tensor* node, double turns) {
  const double context = node->op_params[kOriginalContext];
  return node->op_params[kDims] * std::log(context / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(FloatParam(node, kBase)));
}

// How much of pair i keeps its own frequency instead of the interpolated one: [dims / 2], 0 without YaRN.
std::vector<double> Extrapolated(const ggml_tensor* node) {
  const int32_t dims = node->op_params[kDims];
  std::vector<double> share(dims / 2, 0);
  const double factor = FloatParam(node, kExtrapolation);
  if (factor == 0) return share;
  const double low = std::max(0.0, std::floor(PairOfTurns(node, FloatParam(node, kBetaFast))));
  const double high = std::min(dims - 1.0, std::ceil(PairOfTurns(node, FloatParam(node, kBetaSlow))));
  for (int32_t i = 0; i < dims / 2; ++i)
    share[i] = factor * (1 - std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0));
  return share;
}

}  // namespace

QuerySource FindQuerySource(const ggml_tensor* q) {
  QuerySource source;
  const ggml_tensor* node = q;
  while (node != nullptr) {
    if (node->op == GGML_OP_ROPE) {
      source.rope = node;
      return source;
    }
    const bool rotation = node->op == GGML_OP_MUL_MAT && IsRotation(node->src[0]);
    if (rotation) source.rotated = true;
    if (!rotation && !KeepsDirection(node)) break;
    node = rotation ? node->src[1] : node->src[0];
  }
  source.other = node;
  return source;
}

Result<baseline::Rope> ReadRope(const ggml_tensor* node) {
  const int32_t mode = node->op_params[kMode];
  if (mode != GGML_ROPE_TYPE_NORMAL && mode != GGML_ROPE_TYPE_NEOX)
    return Unsupported("rotary positions: expected pairs of neighbours or of halves, got ggml's mode " +
                       std::to_string(mode));
  baseline::Rope rope;
  rope.dims = node->op_params[kDims];
  rope.halves = mode == GGML_ROPE_TYPE_NEOX;
  std::vector<float> factors(rope.dims / 2, 1.0F);
  if (node->src[2] != nullptr) ggml_backend_tensor_get(node->src[2], factors.data(), 0, factors.size() * sizeof(float));
  const double scale = FloatParam(node, kScale);
  const std::vector<double> extrapolated = Extrapolated(node);
  // ggml makes a frequency from the one before with this rounded ratio; at large positions the rounding shows.
  const float ratio = std::pow(FloatParam(node, kBase), -2.0F / static_cast<float>(rope.dims));
  double frequency = 1;
  for (int32_t i = 0; i < rope.dims / 2; ++i, frequency *= ratio)
    rope.frequencies.push_back(frequency / factors[i] * (scale + (1 - scale) * extrapolated[i]));
  rope.magnitude = FloatParam(node, kAttention);
  if (FloatParam(node, kExtrapolation) != 0) rope.magnitude *= 1 + 0.1 * std::log(1 / scale);
  return rope;
}

}  // namespace dropkv::llama
