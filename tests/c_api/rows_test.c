/* Rows beyond the window through the C ABI: generated tokens and weights, against the formulas of docs/algorithm.md
 * written out in C; and callers whose header had neither. */
#include <stddef.h>

#include "check.h"

enum { kQueryHeads = 2, kKvHeads = 1, kPrompt = 90, kGenerated = 6, kTokens = kPrompt + kGenerated, kDim = 16 };
enum { kRows = 9, kWindow = 8, kKeep = 30 };

static float k[kTokens * kDim];
static float v[kTokens * kDim];
static float q[kQueryHeads * kRows * kDim];

/* Rows of the window's end, of the middle and of generated tokens, in no order. */
static const int32_t visible[kRows] = {90, 96, 88, 93, 40, 91, 89, 95, 92};
static const float weights[kRows] = {1, 0.5F, 2, 0, 1, 3, 0.25F, 1, 1};

/* By removal: what the output of every row loses without token j, squared, times the row's weight, mean over heads. */
static double expected_score(int token) {
  double score = 0;
  for (int h = 0; h < kQueryHeads; ++h) {
    for (int i = 0; i < kRows; ++i) {
      if (token >= visible[i]) continue;
      double sum[2] = {0};
      double out[2][kDim] = {{0}};
      for (int j = 0; j < visible[i]; ++j) {
        double logit = 0;
        for (int x = 0; x < kDim; ++x) logit += (double)q[(h * kRows + i) * kDim + x] * k[j * kDim + x];
        for (int without = 0; without < (j == token ? 1 : 2); ++without) {
          sum[without] += exp(0.25 * logit);
          for (int x = 0; x < kDim; ++x) out[without][x] += exp(0.25 * logit) * v[j * kDim + x];
        }
      }
      double moved = 0;
      for (int x = 0; x < kDim; ++x) moved += pow(out[0][x] / sum[0] - out[1][x] / sum[1], 2);
      score += weights[i] * moved / kQueryHeads;
    }
  }
  return score;
}

/* The window, the best others of the prompt, and all that was generated. */
static void check_list(const dropkv_keep_list* keep, const double* scores) {
  dropkv_keep_view view = {.struct_size = sizeof view};
  int kept[kTokens] = {0};
  double least_kept = INFINITY;
  double most_evicted = 0;
  REQUIRE_OK(dropkv_keep_list_get(keep, &view));
  CHECK(view.offsets[1] == kKeep + kGenerated);
  for (int64_t at = 0; at < view.offsets[1]; ++at) kept[view.positions[at]] = 1;
  for (int j = 0; j < kPrompt - kWindow; ++j) {
    if (kept[j]) {
      least_kept = fmin(least_kept, scores[j]);
    } else {
      most_evicted = fmax(most_evicted, scores[j]);
    }
  }
  for (int j = kPrompt - kWindow; j < kTokens; ++j) CHECK(kept[j]);
  CHECK(most_evicted <= least_kept * (1 + 1e-4));
}

/* A caller with the first header has smaller structs; what lies behind them is its own. */
static void check_older_header(dropkv_engine* engine, dropkv_shape shape, dropkv_layer layer,
                               const dropkv_policy* policy, const dropkv_budget* budget) {
  static float scores[2][kPrompt];
  dropkv_plan_info info = {.struct_size = sizeof info};
  shape.generated = 0;
  shape.rows = 0;
  layer.kv.tokens = kPrompt;
  layer.rows.rows = kWindow;
  layer.row_weights = NULL;
  int32_t ends[kWindow];
  for (int i = 0; i < kWindow; ++i) ends[i] = kPrompt - kWindow + i + 1;
  layer.rows.visible = ends;
  for (int older = 0; older < 2; ++older) {
    dropkv_plan* plan = NULL;
    dropkv_keep_list* keep = NULL;
    dropkv_outputs outputs = {.struct_size = sizeof outputs, .raw_scores = scores[older]};
    if (older) {
      const float nonsense[kRows] = {-1};
      shape.struct_size = offsetof(dropkv_shape, generated);
      shape.generated = -5;
      shape.rows = 99;
      layer.struct_size = offsetof(dropkv_layer, row_weights);
      layer.row_weights = nonsense;
    }
    REQUIRE_OK(dropkv_plan_create(engine, &shape, policy, budget, &plan));
    REQUIRE_OK(dropkv_plan_get(plan, &info));
    void* workspace = malloc(info.workspace_bytes);
    REQUIRE_OK(dropkv_run(engine, plan, &layer, 1, workspace, info.workspace_bytes, &outputs, NULL, &keep));
    float error[kQueryHeads];
    REQUIRE_OK(dropkv_certify(engine, &shape, &layer, 1, keep, error, NULL));
    free(workspace);
    dropkv_keep_list_free(keep);
    dropkv_plan_free(plan);
  }
  CHECK(memcmp(scores[0], scores[1], sizeof scores[0]) == 0);
}

