#include "cpu/score.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "reference/reference.h"

namespace dropkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int32_t kSmallestSplit = 4096;
constexpr int32_t kItemsPerLayer = 8;  // splits grow beyond kSmallestSplit where a layer has twice as many or more

// Tokens of one step, whole tiles. All heads of a layer take one range of tokens before the next: where tokens lie side
// by side for all heads (token-major), its pages are then still in the translation buffers. Where every head lies by
// itself, steps are longer: the rows are packed for each.
constexpr int32_t kRangeTokens = 11 * kTile;
constexpr int32_t kLongRange = 4;        // ranges
constexpr int32_t kRangesPerThread = 8;  // at least, where ranges are joined

// Above this share the handed-in float32 values no longer hold 1 - p and a - v to better than a percent.
constexpr double kGivenShare = 0.99;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether no other head's tokens lie between those of a head.
bool HeadsLieApart(std::span<const LayerInput> layers) {
  const auto apart = [](const KvTensor& tensor) {
    return tensor.dim_stride == 1 && tensor.head_stride > tensor.token_stride;
  };
  return std::all_of(layers.begin(), layers.end(),
                     [&](const LayerInput& layer) { return apart(layer.kv.k) && apart(layer.kv.v); });
}

// Whole tiles of one item of the score. Long ones only where every thread still gets its share.
int32_t ScoreRangeTokens(std::span<const LayerInput> layers, const WaveShape& shape, int32_t threads) {
  if (!HeadsLieApart(layers)) return kRangeTokens;
  for (int32_t joined = kLongRange; joined > 1; joined /= 2) {
    const int64_t heads = static_cast<int64_t>(layers.size()) * shape.kv_heads;
    const int64_t items = heads * CeilDiv(shape.candidates(), int64_t{joined} * kRangeTokens);
    if (items >= int64_t{kRangesPerThread} * threads) return joined * kRangeTokens;
  }
  return kRangeTokens;
}

}  // namespace

int32_t SplitTokens(int32_t kv_heads, int32_t tokens) {
  const int64_t smallest = CeilDiv(tokens, kSmallestSplit) * kv_heads;
  return kSmallestSplit * static_cast<int32_t>(std::max<int64_t>(1, smallest / kItemsPerLayer));
}

int32_t LayersPerWave(const EvictShape& shape, int32_t threads) {
  const int32_t tokens = shape.tokens + shape.generated;
  const int64_t items = shape.kv_heads * CeilDiv(tokens, SplitTokens(shape.kv_heads, tokens));
  return static_cast<int32_t>(std::clamp<int64_t>(CeilDiv(int64_t{4} * threads, items), 1, shape.layers));
}

WaveScorer::WaveScorer(const Kernels& kernels, ThreadPool* pool, const WaveShape& shape, Workspace& lasting,
                       Workspace& passing)
    : kernels_(kernels),
      pool_(pool),
      shape_(shape),
      layout_(shape.head_rows(), kernels.vector_lanes, kernels.panel_vectors),
      split_tokens_(SplitTokens(shape.kv_heads, shape.tokens)),
      splits_(static_cast<int32_t>(CeilDiv(shape.tokens, split_tokens_))) {
  const int32_t lanes = layout_.lanes;
  heads_ = lasting.Take<Head>(shape.heads());
  threads_ = lasting.Take<Thread>(shape.threads);
  for (int32_t i = 0; i < shape.heads(); ++i) {
    Head head;
    head.states = lasting.Take<SoftmaxState>(splits_);
    for (int32_t s = 0; s < splits_; ++s) {
      const SoftmaxState state = TakeState(s == 0 ? lasting : passing, lanes, shape.value_dim);
      if (head.states != nullptr) std::construct_at(head.states + s, state);
    }
    head.center = lasting.Take<float>(shape.value_dim);
    head.denominators.base = lasting.Take<float>(lanes);
    head.denominators.share = lasting.Take<float>(lanes);
    head.norms = lasting.Take<float>(lanes);
    head.contribution = lasting.Take<double>(lanes);
    head.tops = lasting.Take<int32_t>(lanes);
    head.exact = lasting.Take<int32_t>(lanes);
    head.dominant = lasting.Take<uint8_t>(lanes);
    head.skipped = lasting.Take<uint8_t>(lanes);
    if (heads_ != nullptr) std::construct_at(heads_ + i, head);
  }
  for (int32_t t = 0; t < shape.threads; ++t) {
    Thread thread;
    thread.packed = PackedRows::Take(passing, lanes, shape.key_dim);
    thread.tile = TileScratch::Take(passing, shape.key_dim, shape.value_dim);
    thread.row = passing.Take<float>(shape.value_dim);
    thread.out = passing.Take<float>(shape.value_dim);
    thread.weights = passing.Take<float>(lanes);
    thread.state = TakeState(passing, lanes, shape.value_dim);
    if (threads_ != nullptr) std::construct_at(threads_ + t, thread);
  }
}

