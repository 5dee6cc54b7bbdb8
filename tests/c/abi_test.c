/* The C ABI: refusals, option structs, deleters, threads, fork. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tensors.h"

/* Checks the softmax of rows 0 1 2 3. */
static void check_softmax(const float* y) {
  double sum = 0;
  for (int j = 0; j < N; ++j) sum += exp(j);
  for (int i = 0; i < M * N; ++i) CHECK(fabs(y[i] - exp(i % N) / sum) < 1e-6);
}

static void test_info(void) {
  CHECK(strcmp(gander_last_error(), "") == 0);
  CHECK(strcmp(gander_version(), PYTHON_VERSION) == 0);
  CHECK(gander_abi_version() == GANDER_ABI_VERSION);
  const char* info = gander_build_info();
  static const char* const keys[] = {"\"version\":\"" PYTHON_VERSION "\"",
                                     "\"abi_version\":4",
                                     "\"commit\":",
                                     "\"go\":\"go1.",
                                     "\"nvcc\":",
                                     "\"architectures\":[",
                                     "\"simd\":"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) CHECK(strstr(info, keys[i]));
  CHECK(gander_build_info() == info);
}

static void test_borrowed(void) {
  block a, b;
  DLTensor *x = &fill(&a)->managed.dl_tensor, *y = &fill(&b)->managed.dl_tensor;
  CHECK(gander_softmax_forward(x, y, NULL, NULL) == GANDER_OK);
  check_softmax(b.data);
  CHECK(a.deleted == 0 && b.deleted == 0);

  fill(&b);
  REFUSED(gander_softmax_forward(NULL, y, NULL, NULL), GANDER_ERROR_NULL, "softmax_forward: x is NULL");
  REFUSED(gander_softmax_forward(x, NULL, NULL, NULL), GANDER_ERROR_NULL, "softmax_forward: y is NULL");
  a.shape[0] = 1;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_SHAPE,
          "y has shape (3, 4), expected (1, 4) as x");
  a.shape[0] = M;
  x->ndim = -3;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_SHAPE, "ndim is -3");
  x->ndim = 2;
  x->dtype.bits = 8;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_DTYPE, "x has dtype float8");
  x->dtype.bits = 32;
  x->device.device_type = kDLMetal;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_DEVICE, "device type 8");
  x->device.device_type = kDLCPU;
  a.strides[1] = 2;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_LAYOUT, "stride 2 in its last dimension");
  a.strides[1] = 1;
  x->byte_offset = 2;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_ALIGNMENT, "2 bytes after a multiple of 4");
  x->byte_offset = 4;
  a.shape[0] = 1;
  b.shape[0] = 1;
  y->data = a.data;
  REFUSED(gander_softmax_forward(x, y, NULL, NULL), GANDER_ERROR_OVERLAP, "y overlaps x");
  x->byte_offset = 0;
  x->device.device_type = y->device.device_type = kDLCUDA;
  x->device.device_id = y->device.device_id = 1 << 20; /* no machine has so many devices */
  int32_t status = gander_softmax_forward(x, y, NULL, NULL);
  CHECK(status == GANDER_ERROR_UNSUPPORTED || status == GANDER_ERROR_DEVICE);
  for (int i = 0; i < M * N; ++i) CHECK(a.data[i] == (float)(i % N) && b.data[i] == (float)(i % N));
}

