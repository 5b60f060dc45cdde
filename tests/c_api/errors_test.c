/* Bad input to every call of the C ABI: the number, and a message that names the argument. */
#include "check.h"

enum { kTokens = 64, kDim = 16, kRows = 8 };

static float k[kTokens * kDim];
static float v[kTokens * kDim];
static float q[kRows * kDim];
static int32_t visible[kRows];

static dropkv_engine* engine;
static dropkv_plan* plan;
static dropkv_keep_list* keep;
static dropkv_cache* cache;
static dropkv_decode* decode;

static dropkv_policy policy = {.struct_size = sizeof policy};
static const dropkv_budget budget = {.struct_size = sizeof budget, .tokens = 16};
static const dropkv_shape shape = {sizeof shape, 1, 1, 1, kTokens, kDim, kDim, 0, 0};
static dropkv_layer layer = {.struct_size = sizeof layer};
static dropkv_plan_info info = {.struct_size = sizeof info};
static void* workspace;

/* The call failed with this number, and its message has this text. */
static void fails_at(int line, dropkv_status got, dropkv_status wanted, const char* text) {
  if (got == wanted && strstr(dropkv_last_error(), text) != NULL) return;
  ++failures;
  fprintf(stderr, "%s:%d: wanted %s with '%s', got %s: %s\n", __FILE__, line, dropkv_status_name(wanted), text,
          dropkv_status_name(got), dropkv_last_error());
}
#define FAILS(call, status, text) fails_at(__LINE__, call, status, text)
#define REFUSES(call, text) fails_at(__LINE__, call, DROPKV_INVALID_ARGUMENT, text)

static void check_names(void) {
  CHECK(strcmp(dropkv_status_name(DROPKV_OK), "ok") == 0);
  CHECK(strcmp(dropkv_status_name(DROPKV_WORKSPACE_TOO_SMALL), "workspace too small") == 0);
  CHECK(strcmp(dropkv_status_name((dropkv_status)999), "unknown code") == 0);
  CHECK(strcmp(dropkv_last_error(), "") == 0);
  CHECK(strchr(dropkv_version(), '.') != NULL);
}

static void check_engine(void) {
  const char* name = NULL;
  dropkv_engine* other = NULL;
  dropkv_engine_options options = {.struct_size = sizeof options};
  REFUSES(dropkv_engine_create(NULL, NULL), "engine: expected a pointer");
  options.struct_size = 4;
  REFUSES(dropkv_engine_create(&options, &other), "options.struct_size");
  options.struct_size = sizeof options;
  options.force_kernel = "abacus";
  FAILS(dropkv_engine_create(&options, &other), DROPKV_NOT_FOUND, "abacus");
  CHECK(other == NULL);
  REFUSES(dropkv_engine_kernel(NULL, &name), "engine");
  REFUSES(dropkv_engine_kernel(engine, NULL), "name");
  REFUSES(dropkv_kernel_name(0, NULL), "name");
  FAILS(dropkv_kernel_name(-1, &name), DROPKV_NOT_FOUND, "index");
  FAILS(dropkv_kernel_name(1000, &name), DROPKV_NOT_FOUND, "index");
  for (int32_t i = 0; dropkv_kernel_name(i, &name) == DROPKV_OK; ++i) {
    const char* forced = NULL;
    options.force_kernel = name;
    REQUIRE_OK(dropkv_engine_create(&options, &other));
    REQUIRE_OK(dropkv_engine_kernel(other, &forced));
    CHECK(strcmp(forced, name) == 0);
    dropkv_engine_free(other);
  }
}

/* A struct of a newer header: its extra part may be there, but not used. */
static void check_newer_struct(void) {
  struct {
    dropkv_budget known;
    int64_t later;
  } newer = {{sizeof newer, 0, 16}, 0};
  dropkv_plan* made = NULL;
  REQUIRE_OK(dropkv_plan_create(engine, &shape, &policy, &newer.known, &made));
  dropkv_plan_free(made);
  newer.later = 1;
  FAILS(dropkv_plan_create(engine, &shape, &policy, &newer.known, &made), DROPKV_UNSUPPORTED, "budget");
}

