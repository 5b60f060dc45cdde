#include "dropkv/cache_view.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace dropkv {
namespace {

Status CheckTensor(const char* name, const KvTensor& tensor, int32_t dim, int32_t heads) {
  const std::string field = name;
  if (tensor.data == nullptr) return InvalidArgument(field + ".data: expected a pointer, got null");
  if (DTypeName(tensor.dtype) == "?")
    return InvalidArgument(field + ".dtype: expected f32, f16, bf16 or q8_0, got " +
                           std::to_string(static_cast<int>(tensor.dtype)));
  if (tensor.token_stride <= 0 || tensor.dim_stride <= 0 || (heads > 1 && tensor.head_stride <= 0))
    return InvalidArgument(field + ": expected positive strides, got head " + std::to_string(tensor.head_stride) +
                           ", token " + std::to_string(tensor.token_stride) + ", dim " +
                           std::to_string(tensor.dim_stride));
  if (tensor.dtype != DType::kQ8_0) return Status::Ok();
  if (tensor.dim_stride != 1 || dim % kQ8BlockElements != 0 || tensor.head_stride % kQ8BlockElements != 0 ||
      tensor.token_stride % kQ8BlockElements != 0)
    return InvalidArgument(
        field + ": q8_0 needs dim_stride 1, and head size and strides that are multiples of 32; got " + "head size " +
        std::to_string(dim) + ", strides head " + std::to_string(tensor.head_stride) + ", token " +
        std::to_string(tensor.token_stride) + ", dim " + std::to_string(tensor.dim_stride));
  return Status::Ok();
}

Status CheckDim(const char* name, int32_t dim) {
  if (dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0) return Status::Ok();
  return InvalidArgument(std::string(name) + ": expected a multiple of 8 from 8 to 256, got " + std::to_string(dim));
}

Status CheckWeights(const float* weights, int32_t rows) {
  for (int32_t i = 0; i < rows; ++i)
    if (!std::isfinite(weights[i]) || weights[i] < 0.0F)
      return InvalidArgument("rows.weights[" + std::to_string(i) + "]: expected a finite number, 0 or more, got " +
                             std::to_string(weights[i]));
  if (std::any_of(weights, weights + rows, [](float weight) { return weight > 0.0F; })) return Status::Ok();
  return InvalidArgument("rows.weights: expected one above 0, got " + std::to_string(rows) + " zeros");
}

}  // namespace

Status CheckKvView(const KvView& kv) {
  if (kv.kv_heads < 1) return InvalidArgument("kv.kv_heads: expected at least 1, got " + std::to_string(kv.kv_heads));
  if (kv.tokens < 1) return InvalidArgument("kv.tokens: expected at least 1, got " + std::to_string(kv.tokens));
  DROPKV_RETURN_IF_ERROR(CheckDim("kv.key_dim", kv.key_dim));
  DROPKV_RETURN_IF_ERROR(CheckDim("kv.value_dim", kv.value_dim));
  DROPKV_RETURN_IF_ERROR(CheckTensor("kv.k", kv.k, kv.key_dim, kv.kv_heads));
  return CheckTensor("kv.v", kv.v, kv.value_dim, kv.kv_heads);
}

Status CheckRows(const ObservationRows& rows, const KvView& kv) {
  if (rows.q == nullptr) return InvalidArgument("rows.q: expected a pointer, got null");
  if (rows.visible == nullptr) return InvalidArgument("rows.visible: expected a pointer, got null");
  if (rows.rows < 1 || rows.rows > kMaxRows)
    return InvalidArgument("rows.rows: expected 1 to 128, got " + std::to_string(rows.rows));
  if (rows.query_heads < 1 || rows.query_heads % kv.kv_heads != 0 || rows.query_heads / kv.kv_heads > kMaxGroup)
    return InvalidArgument("rows.query_heads: expected 1 to 16 times the " + std::to_string(kv.kv_heads) +
                           " KV heads, got " + std::to_string(rows.query_heads));
  for (int32_t i = 0; i < rows.rows; ++i)
    if (rows.visible[i] < 0 || rows.visible[i] > kv.tokens)
      return InvalidArgument("rows.visible[" + std::to_string(i) + "]: expected 0 to " + std::to_string(kv.tokens) +
                             " tokens, got " + std::to_string(rows.visible[i]));
  return rows.weights == nullptr ? Status::Ok() : CheckWeights(rows.weights, rows.rows);
}

}  // namespace dropkv