WaveScorer::HeadItem WaveScorer::Item(std::span<const LayerInput> layers, int64_t index) {
  const auto kv_head = static_cast<int32_t>(index % shape_.kv_heads);
  return {layers[index / shape_.kv_heads], kv_head, heads_[index], index * shape_.candidates()};
}

double WaveScorer::SinkOf(const HeadItem& item, int32_t id) const {
  const float* sinks = item.layer.attention.sinks;
  return sinks != nullptr ? sinks[item.kv_head * shape_.group + id / shape_.rows] : -kInfinity;
}

void WaveScorer::Attend(std::span<const LayerInput> layers, bool with_values, uint8_t* flags) {
  active_heads_ = static_cast<int64_t>(layers.size()) * shape_.kv_heads;
  pool_->For(active_heads_, [&](int64_t index, int32_t worker) {
    const HeadItem item = Item(layers, index);
    std::fill_n(flags + item.first, shape_.candidates(), uint8_t{0});
    PrepareHead(item, with_values, threads_[worker]);
  });
  if (std::all_of(heads_, heads_ + active_heads_, [](const Head& head) { return head.given; })) return;
  AttendSplits(layers, with_values, flags, [this](const Head& head) { return head.given ? RowChoice{} : AllRows(); });
  pool_->For(active_heads_, [&](int64_t index, int32_t worker) {
    const HeadItem item = Item(layers, index);
    if (!item.head.given) FinishHead(item, with_values, threads_[worker]);
  });
}

void WaveScorer::PrepareHead(const HeadItem& item, bool with_values, Thread& thread) {
  Head& head = item.head;
  const KvView& kv = item.layer.kv;
  if (with_values) ChooseCenter(kernels_, MakeHeadTokens(kv, item.kv_head), thread.row, head.center);
  std::fill_n(head.denominators.base, layout_.lanes, kInfinity);
  std::fill_n(head.denominators.share, layout_.lanes, 0.0F);
  std::fill_n(head.norms, layout_.lanes, 0.0F);
  std::fill_n(head.tops, layout_.lanes, -1);
  std::fill_n(head.dominant, layout_.lanes, uint8_t{0});
  std::fill_n(head.skipped, layout_.lanes, uint8_t{0});
  head.exact_count = 0;
  for (int32_t id = 0; id < shape_.head_rows(); ++id)
    if (!IsFinite(QueryOf(item.layer.rows, shape_.kv_heads, item.kv_head, id), shape_.key_dim)) head.skipped[id] = 1;
  head.given = item.layer.out != nullptr && item.layer.lse != nullptr;
  const int64_t first = int64_t{item.kv_head} * shape_.head_rows();
  for (int32_t id = 0; head.given && id < shape_.head_rows(); ++id) {
    // Where the caller's own attention met a NaN or Inf, what it hands in is of no use.
    const float lse = item.layer.lse[first + id];
    const bool usable = !(std::isnan(lse) || lse == kInfinity) &&
                        IsFinite(item.layer.out + (first + id) * shape_.value_dim, shape_.value_dim);
    head.given = head.skipped[id] != 0 || usable;
  }
  if (head.given) ReadGiven(item, with_values, thread);
}

void WaveScorer::ReadGiven(const HeadItem& item, bool with_values, Thread& thread) {
  Head& head = item.head;
  const int64_t first = int64_t{item.kv_head} * shape_.head_rows();
  if (with_values) std::fill_n(head.states[0].sums, int64_t{layout_.lanes} * shape_.value_dim, 0.0F);
  for (int32_t id = 0; id < shape_.head_rows(); ++id) {
    const float lse = item.layer.lse[first + id];
    if (head.skipped[id] != 0 || lse == -kInfinity) continue;
    head.denominators.base[id] = static_cast<float>(lse / kLn2);
    if (!with_values) continue;
    const float* out = item.layer.out + (first + id) * shape_.value_dim;
    for (int32_t i = 0; i < shape_.value_dim; ++i) thread.out[i] = out[i] - head.center[i];
    StoreOutput(head, id, thread.out);
  }
}

