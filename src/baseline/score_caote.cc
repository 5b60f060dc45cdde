// CAOTE (arXiv 2504.14051): a base score, normalised, as if it were the attention of one token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "baseline/scorers.h"
#include "core/parallel.h"
#include "cpu/attend.h"

namespace dropkv::baseline {
namespace {

constexpr int32_t kRange = 1024;
constexpr int32_t kParts = 8;  // partial sums; dims are multiples of it

// One KV head: shares alpha of the candidates, and the values.
struct Candidates {
  const cpu::Kernels& kernels;
  cpu::HeadTokens tokens;
  std::vector<double> share;  // [n] the base score; 0: no candidate
  double total = 0;
  int32_t top = -1;  // the candidate with more than half of the total

  Candidates(const LayerScores& base, const KvView& kv, int32_t head)
      : kernels(cpu::KernelTable().front()), tokens(cpu::MakeHeadTokens(kv, head)), share(base.tokens, 0.0) {
    const double* score = base.score.data() + static_cast<size_t>(head) * base.tokens;
    for (int32_t j = 0; j < base.tokens; ++j) {
      if (base.is_protected[j] == 0 && score[j] > 0.0) share[j] = score[j];
      total += share[j];
    }
    const auto largest = std::max_element(share.begin(), share.end());
    if (2.0 * *largest > total) top = static_cast<int32_t>(largest - share.begin());
  }

  // sum of share v over the candidates but the top one.
  std::vector<double> WeightedSum() const {
    const int32_t dim = tokens.v.dim;
    std::vector<double> sum(dim, 0.0);
    std::vector<float> value(dim);
    for (int32_t begin = 0; begin < tokens.count; begin += kRange) {
      const int32_t end = std::min(tokens.count, begin + kRange);
      for (int32_t j = begin; j < end; ++j) {
        if (share[j] == 0.0 || j == top) continue;
        kernels.load_row(tokens.v, tokens.cell(j), nullptr, value.data());
        for (int32_t i = 0; i < dim; ++i) sum[i] += share[j] * value[i];
      }
    }
    return sum;
  }
};

double Distance(const float* value, const double* other, int32_t dim) {
  double parts[kParts] = {};
  for (int32_t i = 0; i < dim; i += kParts)
    for (int32_t k = 0; k < kParts; ++k) {
      const double away = value[i + k] - other[i + k];
      parts[k] += away * away;
    }
  double sum = 0.0;
  for (const double part : parts) sum += part;
  return std::sqrt(sum);
}

// alpha / (1 - alpha) |V alpha - v_j|. For the top candidate the same number is alpha |v_j - b| with b the mean of the
// others: no division by a small 1 - alpha.
void ScoreHead(const Candidates& candidates, double* out) {
  const int32_t n = candidates.tokens.count;
  const int32_t dim = candidates.tokens.v.dim;
  std::fill_n(out, n, 0.0);
  if (!(candidates.total > 0.0)) return;
  const std::vector<double> others = candidates.WeightedSum();
  std::vector<double> mean = others;
  std::vector<float> value(dim);
  double rest = 0.0;  // share of all but the top
  for (int32_t j = 0; j < n; ++j) rest += j != candidates.top ? candidates.share[j] : 0.0;
  if (candidates.top >= 0) {
    const int32_t top = candidates.top;
    candidates.kernels.load_row(candidates.tokens.v, candidates.tokens.cell(top), nullptr, value.data());
    for (int32_t i = 0; i < dim; ++i) mean[i] += candidates.share[top] * value[i];
    std::vector<double> without = others;
    for (double& x : without) x /= rest;
    if (rest > 0.0) out[top] = candidates.share[top] / candidates.total * Distance(value.data(), without.data(), dim);
  }
  for (double& x : mean) x /= candidates.total;
  for (int32_t j = 0; j < n; ++j) {
    if (candidates.share[j] == 0.0 || j == candidates.top) continue;
    candidates.kernels.load_row(candidates.tokens.v, candidates.tokens.cell(j), nullptr, value.data());
    out[j] = candidates.share[j] / (candidates.total - candidates.share[j]) * Distance(value.data(), mean.data(), dim);
  }
}

Status ScoreBase(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                 LayerScores* scores) {
  switch (recipe.base) {
    case Scorer::kAttention:
      return ScoreAttention(recipe, layer, keep_fraction, pool, scores);
    case Scorer::kAttentionSum:
      return ScoreAttentionSum(recipe, layer, keep_fraction, pool, scores);
    case Scorer::kLastRow:
      return ScoreLastRow(recipe, layer, keep_fraction, pool, scores);
    default:
      return InvalidArgument("base: expected the scores of SnapKV, H2O or TOVA, got scorer " +
                             std::to_string(static_cast<int>(recipe.base)));
  }
}

}  // namespace

// alpha: the base's pooled score over the candidates (the tokens that are not protected), normalised to sum 1; V alpha:
// their values' mean by it. No public code exists: pooling, group and candidates are as here by our choice.
Status ScoreCaote(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                  LayerScores* scores) {
  DROPKV_RETURN_IF_ERROR(ScoreBase(recipe, layer, keep_fraction, pool, scores));
  const LayerScores base = *scores;
  const KvView prompt = layer.Prompt();
  pool->For(scores->kv_heads, [&](int64_t head, int32_t) {
    double* out = scores->score.data() + head * scores->tokens;
    ScoreHead(Candidates(base, prompt, static_cast<int32_t>(head)), out);
    for (int32_t j = 0; j < scores->tokens; ++j) {
      const double was = base.score[head * scores->tokens + j];
      if (std::isnan(was)) out[j] = was;
    }
  });
  return Status::Ok();
}

}  // namespace dropkv::baseline
