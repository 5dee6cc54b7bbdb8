/* gander: row reductions (softmax, RMSNorm, cross-entropy; forward and backward) at the speed of memory.
 *
 * The C ABI of libgander. It takes DLPack tensors in host memory or in CUDA device memory.
 *
 * Status.     Every function that can fail returns 0 (GANDER_OK) or one of the codes below;
 *             gander_last_error() then gives the calling thread's message: which argument, what came,
 *             what was expected, what to do. Nothing is written to any output of a refused call.
 * Streams.    Work on CUDA tensors is enqueued on `stream` (a cudaStream_t or CUstream; NULL is the legacy
 *             default stream) and nothing synchronises. Work on host tensors is done on return; `stream`
 *             is ignored.
 * Layout.     An operand of "rows" (M, N) may have any rank >= 1: N is its last dimension, whose elements
 *             must be adjacent, and the leading dimensions must collapse into M rows one fixed stride apart.
 *             Pointers need to be aligned to the element only. M = 0 is valid; N must be >= 1.
 * Types.      x: float16, bfloat16 or float32; on host memory also float64. Statistics (loss, lse, rstd,
 *             denominator, dloss) are float32, or float64 where x is float64.
 * Aliasing.   An output may be the very same rows as x, dy or dout where its documentation says so; any
 *             other overlap is refused.
 * Threads.    All functions may be called from any thread at any time.
 * fork.       The library does not survive fork(): in a child of a process that had loaded it every
 *             function returns GANDER_ERROR_FORK (use spawn or forkserver).
 */
#ifndef GANDER_H
#define GANDER_H

#include <stddef.h>
#include <stdint.h>

#include "dlpack.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GANDER_ABI_VERSION 1

typedef enum {
  GANDER_OK = 0,
  GANDER_ERROR_NULL = 1,        /* a required pointer is NULL */
  GANDER_ERROR_SHAPE = 2,       /* rank or shape */
  GANDER_ERROR_DTYPE = 3,       /* element type */
  GANDER_ERROR_DEVICE = 4,      /* device type, or operands on different devices */
  GANDER_ERROR_LAYOUT = 5,      /* strides that cannot be served */
  GANDER_ERROR_ALIGNMENT = 6,   /* a pointer that is not aligned to its element */
  GANDER_ERROR_OVERLAP = 7,     /* an output overlaps another operand */
  GANDER_ERROR_OPTION = 8,      /* an option's value, or an option struct of unknown size */
  GANDER_ERROR_VERSION = 9,     /* a DLPack tensor of another major version */
  GANDER_ERROR_UNSUPPORTED = 10,/* valid, but not served by this build, driver or device */
  GANDER_ERROR_MEMORY = 11,     /* an allocation failed */
  GANDER_ERROR_CUDA = 12,       /* the CUDA driver refused */
  GANDER_ERROR_FORK = 13,       /* called in a child process after fork() */
  GANDER_ERROR_INTERNAL = 14    /* a defect of gander: please report it */
} gander_status;

/* The calling thread's last error message (UTF-8; "" before the first error). Valid until the thread's
 * next failing call. */
const char* gander_last_error(void);

/* "0.1.0" */
const char* gander_version(void);
/* GANDER_ABI_VERSION of the library. */
int32_t gander_abi_version(void);
/* A JSON object: version, abi_version, commit, go, nvcc, architectures (images in the library), simd (the
 * instruction set that host tensors are served with). After fork() it is empty, unless it was asked for before. */
const char* gander_build_info(void);

/* Caps the threads that one call on host tensors uses, 0 (the default): all that the Go runtime has. */
int32_t gander_set_num_threads(int32_t count);

/* Loads all kernels for a device, so that no later call pays for it. */
int32_t gander_warmup(DLDevice device);

/* Where a call gets temporary device memory from. `allocate` returns memory on the device of the operands
 * which may be used by work enqueued on the call's stream, or NULL; the caller frees it any time after the
 * call returned, in stream order. It is called at most once per call, and not for host tensors. */
typedef struct {
  void* context;
  void* (*allocate)(void* context, size_t bytes);
} gander_allocator;

/* Ways over the rows that softmax and RMSNorm can be told to take; gander_algorithms() describes them. One that cannot
 * serve the rows is refused with GANDER_ERROR_UNSUPPORTED and a message that says which limit was passed and which others
 * can, or replaced by auto where GANDER_ALGORITHM_IF_SERVED is added to it. Host tensors have auto alone. */