/* The operands of RMSNorm and LayerNorm that a plain RMSNorm does not have. Rows are 0 1 2 3. */
static void test_norms(void) {
  block x, bias, residual, y, sum, mean, rstd, dout, dsum, dx, dresidual, db;
  DLTensor *tx = &fill(&x)->managed.dl_tensor, *tb = &fill_vector(&bias, N)->managed.dl_tensor;
  DLTensor *tr = &fill(&residual)->managed.dl_tensor, *ty = &fill(&y)->managed.dl_tensor;
  DLTensor *ts = &fill(&sum)->managed.dl_tensor, *tm = &fill_vector(&mean, M)->managed.dl_tensor;
  DLTensor *ti = &fill_vector(&rstd, M)->managed.dl_tensor, *tdo = &fill(&dout)->managed.dl_tensor;
  DLTensor *tds = &fill(&dsum)->managed.dl_tensor, *tdx = &fill(&dx)->managed.dl_tensor;
  DLTensor *tdr = &fill(&dresidual)->managed.dl_tensor, *tdb = &fill_vector(&db, N)->managed.dl_tensor;
  for (int i = 0; i < M * N; ++i) residual.data[i] = dsum.data[i] = 1;

  CHECK(gander_rmsnorm_forward(tx, NULL, tb, tr, ty, ts, ti, NULL, NULL) == GANDER_OK);
  double r = 1 / sqrt((1 + 4 + 9 + 16) / 4.0 + 1e-6);
  CHECK(fabs(rstd.data[1] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i) {
    CHECK(sum.data[i] == x.data[i] + 1);
    CHECK(fabs(y.data[i] - (sum.data[i] * r + bias.data[i % N])) < 1e-5);
  }
  CHECK(gander_rmsnorm_backward(ts, NULL, tdo, tds, ti, tdx, tdr, NULL, tdb, NULL, NULL) == GANDER_OK);
  double along = 0;
  for (int j = 0; j < N; ++j) along += j * (j + 1) * r / N;
  for (int i = 0; i < M * N; ++i) {
    int j = i % N;
    CHECK(fabs(dx.data[i] - ((j - (j + 1) * r * along) * r + 1)) < 1e-5 && dresidual.data[i] == dx.data[i]);
    CHECK(db.data[j] == (float)(M * j));
  }

  gander_layernorm_options options = {.size = sizeof options, .eps = 0.5};
  CHECK(gander_layernorm_forward(tx, NULL, tb, tr, ty, ts, tm, ti, &options, NULL) == GANDER_OK);
  r = 1 / sqrt((2.25 + 0.25 + 0.25 + 2.25) / 4 + 0.5);
  CHECK(mean.data[1] == 2.5F && fabs(rstd.data[1] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i)
    CHECK(fabs(y.data[i] - ((sum.data[i] - 2.5) * r + bias.data[i % N])) < 1e-5);
  CHECK(gander_layernorm_backward(ts, NULL, tdo, tds, tm, ti, tdx, tdr, NULL, tdb, &options, NULL) ==
        GANDER_OK);
  along = 0;
  for (int j = 0; j < N; ++j) along += j * (j - 1.5) * r / N;
  for (int i = 0; i < M * N; ++i) {
    int j = i % N;
    CHECK(fabs(dx.data[i] - ((j - 1.5 - (j - 1.5) * r * along) * r + 1)) < 1e-5);
    CHECK(dresidual.data[i] == dx.data[i] && db.data[j] == (float)(M * j));
  }
}

/* Every function passes its arguments in the right order. */
static void test_every_op(void) {
  block x, weight, y, rstd, dout, dx, dw, target, loss, lse, one;
  DLTensor *tx = &fill(&x)->managed.dl_tensor, *tw = &fill_vector(&weight, N)->managed.dl_tensor;
  DLTensor *ty = &fill(&y)->managed.dl_tensor, *tr = &fill_vector(&rstd, M)->managed.dl_tensor;
  DLTensor *tdo = &fill(&dout)->managed.dl_tensor, *tdx = &fill(&dx)->managed.dl_tensor;
  DLTensor *tdw = &fill_vector(&dw, N)->managed.dl_tensor, *tt = &fill_targets(&target, M)->managed.dl_tensor;
  DLTensor *tl = &fill_vector(&loss, M)->managed.dl_tensor, *te = &fill_vector(&lse, M)->managed.dl_tensor;
  DLTensor* t1 = &fill_vector(&one, 1)->managed.dl_tensor;
  one.data[0] = 1;

  gander_rmsnorm_options norm = {.size = sizeof norm, .eps = 0.5, .batch_invariant = 1};
  CHECK(gander_rmsnorm_forward(tx, tw, NULL, NULL, ty, NULL, tr, &norm, NULL) == GANDER_OK);
  double r = 1 / sqrt((0 + 1 + 4 + 9) / 4.0 + 0.5);
  for (int i = 0; i < M; ++i) CHECK(fabs(rstd.data[i] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i) CHECK(fabs(y.data[i] - x.data[i] * r * weight.data[i % N]) < 1e-5);
  CHECK(gander_rmsnorm_forward(tx, NULL, NULL, NULL, ty, NULL, NULL, NULL, NULL) == GANDER_OK);
  for (int i = 0; i < M * N; ++i) CHECK(fabs(y.data[i] - x.data[i] / sqrt(3.5 + 1e-6)) < 1e-5);

  CHECK(gander_rmsnorm_backward(tx, tw, tdo, NULL, tr, tdx, NULL, tdw, NULL, NULL, NULL) == GANDER_OK);
  for (int j = 0; j < N; ++j) {
    double mean = 0, h = j * r;
    for (int k = 0; k < N; ++k) mean += k * k * k * r / N; /* g = dout * weight = k * k, h = k * r */
    CHECK(fabs(dx.data[j] - (j * j - h * mean) * r) < 1e-5);
    CHECK(fabs(dw.data[j] - M * j * h) < 1e-5);
  }

  test_norms();
  CHECK(gander_cross_entropy_forward(tx, tt, tw, NULL, NULL, tl, te, NULL, NULL, NULL, NULL) == GANDER_OK);
  double sum = exp(0) + exp(1) + exp(2) + exp(3);
  for (int i = 0; i < M; ++i)
    CHECK(fabs(lse.data[i] - log(sum)) < 1e-6 && loss.data[i] == 0); /* weight[0] is 0 */
  CHECK(gander_cross_entropy_forward(tx, tt, NULL, NULL, NULL, tl, NULL, tdx, t1, NULL, NULL) == GANDER_OK);
  CHECK(fabs(loss.data[0] - log(sum)) < 1e-6 && one.data[0] == M);
  CHECK(fabs(dx.data[0] - (1 / sum - 1)) < 1e-6 && fabs(dx.data[1] - exp(1) / sum) < 1e-6);

  gander_cross_entropy_options mean = {
      .size = sizeof mean, .ignore_index = -100, .reduction = GANDER_REDUCTION_MEAN};
  one.data[0] = M;
  block two;
  DLTensor* t2 = &fill_vector(&two, 1)->managed.dl_tensor;
  two.data[0] = 2 * M; /* dloss: divided by the denominator, which is M, it doubles the gradient */
  CHECK(gander_cross_entropy_backward(tx, tt, NULL, t2, te, NULL, NULL, t1, tdx, &mean, NULL) == GANDER_OK);
  CHECK(fabs(dx.data[0] - 2 * (1 / sum - 1)) < 1e-6 && fabs(dx.data[1] - 2 * exp(1) / sum) < 1e-6);
  two.data[0] = 4;
  CHECK(gander_cross_entropy_forward(tx, tt, NULL, t2, t1, tl, NULL, tdx, NULL, NULL, NULL) == GANDER_OK);
  CHECK(fabs(loss.data[0] - log(sum) / 4) < 1e-6 && fabs(dx.data[1] - M * exp(1) / sum / 4) < 1e-6);
  CHECK(gander_cross_entropy_backward(tx, tt, NULL, t1, te, t2, NULL, NULL, tdx, NULL, NULL) == GANDER_OK);
  CHECK(fabs(dx.data[1] - M * exp(1) / sum / 4) < 1e-6);

  CHECK(gander_softmax_forward(tx, ty, NULL, NULL) == GANDER_OK);
  CHECK(gander_softmax_backward(tdo, ty, tdx, NULL, NULL) == GANDER_OK);
  double dot = 0;
  for (int j = 0; j < N; ++j) dot += j * exp(j) / sum;
  for (int j = 0; j < N; ++j) CHECK(fabs(dx.data[j] - (j - dot) * exp(j) / sum) < 1e-6);
}

static void* no_memory(void* context, size_t bytes) {
  (void)context;
  (void)bytes;
  return NULL;
}

static void test_options(void) {
  block a, b;
  DLTensor *x = &fill(&a)->managed.dl_tensor, *y = &fill(&b)->managed.dl_tensor;
  gander_allocator allocator = {NULL, no_memory}; /* not called for host tensors */
  struct {
    gander_rmsnorm_options known;
    char more[16];
  } newer = {{.size = sizeof newer, .allocator = &allocator, .eps = 1e-6}, {0}};
  const gander_rmsnorm_options* options = &newer.known;
  CHECK(gander_rmsnorm_forward(x, NULL, NULL, NULL, y, NULL, NULL, options, NULL) == GANDER_OK);
  newer.more[15] = 1;
  char text[64];
  snprintf(text, sizeof text, "byte %zu is set", sizeof newer - 1);
  REFUSED(gander_rmsnorm_forward(x, NULL, NULL, NULL, y, NULL, NULL, options, NULL), GANDER_ERROR_OPTION,
          text);
  newer.known.size = sizeof newer.known;
  CHECK(gander_rmsnorm_forward(x, NULL, NULL, NULL, y, NULL, NULL, options, NULL) == GANDER_OK);
  static const size_t wrong[] = {0, 4, 8, sizeof(gander_rmsnorm_options) - 1, 4097, SIZE_MAX};
  snprintf(text, sizeof text, "expected %zu; set it to sizeof(the struct)", sizeof newer.known);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    newer.known.size = wrong[i];
    REFUSED(gander_rmsnorm_forward(x, NULL, NULL, NULL, y, NULL, NULL, options, NULL), GANDER_ERROR_OPTION,
            text);
  }
  newer.known.size = sizeof newer.known;
  newer.known.eps = NAN;
  REFUSED(gander_rmsnorm_forward(x, NULL, NULL, NULL, y, NULL, NULL, options, NULL), GANDER_ERROR_OPTION,
          "eps is NaN");
  /* With the size of an older header, later fields are not read. */
  gander_softmax_options softmax = {sizeof softmax - 8, NULL, -1, -1};
  CHECK(gander_softmax_forward(x, y, &softmax, NULL) == GANDER_OK);
  softmax.algorithm = GANDER_ALGORITHM_AUTO, softmax.batch_invariant = 1;
  softmax.size = sizeof softmax;
  CHECK(gander_softmax_forward(x, y, &softmax, NULL) == GANDER_OK);
  softmax.algorithm = GANDER_ALGORITHM_CLUSTER;
  REFUSED(gander_softmax_forward(x, y, &softmax, NULL), GANDER_ERROR_UNSUPPORTED,
          "softmax_forward: algorithm is \"cluster\" on cpu, expected \"auto\"");
  softmax.algorithm |= GANDER_ALGORITHM_IF_SERVED;
  CHECK(gander_softmax_forward(x, y, &softmax, NULL) == GANDER_OK);
  softmax.algorithm = GANDER_ALGORITHM_SPLITK + 1;
  REFUSED(gander_softmax_forward(x, y, &softmax, NULL), GANDER_ERROR_OPTION,
          "algorithm is 9, expected 0 (auto) to 8 (splitk)");
  softmax.algorithm = -1;
  REFUSED(gander_softmax_forward(x, y, &softmax, NULL), GANDER_ERROR_OPTION,
          "algorithm is -1, expected 0 (auto) to 8 (splitk)");
  gander_cross_entropy_options entropy = {.size = sizeof entropy, .ignore_index = -100, .reduction = 7};
  REFUSED(gander_cross_entropy_forward(x, y, NULL, NULL, NULL, y, NULL, NULL, NULL, &entropy, NULL),
          GANDER_ERROR_OPTION, "reduction is 7");
  REFUSED(gander_set_num_threads(-1), GANDER_ERROR_OPTION, "count is -1");
  CHECK(gander_set_num_threads(1) == GANDER_OK && gander_set_num_threads(0) == GANDER_OK);
}

static void test_owned(void) {
  block a, b, c;
  DLManagedTensorVersioned *y = NULL, *z = NULL, *w = NULL;
  DLDataType same = {0, 0, 0}, half = {kDLFloat, 16, 1};

  CHECK(gander_softmax(&fill(&a)->managed, NULL, NULL, &y) == GANDER_OK);
  CHECK(a.deleted == 1);
  CHECK(y->version.major == 1 && y->dl_tensor.ndim == 2 && y->dl_tensor.shape[1] == N &&
        y->dl_tensor.strides[0] == N);
  CHECK((uintptr_t)y->dl_tensor.data % 256 == 0 && y->dl_tensor.device.device_type == kDLCPU);
  check_softmax(y->dl_tensor.data);

  /* An output can be the input of another call. */
  CHECK(gander_softmax_grad(&fill(&a)->managed, y, NULL, NULL, &z) == GANDER_OK && a.deleted == 1);
  z->deleter(z);

  /* A tensor without a deleter, and a tensor that is passed as two inputs. */
  fill(&a)->managed.deleter = NULL;
  CHECK(gander_softmax(&a.managed, NULL, NULL, &y) == GANDER_OK && a.deleted == 0);
  y->deleter(y);
  CHECK(gander_softmax_grad(&fill(&a)->managed, &a.managed, NULL, NULL, &y) == GANDER_OK && a.deleted == 1);
  y->deleter(y);

  CHECK(gander_rmsnorm(&fill(&a)->managed, &fill_vector(&b, N)->managed, NULL, NULL, half, same, NULL, NULL,
                       &y, NULL, &z) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1);
  CHECK(y->dl_tensor.dtype.bits == 16 && z->dl_tensor.dtype.bits == 32 && z->dl_tensor.ndim == 1);
  y->deleter(y);
  CHECK(gander_rmsnorm_grad(&fill(&a)->managed, &fill_vector(&b, N)->managed, &fill(&c)->managed, NULL, z,
                            same, same, same, NULL, NULL, &y, NULL, &w, NULL) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1);
  CHECK(y->dl_tensor.ndim == 2 && w->dl_tensor.ndim == 1 && w->dl_tensor.shape[0] == N);
  y->deleter(y);
  w->deleter(w);
  CHECK(gander_rmsnorm(&fill(&a)->managed, NULL, NULL, NULL, same, same, NULL, NULL, &y, NULL, NULL) ==
            GANDER_OK &&
        a.deleted == 1);
  CHECK(y->dl_tensor.dtype.bits == 32);
  y->deleter(y);

  CHECK(gander_cross_entropy(&fill(&a)->managed, &fill_targets(&b, M)->managed, NULL, NULL, NULL, NULL, NULL,
                             &y, &z, &w, NULL) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1);
  CHECK(y->dl_tensor.ndim == 1 && z->dl_tensor.ndim == 1 && w->dl_tensor.ndim == 2);
  double sum = exp(0) + exp(1) + exp(2) + exp(3);
  CHECK(fabs(((float*)y->dl_tensor.data)[1] - log(sum)) < 1e-6);
  w->deleter(w);
  CHECK(gander_cross_entropy_grad(&fill(&a)->managed, &fill_targets(&b, M)->managed,
                                  &fill_vector(&c, N)->managed, y, z, NULL, NULL, NULL, NULL, NULL,
                                  &w) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1);
  w->deleter(w);
  gander_cross_entropy_options mean = {
      .size = sizeof mean, .ignore_index = -100, .reduction = GANDER_REDUCTION_MEAN};
  CHECK(gander_cross_entropy(&fill(&a)->managed, &fill_targets(&b, M)->managed, NULL, NULL, NULL, &mean, NULL,
                             &y, NULL, NULL, &z) == GANDER_OK);
  CHECK(*(float*)z->dl_tensor.data == M);
  z->deleter(z);
  CHECK(y->dl_tensor.ndim == 0 && fabs(*(float*)y->dl_tensor.data - log(sum)) < 1e-6);
  y->deleter(y);

  /* Without rows there is no data. */
  fill(&a)->shape[0] = 0;
  a.managed.dl_tensor.data = NULL;
  CHECK(gander_softmax(&a.managed, NULL, NULL, &y) == GANDER_OK && a.deleted == 1);
  CHECK(y->dl_tensor.data == NULL && y->dl_tensor.shape[0] == 0);
  y->deleter(y);
}

/* A deleter that calls the library, in vain. */
static void delete_and_fail(DLManagedTensorVersioned* m) {
  delete_block(m);
  CHECK(gander_softmax(NULL, NULL, NULL, NULL) == GANDER_ERROR_NULL);
}

/* After any error, inputs have been released once and outputs are NULL. */
static void test_owned_refusals(void) {
  block a, b, c, d, e;
  DLManagedTensorVersioned *const junk = (DLManagedTensorVersioned*)&a, *y = junk, *z = junk, *w = junk;
  DLDataType same = {0, 0, 0}, wide = {kDLFloat, 64, 1};
  gander_cross_entropy_options mean = {
      .size = sizeof mean, .ignore_index = -100, .reduction = GANDER_REDUCTION_MEAN};
  gander_rmsnorm_options unset = {.eps = 1e-6};

  fill(&a)->managed.version.major = 2;
  /* Fields that must not be read. */
  memset(&a.managed.flags, 0xff, sizeof a.managed - offsetof(DLManagedTensorVersioned, flags));
  REFUSED(gander_softmax(&a.managed, NULL, NULL, &y), GANDER_ERROR_VERSION,
          "gander_softmax: x is a DLPack tensor of version 2.0, expected 1.x");
  CHECK(a.deleted == 1 && y == NULL);

  y = junk;
  fill(&b)->managed.version.major = 0;
  REFUSED(gander_softmax_grad(&fill(&a)->managed, &b.managed, NULL, NULL, &y), GANDER_ERROR_VERSION,
          "y is a DLPack tensor of version 0.0");
  CHECK(a.deleted == 1 && b.deleted == 1 && y == NULL);

  y = junk;
  fill(&a)->managed.dl_tensor.ndim = 0;
  a.managed.deleter = delete_and_fail;
  REFUSED(gander_softmax(&a.managed, NULL, NULL, &y), GANDER_ERROR_SHAPE, "softmax: x has rank 0");
  CHECK(a.deleted == 1 && y == NULL);

  y = junk;
  fill(&a)->managed.dl_tensor.device.device_type = kDLCUDA;
  a.managed.dl_tensor.device.device_id = 1 << 20; /* no machine has so many devices */
  int32_t status = gander_softmax(&a.managed, NULL, NULL, &y);
  CHECK(status == GANDER_ERROR_UNSUPPORTED || status == GANDER_ERROR_DEVICE);
  CHECK(a.deleted == 1 && y == NULL);

  REFUSED(gander_softmax(NULL, NULL, NULL, &y), GANDER_ERROR_NULL, "x is NULL");
  REFUSED(gander_softmax(&fill(&a)->managed, NULL, NULL, NULL), GANDER_ERROR_NULL,
          "y is NULL, expected a pointer");
  CHECK(a.deleted == 1);

  y = z = junk;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &fill_vector(&b, 3)->managed, NULL, NULL, same, same, NULL, NULL,
                         &y, NULL, &z),
          GANDER_ERROR_SHAPE, "weight has shape (3,)");
  CHECK(a.deleted == 1 && b.deleted == 1 && y == NULL && z == NULL);
  REFUSED(gander_rmsnorm(&fill(&a)->managed, NULL, NULL, NULL, wide, same, NULL, NULL, &y, NULL, NULL),
          GANDER_ERROR_DTYPE, "y has dtype float64");
  CHECK(a.deleted == 1 && y == NULL);
  REFUSED(gander_rmsnorm(&fill(&a)->managed, NULL, NULL, NULL, same, same, &unset, NULL, &y, NULL, NULL),
          GANDER_ERROR_OPTION, "size is 0");
  CHECK(a.deleted == 1 && y == NULL);

  y = z = junk;
  REFUSED(gander_rmsnorm_grad(&fill(&a)->managed, NULL, &fill(&b)->managed, NULL,
                              &fill_vector(&c, M)->managed, same, same, same, NULL, NULL, &y, NULL, &z, NULL),
          GANDER_ERROR_OPTION, "dw is requested without a weight");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && y == NULL && z == NULL);

  y = z = w = junk;
  fill_targets(&b, M)->managed.dl_tensor.dtype.code = kDLFloat;
  REFUSED(gander_cross_entropy(&fill(&a)->managed, &b.managed, &fill_vector(&c, N)->managed, NULL, NULL, NULL,
                               NULL, &y, &z, &w, NULL),
          GANDER_ERROR_DTYPE, "target has dtype float32, expected int32 or int64");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && y == NULL && z == NULL && w == NULL);
  REFUSED(gander_cross_entropy_grad(&fill(&a)->managed, &fill_targets(&b, M)->managed,
                                    &fill_vector(&c, N)->managed, &fill_vector(&d, M)->managed,
                                    &fill_vector(&e, M)->managed, NULL, NULL, NULL, &mean, NULL, &y),
          GANDER_ERROR_SHAPE, "which is 3 elements, expected 7: the two parts and the denominator");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && d.deleted == 1 && e.deleted == 1 && y == NULL);
}