static void check_plan(void) {
  const char* name = NULL;
  dropkv_plan* made = NULL;
  dropkv_policy bad = policy;
  dropkv_shape odd = shape;
  dropkv_budget wrong = budget;
  REFUSES(dropkv_policy_find(NULL, &bad), "name");
  REFUSES(dropkv_policy_find("dropkv", NULL), "policy");
  FAILS(dropkv_policy_find("none", &bad), DROPKV_NOT_FOUND, "dropkv");
  REFUSES(dropkv_policy_name(0, NULL), "name");
  FAILS(dropkv_policy_name(-1, &name), DROPKV_NOT_FOUND, "index");
  for (int32_t i = 0; dropkv_policy_name(i, &name) == DROPKV_OK; ++i) {
    dropkv_policy preset = {.struct_size = sizeof preset};
    REQUIRE_OK(dropkv_policy_find(name, &preset));
  }
  REFUSES(dropkv_plan_create(NULL, &shape, &policy, &budget, &made), "engine");
  REFUSES(dropkv_plan_create(engine, NULL, &policy, &budget, &made), "shape");
  REFUSES(dropkv_plan_create(engine, &shape, NULL, &budget, &made), "policy");
  REFUSES(dropkv_plan_create(engine, &shape, &policy, NULL, &made), "budget");
  REFUSES(dropkv_plan_create(engine, &shape, &policy, &budget, NULL), "plan");
  bad.signal = 77;
  REFUSES(dropkv_plan_create(engine, &shape, &bad, &budget, &made), "policy.signal: expected 0 to 4, got 77");
  bad = policy;
  bad.window = 0;
  REFUSES(dropkv_plan_create(engine, &shape, &bad, &budget, &made), "window");
  bad = policy;
  bad.heads = -1;
  REFUSES(dropkv_plan_create(engine, &shape, &bad, &budget, &made), "policy.heads");
  odd.key_dim = 7;
  REFUSES(dropkv_plan_create(engine, &odd, &policy, &budget, &made), "key_dim");
  odd = shape;
  odd.query_heads = 0;
  REFUSES(dropkv_plan_create(engine, &odd, &policy, &budget, &made), "query_heads");
  wrong.fraction = 0.5;
  REFUSES(dropkv_plan_create(engine, &shape, &policy, &wrong, &made), "either fraction or tokens");
  wrong.tokens = 0;
  wrong.fraction = NAN;
  REFUSES(dropkv_plan_create(engine, &shape, &policy, &wrong, &made), "budget");
  CHECK(made == NULL);
  REFUSES(dropkv_plan_get(NULL, &info), "plan");
  REFUSES(dropkv_plan_get(plan, NULL), "info");
}

static dropkv_status run(const dropkv_layer* layers, int32_t count, void* memory, size_t bytes) {
  dropkv_keep_list* made = NULL;
  const dropkv_status status = dropkv_run(engine, plan, layers, count, memory, bytes, NULL, NULL, &made);
  CHECK((made != NULL) == (status == DROPKV_OK));
  dropkv_keep_list_free(made);
  return status;
}

