/* What the C tests share: checks that count failures, and repeatable numbers. */
#ifndef DROPKV_TESTS_C_API_CHECK_H_
#define DROPKV_TESTS_C_API_CHECK_H_

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dropkv/dropkv.h"

static int failures;

/* Says where and what, and goes on. */
static void check_at(const char* file, int line, const char* text, int good) {
  if (good) return;
  ++failures;
  fprintf(stderr, "%s:%d: failed: %s (last error: %s)\n", file, line, text, dropkv_last_error());
}

#define CHECK(condition) check_at(__FILE__, __LINE__, #condition, (condition) != 0)

/* For what the rest of the test needs. */
#define REQUIRE_OK(call)                                       \
  do {                                                         \
    const dropkv_status status_ = (call);                      \
    check_at(__FILE__, __LINE__, #call, status_ == DROPKV_OK); \
    if (status_ != DROPKV_OK) exit(1);                         \
  } while (0)

static inline int close_to(double got, double wanted, double relative, double absolute) {
  const int good = fabs(got - wanted) <= relative * fabs(wanted) + absolute;
  if (!good) fprintf(stderr, "got %.9g, wanted %.9g\n", got, wanted);
  return good;
}

/* About normal: the sum of four uniform numbers, mean 0, variance 1. */
static inline void fill_normal(float* values, size_t count, uint64_t seed) {
  uint64_t state = seed * 2654435761U + 12345;
  for (size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int j = 0; j < 4; ++j) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      sum += (double)(state >> 11) * 0x1p-53 - 0.5;
    }
    values[i] = (float)(sum * sqrt(3.0));
  }
}

#endif
