/* A C program that knows the installed package only: evicts by recency, which needs no queries. */
#include <stdio.h>

#include "dropkv/dropkv.h"

static int fail(const char* call) {
  fprintf(stderr, "%s: %s\n", call, dropkv_last_error());
  return 1;
}

int main(void) {
  enum { TOKENS = 100, DIM = 8 };
  static float keys[TOKENS * DIM];
  static float values[TOKENS * DIM];
  static char workspace[1 << 20];
  dropkv_engine* engine = NULL;
  dropkv_plan* plan = NULL;
  dropkv_keep_list* keep = NULL;
  dropkv_policy policy = {.struct_size = sizeof policy};
  dropkv_plan_info info = {.struct_size = sizeof info};
  dropkv_keep_view view = {.struct_size = sizeof view};
  const dropkv_budget budget = {.struct_size = sizeof budget, .fraction = 0.25};
  const dropkv_shape shape = {sizeof shape, 1, 1, 1, TOKENS, DIM, DIM, 0, 0};
  dropkv_layer layer = {.struct_size = sizeof layer};
  layer.kv.kv_heads = 1;
  layer.kv.tokens = TOKENS;
  layer.kv.key_dim = layer.kv.value_dim = DIM;
  layer.kv.k = (dropkv_tensor){.data = keys, .head_stride = TOKENS * DIM, .token_stride = DIM, .dim_stride = 1};
  layer.kv.v = (dropkv_tensor){.data = values, .head_stride = TOKENS * DIM, .token_stride = DIM, .dim_stride = 1};

  if (dropkv_policy_find("streaming", &policy) != DROPKV_OK) return fail("dropkv_policy_find");
  if (dropkv_engine_create(NULL, &engine) != DROPKV_OK) return fail("dropkv_engine_create");
  if (dropkv_plan_create(engine, &shape, &policy, &budget, &plan) != DROPKV_OK) return fail("dropkv_plan_create");
  if (dropkv_plan_get(plan, &info) != DROPKV_OK) return fail("dropkv_plan_get");
  if (info.workspace_bytes > sizeof workspace) return 1;
  if (dropkv_run(engine, plan, &layer, 1, workspace, sizeof workspace, NULL, NULL, &keep) != DROPKV_OK)
    return fail("dropkv_run");
  if (dropkv_keep_list_get(keep, &view) != DROPKV_OK) return fail("dropkv_keep_list_get");
  printf("dropkv %s keeps %d of %d tokens, the last one at %d\n", dropkv_version(), (int)view.offsets[1], TOKENS,
         (int)view.positions[view.offsets[1] - 1]);
  const int good = view.offsets[1] == 25 && view.positions[0] == 0 && view.positions[24] == TOKENS - 1;
  dropkv_keep_list_free(keep);
  dropkv_plan_free(plan);
  dropkv_engine_free(engine);
  return good ? 0 : 1;
}