static void test_explain(void) {
  char text[512];
  DLDataType half = {kDLFloat, 16, 1}, bytes = {kDLUInt, 8, 1};
  DLDevice host = {kDLCPU, 0}, metal = {kDLMetal, 0};
  CHECK(gander_explain("softmax_forward", 8, 4096, half, host, 0, 0, text, sizeof text) == GANDER_OK);
  CHECK(strstr(text, "softmax_forward of 8 rows of 4096 float16 on cpu"));
  memset(text, '?', sizeof text);
  CHECK(gander_explain("softmax_forward", 8, 4096, half, host, 0, 0, text, 8) == GANDER_OK);
  CHECK(strcmp(text, "softmax") == 0 && text[8] == '?');
  CHECK(gander_explain("softmax_forward", 8, 4096, half, host, 0, 0, text, 1) == GANDER_OK &&
        text[0] == '\0');
  REFUSED(gander_explain("softmax_forward", 8, 4096, half, host, 0, 0, text, 0), GANDER_ERROR_NULL,
          "no capacity");
  REFUSED(gander_explain("softmax_forward", 8, 4096, half, host, 0, 0, NULL, 9), GANDER_ERROR_NULL,
          "text is NULL");
  REFUSED(gander_explain(NULL, 8, 4096, half, host, 0, 0, text, 9), GANDER_ERROR_NULL, "op is NULL");
  REFUSED(gander_explain("relu", 8, 4096, half, host, 0, 0, text, 9), GANDER_ERROR_OPTION, "op is \"relu\"");
  REFUSED(gander_explain("softmax_forward", 8, 0, half, host, 0, 0, text, 9), GANDER_ERROR_SHAPE,
          "shape is (8, 0)");
  REFUSED(gander_explain("softmax_forward", 8, 9, bytes, host, 0, 0, text, 9), GANDER_ERROR_DTYPE,
          "dtype is uint8");
  REFUSED(gander_explain("softmax_forward", 8, 9, half, metal, 0, 0, text, 9), GANDER_ERROR_DEVICE,
          "device has type 8");
  REFUSED(gander_explain("softmax_forward", 8, 9, half, host, GANDER_ALGORITHM_WARP, 0, text, 9),
          GANDER_ERROR_UNSUPPORTED, "explain: algorithm is \"warp\" on cpu");
  REFUSED(gander_explain("softmax_forward", 8, 9, half, host, 0x300, 0, text, 9), GANDER_ERROR_OPTION,
          "algorithm is 768, expected 0 (auto) to 8 (splitk)");
  CHECK(gander_explain("softmax_forward", 8, 9, half, host,
                       GANDER_ALGORITHM_WARP | GANDER_ALGORITHM_IF_SERVED, 0, text,
                       sizeof text) == GANDER_OK);

  CHECK(gander_explain_device("softmax_forward", 4096, 8192, half, "h100", 0, 0, text, sizeof text) ==
        GANDER_OK);
  CHECK(strstr(text, "auto takes register") == text && strstr(text, "softmax_") && strstr(text, "CTAs of"));
  REFUSED(gander_explain_device("softmax_forward", 8, 9, half, "tpu", 0, 0, text, 9), GANDER_ERROR_OPTION,
          "device is \"tpu\", expected a device of this machine or a100, h100, h200");
  REFUSED(gander_explain_device("softmax_forward", 8, 9, half, NULL, 0, 0, text, 9), GANDER_ERROR_NULL,
          "device is NULL");
  REFUSED(gander_explain_device("softmax_forward", 8, 9, bytes, "h100", 0, 0, text, 9), GANDER_ERROR_DTYPE,
          "dtype is uint8");
  char list[4096];
  CHECK(gander_algorithms("softmax_forward", list, sizeof list) == GANDER_OK);
  CHECK(strstr(list, "[{\"name\":\"auto\",\"what\":") == list &&
        strstr(list, "\"limits\":\"rows of up to 128 KiB"));
  memset(list, '?', sizeof list);
  REFUSED(gander_algorithms("softmax_forward", list, 8), GANDER_ERROR_OPTION, "capacity is 8, expected");
  CHECK(list[0] == '\0' && list[8] == '?');
  REFUSED(gander_algorithms("relu", list, sizeof list), GANDER_ERROR_OPTION, "op is \"relu\"");
  REFUSED(gander_algorithms(NULL, list, sizeof list), GANDER_ERROR_NULL, "op is NULL");
  CHECK(gander_warmup(host) == GANDER_OK);
  REFUSED(gander_warmup(metal), GANDER_ERROR_DEVICE, "device has type 8");
}

