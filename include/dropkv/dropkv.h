/* dropkv's C ABI: the whole library from C, or from anything that can call C. No C++ in here.
 *
 * Errors. Every call that can fail returns a dropkv_status. Its message names the argument, what was expected and what
 *   came; dropkv_last_error() has it until the next failing call of the same thread. Outputs are written on
 *   DROPKV_OK only, except where a comment says otherwise. No pointer may be null unless "or null" is written.
 * Handles. dropkv_engine, dropkv_plan, dropkv_keep_list, dropkv_cache and dropkv_decode are opaque; what a _create or
 *   _run call returned is released by the _free call of its kind. _free takes null. A handle may be used by one thread
 *   at a time; different handles are independent, except that an engine serves one run at a time.
 * Sized structs begin with struct_size: set it to sizeof the struct, also where the library writes the struct. A
 *   program that was compiled against an older header goes on working; a newer one's extra fields must be zero.
 * Structs without struct_size (views) never change.
 * Letters: Hq query heads, Hkv KV heads, n cached tokens, d and dv key and value head sizes, w observation rows.
 *   Shapes in brackets, strides in elements, ranges half-open.
 *
 * An eviction is: dropkv_engine_create, dropkv_policy_find, dropkv_plan_create, dropkv_plan_get (tells the workspace),
 * dropkv_run (gives the keep list), then dropkv_compact, dropkv_compact_in_place or dropkv_cache_assign. dropkv_certify
 * measures a keep list of any origin.
 */
#ifndef DROPKV_DROPKV_H_
#define DROPKV_DROPKV_H_

#include <stddef.h>
#include <stdint.h>

#include "dropkv/export.h"

/* NOLINTBEGIN(modernize-use-using): C has no using */

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---------------------------------------------------------------------------------------------------- */

/* Pinned: a number never changes its meaning. */
typedef enum dropkv_status {
  DROPKV_OK = 0,
  DROPKV_INVALID_ARGUMENT = 1,
  DROPKV_UNSUPPORTED = 2,         /* correct input that this build or machine cannot serve */
  DROPKV_NOT_FOUND = 3,           /* no policy or kernel of that name */
  DROPKV_IO = 4,                  /* reading or writing failed */
  DROPKV_WORKSPACE_TOO_SMALL = 5, /* dropkv_plan_get tells the size */
  DROPKV_FAILED_PRECONDITION = 6, /* the call came at the wrong time */
  DROPKV_CANCELLED = 7,
  DROPKV_INTERNAL = 8 /* out of memory, or a bug */
} dropkv_status;

/* "ok", "invalid argument", ...; "unknown code" for a number outside the enumeration. Static storage. */
DROPKV_API const char* dropkv_status_name(dropkv_status status);

/* Message of this thread's last call that did not return DROPKV_OK; "" before the first. Cut at 1,023 bytes. Valid
 * until the thread's next failing call. */
DROPKV_API const char* dropkv_last_error(void);

/* "0.1.0", of the library that is linked. Static storage. */
DROPKV_API const char* dropkv_version(void);

/* ---- Engine ---------------------------------------------------------------------------------------------------- */

typedef struct dropkv_engine dropkv_engine; /* a thread pool and the choice of kernels */

typedef struct dropkv_engine_options {
  size_t struct_size;
  int32_t threads;          /* 0: one per core */
  int32_t reserved;         /* 0 */
  const char* force_kernel; /* or null: the best instruction set. A name that dropkv_kernel_name gives */
} dropkv_engine_options;

/* options: or null, for the defaults. */
DROPKV_API dropkv_status dropkv_engine_create(const dropkv_engine_options* options, dropkv_engine** engine);
DROPKV_API void dropkv_engine_free(dropkv_engine* engine);

/* Name of the instruction set that the engine uses; lives as long as the engine. */
DROPKV_API dropkv_status dropkv_engine_kernel(const dropkv_engine* engine, const char** name);

/* The index-th name that force_kernel takes on this machine, best first; DROPKV_NOT_FOUND past the last. Static. */
DROPKV_API dropkv_status dropkv_kernel_name(int32_t index, const char** name);

/* ---- Policy and budget ------------------------------------------------------------------------------------------ */

enum {
  DROPKV_SIGNAL_FULL = 0,
  DROPKV_SIGNAL_DROPKV = 1,
  DROPKV_SIGNAL_ATTENTION = 2,
  DROPKV_SIGNAL_RECENCY = 3,
  DROPKV_SIGNAL_RANDOM = 4
};
enum { DROPKV_POOL_MEAN = 0, DROPKV_POOL_MAX = 1 };
enum { DROPKV_HEADS_UNIFORM = 0, DROPKV_HEADS_ADA = 1, DROPKV_HEADS_ADA_O = 2 };

