#include "baseline/layer_order.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "baseline/critical.h"
#include "baseline/parity.h"

namespace dropkv::baseline {
namespace {

// Tokens first .. end-1 of all heads or of one.
struct Chunk {
  int32_t first;
  int32_t end;
};

std::vector<Chunk> ChunksOf(int32_t tokens, int32_t size) {
  std::vector<Chunk> chunks;
  for (int32_t first = 0; first < tokens; first += size) chunks.push_back({first, std::min(tokens, first + size)});
  return chunks;
}

void Keep(const Chunk& chunk, std::span<uint8_t> kept) {
  std::fill(kept.begin() + chunk.first, kept.begin() + chunk.end, uint8_t{1});
}

TokenClass Stronger(TokenClass a, TokenClass b) { return static_cast<uint8_t>(a) < static_cast<uint8_t>(b) ? b : a; }

TokenClass ClassOf(const LayerOrder& order, int32_t head, const Chunk& chunk) {
  TokenClass strongest = TokenClass::kScored;
  for (int32_t j = chunk.first; j < chunk.end; ++j) strongest = Stronger(strongest, order.ClassOf(head, j));
  return strongest;
}

bool AnyProtected(const LayerOrder& order, const Chunk& chunk) {
  const auto begin = order.is_protected().begin();
  return std::any_of(begin + chunk.first, begin + chunk.end, [](uint8_t mark) { return mark != 0; });
}

bool AllProtected(const LayerOrder& order, const Chunk& chunk) {
  const auto begin = order.is_protected().begin();
  return std::all_of(begin + chunk.first, begin + chunk.end, [](uint8_t mark) { return mark != 0; });
}

}  // namespace

LayerOrder::LayerOrder(const Recipe& recipe, const LayerScores& scores, int32_t keep)
    : scores_(&scores), protected_(scores.is_protected), kept_(scores.score.size(), 0) {
  // StreamingLLM's recent tokens are what the sinks leave of a budget (kvpress counts so; without a clamp only).
  if (recipe.scorer == Scorer::kRecency && keep <= recipe.policy.sink)
    std::fill(protected_.begin() + std::min(scores.tokens, recipe.policy.sink), protected_.end(), uint8_t{0});
  const auto recent = std::min(scores.tokens, static_cast<int32_t>(recipe.recent_share * keep));
  std::fill(protected_.end() - recent, protected_.end(), uint8_t{1});
  keys_.reserve(scores.score.size());
  for (int32_t head = 0; head < scores.kv_heads; ++head)
    for (int32_t j = 0; j < scores.tokens; ++j)
      keys_.push_back(
          TokenKey(protected_[j] != 0 ? TokenClass::kProtected : ClassOf(head, j), scores.score[Offset(head) + j], j));
}

int32_t LayerOrder::protected_tokens() const {
  return static_cast<int32_t>(
      std::count_if(protected_.begin(), protected_.end(), [](uint8_t mark) { return mark != 0; }));
}

std::vector<std::span<uint64_t>> LayerOrder::keys() {
  std::vector<std::span<uint64_t>> heads;
  heads.reserve(kv_heads());
  for (int32_t head = 0; head < kv_heads(); ++head) heads.push_back(keys(head));
  return heads;
}

std::vector<std::span<uint8_t>> LayerOrder::kept() {
  std::vector<std::span<uint8_t>> heads;
  heads.reserve(kv_heads());
  for (int32_t head = 0; head < kv_heads(); ++head) heads.push_back(kept(head));
  return heads;
}

TokenClass LayerOrder::ClassOf(int32_t head, int32_t token) const {
  const size_t at = Offset(head) + token;
  if (std::isnan(scores_->score[at]) || (!scores_->forced.empty() && scores_->forced[at] != 0))
    return TokenClass::kForced;
  return !scores_->first_stage.empty() && scores_->first_stage[at] != 0 ? TokenClass::kFirstStage : TokenClass::kScored;
}

void LayerOrder::Write(std::vector<int64_t>* offsets, std::vector<int32_t>* positions) const {
  for (int32_t head = 0; head < kv_heads(); ++head) {
    for (int32_t j = 0; j < tokens(); ++j)
      if (kept_[Offset(head) + j] != 0) positions->push_back(j);
    offsets->push_back(static_cast<int64_t>(positions->size()));
  }
}

int32_t TakeChunks(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  const std::vector<float> padded = PaddedScores(recipe, order->scores(), 1 - share.fraction);
  const std::vector<Chunk> chunks = ChunksOf(order->tokens(), recipe.chunk);
  std::vector<uint64_t> keys;
  int64_t protected_chunks = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    double sum = 0;
    TokenClass strongest = TokenClass::kScored;
    for (int32_t head = 0; head < order->kv_heads(); ++head) {
      const size_t offset = static_cast<size_t>(head) * order->tokens();
      for (int32_t j = chunks[c].first; j < chunks[c].end; ++j) sum += padded[offset + j];
      strongest = Stronger(strongest, ClassOf(*order, head, chunks[c]));
    }
    if (share.clamp && AnyProtected(*order, chunks[c])) {
      strongest = TokenClass::kProtected;
      ++protected_chunks;
    }
    keys.push_back(TokenKey(strongest, sum / (chunks[c].end - chunks[c].first), static_cast<int32_t>(c)));
  }
  const auto wanted = static_cast<int64_t>(static_cast<double>(chunks.size()) * share.fraction);
  std::vector<uint8_t> kept(chunks.size(), 0);
  TakeBest(keys, kept, std::max({int64_t{1}, wanted, protected_chunks}));
  int32_t tokens = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    if (kept[c] == 0) continue;
    for (int32_t head = 0; head < order->kv_heads(); ++head) Keep(chunks[c], order->kept(head));
    tokens += chunks[c].end - chunks[c].first;
  }
  return tokens;
}

