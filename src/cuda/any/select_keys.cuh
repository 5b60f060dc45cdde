// From raw scores to keys: 32 bits, the larger the earlier a token is kept; ties go to the lower index. Scores are
// pooled from a tile of raw ones in shared memory wherever keys are needed: no array of pooled scores exists.
#pragma once

#include "cuda/params.h"

namespace dropkv::cuda {

inline constexpr int32_t kSelectThreads = 512;
inline constexpr int32_t kKeysPerThread = 4;
inline constexpr int32_t kSelectChunk = kSelectThreads * kKeysPerThread;  // tokens of one list

inline constexpr uint32_t kNonFiniteKey = 0xFFFFFFFFU;

// Dominant tokens carry the sign bit: their own bits stand above those of any pooled score.
__device__ inline uint32_t MakeKey(float raw, float pooled) {
  if (!isfinite(raw)) return kNonFiniteKey;
  return __float_as_uint(signbit(raw) ? raw : pooled);
}

// Raw scores of a chunk's tokens, `after` before and `before` behind them; 0 where a position is not pooled.
inline constexpr int32_t kTileSlack = 8;  // the last 16-byte read of a thread
inline int32_t SelectTileFloats(const Pooling& pool) {
  return (kSelectChunk + pool.before + pool.after + kTileSlack + 3) / 4 * 4;
}

struct TokenFlags {
  int32_t nonfinite = 0;
  int32_t dominant = 0;
};

// The scores of one tile on their way from memory: loads that nothing waits for yet.
class TileLoads {
 public:
  // scores: of one list of `tokens` tokens.
  __device__ void Issue(const float* scores, int32_t first_token, int32_t tokens, const Pooling& pool) {
    const int32_t size = kSelectChunk + pool.before + pool.after;
#pragma unroll
    for (int32_t i = 0; i < kLoads; ++i) {
      const int32_t at = i * kSelectThreads + static_cast<int32_t>(threadIdx.x);
      const int32_t token = first_token - pool.after + at;
      value_[i] = at < size && token >= 0 && token < tokens ? scores[token] : 0.0F;
    }
  }

  // To shared memory; positions from `pooled_tokens` on are not pooled. Counts the flags of the chunk's own tokens.
  __device__ void Store(float* tile, int32_t first_token, int32_t pooled_tokens, const Pooling& pool,
                        TokenFlags* flags) const {
    const int32_t size = kSelectChunk + pool.before + pool.after;
#pragma unroll
    for (int32_t i = 0; i < kLoads; ++i) {
      const int32_t at = i * kSelectThreads + static_cast<int32_t>(threadIdx.x);
      if (at >= size) continue;
      tile[at] = first_token - pool.after + at < pooled_tokens ? value_[i] : 0.0F;
      if (at < pool.after || at >= pool.after + kSelectChunk) continue;
      flags->nonfinite += isfinite(value_[i]) ? 0 : 1;
      flags->dominant += isfinite(value_[i]) && signbit(value_[i]) ? 1 : 0;
    }
  }

 private:
  static constexpr int32_t kLoads = (kSelectChunk + 2 * kMaxPoolingReach) / kSelectThreads;
  float value_[kLoads];
};

// Mean or maximum of tile[k] .. tile[k + width - 1] for k = 0 .. 3, added in ascending order, as on the host. `tile` is
// aligned to 16 bytes. Scores are not negative: what is left out may count as 0.
template <bool kMean>
__device__ inline float4 PoolFour(const float* tile, int32_t width) {
  float pooled[kKeysPerThread] = {};
  for (int32_t first = 0; first < width + 3; first += 4) {
    const float4 loaded = *reinterpret_cast<const float4*>(tile + first);
    const float raw[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    const bool inside = first >= 4 && first + 4 <= width;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float score = isfinite(raw[i]) ? fabsf(raw[i]) : 0.0F;
#pragma unroll
      for (int32_t k = 0; k < kKeysPerThread; ++k) {
        const int32_t place = first + i - k;  // in the window of token k
        const float counted = inside || (place >= 0 && place < width) ? score : 0.0F;
        pooled[k] = kMean ? __fadd_rn(pooled[k], counted) : fmaxf(pooled[k], counted);
      }
    }
  }
  if (kMean)
    for (float& sum : pooled) sum = __fdiv_rn(sum, static_cast<float>(width));
  return {pooled[0], pooled[1], pooled[2], pooled[3]};
}

__device__ inline float4 PoolFour(const float* tile, const Pooling& pool) {
  const int32_t width = pool.before + pool.after + 1;
  return pool.kind == PoolKind::kMean ? PoolFour<true>(tile, width) : PoolFour<false>(tile, width);
}

}  // namespace dropkv::cuda
