// A float64 forward pass of the tiny models, one token after another, with an explicit cache per layer and KV head:
// the answer that libllama, with or without eviction, is compared to. Written after the published descriptions of the
// architectures: pre-norm transformer, RMS norm, rotary positions (Su et al. 2021), grouped queries (Ainslie et al.
// 2023), gated feed-forward (Shazeer 2020).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dropkv/keep_list.h"
#include "support/tiny_model.h"

namespace dropkv::testing {

// What one KV head of one layer holds, in the order of arrival.
struct HeadCache {
  std::vector<int32_t> positions;           // [n] ascending
  std::vector<std::vector<double>> keys;    // [n][d] after RoPE and norm, rounded to f16 where the cache is f16
  std::vector<std::vector<double>> values;  // [n][d]
};

// What one layer computed in the last Decode call, one row per token of the call.
struct LayerTrace {
  std::vector<std::vector<double>> queries;    // [T][Hq * d] after RoPE and norm, not scaled
  std::vector<std::vector<double>> outputs;    // [T][Hq * d] attention outputs, before the output projection
  std::vector<std::vector<double>> entropies;  // [T][Hq] of the attention, in nats
};

class ReferenceModel {
 public:
  // Keeps a pointer to `model`, which must outlive it. f16_cache: keys and values are rounded to f16 on arrival.
  explicit ReferenceModel(const TinyModel& model, bool f16_cache = false);

  // Runs the tokens at positions position(), position() + 1, ...; every token attends to what its layer and head holds
  // then (in sliding layers to the last sliding_window positions of it), itself included. Returns the logits
  // [vocabulary] of the last token. Prefill and decode are the same call.
  std::vector<double> Decode(std::span<const int32_t> tokens);

  // Drops every cached token that list (i, head) of `keep` does not name, by position, from layer layers[i]; an empty
  // `layers` stands for 0, 1, 2, ... Layers that are not named stay as they are.
  void Keep(const KeepList& keep, std::span<const int32_t> layers = {});

  int32_t position() const { return position_; }
  const HeadCache& cache(int32_t layer, int32_t head) const { return caches_[layer][head]; }
  const LayerTrace& trace(int32_t layer) const { return traces_[layer]; }

 private:
  using Row = std::vector<double>;

  const NamedTensor& Tensor(const std::string& name) const;
  Row Multiply(const std::string& weight, const Row& x) const;
  Row Normalize(const std::string& weight, const Row& x) const;  // RMS norm of each Tensor(weight).size() elements
  void Rotate(Row& x, int32_t layer) const;
  Row Project(const std::string& prefix, const char* part, const Row& x, int32_t layer) const;
  Row Attend(const std::string& prefix, const Row& x, int32_t layer);
  Row FeedForward(const std::string& prefix, const Row& x) const;
  Row Step(int32_t token);

  const TinyModel& model_;
  bool f16_cache_;
  int32_t position_ = 0;
  std::vector<std::vector<HeadCache>> caches_;  // [layer][KV head]
  std::vector<LayerTrace> traces_;              // [layer]
};

}  // namespace dropkv::testing
