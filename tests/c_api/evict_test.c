/* One eviction through the C ABI, against the formulas of docs/algorithm.md written out in C. */
#include "check.h"

enum { kQueryHeads = 4, kKvHeads = 2, kGroup = 2, kTokens = 211, kDim = 16, kValueDim = 24, kRows = 8, kKeep = 40 };

static float k[kKvHeads * kTokens * kDim];
static float v[kKvHeads * kTokens * kValueDim];
static float q[kQueryHeads * kRows * kDim];
static int32_t visible[kRows];

/* What the formulas say. */
static double p[kQueryHeads][kRows][kTokens];
static double a[kQueryHeads][kRows][kValueDim];
static double raw[kKvHeads][kTokens];

static void compute_attention(void) {
  for (int h = 0; h < kQueryHeads; ++h) {
    for (int i = 0; i < kRows; ++i) {
      const float* key = k + h / kGroup * kTokens * kDim;
      const float* value = v + h / kGroup * kTokens * kValueDim;
      double sum = 0;
      for (int j = 0; j < visible[i]; ++j) {
        double logit = 0;
        for (int x = 0; x < kDim; ++x) logit += (double)q[(h * kRows + i) * kDim + x] * key[j * kDim + x];
        p[h][i][j] = exp(0.25 * logit);
        sum += p[h][i][j];
      }
      for (int j = 0; j < visible[i]; ++j) {
        p[h][i][j] /= sum;
        for (int x = 0; x < kValueDim; ++x) a[h][i][x] += p[h][i][j] * value[j * kValueDim + x];
      }
    }
  }
}

static void compute_scores(void) {
  for (int h = 0; h < kQueryHeads; ++h) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < visible[i]; ++j) {
        const double odds = p[h][i][j] / (1 - p[h][i][j]);
        double distance = 0;
        for (int x = 0; x < kValueDim; ++x) {
          const double apart = a[h][i][x] - v[(h / kGroup * kTokens + j) * kValueDim + x];
          distance += apart * apart;
        }
        raw[h / kGroup][j] += odds * odds * distance / kGroup;
      }
    }
  }
}

/* Mean of 5: two to each side, zeros beyond the ends. */
static double pooled(int head, int token) {
  double sum = 0;
  for (int j = token - 2; j <= token + 2; ++j)
    if (j >= 0 && j < kTokens) sum += raw[head][j];
  return sum / 5;
}

static dropkv_layer make_layer(void) {
  dropkv_layer layer = {.struct_size = sizeof layer};
  layer.kv = (dropkv_kv){.kv_heads = kKvHeads, .tokens = kTokens, .key_dim = kDim, .value_dim = kValueDim};
  layer.kv.k = (dropkv_tensor){k, kTokens * kDim, kDim, 1, DROPKV_F32, 0};
  layer.kv.v = (dropkv_tensor){v, kTokens * kValueDim, kValueDim, 1, DROPKV_F32, 0};
  layer.rows = (dropkv_rows){q, kRows * kDim, kDim, visible, kQueryHeads, kRows};
  layer.attention.scale = 0.25F;
  return layer;
}

static int is_kept(const dropkv_keep_view* view, int head, int token) {
  for (int64_t at = view->offsets[head]; at < view->offsets[head + 1]; ++at)
    if (view->positions[at] == token) return 1;
  return 0;
}

/* The window is in, the count is right, and no evicted token beats a kept one by more than rounding. */
static void check_choice(const dropkv_keep_view* view) {
  CHECK(view->layers == 1 && view->kv_heads == kKvHeads);
  for (int head = 0; head < kKvHeads; ++head) {
    CHECK(view->offsets[head + 1] - view->offsets[head] == kKeep);
    double least_kept = INFINITY;
    double most_evicted = 0;
    for (int j = 0; j < kTokens; ++j) {
      if (j >= kTokens - kRows) {
        CHECK(is_kept(view, head, j));
      } else if (is_kept(view, head, j)) {
        least_kept = fmin(least_kept, pooled(head, j));
      } else {
        most_evicted = fmax(most_evicted, pooled(head, j));
      }
    }
    CHECK(most_evicted <= least_kept * (1 + 1e-4));
  }
}

