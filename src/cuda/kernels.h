// Launches: host functions that put kernels into a stream and return at once. None allocates, synchronises or uses the
// default stream; all may be captured in a graph.
#pragma once

#include "cuda/params.h"

namespace dropkv::cuda {

// any/: right on every shape and view.

// row_ok; counters to 0, but for skipped_rows; redo, has_tops, top_split to their neutral values. With given rows: the
// whole RowState (top -1), and redo where a judging row's given lse or out is not finite.
cudaError_t LaunchPrepare(const AttendParams& params, cudaStream_t stream);

// RowState of every row by three passes over its tokens, in float32: the top token apart from the others. Tokens with a
// NaN or Inf in key or value take no part. only_redo: just the heads with params.redo set.
cudaError_t LaunchAttendAny(const AttendParams& params, bool only_redo, cudaStream_t stream);

// RowState (top -1, no contribution) from the partials of all splits and the sinks. redo for a head with a row that
// came out as NaN or Inf; top_split and has_tops for rows with p > 1/2.
cudaError_t LaunchCombine(const AttendParams& params, cudaStream_t stream);

// After attend with `exclude`: top's contribution from the partials, which lack the top token in its split.
// p = 1 / (1 + R + s), R the other tokens' and s the sink's share of 2^top.
cudaError_t LaunchFinishTops(const AttendParams& params, cudaStream_t stream);

// raw [B, Hkv, n] of all rows, times their weights. Pairs (row, state.top[row]) count state.contribution.
cudaError_t LaunchScoreAny(const ScoreParams& params, cudaStream_t stream);

// Handed-in rows, after score: contributions of the pairs that it found, added to raw.
cudaError_t LaunchResolveGiven(const AttendParams& attend, const ScoreParams& params, cudaStream_t stream);

// visible [B, Hkv, w]: how many of a list's kept tokens every row sees.
cudaError_t LaunchKeptVisible(const AttendParams& full, const int64_t* offsets, const int32_t* positions,
                              int32_t* visible, cudaStream_t stream);

// output_error, evicted_mass [B, Hq] from the rows over all tokens and over the kept ones.
cudaError_t LaunchCertificate(const AttendParams& full, const RowState& kept, float* output_error, float* evicted_mass,
                              cudaStream_t stream);

// sm80/ and sm90/: partials of every split; of one without tokens max -inf and sum 0. exclude: only splits with a top
// token are attended again, without it, and only the rows concerned are written; the top token's index goes to
// state.top.
bool SupportsAttendSm80(const AttendParams& params);
cudaError_t LaunchAttendSm80(const AttendParams& params, bool exclude, cudaStream_t stream);
bool SupportsScoreSm80(const ScoreParams& params);
cudaError_t LaunchScoreSm80(const ScoreParams& params, cudaStream_t stream);

// Why the fast path cannot take these views; null where it can.
const char* RefusesAttendSm90(const AttendParams& params);
cudaError_t LaunchAttendSm90(const AttendParams& params, bool exclude, cudaStream_t stream);
const char* RefusesScoreSm90(const ScoreParams& params);
cudaError_t LaunchScoreSm90(const ScoreParams& params, cudaStream_t stream);

// Of LaunchDecodeSm80 and LaunchDecodeSm90. Zero before its first use; every launch leaves its counters at zero, so
// that later launches, of other shapes too, take it as it is. One launch at a time.
size_t DecodeWorkspaceBytes(const DecodeParams& params);
// Its part that must be zero: the first bytes; a counter for each of the lists that the kernels take at most.
inline constexpr int32_t kMaxDecodeLists = 16384;
inline constexpr size_t kDecodeCounterBytes = 256 + size_t{kMaxDecodeLists} * sizeof(int32_t);
bool SupportsDecodeSm80(const DecodeParams& params);
cudaError_t LaunchDecodeSm80(const DecodeParams& params, cudaStream_t stream);
const char* RefusesDecodeSm90(const DecodeParams& params);
cudaError_t LaunchDecodeSm90(const DecodeParams& params, cudaStream_t stream);
cudaError_t LaunchDecodeAny(const DecodeParams& params, cudaStream_t stream);

}  // namespace dropkv::cuda
