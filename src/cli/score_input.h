// One attention layer out of a safetensors file: what `dropkv score` reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "baseline/input.h"
#include "baseline/statistics.h"
#include "cli/score_options.h"
#include "core/parallel.h"
#include "dropkv/cache_view.h"
#include "dropkv/status.h"
#include "io/safetensors.h"

namespace dropkv::cli {

// Least rows that judge an eviction, where the file has them.
inline constexpr int32_t kCertificateRows = 8;

struct ScoreInput {
  int32_t query_heads = 0;  // 0: nothing in the file tells
  int32_t kv_heads = 0;
  int32_t tokens = 0;
  int32_t key_dim = 0;  // as in the file
  int32_t value_dim = 0;
  // With zeros behind a head size that is no multiple of 8; they change neither logits, outputs nor norms.
  int32_t padded_key_dim = 0;
  int32_t padded_value_dim = 0;
  int32_t query_rows = 0;    // in q and q_pre: the last ones of the prompt; 0: none
  std::vector<float> q;      // [Hq, rows, padded d]
  std::vector<float> q_pre;  // [Hq, n, padded d]; empty: not there or not needed; as the next three
  std::vector<float> k_pre;  // [Hkv, n, padded d]
  std::vector<float> wo;     // [hidden, Hq * dv]
  std::vector<float> sinks;  // [Hq]
  std::vector<float> k;      // [Hkv, n, padded d]
  std::vector<float> v;      // [Hkv, n, padded dv]
  int32_t hidden = 0;
  float scale = 0.0F;
  float soft_cap = 0.0F;
  baseline::Rope rope;
  int32_t layer = 0;
  int32_t layers = 0;  // 0: unknown
  std::vector<std::string> notes;

  bool padded() const { return padded_key_dim != key_dim || padded_value_dim != value_dim; }
  KvView View() const;
  AttentionSpec Attention() const;
  // The last `count` rows; visible [count] is filled and must outlive the result.
  ObservationRows LastRows(int32_t count, std::vector<int32_t>* visible) const;
  baseline::OutputProjection Projection() const;
};

// Reads what options.recipe needs. Errors name the file and the tensor or metadata: missing, of another shape than k
// says, of a dtype that is no float; what the recipe needs and the file lacks.
Result<ScoreInput> LoadScoreInput(const ScoreOptions& options);

// Statistics of all rows for the recipe; nothing where it reads none.
Result<baseline::PromptStatistics> GatherStatistics(const baseline::Recipe& recipe, const ScoreInput& input,
                                                    ThreadPool* pool);

}  // namespace dropkv::cli