static void check_errors(dropkv_engine* engine, const dropkv_plan* plan, dropkv_layer layer, dropkv_shape shape,
                         const dropkv_policy* policy, const dropkv_budget* budget) {
  static unsigned char workspace[1 << 20];
  dropkv_keep_list* keep = NULL;
  dropkv_plan* made = NULL;
  const float negative[kRows] = {1, 1, 1, 1, -2};
  const float nothing[kRows] = {0};
  layer.row_weights = negative;
  CHECK(dropkv_run(engine, plan, &layer, 1, workspace, sizeof workspace, NULL, NULL, &keep) == DROPKV_INVALID_ARGUMENT);
  CHECK(strstr(dropkv_last_error(), "rows.weights[4]") != NULL);
  layer.row_weights = nothing;
  CHECK(dropkv_run(engine, plan, &layer, 1, workspace, sizeof workspace, NULL, NULL, &keep) == DROPKV_INVALID_ARGUMENT);
  CHECK(strstr(dropkv_last_error(), "rows.weights: expected one above 0") != NULL);
  layer.row_weights = NULL;
  layer.kv.tokens = kPrompt;
  CHECK(dropkv_run(engine, plan, &layer, 1, workspace, sizeof workspace, NULL, NULL, &keep) == DROPKV_INVALID_ARGUMENT);
  CHECK(strstr(dropkv_last_error(), "rows.visible[1]: expected 0 to 90") != NULL ||
        strstr(dropkv_last_error(), "[1, 96, 16, 16]") != NULL);
  shape.generated = -1;
  CHECK(dropkv_plan_create(engine, &shape, policy, budget, &made) == DROPKV_INVALID_ARGUMENT);
  CHECK(strstr(dropkv_last_error(), "shape.generated") != NULL);
  shape.generated = kGenerated;
  shape.rows = 129;
  CHECK(dropkv_plan_create(engine, &shape, policy, budget, &made) == DROPKV_INVALID_ARGUMENT);
  CHECK(strstr(dropkv_last_error(), "shape.rows") != NULL);
  CHECK(keep == NULL && made == NULL);
}

int main(void) {
  fill_normal(k, kTokens * kDim, 11);
  fill_normal(v, kTokens * kDim, 12);
  fill_normal(q, kQueryHeads * kRows * kDim, 13);
  dropkv_layer layer = {.struct_size = sizeof layer, .row_weights = weights};
  layer.kv = (dropkv_kv){.kv_heads = kKvHeads, .tokens = kTokens, .key_dim = kDim, .value_dim = kDim};
  layer.kv.k = (dropkv_tensor){k, kTokens * kDim, kDim, 1, DROPKV_F32, 0};
  layer.kv.v = (dropkv_tensor){v, kTokens * kDim, kDim, 1, DROPKV_F32, 0};
  layer.rows = (dropkv_rows){q, kRows * kDim, kDim, visible, kQueryHeads, kRows};
  layer.attention.scale = 0.25F;

  dropkv_engine* engine = NULL;
  dropkv_plan* plan = NULL;
  dropkv_keep_list* keep = NULL;
  dropkv_policy policy = {.struct_size = sizeof policy};
  const dropkv_budget budget = {.struct_size = sizeof budget, .tokens = kKeep};
  const dropkv_shape shape = {sizeof shape, 1, kQueryHeads, kKvHeads, kPrompt, kDim, kDim, kGenerated, kRows};
  dropkv_plan_info info = {.struct_size = sizeof info};
  static float raw[kPrompt];
  const dropkv_outputs outputs = {.struct_size = sizeof outputs, .raw_scores = raw};
  REQUIRE_OK(dropkv_engine_create(NULL, &engine));
  REQUIRE_OK(dropkv_policy_find("dropkv", &policy));
  policy.pool_before = policy.pool_after = 0;
  REQUIRE_OK(dropkv_plan_create(engine, &shape, &policy, &budget, &plan));
  REQUIRE_OK(dropkv_plan_get(plan, &info));
  CHECK(info.keep == kKeep && info.max_kept == kKeep + kGenerated);
  void* workspace = malloc(info.workspace_bytes);
  REQUIRE_OK(dropkv_run(engine, plan, &layer, 1, workspace, info.workspace_bytes, &outputs, NULL, &keep));
  double scores[kPrompt];
  for (int j = 0; j < kPrompt; ++j) {
    scores[j] = expected_score(j);
    CHECK(close_to(raw[j], scores[j], 1e-4, 1e-12));
  }
  check_list(keep, scores);
  check_older_header(engine, shape, layer, &policy, &budget);
  check_errors(engine, plan, layer, shape, &policy, &budget);

  free(workspace);
  dropkv_keep_list_free(keep);
  dropkv_plan_free(plan);
  dropkv_engine_free(engine);
  return failures == 0 ? 0 : 1;
}
