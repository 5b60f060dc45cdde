// Listeners that only look: the window's queries, statistics of all queries, and the start-up check of everything that
// is read from the graph.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "baseline/statistics.h"
#include "dropkv/ragged_cache.h"
#include "llama/tap.h"

namespace dropkv::llama {

// Keeps the queries of every layer, [rows, Hq, d] in token order.
class WindowCapture : public AttentionListener {
 public:
  bool Wants(int32_t /*layer*/) override { return true; }
  void Query(int32_t layer, const ggml_tensor* q) override { ReadQuery(q, &queries_[layer]); }
  void Output(int32_t /*layer*/, ggml_tensor* /*out*/) override {}

  const std::vector<float>& queries(int32_t layer) const { return queries_.at(layer); }
  void Clear() { queries_.clear(); }

  // Forgets all but the first `rows` rows of a layer whose rows hold `width` floats.
  void Truncate(int32_t layer, int64_t rows, int64_t width) { queries_.at(layer).resize(rows * width); }

 private:
  std::map<int32_t, std::vector<float>> queries_;
};

// Hands the queries of every layer to the statistics that some policies need of a whole prompt, ubatch by ubatch: no
// more than one ubatch's queries of one layer are held. Layers that turn out to slide are given up.
class StatisticsCapture : public AttentionListener {
 public:
  // `tap` shows the layers; tokens: length of the prompt; pool may be null.
  StatisticsCapture(Tap* tap, baseline::StatisticsPlan plan, int32_t tokens, ThreadPool* pool)
      : tap_(tap), plan_(std::move(plan)), tokens_(tokens), pool_(pool) {}

  // From now on every query goes to `next` too.
  void set_next(AttentionListener* next) { next_ = next; }

  bool Wants(int32_t layer) override;
  void Query(int32_t layer, const ggml_tensor* q) override;
  void Output(int32_t layer, ggml_tensor* out) override;

  // Null where the layer slides.
  const baseline::PromptStatistics* find(int32_t layer) const;

  double seconds() const { return seconds_; }  // spent on the statistics
  const Status& status() const { return status_; }

 private:
  Status Add(int32_t layer);

  Tap* tap_;
  baseline::StatisticsPlan plan_;
  int32_t tokens_;
  ThreadPool* pool_;
  AttentionListener* next_ = nullptr;
  std::map<int32_t, baseline::PromptStatistics> statistics_;
  std::set<int32_t> sliding_;
  std::vector<float> query_;
  double seconds_ = 0;
  Status status_;
};

// Computes every watched node's attention from what the tap sees (queries, cells, scale, soft cap, sinks) with the
// ragged decode kernel, writes nothing, and compares with what the node put out.
class ShadowCheck : public AttentionListener {
 public:
  explicit ShadowCheck(Tap* tap) : tap_(tap) {}

  bool Wants(int32_t /*layer*/) override { return true; }
  void Query(int32_t layer, const ggml_tensor* q) override;
  void Output(int32_t layer, ggml_tensor* out) override;

  // Takes over the tokens that the tap has recorded so far.
  Status Fill();

  double overall() const;                  // relative L2 over all nodes
  double worst() const { return worst_; }  // of the worst node
  int64_t nodes() const { return nodes_; }
  const Status& status() const { return status_; }

 private:
  Tap* tap_;
  std::map<int32_t, RaggedCache> caches_;
  std::map<int32_t, RaggedDecode> decodes_;
  std::map<int32_t, std::vector<float>> ours_;
  std::vector<float> query_;
  double error_ = 0;
  double norm_ = 0;
  double worst_ = 0;
  int64_t nodes_ = 0;
  Status status_;
};

}  // namespace dropkv::llama
