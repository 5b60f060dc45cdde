// What a policy may look at: one layer of one prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dropkv/cache_view.h"

namespace dropkv {
class ThreadPool;
}

namespace dropkv::baseline {

class OutputMetric;      // output_metric.h
class PromptStatistics;  // statistics.h

// W_O [hidden, Hq * dv] of y = W_O x, read by rows so that a quantised one is never expanded whole.
struct OutputProjection {
  int32_t hidden = 0;
  int32_t columns = 0;                                    // Hq * dv
  std::function<void(int32_t row, float* out)> read_row;  // out [columns]; safe from several threads

  explicit operator bool() const { return hidden > 0; }
};

// Rotary embedding of the first `dims` dims of a key or query: pair i turns by position * frequencies[i].
struct Rope {
  int32_t dims = 0;                 // 0: none
  bool halves = true;               // pairs (i, i + dims/2) (NeoX); else (2i, 2i + 1)
  std::vector<double> frequencies;  // [dims / 2]
  double magnitude = 1.0;           // factor on both (YaRN's attention factor)

  // theta^(-2 i / dims).
  static Rope Standard(int32_t dims, double theta);

  // x [d] <- R(position) x, or its inverse for `undo`.
  void Rotate(double position, bool undo, float* x) const;

  // Cosine and sine of every pair at `position`, times the magnitude, for Turn; those of the inverse for `undo`.
  // turns [dims]. An average of them over positions is the averaged rotation.
  void Turns(double position, bool undo, double* turns) const;

  // x [d]: every pair times its (cosine, sine).
  template <typename T>
  void Turn(const double* turns, T* x) const {
    const int32_t pairs = dims / 2;
    for (int32_t i = 0; i < pairs; ++i) {
      T& first = x[halves ? i : 2 * i];
      T& second = x[halves ? i + pairs : 2 * i + 1];
      const double a = first;
      const double b = second;
      first = static_cast<T>(turns[2 * i] * a - turns[2 * i + 1] * b);
      second = static_cast<T>(turns[2 * i + 1] * a + turns[2 * i] * b);
    }
  }
};

struct Layer {
  KvView kv;  // keys after RoPE
  // The last rows of the prompt, then those of generated tokens; at least as many as judge. q null: none.
  ObservationRows rows;
  // The last ones of `rows` that judge; 0: the recipe's window (min(window, n)). A score of the last row reads one.
  int32_t row_count = 0;
  // The last tokens of kv, decoded behind the prompt: rows that see them count them in the softmax; they get no score.
  int32_t generated = 0;
  AttentionSpec attention;
  OutputProjection wo;
  const OutputMetric* output_metric = nullptr;   // kDropKvWo: made from wo before; null: made at every call
  Rope rope;                                     // dims 0: unknown or none
  const float* k_pre = nullptr;                  // [Hkv, n, d] keys before RoPE; null: undone by `rope`
  const PromptStatistics* statistics = nullptr;  // of all rows; null: none
  int32_t index = 0;                             // in the model
  // kCompactor: [Hkv, d, sketch] instead of the random projection; 1 / sqrt(sketch) is inside already.
  const float* sketch = nullptr;

  // The prompt's n tokens alone: the candidates.
  KvView Prompt() const {
    KvView prompt = kv;
    prompt.tokens -= generated;
    return prompt;
  }
};

}  // namespace dropkv::baseline