/* Error of every query head's output over the rows, and the mass that went. */
static void check_certificate(const dropkv_keep_view* view, const float* output_error, const float* evicted_mass) {
  for (int h = 0; h < kQueryHeads; ++h) {
    double squares = 0;
    double mass = 0;
    for (int i = 0; i < kRows; ++i) {
      double kept[kValueDim] = {0};
      double kept_mass = 0;
      for (int j = 0; j < visible[i]; ++j) {
        if (!is_kept(view, h / kGroup, j)) {
          mass += p[h][i][j] / kRows;
          continue;
        }
        kept_mass += p[h][i][j];
        for (int x = 0; x < kValueDim; ++x) kept[x] += p[h][i][j] * v[(h / kGroup * kTokens + j) * kValueDim + x];
      }
      double moved = 0;
      double norm = 0;
      for (int x = 0; x < kValueDim; ++x) {
        moved += pow(a[h][i][x] - kept[x] / kept_mass, 2);
        norm += pow(a[h][i][x], 2);
      }
      squares += moved / norm / kRows;
    }
    CHECK(close_to(output_error[h], sqrt(squares), 1e-4, 1e-7));
    CHECK(close_to(evicted_mass[h], mass, 1e-4, 1e-7));
  }
}

/* The certificate of the run's own list again, and of lists that no run made: of different lengths, without the window,
 * and without any token, where the output is lost whole. */
static void check_any_list(dropkv_engine* engine, const dropkv_shape* shape, const dropkv_layer* layer,
                           const dropkv_keep_list* kept) {
  float output_error[kQueryHeads];
  float evicted_mass[kQueryHeads];
  dropkv_keep_view view = {.struct_size = sizeof view};
  REQUIRE_OK(dropkv_certify(engine, shape, layer, 1, kept, output_error, evicted_mass));
  REQUIRE_OK(dropkv_keep_list_get(kept, &view));
  check_certificate(&view, output_error, evicted_mass);

  const int64_t offsets[kKvHeads + 1] = {0, 3, 10};
  const int32_t positions[10] = {0, 77, 150, 1, 2, 30, 99, 100, 180, 202};
  const dropkv_keep_view own = {sizeof own, 1, kKvHeads, offsets, positions};
  dropkv_keep_list* list = NULL;
  float again[kQueryHeads];
  REQUIRE_OK(dropkv_keep_list_create(&own, &list));
  REQUIRE_OK(dropkv_certify(engine, shape, layer, 1, list, output_error, evicted_mass));
  check_certificate(&own, output_error, evicted_mass);
  REQUIRE_OK(dropkv_certify(engine, shape, layer, 1, list, again, NULL));
  CHECK(memcmp(again, output_error, sizeof again) == 0);
  REQUIRE_OK(dropkv_certify(engine, shape, layer, 1, list, NULL, again));
  CHECK(memcmp(again, evicted_mass, sizeof again) == 0);
  dropkv_keep_list_free(list);

  const int64_t nothing[kKvHeads + 1] = {0, 0, 0};
  const dropkv_keep_view empty = {sizeof empty, 1, kKvHeads, nothing, positions};
  REQUIRE_OK(dropkv_keep_list_create(&empty, &list));
  REQUIRE_OK(dropkv_certify(engine, shape, layer, 1, list, output_error, evicted_mass));
  for (int h = 0; h < kQueryHeads; ++h)
    CHECK(close_to(output_error[h], 1, 1e-6, 0) && close_to(evicted_mass[h], 1, 1e-6, 0));
  dropkv_keep_list_free(list);
}

/* Row i of a head is its i-th kept token, bit for bit; out of place and in place. */
static void check_compaction(const dropkv_layer* layer, const dropkv_keep_list* keep, const dropkv_keep_view* view) {
  static float small_k[kKvHeads * kKeep * kDim];
  static float small_v[kKvHeads * kKeep * kValueDim];
  static float own_k[kKvHeads * kTokens * kDim];
  static float own_v[kKvHeads * kTokens * kValueDim];
  const dropkv_mutable_kv small = {kKvHeads,
                                   kKeep,
                                   kDim,
                                   kValueDim,
                                   {small_k, kKeep * kDim, kDim, 1, DROPKV_F32, 0},
                                   {small_v, kKeep * kValueDim, kValueDim, 1, DROPKV_F32, 0}};
  const dropkv_mutable_kv own = {kKvHeads,
                                 kTokens,
                                 kDim,
                                 kValueDim,
                                 {own_k, kTokens * kDim, kDim, 1, DROPKV_F32, 0},
                                 {own_v, kTokens * kValueDim, kValueDim, 1, DROPKV_F32, 0}};
  memcpy(own_k, k, sizeof k);
  memcpy(own_v, v, sizeof v);
  REQUIRE_OK(dropkv_compact(&layer->kv, keep, 0, &small));
  REQUIRE_OK(dropkv_compact_in_place(&own, NULL, keep, 0));
  for (int head = 0; head < kKvHeads; ++head) {
    for (int i = 0; i < kKeep; ++i) {
      const int token = view->positions[view->offsets[head] + i];
      const float* key = k + (head * kTokens + token) * kDim;
      const float* value = v + (head * kTokens + token) * kValueDim;
      CHECK(memcmp(small_k + (head * kKeep + i) * kDim, key, kDim * sizeof(float)) == 0);
      CHECK(memcmp(small_v + (head * kKeep + i) * kValueDim, value, kValueDim * sizeof(float)) == 0);
      CHECK(memcmp(own_k + (head * kTokens + i) * kDim, key, kDim * sizeof(float)) == 0);
      CHECK(memcmp(own_v + (head * kTokens + i) * kValueDim, value, kValueDim * sizeof(float)) == 0);
    }
  }
}

