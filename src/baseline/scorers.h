// The scorers, one function each: fill score (pooled where the recipe pools), is_protected beyond the window and sinks
// that Score() sets itself, forced and nonfinite_tokens; kv_heads, tokens and the sizes of score, is_protected and
// forced are set already. What they need of the layer has been checked.
#pragma once

#include "baseline/score.h"

namespace dropkv::baseline {

using ScoreFunction = Status (*)(const Recipe& recipe, const Layer& layer, double keep_fraction, ThreadPool* pool,
                                 LayerScores* scores);

// score_keys.cc: keys, values and positions alone.
Status ScoreRecency(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreRandom(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreKeyNorm(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreKeyDiff(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreLag(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreCur(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);

// score_prompt.cc: statistics of all queries.
Status ScoreAttentionSum(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreAttentionMean(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreVatp(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreExpected(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreCapKv(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreCompactor(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreLocalAttention(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);

// score_window.cc and neighbours: the window's rows.
Status ScoreDropKv(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreDropKvCompat(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreDropKvWo(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreAttention(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreProjection(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreProjectionCode(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreCaote(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreLastRow(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreFinch(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreObCache(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreDefensive(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);
Status ScoreVariance(const Recipe&, const Layer&, double, ThreadPool*, LayerScores*);

}  // namespace dropkv::baseline