// Step by step through the splits, all heads together (kRangeTokens says why). choice(head): the rows, none to leave it
// out.
template <class F>
void WaveScorer::AttendSplits(std::span<const LayerInput> layers, bool with_values, uint8_t* flags, F&& choice) {
  const int32_t step = HeadsLieApart(layers) ? split_tokens_ : kRangeTokens;
  for (int32_t offset = 0; offset < std::min(split_tokens_, shape_.tokens); offset += step)
    pool_->For(active_heads_ * splits_, [&](int64_t index, int32_t worker) {
      const int64_t layer = index / (splits_ * shape_.kv_heads);
      const auto split = static_cast<int32_t>(index / shape_.kv_heads % splits_);
      const HeadItem item = Item(layers, layer * shape_.kv_heads + index % shape_.kv_heads);
      const RowChoice rows = choice(item.head);
      if (rows.count == 0) return;
      const int32_t begin = split * split_tokens_ + offset;
      const int32_t end = std::min({shape_.tokens, begin + step, (split + 1) * split_tokens_});
      AttendRange(item, rows, split, begin, end, with_values, flags != nullptr ? flags + item.first : nullptr,
                  threads_[worker]);
    });
}

// Tokens [begin, end) of one split. Flags are the candidates' alone.
void WaveScorer::AttendRange(const HeadItem& item, const RowChoice& choice, int32_t split, int32_t begin, int32_t end,
                             bool with_values, uint8_t* flags, Thread& thread) {
  if (begin >= end) return;
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  const HeadRows rows = PackRows(kernels_, item.layer.rows, item.layer.attention, shape_.kv_heads, item.kv_head, choice,
                                 tokens, thread.packed);
  const SoftmaxState& state = item.head.states[split];
  if (begin == split * split_tokens_) ResetState(rows.layout.lanes, shape_.value_dim, with_values, state);
  const float* center = with_values ? item.head.center : nullptr;
  const int32_t candidates = std::clamp(shape_.candidates(), begin, end);
  if (begin < candidates) kernels_.attend(tokens, rows, center, begin, candidates, state, flags, thread.tile);
  if (candidates < end) kernels_.attend(tokens, rows, center, candidates, end, state, nullptr, thread.tile);
}

void WaveScorer::MergeSplits(const HeadItem& item, const LaneLayout& layout, bool with_values, Thread& thread) {
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  const float* center = with_values ? item.head.center : nullptr;
  for (int32_t s = 1; s < splits_; ++s)
    MergeState(kernels_, tokens, layout, center, item.head.states[s], item.head.states[0], thread.row);
}

void WaveScorer::FinishHead(const HeadItem& item, bool with_values, Thread& thread) {
  Head& head = item.head;
  MergeSplits(item, layout_, with_values, thread);
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  const float* center = with_values ? head.center : nullptr;
  for (int32_t lane = 0; lane < layout_.lanes; ++lane) {
    std::fill_n(thread.out, shape_.value_dim, 0.0F);
    if (lane < shape_.head_rows() && head.skipped[lane] == 0) {
      const RowResult row = FinishRow(kernels_, tokens, layout_, center, SinkOf(item, lane), head.states[0], lane,
                                      thread.out, thread.row);
      head.denominators.base[lane] = row.base;
      head.denominators.share[lane] = row.share;
      head.tops[lane] = row.token;
      head.dominant[lane] = row.dominant ? 1 : 0;
      head.contribution[lane] = row.contribution;
    }
    if (with_values) StoreOutput(head, lane, thread.out);
  }
}

void WaveScorer::StoreOutput(Head& head, int32_t lane, const float* out) {
  const PanelAddress at(layout_, shape_.value_dim, lane);
  float* to = head.states[0].sums + at.first;
  for (int32_t i = 0; i < shape_.value_dim; ++i) to[int64_t{i} * at.stride] = -2.0F * out[i];
  head.norms[lane] = static_cast<float>(SquaredNorm(out, shape_.value_dim));
}

