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
 * Signals.    Install signal handlers before the library is loaded, or by sigaction() with SA_ONSTACK. One
 *             that signal() installs after the load lacks that flag: it may run on the small stack of Go code
 *             that it interrupts, write over what lies next to it, and so crash or hang the process. Handlers
 *             have 32 KiB of stack. Handlers of SIGSEGV, SIGBUS, SIGFPE and SIGPIPE from before the load are
 *             still called for what happens outside of Go. SIGURG is Go's own: an earlier handler is no
 *             longer called.
 * Memory.     A call on host tensors returns GANDER_ERROR_MEMORY where its temporary memory cannot be had.
 *             Go's runtime has no such answer. It aborts the process where the system refuses it a thread or
 *             heap for small objects, at any time, or at load about 1 GiB of address space (RLIMIT_NPROC,
 *             RLIMIT_AS).
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

#define GANDER_ABI_VERSION 2

/* generated: statuses, from internal/operators */
typedef enum {
  GANDER_OK = 0,                  /* done */
  GANDER_ERROR_NULL = 1,          /* a required tensor or pointer is missing */
  GANDER_ERROR_SHAPE = 2,         /* rank or shape */
  GANDER_ERROR_DTYPE = 3,         /* element type */
  GANDER_ERROR_DEVICE = 4,        /* device type, or operands on different devices */
  GANDER_ERROR_LAYOUT = 5,        /* strides that cannot be served */
  GANDER_ERROR_ALIGNMENT = 6,     /* a pointer that is not aligned to its element */
  GANDER_ERROR_OVERLAP = 7,       /* an output overlaps another operand */
  GANDER_ERROR_OPTION = 8,        /* an option's value, or an option struct of unknown size */
  GANDER_ERROR_VERSION = 9,       /* a DLPack tensor of another major version */
  GANDER_ERROR_UNSUPPORTED = 10,  /* valid, but not served by this build, driver or device */
  GANDER_ERROR_MEMORY = 11,       /* an allocation failed */
  GANDER_ERROR_CUDA = 12,         /* the CUDA driver refused */
  GANDER_ERROR_FORK = 13,         /* called in a child process after fork() */
  GANDER_ERROR_INTERNAL = 14      /* a defect of gander: please report it */
} gander_status;
/* end of what is generated */

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
/* generated: choices, from internal/operators */
typedef enum {
  GANDER_ALGORITHM_AUTO = 0, /* whatever was fastest where it was measured */
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

typedef enum {
  GANDER_REDUCTION_NONE = 0, /* a loss for each row */
  GANDER_REDUCTION_MEAN = 1, /* the sum of the rows' losses over the sum of the counted rows' weights */
  GANDER_REDUCTION_SUM = 2 /* the sum of the rows' losses */
} gander_reduction;
/* end of what is generated */

/* Options that all ops share. `size` is sizeof(the struct) of the caller, so that fields can be added.
 * A NULL options pointer means the defaults: every field 0 unless it says otherwise.
 * batch_invariant: 1 makes the bits of a row's results independent of how many rows there are. It does not concern sums
 * over rows (dw, a mean), and rows of whole 16-byte vectors have other bits where an operand is not aligned to 16 bytes. */
/* generated: options, from internal/operators */
typedef struct {
  size_t size;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int32_t algorithm; /* how a GPU goes over the rows: a gander_algorithm */
  int32_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_softmax_options;

typedef struct {
  size_t size;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* added to the mean of squares; backward does not use it; 1e-06 with NULL options, a given struct states
   * it */
  double eps;
  int32_t algorithm; /* how a GPU goes over the rows: a gander_algorithm */
  int32_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  double weight_offset; /* added to each weight; needs a weight */
} gander_rmsnorm_options;

typedef struct {
  size_t size;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* rows with this target count for nothing; -100 with NULL options, a given struct states it */
  int64_t ignore_index;
  int32_t reduction; /* what becomes of the rows' losses: a gander_reduction */
  /* forward and backward share one pass over x. Forward's dx is then the gradient of the reduced loss
   * (over the denominator with a mean); backward is given that dx, apart from x, and makes it again only
   * where dloss, a single element, is not 1: it looks on the device, nothing synchronises. Not with
   * reduction none */
  int32_t one_pass;
  int32_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_cross_entropy_options;

typedef struct {
  size_t size;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int32_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_logsumexp_options;
/* end of what is generated */

/* ---- Borrowed tensors: nothing is kept, freed or allocated, outputs are written where they lie ---- */

/* generated: borrowed, from internal/operators */
/* y[i] = exp(x[i] - max x) / sum exp(x - max x) for each row.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   y: (M, N); x's dtype; may be x where the dtypes agree. */
int32_t gander_softmax_forward(const DLTensor* x, const DLTensor* y, const gander_softmax_options* options,
                               void* stream);

/* dx = (dy - sum(dy * y)) * y for each row.
 *   dy: (M, N); float16, bfloat16, float32, on the host also float64.
 *   y: (M, N); dy's dtype.
 *   dx: (M, N); dy's dtype; may be dy or y where the dtypes agree. */
int32_t gander_softmax_backward(const DLTensor* dy, const DLTensor* y, const DLTensor* dx,
                                const gander_softmax_options* options, void* stream);

/* y = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) for each row (Zhang and
 * Sennrich, "Root Mean Square Layer Normalization", 2019).
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   weight: (N), contiguous; float16, bfloat16 or float32, float64 exactly where x is; or NULL.
 *   y: (M, N); float16, bfloat16 or float32, float64 exactly where x is; may be x where the dtypes agree.
 *   rstd: M elements, contiguous; float32, float64 where x is; or NULL. */
int32_t gander_rmsnorm_forward(const DLTensor* x, const DLTensor* weight, const DLTensor* y,
                               const DLTensor* rstd, const gander_rmsnorm_options* options, void* stream);

/* With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd for each
 * row, and dw = the sum over rows of dout * h, accumulated in float32 or wider in a fixed order.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   weight: (N), contiguous; float16, bfloat16 or float32, float64 exactly where x is; or NULL.
 *   dout: (M, N); float16, bfloat16 or float32, float64 exactly where x is.
 *   rstd: M elements, contiguous; float32, float64 where x is.
 *   dx: (M, N); x's dtype; may be dout where the dtypes agree.
 *   dw: (N), contiguous; weight's dtype; or NULL, as it must be without weight. */
int32_t gander_rmsnorm_backward(const DLTensor* x, const DLTensor* weight, const DLTensor* dout,
                                const DLTensor* rstd, const DLTensor* dx, const DLTensor* dw,
                                const gander_rmsnorm_options* options, void* stream);

/* loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the row's log-sum-exp; the loss of
 * each row, their sum, or the sum over the sum of the counted rows' weights (NaN where no row counts). A
 * row whose target is ignore_index, or whose class has weight 0, counts for nothing: its loss is 0 and its
 * gradient 0. A target outside [0, N) is never read with: that row's loss and gradient are NaN, and with a
 * mean those of all rows. dx, in the same pass over x: weight[t] * (softmax(x) - onehot(t)), the gradient
 * of the sum of the losses. denominator: the mean's, written with any reduction.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   target: M elements, any stride; int32 or int64.
 *   weight: (N), contiguous; float16, bfloat16 or float32, float64 exactly where x is; or NULL.
 *   loss: M elements with reduction none, else one; float32, float64 where x is.
 *   lse: M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: those and the denominator;
 *   float32, float64 where x is; or NULL.
 *   dx: (M, N); x's dtype; may be x where the dtypes agree; or NULL.
 *   denominator: one element; float32, float64 where x is; or NULL. */
int32_t gander_cross_entropy_forward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                     const DLTensor* loss, const DLTensor* lse, const DLTensor* dx,
                                     const DLTensor* denominator, const gander_cross_entropy_options* options,
                                     void* stream);

/* dx = dloss * weight[t] * (softmax(x) - onehot(t)), over the denominator with a mean, for which
 * denominator or a lse that contains it is required; denominator must be NULL otherwise. lse: as forward
 * wrote it, best in two parts, since their sum loses digits where logits are large.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   target: M elements, any stride; int32 or int64.
 *   weight: (N), contiguous; float16, bfloat16 or float32, float64 exactly where x is; or NULL.
 *   dloss: M elements of any stride, or one for all rows; float32, float64 where x is.
 *   lse: M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: those and the denominator;
 *   float32, float64 where x is.
 *   denominator: one element; float32, float64 where x is; or NULL.
 *   dx: (M, N); x's dtype; may be x where the dtypes agree; read too with one_pass, and then apart from
 *   the inputs. */
int32_t gander_cross_entropy_backward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                      const DLTensor* dloss, const DLTensor* lse, const DLTensor* denominator,
                                      const DLTensor* dx, const gander_cross_entropy_options* options,
                                      void* stream);

/* lse = log(sum exp(x)) for each row, its maximum subtracted first. A row of -inf gives -inf; one with
 * +inf or NaN gives NaN.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   lse: M elements, contiguous; float32, float64 where x is. */
int32_t gander_logsumexp_forward(const DLTensor* x, const DLTensor* lse,
                                 const gander_logsumexp_options* options, void* stream);

/* dx = dlse * exp(x - lse) for each row.
 *   x: (M, N); float16, bfloat16, float32, on the host also float64.
 *   dlse: M elements, any stride; float32, float64 where x is.
 *   lse: M elements, contiguous; float32, float64 where x is.
 *   dx: (M, N); x's dtype; may be x where the dtypes agree. */
int32_t gander_logsumexp_backward(const DLTensor* x, const DLTensor* dlse, const DLTensor* lse,
                                  const DLTensor* dx, const gander_logsumexp_options* options, void* stream);
/* end of what is generated */

/* ---- Owned tensors: inputs are consumed, outputs are new ----
 * Every input's deleter is called exactly once, whatever the status. Outputs are compact, live on x's device,
 * and must be released through their deleter; on failure they are set to NULL. The memory of CUDA outputs is
 * stream-ordered: use it on `stream`, or order other streams after it. While `stream` is being captured into a
 * graph they are refused with GANDER_ERROR_CUDA: capture borrowed calls. */

/* generated: owned, from internal/operators */
/* gander_softmax_forward with tensors that change hands. */
int32_t gander_softmax(DLManagedTensorVersioned* x, const gander_softmax_options* options, void* stream,
                       DLManagedTensorVersioned** y);

/* gander_softmax_backward with tensors that change hands. */
int32_t gander_softmax_grad(DLManagedTensorVersioned* dy, DLManagedTensorVersioned* y,
                            const gander_softmax_options* options, void* stream,
                            DLManagedTensorVersioned** dx);

/* gander_rmsnorm_forward with tensors that change hands. out_dtype: the dtype of y, or {0, 0, 0} for x's.
 * rstd: NULL where not wanted. */
int32_t gander_rmsnorm(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight, DLDataType out_dtype,
                       const gander_rmsnorm_options* options, void* stream, DLManagedTensorVersioned** y,
                       DLManagedTensorVersioned** rstd);

/* gander_rmsnorm_backward with tensors that change hands. dw: NULL where not wanted. */
int32_t gander_rmsnorm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight,
                            DLManagedTensorVersioned* dout, DLManagedTensorVersioned* rstd,
                            const gander_rmsnorm_options* options, void* stream,
                            DLManagedTensorVersioned** dx, DLManagedTensorVersioned** dw);

/* gander_cross_entropy_forward with tensors that change hands. lse has M elements. lse, dx, denominator:
 * NULL where not wanted. */
int32_t gander_cross_entropy(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                             DLManagedTensorVersioned* weight, const gander_cross_entropy_options* options,
                             void* stream, DLManagedTensorVersioned** loss, DLManagedTensorVersioned** lse,
                             DLManagedTensorVersioned** dx, DLManagedTensorVersioned** denominator);

/* gander_cross_entropy_backward with tensors that change hands. one_pass is refused, as dx would be read. */
int32_t gander_cross_entropy_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                  DLManagedTensorVersioned* weight, DLManagedTensorVersioned* dloss,
                                  DLManagedTensorVersioned* lse, DLManagedTensorVersioned* denominator,
                                  const gander_cross_entropy_options* options, void* stream,
                                  DLManagedTensorVersioned** dx);