/* What is scored, how it is pooled, what is protected, how heads share the budget (docs/algorithm.md 3 and 4). */
typedef struct dropkv_policy {
  size_t struct_size;
  int32_t signal;         /* DROPKV_SIGNAL_* */
  int32_t window;         /* the prompt's last tokens, 1..128: always kept; where no rows are named, they judge */
  int32_t pool_kind;      /* DROPKV_POOL_* */
  int32_t pool_before;    /* a hit keeps this many tokens before it ... */
  int32_t pool_after;     /* ... and this many after it; 0 and 0: no pooling */
  int32_t pool_past_only; /* not 0: pools the n - window past tokens only */
  int32_t sink;           /* first tokens that are always kept */
  int32_t heads;          /* DROPKV_HEADS_* */
  double alpha;           /* share of the budget that is safe for every head, 0..1; DROPKV_HEADS_ADA and _ADA_O */
  uint64_t seed;          /* DROPKV_SIGNAL_RANDOM */
} dropkv_policy;

/* A preset by name ("dropkv", "adadropkv", ...). DROPKV_NOT_FOUND lists the names. */
DROPKV_API dropkv_status dropkv_policy_find(const char* name, dropkv_policy* policy);

/* Name of the index-th preset; DROPKV_NOT_FOUND past the last. Static storage. */
DROPKV_API dropkv_status dropkv_policy_name(int32_t index, const char** name);

/* How much is KEPT. Exactly one of the two is set, the other is 0. */
typedef struct dropkv_budget {
  size_t struct_size;
  double fraction; /* share of the tokens, (0, 1] */
  int64_t tokens;  /* tokens per KV head, window and sinks included */
} dropkv_budget;

/* ---- Plan ------------------------------------------------------------------------------------------------------- */

typedef struct dropkv_plan dropkv_plan; /* decisions for one shape, policy and budget; used by any number of runs */

/* Layers of one sequence that are evicted together. Views hold tokens + generated tokens: the prompt's n, which are the
 * candidates, then those that were decoded behind it. Generated ones count in the softmax of the rows that see them;
 * they are never evicted, lie outside the budget, and every list ends with them. */
typedef struct dropkv_shape {
  size_t struct_size;
  int32_t layers;
  int32_t query_heads; /* Hq: 1 to 16 times Hkv */
  int32_t kv_heads;    /* Hkv */
  int32_t tokens;      /* n */
  int32_t key_dim;     /* d: a multiple of 8, 8..256 */
  int32_t value_dim;   /* dv: the same */
  int32_t generated;   /* tokens behind the prompt's */
  int32_t rows;        /* observation rows of every layer, up to 128; 0: the policy's window, min(window, n) */
} dropkv_shape;

typedef struct dropkv_plan_info {
  size_t struct_size;
  size_t workspace_bytes; /* that dropkv_run needs */
  int64_t max_kept;       /* upper bound of the keep list's positions, all layers and heads, generated ones included */
  int32_t keep;           /* tokens of the prompt per KV head, after clamping; generated ones come on top */
  int32_t raised;         /* not 0: a fraction fell below window + sink and was raised to it */
} dropkv_plan_info;

DROPKV_API dropkv_status dropkv_plan_create(const dropkv_engine* engine, const dropkv_shape* shape,
                                            const dropkv_policy* policy, const dropkv_budget* budget,
                                            dropkv_plan** plan);
DROPKV_API dropkv_status dropkv_plan_get(const dropkv_plan* plan, dropkv_plan_info* info);
DROPKV_API void dropkv_plan_free(dropkv_plan* plan);

/* ---- Views ------------------------------------------------------------------------------------------------------- */

enum { DROPKV_F32 = 0, DROPKV_F16 = 1, DROPKV_BF16 = 2, DROPKV_Q8_0 = 3 /* 32 elements: f16 scale, 32 int8 */ };

/* Keys or values of one layer of one sequence. Element (head, token, dim) lies at
 * head * head_stride + cell(token) * token_stride + dim * dim_stride. */
typedef struct dropkv_tensor {
  const void* data;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;
  int32_t dtype; /* DROPKV_F32, ... */
  int32_t reserved;
} dropkv_tensor;

typedef struct dropkv_mutable_tensor {
  void* data;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;
  int32_t dtype;
  int32_t reserved;
} dropkv_mutable_tensor;

