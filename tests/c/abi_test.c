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

  gander_rmsnorm_forward_options rms = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
  rms.bias = tb, rms.residual = tr, rms.residual_out = ts, rms.rstd = ti;
  CHECK(gander_rmsnorm_forward(tx, ty, &rms, NULL) == GANDER_OK);
  double r = 1 / sqrt((1 + 4 + 9 + 16) / 4.0 + 1e-6);
  CHECK(fabs(rstd.data[1] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i) {
    CHECK(sum.data[i] == x.data[i] + 1);
    CHECK(fabs(y.data[i] - (sum.data[i] * r + bias.data[i % N])) < 1e-5);
  }
  gander_rmsnorm_backward_options grad = GANDER_RMSNORM_BACKWARD_OPTIONS_DEFAULTS;
  grad.dresidual_out = tds, grad.dresidual = tdr, grad.db = tdb;
  CHECK(gander_rmsnorm_backward(ts, tdo, ti, tdx, &grad, NULL) == GANDER_OK);
  double along = 0;
  for (int j = 0; j < N; ++j) along += j * (j + 1) * r / N;
  for (int i = 0; i < M * N; ++i) {
    int j = i % N;
    CHECK(fabs(dx.data[i] - ((j - (j + 1) * r * along) * r + 1)) < 1e-5 && dresidual.data[i] == dx.data[i]);
    CHECK(db.data[j] == (float)(M * j));
  }

  gander_layernorm_forward_options layer = GANDER_LAYERNORM_FORWARD_OPTIONS_DEFAULTS;
  layer.bias = tb, layer.residual = tr, layer.residual_out = ts, layer.mean = tm, layer.rstd = ti;
  layer.eps = 0.5;
  CHECK(gander_layernorm_forward(tx, ty, &layer, NULL) == GANDER_OK);
  r = 1 / sqrt((2.25 + 0.25 + 0.25 + 2.25) / 4 + 0.5);
  CHECK(mean.data[1] == 2.5F && fabs(rstd.data[1] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i)
    CHECK(fabs(y.data[i] - ((sum.data[i] - 2.5) * r + bias.data[i % N])) < 1e-5);
  gander_layernorm_backward_options centered = GANDER_LAYERNORM_BACKWARD_OPTIONS_DEFAULTS;
  centered.dresidual_out = tds, centered.dresidual = tdr, centered.db = tdb;
  CHECK(gander_layernorm_backward(ts, tdo, tm, ti, tdx, &centered, NULL) == GANDER_OK);
  along = 0;
  for (int j = 0; j < N; ++j) along += j * (j - 1.5) * r / N;
  for (int i = 0; i < M * N; ++i) {
    int j = i % N;
    CHECK(fabs(dx.data[i] - ((j - 1.5 - (j - 1.5) * r * along) * r + 1)) < 1e-5);
    CHECK(dresidual.data[i] == dx.data[i] && db.data[j] == (float)(M * j));
  }
}

/* Every function passes its arguments in the right order, and its options. */
static void test_every_op(void) {
  block x, weight, y, rstd, dout, dx, dw, target, loss, lse, one;
  DLTensor *tx = &fill(&x)->managed.dl_tensor, *tw = &fill_vector(&weight, N)->managed.dl_tensor;
  DLTensor *ty = &fill(&y)->managed.dl_tensor, *tr = &fill_vector(&rstd, M)->managed.dl_tensor;
  DLTensor *tdo = &fill(&dout)->managed.dl_tensor, *tdx = &fill(&dx)->managed.dl_tensor;
  DLTensor *tdw = &fill_vector(&dw, N)->managed.dl_tensor, *tt = &fill_targets(&target, M)->managed.dl_tensor;
  DLTensor *tl = &fill_vector(&loss, M)->managed.dl_tensor, *te = &fill_vector(&lse, M)->managed.dl_tensor;
  DLTensor* t1 = &fill_vector(&one, 1)->managed.dl_tensor;
  one.data[0] = 1;

  gander_rmsnorm_forward_options norm = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
  norm.weight = tw, norm.rstd = tr, norm.eps = 0.5, norm.batch_invariant = 1;
  CHECK(gander_rmsnorm_forward(tx, ty, &norm, NULL) == GANDER_OK);
  double r = 1 / sqrt((0 + 1 + 4 + 9) / 4.0 + 0.5);
  for (int i = 0; i < M; ++i) CHECK(fabs(rstd.data[i] - r) < 1e-6);
  for (int i = 0; i < M * N; ++i) CHECK(fabs(y.data[i] - x.data[i] * r * weight.data[i % N]) < 1e-5);
  CHECK(gander_rmsnorm_forward(tx, ty, NULL, NULL) == GANDER_OK);
  for (int i = 0; i < M * N; ++i) CHECK(fabs(y.data[i] - x.data[i] / sqrt(3.5 + 1e-6)) < 1e-5);

  gander_rmsnorm_backward_options grad = GANDER_RMSNORM_BACKWARD_OPTIONS_DEFAULTS;
  grad.weight = tw, grad.dw = tdw;
  CHECK(gander_rmsnorm_backward(tx, tdo, tr, tdx, &grad, NULL) == GANDER_OK);
  for (int j = 0; j < N; ++j) {
    double mean = 0, h = j * r;
    for (int k = 0; k < N; ++k) mean += k * k * k * r / N; /* g = dout * weight = k * k, h = k * r */
    CHECK(fabs(dx.data[j] - (j * j - h * mean) * r) < 1e-5);
    CHECK(fabs(dw.data[j] - M * j * h) < 1e-5);
  }

  test_norms();
  const gander_cross_entropy_forward_options plain = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
  gander_cross_entropy_forward_options loss_of = plain;
  loss_of.weight = tw, loss_of.lse = te;
  CHECK(gander_cross_entropy_forward(tx, tt, tl, &loss_of, NULL) == GANDER_OK);
  double sum = exp(0) + exp(1) + exp(2) + exp(3);
  for (int i = 0; i < M; ++i)
    CHECK(fabs(lse.data[i] - log(sum)) < 1e-6 && loss.data[i] == 0); /* weight[0] is 0 */
  loss_of = plain;
  loss_of.dx = tdx, loss_of.denominator = t1;
  CHECK(gander_cross_entropy_forward(tx, tt, tl, &loss_of, NULL) == GANDER_OK);
  CHECK(fabs(loss.data[0] - log(sum)) < 1e-6 && one.data[0] == M);
  CHECK(fabs(dx.data[0] - (1 / sum - 1)) < 1e-6 && fabs(dx.data[1] - exp(1) / sum) < 1e-6);

  gander_cross_entropy_backward_options mean = GANDER_CROSS_ENTROPY_BACKWARD_OPTIONS_DEFAULTS;
  mean.reduction = GANDER_REDUCTION_MEAN, mean.denominator = t1;
  one.data[0] = M;
  block two;
  DLTensor* t2 = &fill_vector(&two, 1)->managed.dl_tensor;
  two.data[0] = 2 * M; /* dloss: divided by the denominator, which is M, it doubles the gradient */
  CHECK(gander_cross_entropy_backward(tx, tt, t2, te, tdx, &mean, NULL) == GANDER_OK);
  CHECK(fabs(dx.data[0] - 2 * (1 / sum - 1)) < 1e-6 && fabs(dx.data[1] - 2 * exp(1) / sum) < 1e-6);
  two.data[0] = 4;
  loss_of = plain;
  loss_of.divisor = t2, loss_of.upstream = t1, loss_of.dx = tdx;
  CHECK(gander_cross_entropy_forward(tx, tt, tl, &loss_of, NULL) == GANDER_OK);
  CHECK(fabs(loss.data[0] - log(sum) / 4) < 1e-6 && fabs(dx.data[1] - M * exp(1) / sum / 4) < 1e-6);
  gander_cross_entropy_backward_options divided = GANDER_CROSS_ENTROPY_BACKWARD_OPTIONS_DEFAULTS;
  divided.divisor = t2;
  CHECK(gander_cross_entropy_backward(tx, tt, t1, te, tdx, &divided, NULL) == GANDER_OK);
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

/* An option of 0 is 0, and one that is not set has its default, which is not 0 for these. */
static void test_defaults(void) {
  block a, b, c, d;
  DLTensor *x = &fill(&a)->managed.dl_tensor, *y = &fill(&b)->managed.dl_tensor;
  DLTensor *target = &fill_targets(&c, M)->managed.dl_tensor, *loss = &fill_vector(&d, M)->managed.dl_tensor;
  gander_masked_softmax_forward_options masked = GANDER_MASKED_SOFTMAX_FORWARD_OPTIONS_DEFAULTS;
  CHECK(masked.scale == 1 && gander_masked_softmax_forward(x, y, &masked, NULL) == GANDER_OK);
  check_softmax(b.data);
  masked.scale = 0;
  CHECK(gander_masked_softmax_forward(x, y, &masked, NULL) == GANDER_OK);
  for (int i = 0; i < M * N; ++i) CHECK(b.data[i] == 0.25F);
  CHECK(gander_masked_softmax_forward(x, y, NULL, NULL) == GANDER_OK);
  check_softmax(b.data);

  gander_cross_entropy_forward_options entropy = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
  CHECK(entropy.ignore_index == -100);
  CHECK(gander_cross_entropy_forward(x, target, loss, &entropy, NULL) == GANDER_OK && d.data[0] > 3);
  entropy.ignore_index = 0;
  CHECK(gander_cross_entropy_forward(x, target, loss, &entropy, NULL) == GANDER_OK && d.data[0] == 0);
  CHECK(gander_cross_entropy_forward(x, target, loss, NULL, NULL) == GANDER_OK && d.data[0] > 3);
  /* A struct that ends before ignore_index, as one of an older header may. */
  entropy.size = (uint32_t)offsetof(gander_cross_entropy_forward_options, ignore_index);
  CHECK(gander_cross_entropy_forward(x, target, loss, &entropy, NULL) == GANDER_OK && d.data[0] > 3);

  for (int i = 0; i < M * N; ++i) a.data[i] = 1e-3F;
  gander_rmsnorm_forward_options norm = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
  CHECK(norm.eps == 1e-6 && gander_rmsnorm_forward(x, y, &norm, NULL) == GANDER_OK);
  CHECK(fabs(b.data[0] - sqrt(0.5)) < 1e-6);
  norm.eps = 0;
  CHECK(gander_rmsnorm_forward(x, y, &norm, NULL) == GANDER_OK && fabs(b.data[0] - 1) < 1e-6);
}

static void test_options(void) {
  block a, b;
  DLTensor *x = &fill(&a)->managed.dl_tensor, *y = &fill(&b)->managed.dl_tensor;
  gander_allocator allocator = {NULL, no_memory}; /* not called for host tensors */
  struct {
    gander_rmsnorm_forward_options known;
    char more[16];
  } newer = {GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS, {0}};
  newer.known.size = sizeof newer, newer.known.allocator = &allocator;
  const gander_rmsnorm_forward_options* options = &newer.known;
  CHECK(gander_rmsnorm_forward(x, y, options, NULL) == GANDER_OK);
  newer.more[15] = 1;
  char text[128];
  snprintf(text, sizeof text, "gander_rmsnorm_forward: options: byte %zu is set", sizeof newer - 1);
  REFUSED(gander_rmsnorm_forward(x, y, options, NULL), GANDER_ERROR_OPTION, text);
  newer.known.size = sizeof newer.known;
  CHECK(gander_rmsnorm_forward(x, y, options, NULL) == GANDER_OK);
  static const uint32_t wrong[] = {0, 4, 8, sizeof(gander_rmsnorm_forward_options) - 1, 4104, UINT32_MAX};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    newer.known.size = wrong[i];
    snprintf(text, sizeof text, "options.size is %u, expected %zu; begin the struct with %s",
             (unsigned)wrong[i], sizeof newer.known, "GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS");
    REFUSED(gander_rmsnorm_forward(x, y, options, NULL), GANDER_ERROR_OPTION, text);
  }
  /* Zeros but for the size: which were meant? */
  gander_cross_entropy_forward_options zeros = {.size = sizeof zeros};
  REFUSED(gander_cross_entropy_forward(x, y, y, &zeros, NULL), GANDER_ERROR_OPTION,
          "gander_cross_entropy_forward: options.magic is 0, expected GANDER_OPTIONS_MAGIC; begin the struct "
          "with GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS");
  newer.known.size = sizeof newer.known;
  newer.known.eps = NAN;
  REFUSED(gander_rmsnorm_forward(x, y, options, NULL), GANDER_ERROR_OPTION, "eps is NaN");
  /* With the size of an older header, later fields are not read. */
  gander_softmax_forward_options softmax = GANDER_SOFTMAX_FORWARD_OPTIONS_DEFAULTS;
  softmax.size -= 16, softmax.algorithm = softmax.batch_invariant = -1;
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
  softmax.algorithm = INT64_C(1) << 32; /* 0 in 32 bits */
  REFUSED(gander_softmax_forward(x, y, &softmax, NULL), GANDER_ERROR_OPTION, "algorithm is 2147483647");
  gander_cross_entropy_forward_options entropy = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
  entropy.reduction = 7;
  REFUSED(gander_cross_entropy_forward(x, y, y, &entropy, NULL), GANDER_ERROR_OPTION, "reduction is 7");
  REFUSED(gander_set_num_threads(-1), GANDER_ERROR_OPTION, "count is -1");
  CHECK(gander_set_num_threads(1) == GANDER_OK && gander_set_num_threads(0) == GANDER_OK);
}

static void test_owned(void) {
  block a, b, c;
  DLManagedTensorVersioned *y = NULL, *z = NULL, *w = NULL;
  DLDataType half = {kDLFloat, 16, 1};

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

  gander_rmsnorm_options norm = GANDER_RMSNORM_OPTIONS_DEFAULTS;
  norm.weight = &fill_vector(&b, N)->managed, norm.out_dtype = &half, norm.rstd = &z;
  CHECK(gander_rmsnorm(&fill(&a)->managed, &norm, NULL, &y) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1);
  CHECK(y->dl_tensor.dtype.bits == 16 && z->dl_tensor.dtype.bits == 32 && z->dl_tensor.ndim == 1);
  y->deleter(y);
  gander_rmsnorm_grad_options grad = GANDER_RMSNORM_GRAD_OPTIONS_DEFAULTS;
  grad.weight = &fill_vector(&b, N)->managed, grad.dw = &w;
  CHECK(gander_rmsnorm_grad(&fill(&a)->managed, &fill(&c)->managed, z, &grad, NULL, &y) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1);
  CHECK(y->dl_tensor.ndim == 2 && w->dl_tensor.ndim == 1 && w->dl_tensor.shape[0] == N);
  y->deleter(y);
  w->deleter(w);
  CHECK(gander_rmsnorm(&fill(&a)->managed, NULL, NULL, &y) == GANDER_OK && a.deleted == 1);
  CHECK(y->dl_tensor.dtype.bits == 32);
  y->deleter(y);

  gander_cross_entropy_options loss = GANDER_CROSS_ENTROPY_OPTIONS_DEFAULTS;
  loss.lse = &z, loss.dx = &w;
  CHECK(gander_cross_entropy(&fill(&a)->managed, &fill_targets(&b, M)->managed, &loss, NULL, &y) ==
        GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1);
  CHECK(y->dl_tensor.ndim == 1 && z->dl_tensor.ndim == 1 && w->dl_tensor.ndim == 2);
  double sum = exp(0) + exp(1) + exp(2) + exp(3);
  CHECK(fabs(((float*)y->dl_tensor.data)[1] - log(sum)) < 1e-6);
  w->deleter(w);
  gander_cross_entropy_grad_options back = GANDER_CROSS_ENTROPY_GRAD_OPTIONS_DEFAULTS;
  back.weight = &fill_vector(&c, N)->managed;
  CHECK(gander_cross_entropy_grad(&fill(&a)->managed, &fill_targets(&b, M)->managed, y, z, &back, NULL, &w) ==
        GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1);
  w->deleter(w);
  gander_cross_entropy_options mean = GANDER_CROSS_ENTROPY_OPTIONS_DEFAULTS;
  mean.reduction = GANDER_REDUCTION_MEAN, mean.denominator = &z;
  CHECK(gander_cross_entropy(&fill(&a)->managed, &fill_targets(&b, M)->managed, &mean, NULL, &y) ==
        GANDER_OK);
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

/* Who owns the tensors in an option struct that is refused. */
static void test_refused_structs(void) {
  block a, b, c;
  DLManagedTensorVersioned *const junk = (DLManagedTensorVersioned*)&a, *y = junk, *z = junk, *w = junk;
  struct {
    gander_rmsnorm_options known;
    DLManagedTensorVersioned* newer_input;
    DLManagedTensorVersioned** newer_output;
  } o = {GANDER_RMSNORM_OPTIONS_DEFAULTS, NULL, NULL};
  o.known.size = sizeof o;

  /* A newer struct: what the library knows of it is consumed, what it does not know stays the caller's. */
  o.known.weight = &fill_vector(&b, N)->managed, o.known.rstd = &z;
  o.newer_input = &fill(&c)->managed, o.newer_output = &w;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION, "is set, beyond the");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 0 && y == NULL && z == NULL && w == junk);
  o.newer_input = NULL, o.newer_output = NULL;
  o.known.weight = &fill_vector(&b, N)->managed;
  CHECK(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1);
  y->deleter(y);
  z->deleter(z);

  /* An older struct, which has the weight and not rstd. */
  o.known.size = (uint32_t)offsetof(gander_rmsnorm_options, bias);
  o.known.weight = &fill_vector(&b, N)->managed, z = junk;
  CHECK(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y) == GANDER_OK);
  CHECK(a.deleted == 1 && b.deleted == 1 && z == junk);
  y->deleter(y);

  /* A struct whose fields nobody can know: they are not read. Parameters are consumed as ever. */
  o.known.size = 17, y = junk;
  o.known.weight = &fill_vector(&b, N)->managed;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION, "options.size is 17");
  CHECK(a.deleted == 1 && b.deleted == 0 && y == NULL && z == junk);
  o.known.size = sizeof o.known, o.known.magic = 0, y = junk;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION, "options.magic");
  CHECK(a.deleted == 1 && b.deleted == 0 && y == NULL && z == junk);

  /* Slots that are not variables of their own. */
  o.known.magic = GANDER_OPTIONS_MAGIC, y = junk;
  o.known.weight = &fill_vector(&b, N)->managed, o.known.rstd = &o.known.weight;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION,
          "in the option struct");
  CHECK(a.deleted == 1 && b.deleted == 1 && y == NULL);
  o.known.weight = NULL, o.known.rstd = &y, y = junk;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION, "have the same slot");
  CHECK(a.deleted == 1 && y == NULL);
  o.known.weight = &fill_vector(&b, N)->managed, o.known.rstd = &z;

  /* An option's value, and an operand of another version. */
  o.known.magic = GANDER_OPTIONS_MAGIC, o.known.eps = -1, y = junk;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_OPTION, "eps is -1");
  CHECK(a.deleted == 1 && b.deleted == 1 && y == NULL && z == NULL);
  fill_vector(&b, N)->managed.version.major = 2;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &o.known, NULL, &y), GANDER_ERROR_VERSION, "weight is a DLPack");
  CHECK(a.deleted == 1 && b.deleted == 1);

  /* A tensor that is a parameter and in the struct. */
  o.known.weight = &fill_vector(&a, N)->managed, o.known.eps = 1e-6;
  CHECK(gander_rmsnorm(&a.managed, &o.known, NULL, &y) == GANDER_OK && a.deleted == 1);
  y->deleter(y);
  z->deleter(z);

  /* Borrowed tensors stay the caller's. */
  gander_rmsnorm_forward_options borrowed = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
  DLTensor* x = &fill(&a)->managed.dl_tensor;
  borrowed.weight = &fill_vector(&b, N)->managed.dl_tensor, borrowed.magic = 0;
  REFUSED(gander_rmsnorm_forward(x, x, &borrowed, NULL), GANDER_ERROR_OPTION, "options.magic");
  borrowed.magic = GANDER_OPTIONS_MAGIC, borrowed.eps = -1;
  REFUSED(gander_rmsnorm_forward(x, x, &borrowed, NULL), GANDER_ERROR_OPTION, "eps is -1");
  CHECK(a.deleted == 0 && b.deleted == 0);
}