int main(void) {
  fill_normal(k, sizeof k / sizeof *k, 1);
  fill_normal(v, sizeof v / sizeof *v, 2);
  fill_normal(q, sizeof q / sizeof *q, 3);
  for (int i = 0; i < kRows; ++i) visible[i] = kTokens - kRows + i + 1;
  compute_attention();
  compute_scores();

  dropkv_engine* engine = NULL;
  dropkv_plan* plan = NULL;
  dropkv_keep_list* keep = NULL;
  const dropkv_engine_options options = {.struct_size = sizeof options, .threads = 2};
  dropkv_policy policy = {.struct_size = sizeof policy};
  const dropkv_budget budget = {.struct_size = sizeof budget, .tokens = kKeep};
  const dropkv_shape shape = {sizeof shape, 1, kQueryHeads, kKvHeads, kTokens, kDim, kValueDim, 0, 0};
  dropkv_plan_info info = {.struct_size = sizeof info};
  REQUIRE_OK(dropkv_engine_create(&options, &engine));
  REQUIRE_OK(dropkv_policy_find("dropkv", &policy));
  CHECK(policy.signal == DROPKV_SIGNAL_DROPKV && policy.window == kRows && policy.heads == DROPKV_HEADS_UNIFORM);
  CHECK(policy.pool_before == 5 && policy.pool_after == 5 && policy.struct_size == sizeof policy);
  policy.pool_before = policy.pool_after = 2;
  REQUIRE_OK(dropkv_plan_create(engine, &shape, &policy, &budget, &plan));
  REQUIRE_OK(dropkv_plan_get(plan, &info));
  CHECK(info.keep == kKeep && info.raised == 0 && info.max_kept >= kKvHeads * kKeep);

  static float scores[kKvHeads * kTokens];
  static float raw_scores[kKvHeads * kTokens];
  float output_error[kQueryHeads];
  float evicted_mass[kQueryHeads];
  const dropkv_outputs outputs = {sizeof outputs, scores, raw_scores, output_error, evicted_mass};
  dropkv_report report = {.struct_size = sizeof report};
  dropkv_keep_view view = {.struct_size = sizeof view};
  const dropkv_layer layer = make_layer();
  void* workspace = malloc(info.workspace_bytes);
  REQUIRE_OK(dropkv_run(engine, plan, &layer, 1, workspace, info.workspace_bytes, &outputs, &report, &keep));
  REQUIRE_OK(dropkv_keep_list_get(keep, &view));
  for (int head = 0; head < kKvHeads; ++head) {
    for (int j = 0; j < kTokens; ++j) {
      CHECK(close_to(raw_scores[head * kTokens + j], raw[head][j], 1e-4, 1e-12));
      CHECK(close_to(scores[head * kTokens + j], pooled(head, j), 1e-4, 1e-12));
    }
  }
  CHECK(report.keep == kKeep && report.nonfinite_tokens == 0 && report.skipped_rows == 0);
  const char* kernel = NULL;
  REQUIRE_OK(dropkv_engine_kernel(engine, &kernel));
  CHECK(strcmp(kernel, report.kernel) == 0);
  check_choice(&view);
  check_certificate(&view, output_error, evicted_mass);
  check_any_list(engine, &shape, &layer, keep);
  check_compaction(&layer, keep, &view);

  free(workspace);
  dropkv_keep_list_free(keep);
  dropkv_plan_free(plan);
  dropkv_engine_free(engine);
  return failures == 0 ? 0 : 1;
}
