/* Softmax, and a cross-entropy loss with its gradient, of tensors in host memory. After
 * `./build.sh install PREFIX`:
 *
 *   cc cpu.c -IPREFIX/include -LPREFIX/lib -lgander -Wl,-rpath,PREFIX/lib -lm -o cpu && ./cpu
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "gander.h"

enum { M = 3, N = 5 };

/* Makes a tensor of compact memory, without a copy. */
static DLTensor tensor(void* data, int code, int bits, int32_t ndim, int64_t* shape, int64_t* strides) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.ndim = ndim;
  t.shape = shape;
  t.strides = strides;
  return t;
}

static int failed(const char* what) {
  printf("%s failed: %s\n", what, gander_last_error());
  return 1;
}

int main(void) {
  float logits[M][N] = {{1, 2, 3, 4, 5}, {0, 0, 0, 0, 0}, {1e4f, 0, 0, 1e4f, -1e4f}};
  int64_t targets[M] = {4, 1, 0};
  float probabilities[M][N], gradient[M][N], loss;

  int64_t rows[] = {M, N}, strides[] = {N, 1}, row[] = {M}, stride[] = {1};
  DLTensor x = tensor(logits, kDLFloat, 32, 2, rows, strides);
  DLTensor y = tensor(probabilities, kDLFloat, 32, 2, rows, strides);
  DLTensor dx = tensor(gradient, kDLFloat, 32, 2, rows, strides);
  DLTensor target = tensor(targets, kDLInt, 64, 1, row, stride);
  DLTensor mean = tensor(&loss, kDLFloat, 32, 0, NULL, NULL);

  printf("gander %s\n", gander_version());
  if (gander_softmax_forward(&x, &y, NULL, NULL)) return failed("softmax");

  gander_cross_entropy_forward_options options = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
  options.dx = &dx;
  options.reduction = GANDER_REDUCTION_MEAN;
  if (gander_cross_entropy_forward(&x, &target, &mean, &options, NULL)) return failed("cross-entropy");

  /* Compare both with the same formulas in double. */
  double expected_loss = 0, worst = 0;
  for (int i = 0; i < M; ++i) {
    double top = -INFINITY, sum = 0;
    for (int j = 0; j < N; ++j) top = fmax(top, logits[i][j]);
    for (int j = 0; j < N; ++j) sum += exp(logits[i][j] - top);
    expected_loss += (top + log(sum) - logits[i][targets[i]]) / M;
    for (int j = 0; j < N; ++j) {
      double p = exp(logits[i][j] - top) / sum;
      worst = fmax(worst, fabs(probabilities[i][j] - p));
      worst = fmax(worst, fabs(gradient[i][j] - (p - (j == targets[i]))));
      printf("%9.6f", probabilities[i][j]);
    }
    printf("\n");
  }
  printf("loss %.6f, expected %.6f; largest error of a probability or gradient %.1e\n", loss, expected_loss,
         worst);
  if (!(worst < 1e-6) || !(fabs(loss - expected_loss) < 1e-6)) {
    printf("wrong\n");
    return 1;
  }
  return 0;
}