void WaveScorer::Score(std::span<const LayerInput> layers, Signal signal, float* raw, uint8_t* flags) {
  const bool values = signal == Signal::kDropKv;
  const int32_t range_tokens = ScoreRangeTokens(layers, shape_, pool_->threads());
  const int64_t ranges = CeilDiv(shape_.candidates(), range_tokens);
  pool_->For(active_heads_ * ranges, [&](int64_t index, int32_t worker) {
    const int64_t layer = index / (ranges * shape_.kv_heads);
    const HeadItem item = Item(layers, layer * shape_.kv_heads + index % shape_.kv_heads);
    const auto begin = static_cast<int32_t>(index / shape_.kv_heads % ranges) * range_tokens;
    const int32_t end = std::min(shape_.candidates(), begin + range_tokens);
    ScoreRange(item, values, begin, end, raw + item.first, flags + item.first, threads_[worker]);
  });
  if (values) ScoreGivenTops(layers);
  pool_->For(active_heads_, [&](int64_t index, int32_t) {
    const HeadItem item = Item(layers, index);
    if (values) AddTops(item, raw + item.first, flags + item.first);
    for (int64_t j = item.first; j < item.first + shape_.candidates(); ++j)
      if (!std::isfinite(raw[j])) flags[j] |= reference::kNonFinite;
  });
}

void WaveScorer::ScoreRange(const HeadItem& item, bool values, int32_t begin, int32_t end, float* raw, uint8_t* flags,
                            Thread& thread) {
  const Head& head = item.head;
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  const HeadRows rows = PackRows(kernels_, item.layer.rows, item.layer.attention, shape_.kv_heads, item.kv_head,
                                 AllRows(), tokens, thread.packed);
  const float* weights = LaneWeights(item, thread);
  if (values) {
    const ScoreRows score_rows{head.denominators, head.states[0].sums, head.norms, head.tops, head.given, weights};
    kernels_.score(tokens, rows, score_rows, head.center, 1.0F / static_cast<float>(shape_.group), begin, end, raw,
                   flags, thread.tile);
  } else {
    kernels_.mass(tokens, rows, head.denominators, weights, MassShare(item), head.given, begin, end, raw, flags,
                  thread.tile);
  }
}

// The rows' weights as lanes, 0 for padding ones; null where all rows count the same.
const float* WaveScorer::LaneWeights(const HeadItem& item, Thread& thread) const {
  if (item.layer.rows.weights == nullptr) return nullptr;
  for (int32_t id = 0; id < layout_.lanes; ++id)
    thread.weights[id] = id < shape_.head_rows() ? item.layer.rows.weights[id % shape_.rows] : 0.0F;
  return thread.weights;
}

// What the sum of p over rows and group is multiplied by to be a mean.
float WaveScorer::MassShare(const HeadItem& item) const {
  if (item.layer.rows.weights == nullptr) return 1.0F / static_cast<float>(shape_.head_rows());
  double sum = 0.0;
  for (int32_t id = 0; id < shape_.head_rows(); ++id) sum += WeightOf(item, id);
  return static_cast<float>(1.0 / sum);
}

void WaveScorer::ScoreGivenTops(std::span<const LayerInput> layers) {
  pool_->For(active_heads_, [&](int64_t index, int32_t worker) {
    const HeadItem item = Item(layers, index);
    if (item.head.given) ResolveGiven(item, threads_[worker]);
  });
  bool exact = false;
  for (int64_t i = 0; i < active_heads_; ++i) exact = exact || heads_[i].exact_count > 0;
  if (!exact) return;
  AttendSplits(layers, true, nullptr, [](const Head& head) { return RowChoice{head.exact, head.exact_count}; });
  pool_->For(active_heads_, [&](int64_t index, int32_t worker) {
    const HeadItem item = Item(layers, index);
    if (item.head.exact_count > 0) FinishExact(item, threads_[worker]);
  });
}