/* Each thread has its own last error. A thread can release a tensor that another one made. */
static void* worker(void* number) {
  int n = *(int*)number;
  char expected[64];
  CHECK(strcmp(gander_last_error(), "") == 0);
  snprintf(expected, sizeof expected, "ndim is -%d,", n);
  DLManagedTensorVersioned* y = NULL;
  for (int i = 0; i < 500; ++i) {
    block a, b;
    fill(&a)->managed.dl_tensor.ndim = -n;
    REFUSED(gander_softmax_forward(&a.managed.dl_tensor, &fill(&b)->managed.dl_tensor, NULL, NULL),
            GANDER_ERROR_SHAPE, expected);
    if (y) y->deleter(y);
    CHECK(gander_softmax(&fill(&a)->managed, NULL, NULL, &y) == GANDER_OK);
    check_softmax(y->dl_tensor.data);
  }
  return y;
}

static void test_threads(void) {
  pthread_t threads[8];
  int numbers[8];
  for (int i = 0; i < 8; ++i) {
    numbers[i] = i + 1;
    CHECK(pthread_create(&threads[i], NULL, worker, &numbers[i]) == 0);
  }
  for (int i = 0; i < 8; ++i) {
    void* y;
    CHECK(pthread_join(threads[i], &y) == 0);
    ((DLManagedTensorVersioned*)y)->deleter(y);
  }
}

