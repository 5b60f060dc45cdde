// DropKV: on the engine's kernels, in the authors' arithmetic, and with distances behind the output projection.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "baseline/output_metric.h"
#include "baseline/scorers.h"
#include "baseline/window_attention.h"
#include "baseline/window_scores.h"
#include "core/workspace.h"
#include "reference/reference.h"

namespace dropkv::baseline {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Values behind the factor of one query head per KV head: y = L^T v.
class ProjectedValues {
 public:
  ProjectedValues(const KvView& kv, ThreadPool* pool) : kv_(kv), pool_(pool), cells_(kv.tokens) {
    if (kv.cells != nullptr) cells_ = *std::max_element(kv.cells, kv.cells + kv.tokens) + 1;
    values_.resize(static_cast<size_t>(kv.kv_heads) * cells_ * kv.value_dim);
    Workspace counting;
    for (int32_t i = 0; i < pool->threads(); ++i) cpu::TileScratch::Take(counting, kv.key_dim, kv.value_dim);
    memory_.resize(counting.bytes_needed());
    Workspace workspace(memory_);
    for (int32_t i = 0; i < pool->threads(); ++i)
      scratch_.push_back(cpu::TileScratch::Take(workspace, kv.key_dim, kv.value_dim));
  }

  // Query head `member` of every group.
  void Fill(const OutputMetric& metric, int32_t member) {
    const int32_t group = metric.heads() / kv_.kv_heads;
    const int32_t tiles = (kv_.tokens + cpu::kTile - 1) / cpu::kTile;
    for (int32_t head = 0; head < kv_.kv_heads; ++head) {
      const AlignedFloats packed = Pack(metric.factor(head * group + member));
      pool_->For(tiles, [&](int64_t tile, int32_t worker) {
        FillTile(head, packed, static_cast<int32_t>(tile) * cpu::kTile, scratch_[worker]);
      });
    }
  }

  // The cache with these values instead of its own.
  KvView View() const {
    KvView view = kv_;
    const int32_t dim = kv_.value_dim;
    view.v = {values_.data(), DType::kF32, int64_t{cells_} * dim, dim, 1};
    return view;
  }

 private:
  AlignedFloats Pack(const float* factor) const {
    const int32_t dim = kv_.value_dim;
    AlignedFloats packed(static_cast<size_t>(layout_.lanes) * dim, 0.0F);
    for (int32_t lane = 0; lane < dim; ++lane) {
      const cpu::PanelAddress at(layout_, dim, lane);
      for (int32_t i = 0; i < dim; ++i)
        packed[at.first + int64_t{i} * at.stride] = factor[static_cast<size_t>(i) * dim + lane];
    }
    return packed;
  }

  void FillTile(int32_t head, const AlignedFloats& packed, int32_t begin, const cpu::TileScratch& scratch) {
    const int32_t dim = kv_.value_dim;
    const int32_t count = std::min(cpu::kTile, kv_.tokens - begin);
    const cpu::HeadTokens tokens = cpu::MakeHeadTokens(kv_, head);
    std::vector<float> products(static_cast<size_t>(count) * layout_.lanes);
    BestWindowKernels().products(tokens, layout_, packed.data(), begin, count, products.data(), nullptr, scratch);
    for (int32_t t = 0; t < count; ++t) {
      float* out = values_.data() + (int64_t{head} * cells_ + tokens.cell(begin + t)) * dim;
      std::copy_n(products.data() + static_cast<size_t>(t) * layout_.lanes, dim, out);
      if (scratch.bad[t] != 0) out[0] = kNaN;
    }
  }

  const KvView& kv_;
  ThreadPool* pool_;
  int32_t cells_;
  cpu::LaneLayout layout_{kv_.value_dim, cpu::KernelTable().front().vector_lanes,
                          cpu::KernelTable().front().panel_vectors};
  std::vector<float> values_;
  std::vector<std::byte> memory_;
  std::vector<cpu::TileScratch> scratch_;
};

// Rows and sinks of query head `member` of every group: as if there were no grouping.
struct MemberRows {
  ObservationRows rows;
  AttentionSpec attention;
  std::vector<float> sinks;

  MemberRows(const ObservationRows& all, const AttentionSpec& spec, int32_t kv_heads, int32_t member)
      : rows(all), attention(spec) {
    const int32_t group = all.query_heads / kv_heads;
    rows.q += member * all.head_stride;
    rows.head_stride *= group;
    rows.query_heads = kv_heads;
    if (spec.sinks == nullptr) return;
    for (int32_t head = 0; head < kv_heads; ++head) sinks.push_back(spec.sinks[head * group + member]);
    attention.sinks = sinks.data();
  }
};

// What the expanded form needs of the rows of one KV head, along the lanes.
struct ExpandedRows {
  AlignedFloats outputs;     // [dv, lanes] in panels: a
  std::vector<float> norms;  // [lanes] |a|^2
  std::vector<float> ones;   // [lanes]

