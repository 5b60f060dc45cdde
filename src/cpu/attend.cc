#include "cpu/attend.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

namespace dropkv::cpu {
namespace {

constexpr double kDominantRest = 1e-6;  // algorithm.md section 3: p >= 1 - 1e-6
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

HeadTensor MakeHeadTensor(const KvTensor& tensor, int32_t head, int32_t dim) {
  const auto* data = static_cast<const std::byte*>(tensor.data) + DTypeBytes(tensor.dtype, head * tensor.head_stride);
  return {data, tensor.dtype, tensor.token_stride, tensor.dim_stride, dim};
}

// 2^(a - b), where a or both may be -inf.
double Ratio(double a, double b) { return std::isinf(a) && a < 0 ? 0.0 : std::exp2(a - b); }

// Infinite or NaN where one of the components is. On the bits, which order as the magnitudes do: such a reduction
// vectorises, one over floats does not.
float LargestMagnitude(const float* x, int32_t count) {
  int32_t largest = 0;
  for (int32_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<int32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(largest);
}

// out [dim, lanes] = factor times the lanes' rows [dim]; zeros where a row is null. Four lanes at a time: their
// elements are stored together.
void PackPanel(std::span<const float* const> rows, int32_t dim, float factor, float* out) {
  const size_t stride = rows.size();
  size_t lane = 0;
  for (; lane + 4 <= stride; lane += 4) {
    const float* four[4] = {rows[lane], rows[lane + 1], rows[lane + 2], rows[lane + 3]};
    if (std::find(four, four + 4, nullptr) != four + 4) break;
    for (int32_t i = 0; i < dim; ++i) {
      const float packed[4] = {four[0][i] * factor, four[1][i] * factor, four[2][i] * factor, four[3][i] * factor};
      std::memcpy(out + i * stride + lane, packed, sizeof(packed));
    }
  }
  for (; lane < stride; ++lane) {
    const float* row = rows[lane];
    for (int32_t i = 0; i < dim; ++i) out[i * stride + lane] = row != nullptr ? row[i] * factor : 0.0F;
  }
}

}  // namespace

HeadTokens MakeHeadTokens(const KvView& kv, int32_t head, const int32_t* subset, int32_t count) {
  return {MakeHeadTensor(kv.k, head, kv.key_dim), MakeHeadTensor(kv.v, head, kv.value_dim), kv.cells, subset, count};
}

HeadTokens MakeHeadTokens(const KvView& kv, int32_t head) { return MakeHeadTokens(kv, head, nullptr, kv.tokens); }

const float* QueryOf(const ObservationRows& rows, int32_t kv_heads, int32_t head, int32_t id) {
  const int32_t group = rows.query_heads / kv_heads;
  return rows.q + (head * group + id / rows.rows) * rows.head_stride + id % rows.rows * rows.row_stride;
}

double SquaredNorm(const float* x, int32_t dim) {
  double parts[4] = {};  // one sum would wait for itself
  for (int32_t i = 0; i < dim; i += 4)
    for (int32_t lane = 0; lane < 4; ++lane) parts[lane] += double{x[i + lane]} * x[i + lane];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

bool IsFinite(const float* x, int32_t count) { return std::isfinite(LargestMagnitude(x, count)); }

PackedRows PackedRows::Take(Workspace& workspace, int32_t lanes, int32_t key_dim) {
  PackedRows packed;
  packed.queries = workspace.Take<float>(static_cast<size_t>(lanes) * key_dim);
  packed.visible = workspace.Take<int32_t>(lanes);
  return packed;
}

HeadRows PackRows(const Kernels& kernels, const ObservationRows& rows, const AttentionSpec& spec, int32_t kv_heads,
                  int32_t head, const RowChoice& choice, const HeadTokens& tokens, const PackedRows& memory) {
  const LaneLayout layout(choice.count, kernels.vector_lanes, kernels.panel_vectors);
  HeadRows packed{layout, memory.queries, memory.visible, tokens.count, 0.0F, 0.0F};
  const bool capped = spec.soft_cap > 0.0F;
  if (capped) packed.cap = spec.soft_cap * kLog2E;
  const float factor = capped ? spec.scale / spec.soft_cap : spec.scale * kLog2E;
  const int32_t dim = tokens.k.dim;
  std::array<const float*, kMaxPanelLanes> queries;
  for (int32_t p = 0; p < layout.panels; ++p) {
    const int32_t first = layout.panel_begin(p);
    const int32_t width = layout.panel_lanes(p);
    for (int32_t lane = first; lane < first + width; ++lane) {
      const float*& query = queries[lane - first];
      query = lane < choice.count ? QueryOf(rows, kv_heads, head, choice.id(lane)) : nullptr;
      memory.visible[lane] = tokens.count;
      const float largest = query != nullptr ? LargestMagnitude(query, dim) : 0.0F;
      if (!std::isfinite(largest)) query = nullptr;
      if (query == nullptr) continue;
      packed.query_max = std::max(packed.query_max, largest * std::abs(factor));
      const int32_t sees = rows.visible[choice.id(lane) % rows.rows];
      memory.visible[lane] =
          tokens.subset == nullptr
              ? sees
              : static_cast<int32_t>(std::lower_bound(tokens.subset, tokens.subset + tokens.count, sees) -
                                     tokens.subset);
      packed.fewest_visible = std::min(packed.fewest_visible, memory.visible[lane]);
    }
    PackPanel({queries.data(), static_cast<size_t>(width)}, dim, factor, memory.queries + int64_t{first} * dim);
  }
  return packed;
}

SoftmaxState TakeState(Workspace& workspace, int32_t lanes, int32_t value_dim) {
  SoftmaxState state;
  state.top = workspace.Take<float>(lanes);
  state.second = workspace.Take<float>(lanes);
  state.rest = workspace.Take<float>(lanes);
  state.token = workspace.Take<int32_t>(lanes);
  state.sums = workspace.Take<float>(static_cast<size_t>(lanes) * value_dim);
  return state;
}

void ResetState(int32_t lanes, int32_t value_dim, bool with_values, const SoftmaxState& state) {
  std::fill_n(state.top, lanes, kMinusInfinity);
  std::fill_n(state.second, lanes, kMinusInfinity);
  std::fill_n(state.rest, lanes, 0.0F);
  std::fill_n(state.token, lanes, -1);
  if (with_values) std::fill_n(state.sums, static_cast<int64_t>(lanes) * value_dim, 0.0F);
}

void MergeState(const Kernels& kernels, const HeadTokens& tokens, const LaneLayout& layout, const float* center,
                const SoftmaxState& from, const SoftmaxState& into, float* row) {
  const int32_t dim = center != nullptr ? tokens.v.dim : 0;
  for (int32_t lane = 0; lane < layout.lanes; ++lane) {
    if (from.token[lane] < 0) continue;
    const bool later_wins = from.top[lane] > into.top[lane];  // equal logits: the earlier token stays
    const float low = std::min(from.top[lane], into.top[lane]);
    const float second = std::max({low, into.second[lane], from.second[lane]});
    const auto keep = static_cast<float>(Ratio(into.second[lane], second));
    const auto add = static_cast<float>(Ratio(from.second[lane], second));
    const auto join = static_cast<float>(Ratio(low, second));  // the lesser of the two tops joins the others
    const int32_t joining = later_wins ? into.token[lane] : from.token[lane];
    if (dim > 0 && joining >= 0) kernels.load_row(tokens.v, tokens.cell(joining), center, row);
    const PanelAddress at(layout, tokens.v.dim, lane);
    for (int32_t i = 0; i < dim; ++i) {
      const int64_t element = at.first + int64_t{i} * at.stride;
      const float joined = joining >= 0 ? join * row[i] : 0.0F;
      into.sums[element] = into.sums[element] * keep + from.sums[element] * add + joined;
    }
    into.rest[lane] = into.rest[lane] * keep + from.rest[lane] * add + join;
    into.second[lane] = second;
    if (!later_wins) continue;
    into.top[lane] = from.top[lane];
    into.token[lane] = from.token[lane];
  }
}

RowResult FinishRow(const Kernels& kernels, const HeadTokens& tokens, const LaneLayout& layout, const float* center,
                    double sink, const SoftmaxState& state, int32_t lane, float* out, float* row) {
  RowResult result;
  const int32_t dim = center != nullptr ? tokens.v.dim : 0;
  const double sink2 = sink / kLn2;
  const double top = state.top[lane];
  const double second = state.second[lane];
  const double rest = state.rest[lane];
  if (state.token[lane] < 0) {
    result.lse = sink;
    result.base = std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < dim; ++i) out[i] = -center[i];
    return result;
  }
  result.base = static_cast<float>(std::max(top, sink2));
  const double base = result.base;
  const double top_share = std::exp2(top - base);
  const double others = Ratio(second, base);  // per unit of rest and of sums
  const double sink_share = Ratio(sink2, base);
  const double apart = others * rest + sink_share;
  const double total = top_share + apart;
  const double bits = base == top ? std::log1p(apart) / kLn2 : std::log2(total);
  result.lse = (base + bits) * kLn2;
  result.share = static_cast<float>(-bits);
  const double p = top_share / total;
  if (dim > 0) kernels.load_row(tokens.v, tokens.cell(state.token[lane]), center, row);
  const PanelAddress at(layout, tokens.v.dim, lane);
  for (int32_t i = 0; i < dim; ++i) {
    const double sum = state.sums[at.first + int64_t{i} * at.stride];
    out[i] = static_cast<float>((top_share * row[i] + others * sum - sink_share * center[i]) / total);
  }
  if (!(apart < top_share)) return result;

  result.token = state.token[lane];
  result.dominant = apart / total <= kDominantRest;
  const double base_without = std::max(second, sink2);
  if (std::isinf(base_without)) return result;  // nothing else: p = 1, no output without it
  const double others_without = Ratio(second, base_without);
  const double sink_without = Ratio(sink2, base_without);
  const double total_without = others_without * rest + sink_without;
  for (int32_t i = 0; i < dim; ++i) {
    const double sum = state.sums[at.first + int64_t{i} * at.stride];
    const double moved = row[i] - (others_without * sum - sink_without * center[i]) / total_without;
    result.contribution += moved * moved;
  }
  result.contribution *= p * p;
  return result;
}

void ChooseCenter(const Kernels& kernels, const HeadTokens& tokens, float* row, float* center) {
  const int32_t dim = tokens.v.dim;
  std::fill_n(center, dim, 0.0F);
  double square = 0.0;  // sum of |v|^2
  int32_t found = 0;
  for (int32_t t = 0; t < std::min(kTile, tokens.count); ++t) {
    if (!kernels.load_row(tokens.v, tokens.cell(t), nullptr, row)) continue;
    ++found;
    const float part = 1.0F / static_cast<float>(found);
    for (int32_t i = 0; i < dim; ++i) center[i] += (row[i] - center[i]) * part;
    square += SquaredNorm(row, dim);
  }
  // What the values share is a small part of them: 0 serves as well, and they can be read where they are.
  if (5.0 * SquaredNorm(center, dim) <= square / std::max(1, found)) std::fill_n(center, dim, 0.0F);
}

}  // namespace dropkv::cpu
