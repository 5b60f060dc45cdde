/* C ABI of the CUDA part (library dropkv_cuda); dropkv/cuda.h says what everything means. Every pointer inside the
 * structures is to device memory; strides are in elements. Set struct_size to sizeof, and the rest to zero first. */
#ifndef DROPKV_DROPKV_CUDA_H_
#define DROPKV_DROPKV_CUDA_H_

#include "dropkv/dropkv.h"

/* NOLINTBEGIN(modernize-use-using): C has no using */
#ifdef __cplusplus
extern "C" {
#endif

typedef struct dropkv_cuda_plan dropkv_cuda_plan;

typedef struct dropkv_cuda_tensor {
  const void* data;
  int64_t sequence_stride;
  int64_t head_stride;
  int64_t token_stride;
} dropkv_cuda_tensor;

typedef struct dropkv_cuda_cache {
  uint64_t struct_size;
  int32_t dtype; /* DROPKV_F16 or DROPKV_BF16 */
  int32_t sequences;
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t max_tokens;
  dropkv_cuda_tensor k;
  dropkv_cuda_tensor v;
  const int32_t* lengths;
  const int64_t* starts;
  const int32_t* blocks;
  int32_t blocks_stride;
  int32_t block_size;
  const int64_t* offsets;
  int64_t blocks_in_pool;
  int64_t rows_in_pool;
  const int32_t* generated; /* [B], or null: max_generated */
  int32_t max_generated;    /* tokens behind the prompt: no candidates, always kept, outside the budget */
  int32_t reserved;
} dropkv_cuda_cache;

typedef struct dropkv_cuda_rows {
  uint64_t struct_size;
  const void* q;
  int64_t q_sequence_stride;
  int64_t q_head_stride;
  int64_t q_row_stride;
  int32_t query_heads;
  int32_t rows;
  const int32_t* visible;
  float scale;
  float soft_cap;
  const float* sinks;
  const float* lse; /* with out, or both null */
  const void* out;
  int32_t out_dtype;    /* DROPKV_F32, or the cache's */
  const float* weights; /* [B, w] how much every row counts in the scores; null: 1 each */
} dropkv_cuda_rows;

typedef enum dropkv_cuda_placement {
  DROPKV_CUDA_LISTS_ONLY = 0,
  DROPKV_CUDA_OUT_OF_PLACE = 1,
  DROPKV_CUDA_IN_PLACE = 2
} dropkv_cuda_placement;

typedef struct dropkv_cuda_outputs {
  uint64_t struct_size;
  float* raw_scores;
  float* scores;
  int64_t* offsets;
  int32_t* positions;
  int64_t capacity;
  float* output_error;
  float* evicted_mass;
  void* k;
  void* v;
  int32_t compact; /* dropkv_cuda_placement */
  uint64_t* counters;
} dropkv_cuda_outputs;

/* force_kernel: null, "any", "sm80" or "sm90". Free the plan with dropkv_cuda_plan_free. */
DROPKV_API dropkv_status dropkv_cuda_plan_create(const dropkv_cuda_cache* shape, int32_t query_heads, int32_t rows,
                                                 int32_t rows_given, const dropkv_policy* policy,
                                                 const dropkv_budget* budget, const char* force_kernel,
                                                 dropkv_cuda_plan** plan);
DROPKV_API size_t dropkv_cuda_plan_workspace_bytes(const dropkv_cuda_plan* plan);
DROPKV_API int64_t dropkv_cuda_plan_capacity(const dropkv_cuda_plan* plan);
/* "attend sm90, score sm90" after a run, with the reason where a faster kernel refused; empty before. */
DROPKV_API const char* dropkv_cuda_plan_kernels(const dropkv_cuda_plan* plan);
DROPKV_API void dropkv_cuda_plan_free(dropkv_cuda_plan* plan);

/* stream: a cudaStream_t. */
DROPKV_API dropkv_status dropkv_cuda_score(dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                           const dropkv_cuda_rows* rows, const dropkv_cuda_outputs* outputs,
                                           void* workspace, void* stream);
DROPKV_API dropkv_status dropkv_cuda_select(const dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                            const dropkv_cuda_outputs* outputs, void* workspace, void* stream);
DROPKV_API dropkv_status dropkv_cuda_compact(const dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                             const dropkv_cuda_outputs* outputs, void* workspace, void* stream);
DROPKV_API dropkv_status dropkv_cuda_run(dropkv_cuda_plan* plan, const dropkv_cuda_cache* cache,
                                         const dropkv_cuda_rows* rows, const dropkv_cuda_outputs* outputs,
                                         void* workspace, void* stream);

/* workspace: that many bytes at a multiple of 256, one call at a time. Prepare it once before its first use (zeroing
   all of it does the same); every decode leaves it prepared, for other shapes too. */
DROPKV_API size_t dropkv_cuda_decode_workspace_bytes(const dropkv_cuda_cache* cache, int32_t query_heads);
DROPKV_API dropkv_status dropkv_cuda_decode_prepare(void* workspace, void* stream);
DROPKV_API dropkv_status dropkv_cuda_decode(const dropkv_cuda_cache* cache, int32_t query_heads, const void* q,
                                            void* out, float scale, float soft_cap, const float* sinks, void* workspace,
                                            void* stream);

#ifdef __cplusplus
}
#endif
/* NOLINTEND(modernize-use-using) */

#endif /* DROPKV_DROPKV_CUDA_H_ */