/* A caller's parallel_for. It calls the ranges on threads of its own, on the calling one, or not all. */
typedef struct {
  void (*task)(int64_t, int64_t, void*);
  int64_t begin, end;
  void* context;
} range;

static enum { THREADS, BACKWARDS, LAST_ONLY } manner;
static int parallel_calls;

static void* run_range(void* argument) {
  const range* r = argument;
  r->task(r->begin, r->end, r->context);
  return NULL;
}

static int32_t parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                            void (*task)(int64_t, int64_t, void*), void* context) {
  enum { MOST = 2 }; /* as many threads as test_parallel_for allows */
  CHECK(begin == 0 && end >= 1 && end <= MOST && grain_size == 1);
  ++parallel_calls;
  if (manner != THREADS) {
    for (int64_t i = end - 1; i >= (manner == LAST_ONLY ? end - 1 : 0); --i) task(i, i + 1, context);
    return manner == LAST_ONLY;
  }
  pthread_t threads[MOST];
  range ranges[MOST];
  for (int64_t i = 0; i < end; ++i) {
    ranges[i] = (range){task, i, i + 1, context};
    CHECK(pthread_create(&threads[i], NULL, run_range, &ranges[i]) == 0);
  }
  for (int64_t i = 0; i < end; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  return 0;
}

static void test_parallel_for(void) {
  enum { ROWS = 1000, COLUMNS = 300 };
  int64_t shape[2] = {ROWS, COLUMNS}, strides[2] = {COLUMNS, 1};
  float* data = malloc(2 * ROWS * COLUMNS * sizeof *data);
  float *want = data + ROWS * COLUMNS, *got = malloc(ROWS * COLUMNS * sizeof *got);
  for (int i = 0; i < ROWS * COLUMNS; ++i) data[i] = (float)(i % 977) / 100;
  DLTensor x = {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, strides, 0}, y = x;
  y.data = want;
  CHECK(gander_softmax_forward(&x, &y, NULL, NULL) == GANDER_OK);
  y.data = got;
  CHECK(gander_set_parallel_for(parallel_for) == GANDER_OK && gander_set_num_threads(2) == GANDER_OK);
  for (manner = THREADS; manner <= LAST_ONLY; ++manner) {
    memset(got, 0, ROWS * COLUMNS * sizeof *got);
    CHECK(gander_softmax_forward(&x, &y, NULL, NULL) == GANDER_OK);
    CHECK(memcmp(got, want, ROWS * COLUMNS * sizeof *got) == 0);
  }
  /* Go has one processor here, or more. */
  cpu_set_t set;
  const bool several = sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 1;
  CHECK(parallel_calls == 3 || (parallel_calls == 0 && (!several || getenv("GOMAXPROCS"))));
  /* More threads than Go has processors. */
  CHECK(gander_set_num_threads(1 << 20) == GANDER_OK);
  CHECK(gander_softmax_forward(&x, &y, NULL, NULL) == GANDER_OK && parallel_calls <= 3);
  CHECK(gander_set_num_threads(2) == GANDER_OK && gander_set_parallel_for(NULL) == GANDER_OK);
  CHECK(gander_softmax_forward(&x, &y, NULL, NULL) == GANDER_OK && parallel_calls <= 3);
  CHECK(gander_set_num_threads(0) == GANDER_OK);
  free(data);
  free(got);
}

/* In a forked child every function returns an error, and deleters still work. */
static void forked_child(DLManagedTensorVersioned* inherited) {
  block a, b, c, d, e;
  DLTensor* x = &fill(&a)->managed.dl_tensor;
  DLManagedTensorVersioned *junk = &a.managed, *y = junk, *z = junk, *w = junk;
  DLDevice host = {kDLCPU, 0};
  DLDataType half = {kDLFloat, 16, 1};
  char text[64];
#define FORKED(call, name) REFUSED(call, GANDER_ERROR_FORK, name ": called in a child process after fork()")
  FORKED(gander_softmax_forward(x, x, NULL, NULL), "gander_softmax_forward");
  FORKED(gander_softmax_backward(x, x, x, NULL, NULL), "gander_softmax_backward");
  FORKED(gander_rmsnorm_forward(x, NULL, NULL, NULL, x, NULL, NULL, NULL, NULL), "gander_rmsnorm_forward");
  FORKED(gander_rmsnorm_backward(x, NULL, x, NULL, x, x, NULL, NULL, NULL, NULL, NULL),
         "gander_rmsnorm_backward");
  FORKED(gander_layernorm_forward(x, NULL, NULL, NULL, x, NULL, NULL, NULL, NULL, NULL),
         "gander_layernorm_forward");
  FORKED(gander_layernorm_backward(x, NULL, x, NULL, x, x, x, NULL, NULL, NULL, NULL, NULL),
         "gander_layernorm_backward");
  FORKED(gander_cross_entropy_forward(x, x, x, x, x, x, x, x, x, NULL, NULL), "gander_cross_entropy_forward");
  FORKED(gander_cross_entropy_backward(x, x, x, x, x, x, x, x, x, NULL, NULL),
         "gander_cross_entropy_backward");
  FORKED(gander_set_num_threads(1), "gander_set_num_threads");
  FORKED(gander_set_parallel_for(NULL), "gander_set_parallel_for");
  FORKED(gander_warmup(host), "gander_warmup");
  FORKED(gander_explain("softmax_forward", 1, 1, half, host, 0, 0, text, sizeof text), "gander_explain");
  FORKED(gander_explain_device("softmax_forward", 1, 1, half, "h100", 0, 0, text, sizeof text),
         "gander_explain_device");
  FORKED(gander_algorithms("softmax_forward", text, sizeof text), "gander_algorithms");
  FORKED(gander_softmax(&fill(&a)->managed, NULL, NULL, &y), "gander_softmax");
  CHECK(a.deleted == 1 && y == NULL);
  FORKED(gander_softmax_grad(&fill(&a)->managed, &fill(&b)->managed, NULL, NULL, &y), "gander_softmax_grad");
  CHECK(a.deleted == 1 && b.deleted == 1);
  FORKED(gander_rmsnorm(&fill(&a)->managed, NULL, NULL, NULL, half, half, NULL, NULL, &y, NULL, &z),
         "gander_rmsnorm");
  CHECK(a.deleted == 1 && z == NULL);
  FORKED(gander_rmsnorm_grad(&fill(&a)->managed, &fill(&b)->managed, &fill(&c)->managed, NULL,
                             &fill(&d)->managed, half, half, half, NULL, NULL, &y, NULL, &z, NULL),
         "gander_rmsnorm_grad");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && d.deleted == 1);
  FORKED(gander_layernorm(&fill(&a)->managed, NULL, NULL, NULL, half, half, NULL, NULL, &y, NULL, NULL, &z),
         "gander_layernorm");
  CHECK(a.deleted == 1 && z == NULL);
  FORKED(gander_layernorm_grad(&fill(&a)->managed, NULL, &fill(&b)->managed, NULL, &fill(&c)->managed,
                               &fill(&d)->managed, half, half, half, NULL, NULL, &y, NULL, NULL, &z),
         "gander_layernorm_grad");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && d.deleted == 1);
  FORKED(gander_cross_entropy(&fill(&a)->managed, &fill(&b)->managed, NULL, NULL, NULL, NULL, NULL, &y, &z,
                              &w, NULL),
         "gander_cross_entropy");
  CHECK(a.deleted == 1 && b.deleted == 1 && w == NULL);
  FORKED(gander_cross_entropy_grad(&fill(&a)->managed, &fill(&b)->managed, &fill(&c)->managed,
                                   &fill(&d)->managed, &fill(&e)->managed, NULL, NULL, NULL, NULL, NULL, &y),
         "gander_cross_entropy_grad");
  CHECK(a.deleted == 1 && e.deleted == 1);
  CHECK(strcmp(gander_version(), PYTHON_VERSION) == 0 && gander_abi_version() == GANDER_ABI_VERSION);
  CHECK(gander_build_info()[0] == '{');
  inherited->deleter(inherited);
}

static void test_fork(void) {
  block a;
  DLManagedTensorVersioned* y;
  CHECK(gander_softmax(&fill(&a)->managed, NULL, NULL, &y) == GANDER_OK);
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20); /* end the child if it hangs */
    forked_child(y);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  y->deleter(y);
  CHECK(gander_softmax(&fill(&a)->managed, NULL, NULL, &y) == GANDER_OK); /* the parent still works */
  y->deleter(y);
}

int main(void) {
  static const struct {
    const char* name;
    void (*run)(void);
  } tests[] = {
      {"info", test_info},       {"borrowed", test_borrowed}, {"every op", test_every_op},
      {"options", test_options}, {"owned", test_owned},       {"owned refusals", test_owned_refusals},
      {"explain", test_explain}, {"threads", test_threads},   {"parallel_for", test_parallel_for},
      {"fork", test_fork}};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) {
    tests[i].run();
    printf("ok  %s\n", tests[i].name);
  }
  return 0;
}
