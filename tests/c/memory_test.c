/* With too little address space, calls on host tensors return an error. The process does not abort. */
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "gander.h"

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, gander_last_error()); \
      exit(1); \
    } \
  } while (0)

/* For these rows RMSNorm backward has 32 MiB of partial sums of dw. */
enum { M = 512, N = 64 << 10, CALLERS = 6 };

static const DLDataType bfloat16 = {kDLBfloat, 16, 1}, float32 = {kDLFloat, 32, 1};
static const uint16_t one = 0x3f80; /* 1 in bfloat16 */

static DLTensor borrow(void* data, DLDataType dtype, int32_t ndim, int64_t* shape, int64_t* strides) {
  DLTensor t = {data, {kDLCPU, 0}, ndim, dtype, shape, strides, 0};
  return t;
}

/* The operands of one thread's calls. All rows of x and dout are the same row of ones. */
typedef struct {
  uint16_t *dx, *dw;
  float rstd[M];
} operands;

static uint16_t row[N];

static void prepare(operands* o) {
  o->dx = calloc((size_t)M * N, sizeof *o->dx);
  o->dw = calloc(N, sizeof *o->dw);
  CHECK(o->dx && o->dw);
  for (int i = 0; i < M; ++i) o->rstd[i] = 1;
}

static int32_t backward(operands* o, int64_t m, int64_t n) {
  int64_t rows[] = {m, n}, repeated[] = {0, 1}, one_stride[] = {1}, adjacent[] = {n, 1};
  DLTensor x = borrow(row, bfloat16, 2, rows, repeated), dx = borrow(o->dx, bfloat16, 2, rows, adjacent);
  DLTensor weight = borrow(row, bfloat16, 1, rows + 1, one_stride);
  DLTensor dw = borrow(o->dw, bfloat16, 1, rows + 1, one_stride);
  DLTensor rstd = borrow(o->rstd, float32, 1, rows, one_stride);
  gander_rmsnorm_backward_options options = GANDER_RMSNORM_BACKWARD_OPTIONS_DEFAULTS;
  options.weight = &weight;
  options.dw = &dw;
  return gander_rmsnorm_backward(&x, &x, &rstd, &dx, &options, NULL);
}

static void check_untouched(const operands* o) {
  for (size_t i = 0; i < (size_t)M * N; ++i) CHECK(o->dx[i] == 0);
  for (size_t i = 0; i < N; ++i) CHECK(o->dw[i] == 0);
}

static operands all[CALLERS];

static void* caller(void* argument) {
  operands* o = argument;
  for (int i = 0; i < 20; ++i) {
    CHECK(backward(o, M, N) == GANDER_ERROR_MEMORY);
    CHECK(strstr(gander_last_error(), "rmsnorm_backward: no memory for a workspace of "));
    CHECK(strstr(gander_last_error(), "free memory, raise the process's limit"));
  }
  check_untouched(o);
  CHECK(backward(o, 1, 8) == GANDER_OK && o->dw[7] == one);
  return NULL;
}

/* Limits the address space to what the process uses plus `more` bytes. */
static void limit_memory(size_t more) {
  FILE* file = fopen("/proc/self/statm", "r");
  unsigned long pages;
  CHECK(file && fscanf(file, "%lu", &pages) == 1);
  fclose(file);
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
  limit.rlim_cur = pages * (size_t)sysconf(_SC_PAGESIZE) + more;
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

int main(void) {
  /* A thread's own heap takes 128 MiB of address space for a moment, which may be when the limit is set. */
  CHECK(mallopt(M_ARENA_MAX, 1) == 1);
  /* Threads need address space, including those of Go: start them before the limit. */
  pthread_attr_t attributes;
  CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 256 << 10) == 0);
  CHECK(pthread_setattr_default_np(&attributes) == 0);
  for (int j = 0; j < N; ++j) row[j] = one;
  for (int i = 0; i < CALLERS; ++i) prepare(&all[i]);
  CHECK(backward(&all[0], 16, 4096) == GANDER_OK && all[0].dw[0] == 0x4180); /* 16 */
  memset(all[0].dx, 0, (size_t)16 * 4096 * sizeof(uint16_t));
  memset(all[0].dw, 0, 4096 * sizeof(uint16_t));

  struct rlimit before;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  limit_memory(24 << 20);
  pthread_t threads[CALLERS];
  for (int i = 0; i < CALLERS; ++i) CHECK(pthread_create(&threads[i], NULL, caller, &all[i]) == 0);
  for (int i = 0; i < CALLERS; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  printf("ok  no memory\n");

  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(backward(&all[0], M, N) == GANDER_OK);
  for (int j = 0; j < N; ++j) CHECK(all[0].dw[j] == 0x4400); /* 512 */
  printf("ok  memory again\n");
  return 0;
}