typedef enum {
  GANDER_ALGORITHM_AUTO = 0,
  GANDER_ALGORITHM_WARP = 1,
  GANDER_ALGORITHM_BLOCK = 2,
  GANDER_ALGORITHM_REGISTER = 3,
  GANDER_ALGORITHM_MEDIUM = 4,
  GANDER_ALGORITHM_EXTREME = 5,
  GANDER_ALGORITHM_CLUSTER = 6,
  GANDER_ALGORITHM_ARBITRARY = 7,
  GANDER_ALGORITHM_SPLITK = 8
} gander_algorithm;
#define GANDER_ALGORITHM_IF_SERVED 0x100

/* Options that all ops share. `size` is sizeof(the struct) of the caller, so that fields can be added.
 * A NULL options pointer means the defaults: every field 0 unless it says otherwise.
 * batch_invariant: 1 makes the bits of a row's results independent of how many rows there are. It does not concern sums
 * over rows (dw, a mean), and rows of whole 16-byte vectors have other bits where an operand is not aligned to 16 bytes. */
typedef struct {
  size_t size;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int32_t algorithm;                 /* gander_algorithm */
  int32_t batch_invariant;
} gander_softmax_options;

typedef struct {
  size_t size;
  const gander_allocator* allocator;
  double eps;            /* default 1e-6 (NULL options only; a given struct states it) */
  int32_t algorithm;
  int32_t batch_invariant;
} gander_rmsnorm_options;

typedef enum {
  GANDER_REDUCTION_NONE = 0,
  GANDER_REDUCTION_MEAN = 1,
  GANDER_REDUCTION_SUM = 2
} gander_reduction;

typedef struct {
  size_t size;
  const gander_allocator* allocator;
  int64_t ignore_index;  /* default -100 (NULL options only; a given struct states it) */
  int32_t reduction;     /* gander_reduction */
  /* 1: forward and backward share one pass over x. Forward's dx is then the gradient of the reduced loss (over the
   * denominator with GANDER_REDUCTION_MEAN); backward is given that dx, apart from x, and makes it again only where dloss,
   * a single element, is not 1: it looks on the device, nothing synchronises. Not with GANDER_REDUCTION_NONE. */
  int32_t one_pass;
  int32_t algorithm;     /* GANDER_ALGORITHM_AUTO: there are no others */
  int32_t batch_invariant;
} gander_cross_entropy_options;

/* ---- Borrowed tensors: nothing is kept, freed or allocated, outputs are written where they lie ---- */

/* y[i] = exp(x[i] - max x) / sum exp(x - max x) for each row. x, y: (M, N) of one dtype. y may be x. */
int32_t gander_softmax_forward(const DLTensor* x, const DLTensor* y,
                               const gander_softmax_options* options, void* stream);

/* dx = (dy - sum(dy * y)) * y for each row. dy, y, dx: (M, N) of one dtype. dx may be dy or y. */
int32_t gander_softmax_backward(const DLTensor* dy, const DLTensor* y, const DLTensor* dx,
                                const gander_softmax_options* options, void* stream);

/* y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) for each row.
 * x: (M, N); weight: (N), contiguous, or NULL; y: (M, N); rstd: M elements, contiguous, or NULL.
 * weight and y may each be float16, bfloat16 or float32, whatever x is (float64 exactly when x is).
 * y may be x where the dtypes agree. */
int32_t gander_rmsnorm_forward(const DLTensor* x, const DLTensor* weight, const DLTensor* y,
                               const DLTensor* rstd, const gander_rmsnorm_options* options, void* stream);

/* With h = x * rstd and g = dout * weight:  dx = (g - h * mean(g * h)) * rstd,  dw = sum over rows of dout * h.
 * x, dout, dx: (M, N); weight: (N) or NULL; rstd: M; dw: (N), or NULL where it is not wanted (it must be NULL
 * without a weight). dx has the dtype of x, dw that of weight, dout any of the three (float64 exactly when x is).
 * dx may be dout where the dtypes agree.
 * dw is accumulated in float32 or wider in a fixed order. eps is not used. */
int32_t gander_rmsnorm_backward(const DLTensor* x, const DLTensor* weight, const DLTensor* dout,
                                const DLTensor* rstd, const DLTensor* dx, const DLTensor* dw,
                                const gander_rmsnorm_options* options, void* stream);

/* loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the row's log-sum-exp.
 * x: (M, N); target: M int32 or int64 elements, any stride; weight: (N) or NULL, float16, bfloat16 or float32
 * (float64 exactly when x is).
 * loss: M elements with GANDER_REDUCTION_NONE, else one element: the sum, or the sum over the sum of the counted
 * rows' weights. A row whose target is ignore_index counts for nothing: its loss is 0 and its gradient 0. A target
 * outside [0, N) is never read with: that row's loss and gradient are NaN.
 * lse: M elements, or (2, M) which receives the maximum and log(sum exp(x - max)) apart (what backward should be
 * given: their sum loses digits where logits are large), or NULL.
 * dx: (M, N) of x's dtype or NULL: in the same pass over x, weight[t] * (softmax(x) - onehot(t)), the gradient of the
 * sum of the losses. dx may be x.
 * denominator: one element or NULL: the mean's denominator, written with any reduction. */
int32_t gander_cross_entropy_forward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                     const DLTensor* loss, const DLTensor* lse, const DLTensor* dx,
                                     const DLTensor* denominator,
                                     const gander_cross_entropy_options* options, void* stream);

/* dx = dloss * weight[t] * (softmax(x) - onehot(t)), over denominator with GANDER_REDUCTION_MEAN.
 * dloss: M elements with any stride (0 too), or a single one for all rows. lse: M or (2, M), as forward wrote it.
 * denominator: one element; required with GANDER_REDUCTION_MEAN, else NULL. dx: x's shape and dtype; it may be x. */
int32_t gander_cross_entropy_backward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                      const DLTensor* dloss, const DLTensor* lse, const DLTensor* denominator,
                                      const DLTensor* dx,
                                      const gander_cross_entropy_options* options, void* stream);

/* ---- Owned tensors: inputs are consumed, outputs are new ----
 * Every input's deleter is called exactly once, whatever the status. Outputs are compact, live on x's device,
 * and must be released through their deleter; on failure they are set to NULL. The memory of CUDA outputs is
 * stream-ordered: use it on `stream`, or order other streams after it. While `stream` is being captured into a
 * graph they are refused with GANDER_ERROR_CUDA: capture borrowed calls. */

int32_t gander_softmax(DLManagedTensorVersioned* x, const gander_softmax_options* options, void* stream,
                       DLManagedTensorVersioned** y);

int32_t gander_softmax_grad(DLManagedTensorVersioned* dy, DLManagedTensorVersioned* y,
                            const gander_softmax_options* options, void* stream, DLManagedTensorVersioned** dx);

/* out_dtype: the dtype of y, or {0, 0, 0} for x's. rstd may be NULL: not wanted. */
int32_t gander_rmsnorm(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight, DLDataType out_dtype,
                       const gander_rmsnorm_options* options, void* stream,
                       DLManagedTensorVersioned** y, DLManagedTensorVersioned** rstd);

/* dw may be NULL: not wanted. */
int32_t gander_rmsnorm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight,
                            DLManagedTensorVersioned* dout, DLManagedTensorVersioned* rstd,
                            const gander_rmsnorm_options* options, void* stream,
                            DLManagedTensorVersioned** dx, DLManagedTensorVersioned** dw);

/* lse (M elements) and dx may be NULL: not wanted. */
int32_t gander_cross_entropy(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                             DLManagedTensorVersioned* weight,
                             const gander_cross_entropy_options* options, void* stream,
                             DLManagedTensorVersioned** loss, DLManagedTensorVersioned** lse,
                             DLManagedTensorVersioned** dx);

/* The gradient of the sum of dloss * loss; dloss: M elements or one (reduction must be none or sum). */
int32_t gander_cross_entropy_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                  DLManagedTensorVersioned* weight, DLManagedTensorVersioned* dloss,
                                  DLManagedTensorVersioned* lse,
                                  const gander_cross_entropy_options* options, void* stream,
                                  DLManagedTensorVersioned** dx);

/* ---- What would run ---- */

/* Says in words which kernel a call would run and why, for aligned compact rows (m, n) of x. op is "softmax_forward",
 * "softmax_backward", "rmsnorm_forward", "rmsnorm_backward" (with a weight), "cross_entropy_forward",
 * "cross_entropy_forward_dx" or "cross_entropy_backward"; algorithm and batch_invariant are those of its options. Writes at
 * most capacity bytes, always with a closing NUL. */
int32_t gander_explain(const char* op, int64_t m, int64_t n, DLDataType dtype, DLDevice device, int32_t algorithm,
                       int32_t batch_invariant, char* text, size_t capacity);

/* A JSON array of an op's algorithms (op as for gander_explain) in the order of gander_algorithm, each an object of strings:
 * name, what (it does), limits (which rows it serves). Writes at most capacity bytes, always with a closing NUL: GANDER_ERROR_OPTION
 * where that is too little. */
int32_t gander_algorithms(const char* op, char* text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
