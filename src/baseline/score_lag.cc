// LagKV (arXiv 2504.04704), as in kvpress: how far a token's channels spread when they are scaled by the range that the
// next partition of tokens has.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "baseline/head_reader.h"
#include "baseline/scorers.h"

namespace dropkv::baseline {
namespace {

// The keys, or the values, of two partitions of one head.
class SpreadOfPartition {
 public:
  SpreadOfPartition(const KvView& kv, int32_t head, bool keys, const uint8_t* forced)
      : reader_(kv, head), keys_(keys), dim_(keys ? kv.key_dim : kv.value_dim), forced_(forced), row_(dim_) {}

  // share [lag] of the tokens begin .. begin+lag-1: softmax over the partition of the standard deviation of the scaled
  // channels. Reference: the next lag tokens. A channel that does not vary there counts 0; forced tokens get 0.
  void Share(int32_t begin, int32_t lag, double* share) {
    FindRange(begin + lag, lag);
    double largest = -1.0;
    for (int32_t t = 0; t < lag; ++t) {
      share[t] = forced_[begin + t] != 0 ? -1.0 : Deviation(begin + t);
      largest = std::max(largest, share[t]);
    }
    double sum = 0.0;
    for (int32_t t = 0; t < lag; ++t) {
      share[t] = share[t] < 0.0 ? 0.0 : std::exp(share[t] - largest);
      sum += share[t];
    }
    for (int32_t t = 0; sum > 0.0 && t < lag; ++t) share[t] /= sum;
  }

 private:
  void Load(int32_t token) {
    if (keys_) {
      reader_.Key(token, row_.data());
    } else {
      reader_.Value(token, row_.data());
    }
  }

  void FindRange(int32_t begin, int32_t lag) {
    low_.assign(dim_, INFINITY);
    high_.assign(dim_, -INFINITY);
    for (int32_t t = begin; t < begin + lag; ++t) {
      if (forced_[t] != 0) continue;
      Load(t);
      for (int32_t i = 0; i < dim_; ++i) {
        low_[i] = std::min<double>(low_[i], row_[i]);
        high_[i] = std::max<double>(high_[i], row_[i]);
      }
    }
  }

  // Unbiased.
  double Deviation(int32_t token) {
    Load(token);
    scaled_.resize(dim_);
    for (int32_t i = 0; i < dim_; ++i) {
      const double width = high_[i] - low_[i];
      scaled_[i] = width > 0.0 ? (row_[i] - low_[i]) / width : 0.0;
    }
    const double mean = std::accumulate(scaled_.begin(), scaled_.end(), 0.0) / dim_;
    double squares = 0.0;
    for (const double x : scaled_) squares += (x - mean) * (x - mean);
    return std::sqrt(squares / (dim_ - 1));
  }

  HeadReader reader_;
  bool keys_;
  int32_t dim_;
  const uint8_t* forced_;
  std::vector<float> row_;
  std::vector<double> low_;
  std::vector<double> high_;
  std::vector<double> scaled_;
};

// share [lag] -> rank / lag, 0 for the smallest; of equal ones the lower index ranks higher.
void ReplaceByRanks(int32_t lag, double* share) {
  std::vector<int32_t> order(lag);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return share[a] != share[b] ? share[a] < share[b] : a > b; });
  for (int32_t rank = 0; rank < lag; ++rank) share[order[rank]] = static_cast<double>(rank) / lag;
}

// Too short a prompt: the sinks, then by position.
void ScoreByPosition(int32_t n, int32_t sink, double* score) {
  for (int32_t j = 0; j < n; ++j) score[j] = j < sink ? 1.0 : static_cast<double>(j - sink) / (n - sink);
}

}  // namespace

// recipe.block: the lag. Protects the sinks, the last full partition and the tokens behind it.
Status ScoreLag(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  const KvView& kv = layer.kv;
  const int32_t n = kv.tokens;
  const int32_t lag = recipe.block;
  if (lag < 1) return InvalidArgument("block: expected the lag, at least 1, got " + std::to_string(lag));
  const int32_t sink = std::min(recipe.policy.sink, n);
  const int32_t partitions = (n - sink) / lag;
  const int32_t end = partitions < 2 ? n : sink + (partitions - 1) * lag;  // of what is ranked
  ForceNonFinite(kv, pool, scores);
  std::fill_n(scores->is_protected.begin(), sink, uint8_t{1});
  std::fill(scores->is_protected.begin() + end, scores->is_protected.end(), uint8_t{1});
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    double* score = scores->score.data() + head * n;
    if (partitions < 2) return ScoreByPosition(n, sink, score);
    const uint8_t* forced = scores->forced.data() + head * n;
    SpreadOfPartition keys(kv, static_cast<int32_t>(head), true, forced);
    SpreadOfPartition values(kv, static_cast<int32_t>(head), false, forced);
    std::vector<double> of_values(lag);
    std::fill_n(score, n, 1.0);
    for (int32_t begin = sink; begin < end; begin += lag) {
      keys.Share(begin, lag, score + begin);
      values.Share(begin, lag, of_values.data());
      for (int32_t t = 0; t < lag; ++t) score[begin + t] = 0.5 * (score[begin + t] + of_values[t]);
      if (!recipe.cross) ReplaceByRanks(lag, score + begin);
    }
  });
  FinishScores(scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