static void check_run(void) {
  dropkv_keep_list* made = NULL;
  dropkv_report report = {.struct_size = 8};
  dropkv_outputs outputs = {.struct_size = 8};
  const size_t bytes = info.workspace_bytes;
  REFUSES(dropkv_run(NULL, plan, &layer, 1, workspace, bytes, NULL, NULL, &made), "engine");
  REFUSES(dropkv_run(engine, NULL, &layer, 1, workspace, bytes, NULL, NULL, &made), "plan");
  REFUSES(dropkv_run(engine, plan, NULL, 1, workspace, bytes, NULL, NULL, &made), "layers");
  REFUSES(dropkv_run(engine, plan, &layer, 1, workspace, bytes, NULL, NULL, NULL), "keep");
  REFUSES(dropkv_run(engine, plan, &layer, 1, workspace, bytes, &outputs, NULL, &made), "outputs.struct_size");
  REFUSES(dropkv_run(engine, plan, &layer, 1, workspace, bytes, NULL, &report, &made), "report.struct_size");
  REFUSES(run(&layer, 0, workspace, bytes), "layer_count");
  REFUSES(run(&layer, 1, NULL, bytes), "workspace");
  FAILS(run(&layer, 1, workspace, bytes / 2), DROPKV_WORKSPACE_TOO_SMALL, "workspace");

  dropkv_layer bad = layer;
  bad.struct_size = 8;
  REFUSES(run(&bad, 1, workspace, bytes), "layers[0].struct_size");
  bad = layer;
  bad.kv.k.data = NULL;
  REFUSES(run(&bad, 1, workspace, bytes), "kv.k.data");
  bad = layer;
  bad.kv.v.dtype = 9;
  REFUSES(run(&bad, 1, workspace, bytes), "kv.v.dtype");
  bad = layer;
  bad.kv.tokens = kTokens - 1;
  REFUSES(run(&bad, 1, workspace, bytes), "got [1, 63, 16, 16]");
  bad = layer;
  bad.rows.q = NULL;
  REFUSES(run(&bad, 1, workspace, bytes), "rows.q");
  bad = layer;
  bad.rows.visible = NULL;
  REFUSES(run(&bad, 1, workspace, bytes), "rows.visible");
  bad = layer;
  bad.rows.rows = kRows - 1;
  REFUSES(run(&bad, 1, workspace, bytes), "rows");
  bad = layer;
  bad.out = v; /* without lse */
  REFUSES(run(&bad, 1, workspace, bytes), "lse");
  CHECK(run(&layer, 1, workspace, bytes) == DROPKV_OK);
}

static void check_keep_list(void) {
  const int64_t offsets[] = {0, 3};
  const int64_t late[] = {1, 3};
  const int64_t falling[] = {0, -1};
  const int32_t positions[] = {1, 5, 9};
  const int32_t twice[] = {1, 5, 5};
  const int32_t negative[] = {-1, 5, 9};
  dropkv_keep_list* made = NULL;
  const dropkv_keep_view good = {sizeof good, 1, 1, offsets, positions};
  dropkv_keep_view view = good;
  REFUSES(dropkv_keep_list_create(NULL, &made), "view");
  REFUSES(dropkv_keep_list_create(&good, NULL), "keep");
  view.layers = 0;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.layers");
  view = good;
  view.kv_heads = -3;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.kv_heads: expected at least 1, got -3");
  view = good;
  view.offsets = NULL;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.offsets");
  view.offsets = late;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.offsets[0]");
  view.offsets = falling;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.offsets[1]");
  view = good;
  view.positions = NULL;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.positions");
  view.positions = twice;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.positions[2]: expected more than 5, got 5");
  view.positions = negative;
  REFUSES(dropkv_keep_list_create(&view, &made), "view.positions[0]");
  CHECK(made == NULL);
  view = good;
  REFUSES(dropkv_keep_list_get(NULL, &view), "keep");
  REFUSES(dropkv_keep_list_get(keep, NULL), "view");
}

static void check_certify(void) {
  float error[1] = {-1};
  float mass[1] = {-1};
  const int64_t offsets[] = {0, 1, 2};
  const int32_t positions[] = {kTokens, 0};
  const dropkv_keep_view far = {sizeof far, 1, 1, offsets, positions};
  const dropkv_keep_view two = {sizeof two, 2, 1, offsets, positions};
  dropkv_keep_list* outside = NULL;
  dropkv_keep_list* layers = NULL;
  REQUIRE_OK(dropkv_keep_list_create(&far, &outside));
  REQUIRE_OK(dropkv_keep_list_create(&two, &layers));
  REFUSES(dropkv_certify(NULL, &shape, &layer, 1, keep, error, mass), "engine");
  REFUSES(dropkv_certify(engine, NULL, &layer, 1, keep, error, mass), "shape");
  REFUSES(dropkv_certify(engine, &shape, NULL, 1, keep, error, mass), "layers");
  REFUSES(dropkv_certify(engine, &shape, &layer, 0, keep, error, mass), "layer_count");
  REFUSES(dropkv_certify(engine, &shape, &layer, 1, NULL, error, mass), "keep");
  REFUSES(dropkv_certify(engine, &shape, &layer, 1, keep, NULL, NULL), "output_error, evicted_mass");
  REFUSES(dropkv_certify(engine, &shape, &layer, 1, outside, error, mass), "below 64, got 64");
  REFUSES(dropkv_certify(engine, &shape, &layer, 1, layers, error, mass), "got 2 and 1");
  dropkv_shape odd = shape;
  odd.struct_size = 8;
  REFUSES(dropkv_certify(engine, &odd, &layer, 1, keep, error, mass), "shape.struct_size");
  odd = shape;
  odd.layers = 2;
  REFUSES(dropkv_certify(engine, &odd, &layer, 1, layers, error, mass), "layers: expected the shape's 2");
  odd = shape;
  odd.key_dim = 7;
  REFUSES(dropkv_certify(engine, &odd, &layer, 1, keep, error, mass), "key_dim");
  dropkv_layer bad = layer;
  bad.rows.rows = 0;
  REFUSES(dropkv_certify(engine, &shape, &bad, 1, keep, error, mass), "rows");
  bad = layer;
  bad.kv.v.data = NULL;
  REFUSES(dropkv_certify(engine, &shape, &bad, 1, keep, error, mass), "kv.v.data");
  CHECK(error[0] == -1 && mass[0] == -1);
  REQUIRE_OK(dropkv_certify(engine, &shape, &layer, 1, keep, error, mass));
  CHECK(error[0] > 0 && mass[0] > 0);
  dropkv_keep_list_free(outside);
  dropkv_keep_list_free(layers);
}