// Pairs with p > 1/2 of handed-in rows: direct differences up to kGivenShare, the row's own softmax beyond.
void WaveScorer::ResolveGiven(const HeadItem& item, Thread& thread) {
  Head& head = item.head;
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  const AttentionSpec& spec = item.layer.attention;
  for (int32_t id = 0; id < shape_.head_rows(); ++id) {
    if (head.tops[id] < 0 || WeightOf(item, id) == 0.0) continue;
    const int64_t cell = tokens.cell(head.tops[id]);
    const float* query = QueryOf(item.layer.rows, shape_.kv_heads, item.kv_head, id);
    kernels_.load_row(tokens.k, cell, nullptr, thread.tile.row);
    double logit = 0.0;
    for (int32_t i = 0; i < shape_.key_dim; ++i) logit += double{query[i]} * thread.tile.row[i];
    logit *= spec.scale;
    if (spec.soft_cap > 0.0F) logit = spec.soft_cap * std::tanh(logit / spec.soft_cap);
    const int64_t row = int64_t{item.kv_head} * shape_.head_rows() + id;
    const double exponent = logit - item.layer.lse[row];
    const double p = std::exp(exponent);
    if (p > kGivenShare) {
      head.exact[head.exact_count++] = id;
      continue;
    }
    kernels_.load_row(tokens.v, cell, nullptr, thread.row);
    const float* out = item.layer.out + row * shape_.value_dim;
    double distance = 0.0;
    for (int32_t i = 0; i < shape_.value_dim; ++i) {
      const double moved = double{out[i]} - thread.row[i];
      distance += moved * moved;
    }
    const double odds = p / -std::expm1(exponent);
    head.contribution[id] = odds * odds * distance;
  }
}

void WaveScorer::FinishExact(const HeadItem& item, Thread& thread) {
  Head& head = item.head;
  const LaneLayout layout(head.exact_count, kernels_.vector_lanes, kernels_.panel_vectors);
  MergeSplits(item, layout, true, thread);
  const HeadTokens tokens = MakeHeadTokens(item.layer.kv, item.kv_head);
  for (int32_t lane = 0; lane < head.exact_count; ++lane) {
    const int32_t id = head.exact[lane];
    const RowResult row = FinishRow(kernels_, tokens, layout, head.center, SinkOf(item, id), head.states[0], lane,
                                    thread.out, thread.row);
    head.contribution[id] = row.contribution;
    head.dominant[id] = row.dominant ? 1 : 0;
  }
}

void WaveScorer::AddTops(const HeadItem& item, float* raw, uint8_t* flags) {
  const Head& head = item.head;
  for (int32_t id = 0; id < shape_.head_rows(); ++id) {
    const int32_t token = head.tops[id];
    const double weight = WeightOf(item, id);
    if (token < 0 || token >= shape_.candidates() || weight == 0.0) continue;
    raw[token] += static_cast<float>(weight * head.contribution[id] / shape_.group);
    if (head.dominant[id] != 0) flags[token] |= reference::kDominant;
  }
}

int64_t WaveScorer::skipped_rows() const {
  int64_t count = 0;
  for (int64_t i = 0; i < active_heads_; ++i)
    count += std::count(heads_[i].skipped, heads_[i].skipped + shape_.head_rows(), 1);
  return count;
}

void PoolScores(const float* raw, int32_t n, const Pooling& pool, int32_t window, float* pooled) {
  constexpr int32_t kBlock = 1024;  // inner loops run over a block of positions and vectorise
  const int32_t count = pool.past_only ? std::max(0, n - window) : n;
  const bool mean = pool.kind == PoolKind::kMean;
  std::fill(pooled + count, pooled + n, 0.0F);
  for (int32_t begin = 0; begin < count; begin += kBlock) {
    const int32_t length = std::min(kBlock, count - begin);
    float* out = pooled + begin;
    std::fill_n(out, length, mean ? 0.0F : -kInfinity);
    for (int32_t shift = -pool.after; shift <= pool.before; ++shift) {
      const int32_t first = std::max(0, -(begin + shift));
      const int32_t last = std::min(length, count - begin - shift);
      for (int32_t i = first; i < last; ++i) {
        const float x = raw[begin + shift + i];
        const float score = std::abs(x) <= std::numeric_limits<float>::max() ? x : 0.0F;
        out[i] = mean ? out[i] + score : std::max(out[i], score);
      }
    }
    if (!mean) continue;
    const auto width = static_cast<float>(pool.before + pool.after + 1);
    for (int32_t i = 0; i < length; ++i) out[i] /= width;
  }
}

}  // namespace dropkv::cpu