/* One layer of one sequence; keys after RoPE. */
typedef struct dropkv_kv {
  int32_t kv_heads; /* Hkv */
  int32_t tokens;   /* n; in a dropkv_layer the generated ones too */
  int32_t key_dim;
  int32_t value_dim;
  dropkv_tensor k;
  dropkv_tensor v;
  const int32_t* cells; /* [n] cell of every token, or null: token j lies in cell j */
} dropkv_kv;

typedef struct dropkv_mutable_kv {
  int32_t kv_heads;
  int32_t tokens; /* capacity in tokens */
  int32_t key_dim;
  int32_t value_dim;
  dropkv_mutable_tensor k;
  dropkv_mutable_tensor v;
} dropkv_mutable_kv;

/* The queries that judge the tokens: any set, in any order. A row of a generated token sees those before it too. */
typedef struct dropkv_rows {
  const float* q;         /* [Hq, w, d] after RoPE and any query norm; dims contiguous */
  int64_t head_stride;    /* elements between query heads */
  int64_t row_stride;     /* elements between rows */
  const int32_t* visible; /* [w]; row i attends to tokens 0 .. visible[i]-1 */
  int32_t query_heads;    /* Hq */
  int32_t rows;           /* w */
} dropkv_rows;

/* logit = scale * <q, k>, then soft_cap * tanh(logit / soft_cap) where soft_cap > 0. */
typedef struct dropkv_attention {
  float scale;
  float soft_cap;     /* 0: none */
  const float* sinks; /* [Hq] one more logit per query head, without a value; or null */
} dropkv_attention;

/* ---- Run --------------------------------------------------------------------------------------------------------- */

/* One layer's input. In an array the elements lie the first one's struct_size apart. */
typedef struct dropkv_layer {
  size_t struct_size;
  dropkv_kv kv;
  dropkv_rows rows; /* shape's rows, or min(window, n); not read where the policy needs no queries */
  dropkv_attention attention;
  const float* out;    /* [Hq, w, dv] the rows' attention outputs, and ... */
  const float* lse;    /* [Hq, w] ... log-sum-exps, where the prefill has them: saves a pass. Both or null */
  int32_t layer_index; /* in the model: part of the random policy's counter */
  int32_t reserved;
  const float* row_weights; /* [w] finite, >= 0, not all 0: how much every row counts in the scores; null: 1 each */
} dropkv_layer;

/* Arrays of the caller; null: not wanted. */
typedef struct dropkv_outputs {
  size_t struct_size;
  float* scores;       /* [layers, Hkv, n] pooled scores */
  float* raw_scores;   /* [layers, Hkv, n] before pooling */
  float* output_error; /* [layers, Hq] sqrt(mean over rows of (|a - a'| / |a|)^2), without row_weights */
  float* evicted_mass; /* [layers, Hq] mean over rows of the evicted probability, likewise */
} dropkv_outputs;

typedef struct dropkv_report {
  size_t struct_size;
  int32_t keep;             /* as in dropkv_plan_info */
  int32_t raised;           /* as in dropkv_plan_info */
  int64_t nonfinite_tokens; /* (layer, head, token) with NaN or Inf: kept */
  int64_t dominant_tokens;  /* (layer, head, token) that are a row's whole output: kept */
  int64_t skipped_rows;     /* query rows with NaN or Inf: they judge nothing */
  double attend_s;          /* wall-clock seconds */
  double score_s;
  double select_s;
  double certificate_s;
  char kernel[32]; /* the instruction set that ran */
} dropkv_report;

typedef struct dropkv_keep_list dropkv_keep_list; /* which tokens stay */

/* Scores and selects. layers: plan's shape.layers elements. workspace: dropkv_plan_info.workspace_bytes bytes, any
 * alignment. outputs, report: or null. */
DROPKV_API dropkv_status dropkv_run(dropkv_engine* engine, const dropkv_plan* plan, const dropkv_layer* layers,
                                    int32_t layer_count, void* workspace, size_t workspace_bytes,
                                    const dropkv_outputs* outputs, dropkv_report* report, dropkv_keep_list** keep);

/* ---- Keep list --------------------------------------------------------------------------------------------------- */

/* Lists of all layers and heads, one behind the other: list i = layer * kv_heads + head holds positions
 * [offsets[i], offsets[i + 1]), strictly ascending. The arrays live as long as the list. */
typedef struct dropkv_keep_view {
  size_t struct_size;
  int32_t layers;
  int32_t kv_heads;
  const int64_t* offsets;   /* [layers * kv_heads + 1] */
  const int32_t* positions; /* [offsets[layers * kv_heads]] */
} dropkv_keep_view;