static void check_compact(void) {
  static float room[2][16 * kDim];
  const int64_t offsets[] = {0, 1};
  const int32_t beyond[] = {kTokens};
  const dropkv_keep_view far = {sizeof far, 1, 1, offsets, beyond};
  dropkv_keep_list* outside = NULL;
  dropkv_mutable_kv small = {
      1, 16, kDim, kDim, {room[0], 16 * kDim, kDim, 1, DROPKV_F32, 0}, {room[1], 16 * kDim, kDim, 1, DROPKV_F32, 0}};
  REQUIRE_OK(dropkv_keep_list_create(&far, &outside));
  REFUSES(dropkv_compact(NULL, keep, 0, &small), "source");
  REFUSES(dropkv_compact(&layer.kv, NULL, 0, &small), "keep");
  REFUSES(dropkv_compact(&layer.kv, keep, 0, NULL), "destination");
  REFUSES(dropkv_compact(&layer.kv, keep, 1, &small), "layer: expected 0 to 0, got 1");
  REFUSES(dropkv_compact(&layer.kv, outside, 0, &small), "64");
  small.tokens = 15;
  REFUSES(dropkv_compact(&layer.kv, keep, 0, &small), "tokens");
  small.tokens = 16;
  small.k.dtype = DROPKV_F16;
  CHECK(dropkv_compact(&layer.kv, keep, 0, &small) != DROPKV_OK);
  small.k.dtype = DROPKV_F32;
  REFUSES(dropkv_compact_in_place(NULL, NULL, keep, 0), "cache");
  REFUSES(dropkv_compact_in_place(&small, NULL, NULL, 0), "keep");
  REFUSES(dropkv_compact_in_place(&small, NULL, keep, -1), "layer");
  REFUSES(dropkv_compact_in_place(&small, NULL, outside, 0), "64");
  dropkv_keep_list_free(outside);
}