/* gander_logsumexp_forward with tensors that change hands. */
int32_t gander_logsumexp(DLManagedTensorVersioned* x, const gander_logsumexp_options* options, void* stream,
                         DLManagedTensorVersioned** lse);

/* gander_logsumexp_backward with tensors that change hands. */
int32_t gander_logsumexp_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dlse,
                              DLManagedTensorVersioned* lse, const gander_logsumexp_options* options,
                              void* stream, DLManagedTensorVersioned** dx);
/* end of what is generated */

/* ---- What would run ---- */

/* Says in words which kernel a call would run and why, for aligned compact rows (m, n) of x. op is "softmax_forward",
 * "softmax_backward", "rmsnorm_forward", "rmsnorm_backward" (with a weight), "cross_entropy_forward",
 * "cross_entropy_forward_dx" or "cross_entropy_backward"; algorithm and batch_invariant are those of its options. Writes at
 * most capacity bytes, always with a closing NUL. */
int32_t gander_explain(const char* op, int64_t m, int64_t n, DLDataType dtype, DLDevice device, int32_t algorithm,
                       int32_t batch_invariant, char* text, size_t capacity);

/* gander_explain for a GPU that need not be there, by its name: "a100", "h100" or "h200". */
int32_t gander_explain_device(const char* op, int64_t m, int64_t n, DLDataType dtype, const char* device, int32_t algorithm,
                              int32_t batch_invariant, char* text, size_t capacity);

/* A JSON array of an op's algorithms (op as for gander_explain) in the order of gander_algorithm, each an object of strings:
 * name, what (it does), limits (which rows it serves). Writes at most capacity bytes, always with a closing NUL: GANDER_ERROR_OPTION
 * where that is too little. */
int32_t gander_algorithms(const char* op, char* text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