/* A list of the caller's own choice; the arrays are copied. */
DROPKV_API dropkv_status dropkv_keep_list_create(const dropkv_keep_view* view, dropkv_keep_list** keep);
DROPKV_API dropkv_status dropkv_keep_list_get(const dropkv_keep_list* keep, dropkv_keep_view* view);
DROPKV_API void dropkv_keep_list_free(dropkv_keep_list* keep);

/* ---- Certificate ------------------------------------------------------------------------------------------------- */

/* What any keep list does to the outputs of the rows given, also one that no run made. layers: shape's layers elements,
 * each with the same number of rows, 1..128, whether or not a policy would read them; out and lse as in dropkv_run.
 * keep: lists of shape's layers and KV heads, positions below shape's tokens + generated; heads may differ in length,
 * also 0. shape's rows: as many, or 0.
 * output_error, evicted_mass: [layers, Hq] as in dropkv_outputs; one of them may be null. Allocates its workspace. */
DROPKV_API dropkv_status dropkv_certify(dropkv_engine* engine, const dropkv_shape* shape, const dropkv_layer* layers,
                                        int32_t layer_count, const dropkv_keep_list* keep, float* output_error,
                                        float* evicted_mass);

/* ---- Compaction -------------------------------------------------------------------------------------------------- */

/* Copies the kept rows of list `layer` to the front of `destination`: row i of a head becomes its token i. Same dtypes;
 * destination->tokens at least the longest list. */
DROPKV_API dropkv_status dropkv_compact(const dropkv_kv* source, const dropkv_keep_list* keep, int32_t layer,
                                        const dropkv_mutable_kv* destination);

/* The same inside one cache. cells: [n] or null, as in dropkv_kv. */
DROPKV_API dropkv_status dropkv_compact_in_place(const dropkv_mutable_kv* cache, const int32_t* cells,
                                                 const dropkv_keep_list* keep, int32_t layer);

/* ---- Ragged cache and decode attention --------------------------------------------------------------------------- */

typedef struct dropkv_cache dropkv_cache; /* one layer; every KV head holds its own number of tokens; owns its memory */

typedef struct dropkv_cache_info {
  size_t struct_size;
  int32_t dtype;
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int64_t capacity_bytes; /* allocated */
  int64_t used_bytes;     /* of the tokens held */
} dropkv_cache_info;

/* key_dim, value_dim: multiples of 8 up to 256 (DROPKV_Q8_0: of 32). */
DROPKV_API dropkv_status dropkv_cache_create(int32_t dtype, int32_t kv_heads, int32_t key_dim, int32_t value_dim,
                                             dropkv_cache** cache);
DROPKV_API void dropkv_cache_free(dropkv_cache* cache);

/* Replaces the content by the kept tokens of list `layer`, with room for `reserve` more per head. Same dtypes. */
DROPKV_API dropkv_status dropkv_cache_assign(dropkv_cache* cache, const dropkv_kv* source, const dropkv_keep_list* keep,
                                             int32_t layer, int32_t reserve);
/* Appends token `token` of `source` to every head. */
DROPKV_API dropkv_status dropkv_cache_append(dropkv_cache* cache, const dropkv_kv* source, int32_t token);
/* Removes the last `count` tokens of every head. */
DROPKV_API dropkv_status dropkv_cache_truncate(dropkv_cache* cache, int32_t count);
DROPKV_API dropkv_status dropkv_cache_get(const dropkv_cache* cache, dropkv_cache_info* info);
DROPKV_API dropkv_status dropkv_cache_length(const dropkv_cache* cache, int32_t head, int32_t* tokens);

typedef struct dropkv_decode dropkv_decode; /* buffers of decode attention for one shape */

/* group: query heads per KV head, 1..16. */
DROPKV_API dropkv_status dropkv_decode_create(int32_t kv_heads, int32_t group, int32_t key_dim, int32_t value_dim,
                                              dropkv_decode** decode);
DROPKV_API void dropkv_decode_free(dropkv_decode* decode);

/* out [Hq, dv] = softmax(logits of q [Hq, d] with the cache's keys) times its values, float32, heads contiguous.
 * engine: lends its threads; or null, this thread alone. The bits do not depend on the number of threads. */
DROPKV_API dropkv_status dropkv_decode_run(dropkv_decode* decode, dropkv_engine* engine, const dropkv_cache* cache,
                                           const dropkv_attention* attention, const float* q, float* out);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-use-using) */

#endif /* DROPKV_DROPKV_H_ */