void TakeProjectionChunks(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  const std::vector<Chunk> chunks = ChunksOf(order->tokens(), recipe.chunk);
  const auto heads = static_cast<size_t>(order->kv_heads());
  std::vector<uint64_t> keys;
  int64_t protected_chunks = 0;
  for (int32_t head = 0; head < order->kv_heads(); ++head)
    for (size_t c = 0; c < chunks.size(); ++c) {
      const double score = order->scores().score[static_cast<size_t>(head) * order->tokens() + chunks[c].first];
      const bool whole = AllProtected(*order, chunks[c]);
      protected_chunks += whole ? 1 : 0;
      keys.push_back(
          TokenKey(whole ? TokenClass::kProtected : ClassOf(*order, head, chunks[c]), score, static_cast<int32_t>(c)));
    }
  const int64_t wanted = static_cast<int64_t>(heads) * share.keep / recipe.chunk;
  std::vector<uint8_t> kept(keys.size(), 0);
  TakeBest(keys, kept, share.clamp ? std::max(wanted, protected_chunks) : wanted);
  for (size_t i = 0; i < keys.size(); ++i)
    if (kept[i] != 0) Keep(chunks[i % chunks.size()], order->kept(static_cast<int32_t>(i / chunks.size())));
}

void TakeCritical(const Recipe& recipe, const LayerShareOf& share, LayerOrder* order) {
  std::vector<float> padded = PaddedScores(recipe, order->scores(), 1 - share.fraction);
  for (size_t at = 0; share.clamp && at < padded.size(); ++at)
    if (order->is_protected()[at % order->tokens()] != 0) padded[at] = std::numeric_limits<float>::max();
  const CriticalStages stages =
      FindCritical(recipe, order->scores(), padded, share.keep, static_cast<int32_t>(share.exact * recipe.first_stage));
  for (int32_t head = 0; head < order->kv_heads(); ++head) {
    const std::span<uint64_t> keys = order->keys(head);
    for (int32_t j = 0; j < order->tokens(); ++j) {
      const size_t at = static_cast<size_t>(head) * order->tokens() + j;
      if (share.clamp && order->is_protected()[j] != 0) continue;
      TokenClass token_class = order->ClassOf(head, j);
      if (stages.first[at] != 0) token_class = Stronger(token_class, TokenClass::kFirstStage);
      keys[j] = TokenKey(token_class, token_class == TokenClass::kFirstStage ? padded[at] : stages.value[at], j);
    }
    order->TakeFromHead(head, stages.budget[head]);
  }
}

}  // namespace dropkv::baseline
