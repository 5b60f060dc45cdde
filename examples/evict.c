/* The C ABI: scores a made-up cache of one head, keeps 32 tokens and copies them to a smaller cache. */
#include <stdio.h>
#include <stdlib.h>

#include "dropkv/dropkv.h"

enum { kTokens = 500, kDim = 64, kRows = 8, kKeep = 32 };

static void check(dropkv_status status) {
  if (status == DROPKV_OK) return;
  fprintf(stderr, "%s: %s\n", dropkv_status_name(status), dropkv_last_error());
  exit(1);
}

static void fill(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5F;
}

int main(void) {
  static float k[kTokens * kDim], v[kTokens * kDim], q[kRows * kDim], small_k[kKeep * kDim], small_v[kKeep * kDim];
  int32_t visible[kRows];
  fill(k, kTokens * kDim);
  fill(v, kTokens * kDim);
  fill(q, kRows * kDim);
  for (int i = 0; i < kRows; ++i) visible[i] = kTokens - kRows + i + 1;

  dropkv_engine* engine;
  dropkv_plan* plan;
  dropkv_keep_list* keep;
  dropkv_policy policy = {.struct_size = sizeof policy};
  dropkv_plan_info info = {.struct_size = sizeof info};
  dropkv_report report = {.struct_size = sizeof report};
  const dropkv_shape shape = {sizeof shape, 1, 1, 1, kTokens, kDim, kDim, 0, 0};
  const dropkv_budget budget = {.struct_size = sizeof budget, .tokens = kKeep};
  dropkv_layer layer = {.struct_size = sizeof layer};
  const dropkv_tensor keys = {k, kTokens * kDim, kDim, 1, DROPKV_F32, 0};
  const dropkv_tensor values = {v, kTokens * kDim, kDim, 1, DROPKV_F32, 0};
  layer.kv = (dropkv_kv){1, kTokens, kDim, kDim, keys, values, NULL};
  layer.rows = (dropkv_rows){q, kRows * kDim, kDim, visible, 1, kRows};
  layer.attention.scale = 0.125F; /* 1 / sqrt(kDim) */
  const dropkv_mutable_tensor kept_keys = {small_k, kKeep * kDim, kDim, 1, DROPKV_F32, 0};
  const dropkv_mutable_tensor kept_values = {small_v, kKeep * kDim, kDim, 1, DROPKV_F32, 0};
  const dropkv_mutable_kv small = {1, kKeep, kDim, kDim, kept_keys, kept_values};

  check(dropkv_engine_create(NULL, &engine));
  check(dropkv_policy_find("dropkv", &policy));
  check(dropkv_plan_create(engine, &shape, &policy, &budget, &plan));
  check(dropkv_plan_get(plan, &info));
  void* workspace = malloc(info.workspace_bytes);
  check(dropkv_run(engine, plan, &layer, 1, workspace, info.workspace_bytes, NULL, &report, &keep));
  check(dropkv_compact(&layer.kv, keep, 0, &small));
  printf("kernel %s kept %d of %d tokens\n", report.kernel, report.keep, kTokens);
  dropkv_keep_list_free(keep);
  dropkv_plan_free(plan);
  dropkv_engine_free(engine);
  free(workspace);
  return report.keep == kKeep ? 0 : 1;
}