static void check_cache(void) {
  float out[kDim];
  int32_t length = 0;
  dropkv_cache* made = NULL;
  dropkv_decode* made_decode = NULL;
  dropkv_cache_info held = {.struct_size = sizeof held};
  const dropkv_attention attention = {.scale = 0.25F};
  REFUSES(dropkv_cache_create(DROPKV_F32, 1, kDim, kDim, NULL), "cache");
  REFUSES(dropkv_cache_create(42, 1, kDim, kDim, &made), "dtype");
  REFUSES(dropkv_cache_create(DROPKV_F32, 0, kDim, kDim, &made), "kv_heads");
  REFUSES(dropkv_cache_create(DROPKV_F32, 1, 12, kDim, &made), "key_dim");
  REFUSES(dropkv_cache_create(DROPKV_Q8_0, 1, 32, 40, &made), "value_dim");
  CHECK(made == NULL);
  REFUSES(dropkv_cache_assign(NULL, &layer.kv, keep, 0, 0), "cache");
  REFUSES(dropkv_cache_assign(cache, NULL, keep, 0, 0), "source");
  REFUSES(dropkv_cache_assign(cache, &layer.kv, NULL, 0, 0), "keep");
  REFUSES(dropkv_cache_assign(cache, &layer.kv, keep, 7, 0), "layer");
  REFUSES(dropkv_cache_assign(cache, &layer.kv, keep, 0, -1), "reserve");
  REFUSES(dropkv_cache_append(NULL, &layer.kv, 0), "cache");
  REFUSES(dropkv_cache_append(cache, NULL, 0), "source");
  REFUSES(dropkv_cache_append(cache, &layer.kv, kTokens), "token");
  REFUSES(dropkv_cache_append(cache, &layer.kv, -1), "token");
  REFUSES(dropkv_cache_truncate(NULL, 0), "cache");
  REFUSES(dropkv_cache_truncate(cache, -1), "count");
  REFUSES(dropkv_cache_truncate(cache, 1000), "count");
  REFUSES(dropkv_cache_get(NULL, &held), "cache");
  REFUSES(dropkv_cache_get(cache, NULL), "info");
  REFUSES(dropkv_cache_length(NULL, 0, &length), "cache");
  REFUSES(dropkv_cache_length(cache, 0, NULL), "tokens");
  REFUSES(dropkv_cache_length(cache, 1, &length), "head: expected 0 to 0, got 1");
  REFUSES(dropkv_decode_create(1, 1, kDim, kDim, NULL), "decode");
  REFUSES(dropkv_decode_create(1, 17, kDim, kDim, &made_decode), "group");
  REFUSES(dropkv_decode_run(NULL, NULL, cache, &attention, q, out), "decode");
  REFUSES(dropkv_decode_run(decode, NULL, NULL, &attention, q, out), "cache");
  REFUSES(dropkv_decode_run(decode, NULL, cache, NULL, q, out), "attention");
  REFUSES(dropkv_decode_run(decode, NULL, cache, &attention, NULL, out), "q");
  REFUSES(dropkv_decode_run(decode, NULL, cache, &attention, q, NULL), "out");
}

static void check_free_takes_null(void) {
  dropkv_engine_free(NULL);
  dropkv_plan_free(NULL);
  dropkv_keep_list_free(NULL);
  dropkv_cache_free(NULL);
  dropkv_decode_free(NULL);
}

int main(void) {
  check_names();
  fill_normal(k, kTokens * kDim, 7);
  fill_normal(v, kTokens * kDim, 8);
  fill_normal(q, kRows * kDim, 9);
  for (int i = 0; i < kRows; ++i) visible[i] = kTokens - kRows + i + 1;
  layer.kv = (dropkv_kv){1,
                         kTokens,
                         kDim,
                         kDim,
                         {k, kTokens * kDim, kDim, 1, DROPKV_F32, 0},
                         {v, kTokens * kDim, kDim, 1, DROPKV_F32, 0},
                         NULL};
  layer.rows = (dropkv_rows){q, kRows * kDim, kDim, visible, 1, kRows};
  layer.attention.scale = 0.25F;
  REQUIRE_OK(dropkv_engine_create(NULL, &engine));
  REQUIRE_OK(dropkv_policy_find("dropkv", &policy));
  REQUIRE_OK(dropkv_plan_create(engine, &shape, &policy, &budget, &plan));
  REQUIRE_OK(dropkv_plan_get(plan, &info));
  workspace = malloc(info.workspace_bytes);
  REQUIRE_OK(dropkv_run(engine, plan, &layer, 1, workspace, info.workspace_bytes, NULL, NULL, &keep));
  REQUIRE_OK(dropkv_cache_create(DROPKV_F32, 1, kDim, kDim, &cache));
  REQUIRE_OK(dropkv_cache_assign(cache, &layer.kv, keep, 0, 0));
  REQUIRE_OK(dropkv_decode_create(1, 1, kDim, kDim, &decode));

  check_engine();
  check_newer_struct();
  check_plan();
  check_run();
  check_keep_list();
  check_certify();
  check_compact();
  check_cache();
  check_free_takes_null();

  free(workspace);
  dropkv_decode_free(decode);
  dropkv_cache_free(cache);
  dropkv_keep_list_free(keep);
  dropkv_plan_free(plan);
  dropkv_engine_free(engine);
  return failures == 0 ? 0 : 1;
}
