/* A ragged cache through the C ABI: a list of the caller's, assign, append, truncate, and decode attention against the
 * softmax written out in C. */
#include "check.h"

enum { kQueryHeads = 4, kKvHeads = 2, kGroup = 2, kTokens = 50, kDim = 16, kValueDim = 8 };

/* Token-major, as llama.cpp stores caches. */
static float k[kTokens * kKvHeads * kDim];
static float v[kTokens * kKvHeads * kValueDim];
static float q[kQueryHeads * kDim];

static const int64_t offsets[] = {0, 5, 8};
static const int32_t positions[] = {0, 7, 20, 31, 48, 2, 3, 40};

/* out [kValueDim] of query head h over `count` tokens. */
static void attend(int h, const int32_t* tokens, int count, double sink, double* out) {
  const int head = h / kGroup;
  double sum = exp(sink);
  memset(out, 0, kValueDim * sizeof *out);
  for (int i = 0; i < count; ++i) {
    double logit = 0;
    for (int x = 0; x < kDim; ++x) logit += (double)q[h * kDim + x] * k[(tokens[i] * kKvHeads + head) * kDim + x];
    const double weight = exp(2 * tanh(0.25 * logit / 2));
    sum += weight;
    for (int x = 0; x < kValueDim; ++x) out[x] += weight * v[(tokens[i] * kKvHeads + head) * kValueDim + x];
  }
  for (int x = 0; x < kValueDim; ++x) out[x] /= sum;
}

/* The cache holds the lists and `extra` in every head: compares decode attention, by one thread and by the engine's. */
static void check_decode(dropkv_engine* engine, const dropkv_cache* cache, const int32_t* extra, int extra_count) {
  const float sinks[kQueryHeads] = {0.5F, -1.0F, 0.0F, 2.0F};
  const dropkv_attention attention = {.scale = 0.25F, .soft_cap = 2.0F, .sinks = sinks};
  float alone[kQueryHeads * kValueDim];
  float together[kQueryHeads * kValueDim];
  dropkv_decode* decode = NULL;
  REQUIRE_OK(dropkv_decode_create(kKvHeads, kGroup, kDim, kValueDim, &decode));
  REQUIRE_OK(dropkv_decode_run(decode, NULL, cache, &attention, q, alone));
  REQUIRE_OK(dropkv_decode_run(decode, engine, cache, &attention, q, together));
  CHECK(memcmp(alone, together, sizeof alone) == 0);
  dropkv_decode_free(decode);
  for (int h = 0; h < kQueryHeads; ++h) {
    int32_t tokens[kTokens];
    int count = 0;
    double wanted[kValueDim];
    for (int64_t at = offsets[h / kGroup]; at < offsets[h / kGroup + 1]; ++at) tokens[count++] = positions[at];
    for (int i = 0; i < extra_count; ++i) tokens[count++] = extra[i];
    attend(h, tokens, count, sinks[h], wanted);
    for (int x = 0; x < kValueDim; ++x) CHECK(close_to(alone[h * kValueDim + x], wanted[x], 1e-5, 1e-6));
  }
}

static void check_lengths(const dropkv_cache* cache, int extra) {
  const int64_t token_bytes = (kDim + kValueDim) * (int64_t)sizeof(float);
  dropkv_cache_info info = {.struct_size = sizeof info};
  for (int head = 0; head < kKvHeads; ++head) {
    int32_t length = -1;
    REQUIRE_OK(dropkv_cache_length(cache, head, &length));
    CHECK(length == offsets[head + 1] - offsets[head] + extra);
  }
  REQUIRE_OK(dropkv_cache_get(cache, &info));
  CHECK(info.dtype == DROPKV_F32 && info.kv_heads == kKvHeads && info.key_dim == kDim && info.value_dim == kValueDim);
  CHECK(info.used_bytes == (offsets[kKvHeads] + (int64_t)extra * kKvHeads) * token_bytes);
  CHECK(info.capacity_bytes >= info.used_bytes);
}

int main(void) {
  fill_normal(k, sizeof k / sizeof *k, 4);
  fill_normal(v, sizeof v / sizeof *v, 5);
  fill_normal(q, sizeof q / sizeof *q, 6);
  const dropkv_kv source = {kKvHeads,
                            kTokens,
                            kDim,
                            kValueDim,
                            {k, kDim, kKvHeads * kDim, 1, DROPKV_F32, 0},
                            {v, kValueDim, kKvHeads * kValueDim, 1, DROPKV_F32, 0},
                            NULL};
  const dropkv_keep_view chosen = {sizeof chosen, 1, kKvHeads, offsets, positions};
  dropkv_keep_view view = {.struct_size = sizeof view};
  dropkv_engine* engine = NULL;
  dropkv_keep_list* keep = NULL;
  dropkv_cache* cache = NULL;
  const dropkv_engine_options options = {.struct_size = sizeof options, .threads = 2};
  REQUIRE_OK(dropkv_engine_create(&options, &engine));
  REQUIRE_OK(dropkv_keep_list_create(&chosen, &keep));
  REQUIRE_OK(dropkv_keep_list_get(keep, &view));
  CHECK(view.layers == 1 && view.kv_heads == kKvHeads);
  CHECK(memcmp(view.offsets, offsets, sizeof offsets) == 0);
  CHECK(memcmp(view.positions, positions, sizeof positions) == 0);

  REQUIRE_OK(dropkv_cache_create(DROPKV_F32, kKvHeads, kDim, kValueDim, &cache));
  REQUIRE_OK(dropkv_cache_assign(cache, &source, keep, 0, 1));
  check_lengths(cache, 0);
  check_decode(engine, cache, NULL, 0);

  /* Two appends: one into the reserve, one beyond it. */
  const int32_t extra[] = {49, 13};
  REQUIRE_OK(dropkv_cache_append(cache, &source, extra[0]));
  REQUIRE_OK(dropkv_cache_append(cache, &source, extra[1]));
  check_lengths(cache, 2);
  check_decode(engine, cache, extra, 2);
  REQUIRE_OK(dropkv_cache_truncate(cache, 1));
  check_lengths(cache, 1);
  check_decode(engine, cache, extra, 1);

  dropkv_cache_free(cache);
  dropkv_keep_list_free(keep);
  dropkv_engine_free(engine);
  return failures == 0 ? 0 : 1;
}
