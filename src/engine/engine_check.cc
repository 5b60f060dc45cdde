#include <array>
#include <limits>

#include "engine/engine_impl.h"

namespace dropkv {

std::string Got(int64_t value) { return ", got " + std::to_string(value); }

Status CheckShape(const EvictShape& shape) {
  if (shape.layers < 1) return InvalidArgument("shape.layers: expected at least 1" + Got(shape.layers));
  if (shape.kv_heads < 1) return InvalidArgument("shape.kv_heads: expected at least 1" + Got(shape.kv_heads));
  if (shape.tokens < 1) return InvalidArgument("shape.tokens: expected at least 1" + Got(shape.tokens));
  const int32_t room = std::numeric_limits<int32_t>::max() - shape.tokens;
  if (shape.generated < 0 || shape.generated > room)
    return InvalidArgument("shape.generated: expected 0 to " + std::to_string(room) + Got(shape.generated));
  if (shape.rows < 0 || shape.rows > kMaxRows)
    return InvalidArgument("shape.rows: expected 0 (the policy's window) to 128" + Got(shape.rows));
  if (shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0 ||
      shape.query_heads / shape.kv_heads > kMaxGroup)
    return InvalidArgument("shape.query_heads: expected 1 to 16 times the " + std::to_string(shape.kv_heads) +
                           " KV heads" + Got(shape.query_heads));
  for (const int32_t dim : {shape.key_dim, shape.value_dim})
    if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0)
      return InvalidArgument("shape.key_dim, shape.value_dim: expected multiples of 8 from 8 to 256" + Got(dim));
  return Status::Ok();
}

namespace {

struct Field {
  const char* name;
  int64_t value;
};

// All that decides what is attended to, scored and pooled.
auto PassFields(const Plan& plan) {
  const EvictShape& shape = plan.shape;
  const Policy& policy = plan.policy;
  return std::to_array<Field>({{"shape.layers", shape.layers},
                               {"shape.query_heads", shape.query_heads},
                               {"shape.kv_heads", shape.kv_heads},
                               {"shape.tokens", shape.tokens},
                               {"shape.key_dim", shape.key_dim},
                               {"shape.value_dim", shape.value_dim},
                               {"shape.generated", shape.generated},
                               {"shape.rows", shape.rows},
                               {"policy.signal", static_cast<int64_t>(policy.signal)},
                               {"policy.window", policy.window},
                               {"policy.pool.kind", static_cast<int64_t>(policy.pool.kind)},
                               {"policy.pool.before", policy.pool.before},
                               {"policy.pool.after", policy.pool.after},
                               {"policy.pool.past_only", policy.pool.past_only ? 1 : 0},
                               {"policy.sink", policy.sink},
                               {"policy.seed", static_cast<int64_t>(policy.seed)}});
}

}  // namespace

Status CheckOnePass(std::span<const Plan> plans) {
  if (plans.empty()) return InvalidArgument("plans: expected at least 1" + Got(0));
  const auto first = PassFields(plans.front());
  for (size_t i = 1; i < plans.size(); ++i) {
    const auto fields = PassFields(plans[i]);
    for (size_t f = 0; f < fields.size(); ++f)
      if (fields[f].value != first[f].value)
        return InvalidArgument("plans[" + std::to_string(i) + "]." + fields[f].name + ": expected plans[0]'s " +
                               std::to_string(first[f].value) + Got(fields[f].value));
  }
  return Status::Ok();
}

Status CheckLayer(const EvictShape& shape, const LayerInput& layer) {
  const KvView& kv = layer.kv;
  DROPKV_RETURN_IF_ERROR(CheckKvView(kv));
  if (kv.kv_heads == shape.kv_heads && kv.tokens == ViewTokens(shape) && kv.key_dim == shape.key_dim &&
      kv.value_dim == shape.value_dim)
    return Status::Ok();
  const auto text = [](int32_t heads, int32_t tokens, int32_t key_dim, int32_t value_dim) {
    std::string shape_text = "[";  // not one sum of strings: GCC 12 warns of an overlap that is not there
    shape_text += std::to_string(heads) + ", " + std::to_string(tokens) + ", " + std::to_string(key_dim) + ", ";
    return shape_text + std::to_string(value_dim) + "]";
  };
  return InvalidArgument("layer.kv: expected the plan's shape [Hkv, n, d, dv] = " +
                         text(shape.kv_heads, ViewTokens(shape), shape.key_dim, shape.value_dim) + ", got " +
                         text(kv.kv_heads, kv.tokens, kv.key_dim, kv.value_dim));
}

Status CheckLayerRows(const EvictShape& shape, int32_t rows, std::string_view source, const LayerInput& layer) {
  DROPKV_RETURN_IF_ERROR(CheckRows(layer.rows, layer.kv));
  if (layer.rows.query_heads != shape.query_heads)
    return InvalidArgument("layer.rows.query_heads: expected the plan's " + std::to_string(shape.query_heads) +
                           Got(layer.rows.query_heads));
  if (layer.rows.rows != rows)
    return InvalidArgument("layer.rows.rows: expected " + std::to_string(rows) + " (" + std::string(source) + ")" +
                           Got(layer.rows.rows));
  if ((layer.out == nullptr) != (layer.lse == nullptr))
    return InvalidArgument("layer.out, layer.lse: expected both or none, got " +
                           std::string(layer.out == nullptr ? "lse" : "out") + " alone");
  return Status::Ok();
}

}  // namespace dropkv
