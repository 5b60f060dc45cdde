// Scores that look at keys, values and positions alone.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "baseline/head_reader.h"
#include "baseline/scorers.h"
#include "core/random.h"

namespace dropkv::baseline {
namespace {

constexpr double kSmallestNorm = 1e-12;  // of a key that is divided by its norm

// KeyDiff over one head: sums of normalised keys over a set of tokens, and the cosine of every token with them.
class KeyDifference {
 public:
  KeyDifference(const KvView& kv, int32_t head, const uint8_t* forced)
      : reader_(kv, head), dim_(kv.key_dim), forced_(forced), key_(kv.key_dim), anchor_(kv.key_dim) {}

  // score[t] of tokens[t]: -cos(key, mean of the set's normalised keys); 0 for forced ones.
  void Score(const std::vector<int32_t>& tokens, std::vector<double>* score) {
    std::fill(anchor_.begin(), anchor_.end(), 0.0);
    for (const int32_t token : tokens) {
      const double norm = Load(token);
      for (int32_t i = 0; i < dim_; ++i) anchor_[i] += key_[i] / norm;
    }
    const double length = std::sqrt(Dot(anchor_.data(), anchor_.data(), dim_));
    score->resize(tokens.size());
    for (size_t t = 0; t < tokens.size(); ++t) {
      const double norm = Load(tokens[t]);
      (*score)[t] = -Dot(key_.data(), anchor_.data(), dim_) / (norm * std::max(kSmallestNorm, length));
    }
  }

 private:
  // Reads a key, zeros where it is forced; returns its norm.
  double Load(int32_t token) {
    row_.resize(dim_);
    reader_.Key(token, row_.data());
    if (forced_[token] != 0) std::fill(row_.begin(), row_.end(), 0.0F);
    std::copy(row_.begin(), row_.end(), key_.begin());
    return std::max(kSmallestNorm, std::sqrt(SquaredNorm(row_.data(), dim_)));
  }

  HeadReader reader_;
  int32_t dim_;
  const uint8_t* forced_;
  std::vector<float> row_;
  std::vector<double> key_;
  std::vector<double> anchor_;
};

// One head of the block form: the first `keep` tokens, then block after block the best `keep` of those kept and the
// block's. A token's score is its last one, lowered by more than the range of cosines for every round that it has
// missed, so that the best `keep` of all scores are those kept by the last round.
class BlockKeyDifference {
 public:
  BlockKeyDifference(const KvView& kv, int32_t head, const LayerScores& scores, int32_t keep)
      : difference_(kv, head, scores.forced.data() + int64_t{head} * kv.tokens),
        forced_(scores.forced.data() + int64_t{head} * kv.tokens),
        protected_(scores.is_protected.data()),
        keep_(keep) {}

  void Run(int32_t tokens, int32_t block, double* out) {
    std::vector<int32_t> candidates(keep_);
    for (int32_t j = 0; j < keep_; ++j) candidates[j] = j;
    if (keep_ == tokens) Round(candidates, 0, out);
    const int32_t rounds = (tokens - keep_ + block - 1) / block;
    for (int32_t round = 0; round < rounds; ++round) {
      const int32_t begin = keep_ + round * block;
      for (int32_t j = begin; j < std::min(tokens, begin + block); ++j) candidates.push_back(j);
      Round(candidates, rounds - 1 - round, out);
      Shrink(out, &candidates);
    }
  }

 private:
  static constexpr double kPerRound = 4.0;  // more than 2, the range of cosines

  void Round(const std::vector<int32_t>& candidates, int32_t rounds_left, double* out) {
    difference_.Score(candidates, &score_);
    for (size_t t = 0; t < candidates.size(); ++t) out[candidates[t]] = score_[t] - kPerRound * rounds_left;
  }

  // Protected tokens first, then forced ones, then by score; ties to the lower index.
  void Shrink(const double* out, std::vector<int32_t>* candidates) const {
    const auto before = [&](int32_t a, int32_t b) {
      if (protected_[a] != protected_[b]) return protected_[a] > protected_[b];
      if (forced_[a] != forced_[b]) return forced_[a] > forced_[b];
      return out[a] != out[b] ? out[a] > out[b] : a < b;
    };
    std::nth_element(candidates->begin(), candidates->begin() + (keep_ - 1), candidates->end(), before);
    candidates->resize(keep_);
    std::sort(candidates->begin(), candidates->end());
  }

