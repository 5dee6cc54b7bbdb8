/* Shared by the C tests: checks, and tensors in host memory that count the calls of their deleter. */
#ifndef TENSORS_H
#define TENSORS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gander.h"

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, gander_last_error()); \
      exit(1); \
    } \
  } while (0)

/* Checks that a call returns this status, with a message that contains this text. */
#define REFUSED(call, expected, text) \
  do { \
    CHECK((call) == (expected)); \
    CHECK(strstr(gander_last_error(), text)); \
  } while (0)

enum { M = 3, N = 4 };

/* A float32 tensor of shape (M, N) with its memory, which has room for more, and a count of the calls of its
 * deleter. */
typedef struct {
  DLManagedTensorVersioned managed;
  float data[8 * N];
  int64_t shape[3], strides[3];
  int deleted;
} block;

static inline void delete_block(DLManagedTensorVersioned* m) { ++((block*)m->manager_ctx)->deleted; }

static inline block* fill(block* b) {
  memset(b, 0, sizeof *b);
  for (int i = 0; i < 8 * N; ++i) b->data[i] = (float)(i % N);
  b->shape[0] = M;
  b->shape[1] = N;
  b->strides[0] = N;
  b->strides[1] = 1;
  b->managed.version.major = DLPACK_MAJOR_VERSION;
  b->managed.manager_ctx = b;
  b->managed.deleter = delete_block;
  DLTensor* t = &b->managed.dl_tensor;
  t->data = b->data;
  t->device.device_type = kDLCPU;
  t->ndim = 2;
  t->dtype.code = kDLFloat;
  t->dtype.bits = 32;
  t->dtype.lanes = 1;
  t->shape = b->shape;
  t->strides = b->strides;
  return b;
}

/* The rows as tokens with one head. */
static inline block* fill_heads(block* b) {
  fill(b)->managed.dl_tensor.ndim = 3;
  b->shape[1] = b->strides[2] = 1;
  b->shape[2] = b->strides[1] = N;
  return b;
}

static inline block* fill_vector(block* b, int64_t length) {
  fill(b)->managed.dl_tensor.ndim = 1;
  b->shape[0] = length;
  b->strides[0] = 1;
  return b;
}

static inline block* fill_targets(block* b, int64_t length) {
  fill_vector(b, length)->managed.dl_tensor.dtype.code = kDLInt;
  memset(b->data, 0, sizeof b->data);
  return b;
}

#endif
