/* RMSNorm of rows in CUDA memory, on a stream. After `./build.sh install PREFIX`:
 *
 *   cc cuda.c -IPREFIX/include -I/usr/local/cuda/include -LPREFIX/lib -L/usr/local/cuda/lib64 -lgander \
 *     -lcudart -Wl,-rpath,PREFIX/lib -Wl,-rpath,/usr/local/cuda/lib64 -lm -o cuda && ./cuda
 *
 * Without a GPU it says so and exits with 77. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "gander.h"

enum { M = 512, N = 4096 };

static float x[M][N], weight[N], y[M][N];

#define CHECK(call) \
  do { \
    cudaError_t status = (call); \
    if (status != cudaSuccess) { \
      printf("%s failed: %s\n", #call, cudaGetErrorString(status)); \
      return 1; \
    } \
  } while (0)

/* Makes a tensor of compact float32 memory of a device, without a copy. */
static DLTensor tensor(void* data, int device, int32_t ndim, int64_t* shape, int64_t* strides) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCUDA;
  t.device.device_id = device;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.ndim = ndim;
  t.shape = shape;
  t.strides = strides;
  return t;
}

int main(void) {
  int device, count;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    printf("there is no GPU here, or no driver for it\n");
    return 77;
  }
  for (int j = 0; j < N; ++j) weight[j] = 1 + (float)(j % 7) / 8;
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) x[i][j] = (float)((i * 31 + j * 17) % 101) / 50 - 1;

  void *of_x, *of_weight, *of_y;
  cudaStream_t stream;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMalloc(&of_x, sizeof x));
  CHECK(cudaMalloc(&of_weight, sizeof weight));
  CHECK(cudaMalloc(&of_y, sizeof y));
  CHECK(cudaMemcpyAsync(of_x, x, sizeof x, cudaMemcpyHostToDevice, stream));
  CHECK(cudaMemcpyAsync(of_weight, weight, sizeof weight, cudaMemcpyHostToDevice, stream));

  int64_t rows[] = {M, N}, strides[] = {N, 1}, row[] = {N}, stride[] = {1};
  DLTensor in = tensor(of_x, device, 2, rows, strides), out = tensor(of_y, device, 2, rows, strides);
  DLTensor w = tensor(of_weight, device, 1, row, stride);
  gander_rmsnorm_forward_options options = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
  options.weight = &w;
  if (gander_rmsnorm_forward(&in, &out, &options, stream)) { /* enqueues the kernel and returns */
    printf("rmsnorm failed: %s\n", gander_last_error());
    return 1;
  }
  CHECK(cudaMemcpyAsync(y, of_y, sizeof y, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaStreamSynchronize(stream));

  double worst = 0; /* against the same formula in double */
  for (int i = 0; i < M; ++i) {
    double sum = 0;
    for (int j = 0; j < N; ++j) sum += (double)x[i][j] * x[i][j];
    for (int j = 0; j < N; ++j)
      worst = fmax(worst, fabs(y[i][j] - x[i][j] / sqrt(sum / N + options.eps) * weight[j]));
  }
  printf("gander %s on GPU %d: largest error %.1e\n", gander_version(), device, worst);
  if (!(worst < 1e-5)) {
    printf("wrong\n");
    return 1;
  }
  CHECK(cudaFree(of_x));
  CHECK(cudaFree(of_weight));
  CHECK(cudaFree(of_y));
  CHECK(cudaStreamDestroy(stream));
  return 0;
}
