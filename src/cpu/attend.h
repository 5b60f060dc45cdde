// Around the attend kernel: rows packed as lanes, softmax states of token ranges merged in order, and what a finished
// state says about a row.
#pragma once

#include <cstdint>

#include "core/workspace.h"
#include "cpu/kernels.h"
#include "dropkv/engine.h"

namespace dropkv::cpu {

// The tokens of KV head `head`: all, or the `count` ascending positions in `subset`.
HeadTokens MakeHeadTokens(const KvView& kv, int32_t head);
HeadTokens MakeHeadTokens(const KvView& kv, int32_t head, const int32_t* subset, int32_t count);

// Which rows of one KV head a packing holds: row i = h * w + row of query head h of the group, or ids[i].
struct RowChoice {
  const int32_t* ids = nullptr;  // [count] ascending; null: all g*w
  int32_t count = 0;

  int32_t id(int32_t lane) const { return ids != nullptr ? ids[lane] : lane; }
};

// The query of row `id` of KV head `head` [d].
const float* QueryOf(const ObservationRows& rows, int32_t kv_heads, int32_t head, int32_t id);

// |x|^2; dim is a multiple of 4.
double SquaredNorm(const float* x, int32_t dim);

// True where all components are finite. Rows whose query is not judge nothing.
bool IsFinite(const float* x, int32_t count);

// Memory of one packing.
struct PackedRows {
  float* queries = nullptr;    // [d, r] in panels
  int32_t* visible = nullptr;  // [r]

  static PackedRows Take(Workspace& workspace, int32_t lanes, int32_t key_dim);
};

// Packs the chosen rows: queries times scale * log2(e) (or scale / soft_cap), zeros for rows with a non-finite query
// and for padding lanes. Visible counts are those of `tokens`: positions below rows.visible, counted in its subset.
HeadRows PackRows(const Kernels& kernels, const ObservationRows& rows, const AttentionSpec& spec, int32_t kv_heads,
                  int32_t head, const RowChoice& choice, const HeadTokens& tokens, const PackedRows& memory);

SoftmaxState TakeState(Workspace& workspace, int32_t lanes, int32_t value_dim);
void ResetState(int32_t lanes, int32_t value_dim, bool with_values, const SoftmaxState& state);

// into = into and from together; `from` holds later tokens. center as in Kernels::attend. row [dv]: scratch.
void MergeState(const Kernels& kernels, const HeadTokens& tokens, const LaneLayout& layout, const float* center,
                const SoftmaxState& from, const SoftmaxState& into, float* row);

// What a row's complete state says.
struct RowResult {
  double lse = 0.0;   // natural log; -inf: the row sees nothing
  float base = 0.0F;  // as in Denominators; +inf where the row sees no token
  float share = 0.0F;
  int32_t token = -1;         // the top token, by its index in HeadTokens, where p > 1/2; else -1
  bool dominant = false;      // its 1 - p <= 1e-6
  double contribution = 0.0;  // its pair's p^2 |v - a_without|^2
};

// center [dv] and out [dv] are null where values were not accumulated; out: a - center. sink: the row's sink logit, or
// -inf. row [dv]: scratch.
//
// With top t, others' sum R = rest * 2^(second - top), sink share s, all relative to 2^top: p = 1 / (1 + R + s) and
// 1 - p = (R + s) / (1 + R + s) have no subtraction; a_without = (sums - s c) / (R + s) has one of its own scale only.
// The sink is a token with value 0, hence value -c after centring.
RowResult FinishRow(const Kernels& kernels, const HeadTokens& tokens, const LaneLayout& layout, const float* center,
                    double sink, const SoftmaxState& state, int32_t lane, float* out, float* row);

// center [dv]: mean of the first tile's finite values, or 0 where its square is below a quarter of their variance. Any
// constant would do: it takes out what all values share, so that distances do not cancel. row [dv]: scratch.
void ChooseCenter(const Kernels& kernels, const HeadTokens& tokens, float* row, float* center);

}  // namespace dropkv::cpu