  ExpandedRows(const WindowAttention& attention, int32_t kv_head)
      : norms(attention.lanes(), 0.0F), ones(attention.lanes(), 1.0F) {
    outputs = attention.PackLanes([&](int32_t lane, float* column) {
      attention.Output(kv_head, lane, column);
      norms[lane] = static_cast<float>(cpu::SquaredNorm(column, attention.value_dim()));
    });
  }
};

}  // namespace

// The exact mode of docs/algorithm.md section 3.
Status ScoreDropKv(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                   LayerScores* scores) {
  const ObservationRows rows = JudgingRows(recipe, layer);
  const RawScores raw = EngineScores(layer.kv, layer.generated, rows, layer.attention, Signal::kDropKv, pool);
  PoolAndReduce(recipe, raw.raw, rows.query_heads / layer.kv.kv_heads, pool, scores);
  Force(raw.flags, raw.raw.data(), scores);
  return Status::Ok();
}

// The authors' float32 arithmetic (AozhongZhang/DropKV, kvpress pull request 285): epsilon in the denominator and the
// expanded form, which may come out negative.
Status ScoreDropKvCompat(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                         LayerScores* scores) {
  WindowAttention attention(recipe, layer, true, pool);
  std::vector<ExpandedRows> expanded;
  expanded.reserve(scores->kv_heads);
  for (int32_t head = 0; head < scores->kv_heads; ++head) expanded.emplace_back(attention, head);
  const int32_t lanes = attention.lanes();
  const auto epsilon = static_cast<float>(recipe.epsilon);
  std::vector<float> raw(scores->score.size());
  attention.ForEachTile([&](const WindowAttention::Range& range, int32_t begin, int32_t count) {
    const ExpandedRows& of_rows = expanded[range.kv_head];
    std::vector<float> weights(static_cast<size_t>(count) * lanes);
    std::vector<float> cross(weights.size());
    std::vector<float> sums(size_t{4} * cpu::kTile);
    float* norms = sums.data() + 3 * cpu::kTile;
    attention.Weights(range, begin, count, weights.data());
    for (float& weight : weights) {
      const float ratio = weight / (1.0F - weight + epsilon);
      weight = ratio * ratio;
    }
    attention.Products(range, of_rows.outputs.data(), begin, count, cross.data(), norms);
    const float* others[] = {of_rows.ones.data(), cross.data(), of_rows.norms.data()};
    for (int32_t k = 0; k < 3; ++k)
      attention.kernels().dots(weights.data(), others[k], k == 1 ? lanes : 0, count, lanes,
                               sums.data() + k * cpu::kTile);
    float* out = raw.data() + static_cast<size_t>(range.kv_head) * scores->tokens + begin;
    for (int32_t t = 0; t < count; ++t) {
      const float sum = sums[t] * norms[t] - 2.0F * sums[cpu::kTile + t] + sums[2 * cpu::kTile + t];
      out[t] = sum / static_cast<float>(attention.group());
    }
  });
  PoolAndReduce(recipe, raw, attention.group(), pool, scores);
  Force(attention.flags(), nullptr, scores);
  return Status::Ok();
}

// DropKV with |(a - v_j) W_O^h| as the distance. Attention outputs are linear in the values, so this is the exact mode
// over values L_h^T v, one query head of every group at a time.
Status ScoreDropKvWo(const Recipe& recipe, const Layer& layer, double /*keep_fraction*/, ThreadPool* pool,
                     LayerScores* scores) {
  const ObservationRows rows = JudgingRows(recipe, layer);
  const int32_t group = rows.query_heads / layer.kv.kv_heads;
  std::optional<OutputMetric> own;
  if (layer.output_metric == nullptr) own.emplace(layer.wo, layer.kv.value_dim, pool);
  const OutputMetric& metric = own.has_value() ? *own : *layer.output_metric;
  ProjectedValues values(layer.kv, pool);
  std::vector<float> raw(scores->score.size(), 0.0F);
  std::vector<uint8_t> flags(raw.size(), 0);
  for (int32_t member = 0; member < group; ++member) {
    values.Fill(metric, member);
    const MemberRows of_member(rows, layer.attention, layer.kv.kv_heads, member);
    const RawScores part =
        EngineScores(values.View(), layer.generated, of_member.rows, of_member.attention, Signal::kDropKv, pool);
    for (size_t j = 0; j < raw.size(); ++j) {
      raw[j] += part.raw[j] / static_cast<float>(group);
      flags[j] |= part.flags[j];
    }
  }
  PoolAndReduce(recipe, raw, group, pool, scores);
  Force(flags, raw.data(), scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