/* After any error, inputs have been released once and outputs are NULL. */
static void test_owned_refusals(void) {
  block a, b, c, d, e;
  DLManagedTensorVersioned *const junk = (DLManagedTensorVersioned*)&a, *y = junk, *z = junk, *w = junk;
  DLDataType wide = {kDLFloat, 64, 1};

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
  const gander_rmsnorm_options defaults = GANDER_RMSNORM_OPTIONS_DEFAULTS;
  gander_rmsnorm_options norm = defaults;
  norm.weight = &fill_vector(&b, 3)->managed, norm.rstd = &z;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &norm, NULL, &y), GANDER_ERROR_SHAPE, "weight has shape (3,)");
  CHECK(a.deleted == 1 && b.deleted == 1 && y == NULL && z == NULL);
  norm = defaults;
  norm.out_dtype = &wide;
  REFUSED(gander_rmsnorm(&fill(&a)->managed, &norm, NULL, &y), GANDER_ERROR_DTYPE, "y has dtype float64");
  CHECK(a.deleted == 1 && y == NULL);

  y = z = junk;
  gander_rmsnorm_grad_options grad = GANDER_RMSNORM_GRAD_OPTIONS_DEFAULTS;
  grad.dw = &z;
  REFUSED(gander_rmsnorm_grad(&fill(&a)->managed, &fill(&b)->managed, &fill_vector(&c, M)->managed, &grad,
                              NULL, &y),
          GANDER_ERROR_OPTION, "dw is requested without a weight");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && y == NULL && z == NULL);

  y = z = w = junk;
  fill_targets(&b, M)->managed.dl_tensor.dtype.code = kDLFloat;
  gander_cross_entropy_options loss = GANDER_CROSS_ENTROPY_OPTIONS_DEFAULTS;
  loss.weight = &fill_vector(&c, N)->managed, loss.lse = &z, loss.dx = &w;
  REFUSED(gander_cross_entropy(&fill(&a)->managed, &b.managed, &loss, NULL, &y), GANDER_ERROR_DTYPE,
          "target has dtype float32, expected int32 or int64");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && y == NULL && z == NULL && w == NULL);
  gander_cross_entropy_grad_options mean = GANDER_CROSS_ENTROPY_GRAD_OPTIONS_DEFAULTS;
  mean.weight = &fill_vector(&c, N)->managed, mean.reduction = GANDER_REDUCTION_MEAN;
  REFUSED(
      gander_cross_entropy_grad(&fill(&a)->managed, &fill_targets(&b, M)->managed,
                                &fill_vector(&d, M)->managed, &fill_vector(&e, M)->managed, &mean, NULL, &y),
      GANDER_ERROR_SHAPE, "which is 3 elements, expected 7: the two parts and the denominator");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && d.deleted == 1 && e.deleted == 1 && y == NULL);
  mean.weight = NULL, mean.reduction = GANDER_REDUCTION_SUM, mean.one_pass = 1;
  REFUSED(
      gander_cross_entropy_grad(&fill(&a)->managed, &fill_targets(&b, M)->managed,
                                &fill_vector(&d, M)->managed, &fill_vector(&e, M)->managed, &mean, NULL, &y),
      GANDER_ERROR_OPTION, "one_pass is set, expected 0");
  CHECK(a.deleted == 1 && b.deleted == 1 && d.deleted == 1 && e.deleted == 1);
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
          "device is \"tpu\", expected a device of this machine or a10, a100, b200, h100");
  REFUSED(gander_explain_device("softmax_forward", 8, 9, half, NULL, 0, 0, text, 9), GANDER_ERROR_NULL,
          "device is NULL");
  REFUSED(gander_explain_device("softmax_forward", 8, 9, bytes, "h100", 0, 0, text, 9), GANDER_ERROR_DTYPE,
          "dtype is uint8");
  CHECK(gander_explain_heads("rotary_forward", 8, 40, 128, half, host, NULL, text, sizeof text) == GANDER_OK);
  CHECK(strstr(text, "rotary_forward of 8 tokens of 40 heads of 128 float16 on cpu"));
  CHECK(gander_explain_heads("rotary_backward", 8192, 40, 128, half, host, "h100", text, sizeof text) ==
        GANDER_OK);
  CHECK(strstr(text, "rotate_elementwise_float16_256x2: 5120 CTAs of 256 threads"));
  REFUSED(gander_explain_heads("softmax_forward", 8, 4, 9, half, host, NULL, text, 9), GANDER_ERROR_OPTION,
          "op is \"softmax_forward\", expected qk_norm_rotary_backward");
  REFUSED(gander_explain_heads("rotary_forward", 8, 0, 9, half, host, NULL, text, 9), GANDER_ERROR_SHAPE,
          "shape is (8, 0, 9)");
  REFUSED(gander_explain_heads("rotary_forward", 8, 1, 9, half, host, "tpu", text, 9), GANDER_ERROR_OPTION,
          "device is \"tpu\"");
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
  FORKED(gander_rmsnorm_forward(x, x, NULL, NULL), "gander_rmsnorm_forward");
  FORKED(gander_rmsnorm_backward(x, x, x, x, NULL, NULL), "gander_rmsnorm_backward");
  FORKED(gander_layernorm_forward(x, x, NULL, NULL), "gander_layernorm_forward");
  FORKED(gander_layernorm_backward(x, x, x, x, x, NULL, NULL), "gander_layernorm_backward");
  FORKED(gander_cross_entropy_forward(x, x, x, NULL, NULL), "gander_cross_entropy_forward");
  FORKED(gander_cross_entropy_backward(x, x, x, x, x, NULL, NULL), "gander_cross_entropy_backward");
  FORKED(gander_set_num_threads(1), "gander_set_num_threads");
  FORKED(gander_set_parallel_for(NULL), "gander_set_parallel_for");
  FORKED(gander_warmup(host), "gander_warmup");
  FORKED(gander_explain("softmax_forward", 1, 1, half, host, 0, 0, text, sizeof text), "gander_explain");
  FORKED(gander_explain_device("softmax_forward", 1, 1, half, "h100", 0, 0, text, sizeof text),
         "gander_explain_device");
  FORKED(gander_explain_heads("rotary_forward", 1, 1, 1, half, host, NULL, text, sizeof text),
         "gander_explain_heads");
  FORKED(gander_algorithms("softmax_forward", text, sizeof text), "gander_algorithms");
  FORKED(gander_softmax(&fill(&a)->managed, NULL, NULL, &y), "gander_softmax");
  CHECK(a.deleted == 1 && y == NULL);
  FORKED(gander_softmax_grad(&fill(&a)->managed, &fill(&b)->managed, NULL, NULL, &y), "gander_softmax_grad");
  CHECK(a.deleted == 1 && b.deleted == 1);
  gander_rmsnorm_options norm = GANDER_RMSNORM_OPTIONS_DEFAULTS;
  norm.weight = &fill(&b)->managed, norm.rstd = &z;
  FORKED(gander_rmsnorm(&fill(&a)->managed, &norm, NULL, &y), "gander_rmsnorm");
  CHECK(a.deleted == 1 && b.deleted == 1 && z == NULL);
  FORKED(gander_rmsnorm_grad(&fill(&a)->managed, &fill(&c)->managed, &fill(&d)->managed, NULL, NULL, &y),
         "gander_rmsnorm_grad");
  CHECK(a.deleted == 1 && c.deleted == 1 && d.deleted == 1);
  FORKED(gander_layernorm(&fill(&a)->managed, NULL, NULL, &y), "gander_layernorm");
  CHECK(a.deleted == 1 && y == NULL);
  FORKED(gander_layernorm_grad(&fill(&a)->managed, &fill(&b)->managed, &fill(&c)->managed, &fill(&d)->managed,
                               NULL, NULL, &y),
         "gander_layernorm_grad");
  CHECK(a.deleted == 1 && b.deleted == 1 && c.deleted == 1 && d.deleted == 1);
  gander_cross_entropy_options loss = GANDER_CROSS_ENTROPY_OPTIONS_DEFAULTS;
  loss.dx = &w;
  FORKED(gander_cross_entropy(&fill(&a)->managed, &fill(&b)->managed, &loss, NULL, &y),
         "gander_cross_entropy");
  CHECK(a.deleted == 1 && b.deleted == 1 && w == NULL);
  gander_cross_entropy_grad_options grad = GANDER_CROSS_ENTROPY_GRAD_OPTIONS_DEFAULTS;
  grad.weight = &fill(&c)->managed;
  FORKED(gander_cross_entropy_grad(&fill(&a)->managed, &fill(&b)->managed, &fill(&d)->managed,
                                   &fill(&e)->managed, &grad, NULL, &y),
         "gander_cross_entropy_grad");
  CHECK(a.deleted == 1 && c.deleted == 1 && e.deleted == 1);
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
  } tests[] = {{"info", test_info},
               {"borrowed", test_borrowed},
               {"every op", test_every_op},
               {"options", test_options},
               {"defaults", test_defaults},
               {"refused structs", test_refused_structs},
               {"owned", test_owned},
               {"owned refusals", test_owned_refusals},
               {"explain", test_explain},
               {"threads", test_threads},
               {"parallel_for", test_parallel_for},
               {"fork", test_fork}};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) {
    tests[i].run();
    printf("ok  %s\n", tests[i].name);
  }
  return 0;
}