  KeyDifference difference_;
  const uint8_t* forced_;
  const uint8_t* protected_;
  int32_t keep_;
  std::vector<double> score_;
};

// x [n] divided by the sum of its block; blocks of zeros stay.
void DivideByBlockSums(int32_t block, std::vector<double>* x) {
  const auto n = static_cast<int32_t>(x->size());
  for (int32_t begin = 0; begin < n; begin += block) {
    const int32_t end = std::min(n, begin + block);
    double sum = 0.0;
    for (int32_t j = begin; j < end; ++j) sum += (*x)[j];
    for (int32_t j = begin; sum > 0.0 && j < end; ++j) (*x)[j] /= sum;
  }
}

double Combine(CurForm form, double key, double value) {
  switch (form) {
    case CurForm::kKey:
      return key;
    case CurForm::kValue:
      return value;
    case CurForm::kMean:
      return 0.5 * (key + value);
    case CurForm::kProduct:
      break;
  }
  return key * value;
}

}  // namespace

// StreamingLLM: the position.
Status ScoreRecency(const Recipe&, const Layer& layer, double, ThreadPool*, LayerScores* scores) {
  const int32_t n = layer.kv.tokens;
  for (size_t i = 0; i < scores->score.size(); ++i) scores->score[i] = static_cast<double>(i % n);
  return Status::Ok();
}

Status ScoreRandom(const Recipe& recipe, const Layer& layer, double, ThreadPool*, LayerScores* scores) {
  const int32_t n = layer.kv.tokens;
  for (int32_t u = 0; u < layer.kv.kv_heads; ++u)
    for (int32_t j = 0; j < n; ++j)
      scores->score[int64_t{u} * n + j] = RandomScore(recipe.policy.seed, layer.index, u, j);
  return Status::Ok();
}

Status ScoreKeyNorm(const Recipe&, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  const KvView& kv = layer.kv;
  ForceNonFinite(kv, pool, scores);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const HeadReader reader(kv, static_cast<int32_t>(head));
    std::vector<float> key(kv.key_dim);
    for (int32_t j = 0; j < kv.tokens; ++j) {
      reader.Key(j, key.data());
      scores->score[head * kv.tokens + j] = -std::sqrt(SquaredNorm(key.data(), kv.key_dim));
    }
  });
  FinishScores(scores);
  return Status::Ok();
}

// arXiv 2504.15364; block 0: all tokens at once, else its block-wise form, as kvpress runs it.
Status ScoreKeyDiff(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                    LayerScores* scores) {
  const KvView& kv = layer.kv;
  const int32_t n = kv.tokens;
  if (recipe.block < 0) return InvalidArgument("block: expected at least 0, got " + std::to_string(recipe.block));
  const auto kept = static_cast<int32_t>(std::clamp(keep_fraction, 0.0, 1.0) * n);
  const int32_t keep = recipe.block == 0 ? n : std::clamp(kept, 1, n);
  ForceNonFinite(kv, pool, scores);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    BlockKeyDifference difference(kv, static_cast<int32_t>(head), *scores, keep);
    difference.Run(n, std::max(1, recipe.block), scores->score.data() + head * n);
  });
  FinishScores(scores);
  return Status::Ok();
}

// CurDKV, arXiv 2509.15038, as in kvpress: squared norms of keys and values, each by its share of a block's sum, and
// their product (or one of them, or the mean) by its share of the head's sum.
Status ScoreCur(const Recipe& recipe, const Layer& layer, double, ThreadPool* pool, LayerScores* scores) {
  const KvView& kv = layer.kv;
  const int32_t n = kv.tokens;
  if (recipe.block < 0) return InvalidArgument("block: expected at least 0, got " + std::to_string(recipe.block));
  ForceNonFinite(kv, pool, scores);
  ForEach(pool, kv.kv_heads, [&](int64_t head) {
    const HeadReader reader(kv, static_cast<int32_t>(head));
    std::vector<float> row(std::max(kv.key_dim, kv.value_dim));
    std::vector<double> keys(n, 0.0);
    std::vector<double> values(n, 0.0);
    for (int32_t j = 0; j < n; ++j) {
      if (scores->forced[head * n + j] != 0) continue;
      reader.Key(j, row.data());
      keys[j] = SquaredNorm(row.data(), kv.key_dim);
      reader.Value(j, row.data());
      values[j] = SquaredNorm(row.data(), kv.value_dim);
    }
    if (recipe.block > 0) {
      DivideByBlockSums(recipe.block, &keys);
      DivideByBlockSums(recipe.block, &values);
    }
    for (int32_t j = 0; j < n; ++j) keys[j] = Combine(recipe.cur, keys[j], values[j]);
    DivideByBlockSums(n, &keys);
    std::copy(keys.begin(), keys.end(), scores->score.begin() + head * n);
  });
  FinishScores(scores);
  return Status::Ok();
}

}  // namespace dropkv::baseline
