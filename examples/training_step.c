/* Trains a linear classifier: forward saves the log-sum-exp of each row, and backward makes the gradient from
 * it. After `./build.sh install PREFIX`:
 *
 *   cc training_step.c -IPREFIX/include -LPREFIX/lib -lgander -Wl,-rpath,PREFIX/lib -lm -o step && ./step
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "gander.h"

enum { M = 64, K = 8, N = 10, STEPS = 30 }; /* rows, features, classes */

static float features[M][K], weights[K][N], logits[M][N];
static int64_t targets[M];
static float loss, lse[2 * M + 1]; /* the maxima, log(sum exp(x - max)), and the number of rows that count */

/* Makes a tensor of compact float32 memory, without a copy. */
static DLTensor tensor(void* data, int32_t ndim, int64_t* shape, int64_t* strides) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.ndim = ndim;
  t.shape = shape;
  t.strides = strides;
  return t;
}

int main(void) {
  int64_t rows[] = {M, N}, strides[] = {N, 1}, row[] = {M}, saved[] = {2 * M + 1}, stride[] = {1};
  float one = 1; /* the gradient of the loss itself */
  DLTensor x = tensor(logits, 2, rows, strides);
  DLTensor target = tensor(targets, 1, row, stride);
  target.dtype.code = kDLInt;
  target.dtype.bits = 64;
  DLTensor mean = tensor(&loss, 0, NULL, NULL);
  DLTensor dloss = tensor(&one, 0, NULL, NULL);
  DLTensor statistics = tensor(lse, 1, saved, stride);

  /* The class of a row is the largest of random linear functions of it, so that it can be learned. */
  uint32_t state = 1;
#define RANDOM() ((float)((state = state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1) /* in [-1, 1) */
  float truth[K][N];
  for (int k = 0; k < K; ++k)
    for (int j = 0; j < N; ++j) truth[k][j] = RANDOM();
  for (int i = 0; i < M; ++i) {
    float best = -INFINITY;
    for (int k = 0; k < K; ++k) features[i][k] = RANDOM();
    for (int j = 0; j < N; ++j) {
      float score = 0;
      for (int k = 0; k < K; ++k) score += features[i][k] * truth[k][j];
      if (score > best) best = score, targets[i] = j;
    }
  }

  gander_cross_entropy_forward_options forward = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
  forward.reduction = GANDER_REDUCTION_MEAN;
  forward.lse = &statistics;
  gander_cross_entropy_backward_options backward = GANDER_CROSS_ENTROPY_BACKWARD_OPTIONS_DEFAULTS;
  backward.reduction = GANDER_REDUCTION_MEAN;

  float first = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) {
        logits[i][j] = 0;
        for (int k = 0; k < K; ++k) logits[i][j] += features[i][k] * weights[k][j];
      }
    /* The gradient is written over the logits, which nothing needs any more. */
    if (gander_cross_entropy_forward(&x, &target, &mean, &forward, NULL) ||
        gander_cross_entropy_backward(&x, &target, &dloss, &statistics, &x, &backward, NULL)) {
      printf("step %d failed: %s\n", step, gander_last_error());
      return 1;
    }
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < N; ++j)
        for (int i = 0; i < M; ++i) weights[k][j] -= 5 * features[i][k] * logits[i][j];
    if (step == 0) first = loss;
    if (step % 10 == 0 || step == STEPS - 1) printf("step %2d: loss %.4f\n", step, loss);
  }
  /* All weights are 0 in the first step, so all classes are equally probable. */
  if (!(fabs(first - log(N)) < 1e-5) || !(loss < first / 3)) {
    printf("wrong: the first loss is %.6f, expected %.6f, and a third of it at the end\n", first, log(N));
    return 1;
  }
  return 0;
}
