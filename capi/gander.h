/* gander: softmax, norms, gated linear units and cross-entropy at the speed of memory, forward and backward.
 *
 * The C ABI of libgander. It takes DLPack tensors in host memory or in CUDA device memory.
 *
 * Status.     Every function that can fail returns 0 (GANDER_OK) or one of the codes below;
 *             gander_last_error() then returns the calling thread's message: which argument, its value,
 *             what was expected, what to do. A refused call writes nothing to its outputs.
 * Streams.    Work on CUDA tensors is enqueued on `stream` (a cudaStream_t or CUstream; NULL is the legacy
 *             default stream); no call synchronizes. Work on host tensors is done on return; `stream`
 *             is ignored.
 * Layout.     An operand of "rows" (M, N) may have any rank >= 1: N is its last dimension, whose elements
 *             must be adjacent, and the leading dimensions must collapse into M rows one fixed stride apart.
 *             Pointers need to be aligned to the element only. M = 0 is valid; N must be >= 1.
 * Types.      x: float16, bfloat16 or float32; on host memory also float64. Statistics (loss, lse, rstd,
 *             denominator, dloss) are float32, or float64 where x is float64.
 * Aliasing.   An output may be exactly the same rows as an input if its documentation says so. Any other
 *             overlap is refused.
 * Threads.    All functions may be called from any thread at any time.
 * Signals.    Install signal handlers before the library is loaded, or by sigaction() with SA_ONSTACK. A
 *             handler that signal() installs after the load lacks that flag. It may run on the small stack of
 *             Go code that it interrupts, overflow it, and so crash or hang the process. Handlers have 32 KiB
 *             of stack. Earlier handlers of SIGSEGV, SIGBUS, SIGFPE and SIGPIPE are still called for signals
 *             outside of Go code. An earlier handler of SIGURG, which Go uses, is no longer called.
 * Memory.     A call on host tensors returns GANDER_ERROR_MEMORY if its temporary memory cannot be allocated.
 *             Go's runtime cannot return an error. It aborts the process if the system refuses it a thread or
 *             heap memory (RLIMIT_NPROC, RLIMIT_AS), or about 1 GiB of address space when it is loaded.
 * Copies.     A process should have one libgander, because two would be two Go runtimes. Every copy of one
 *             GANDER_ABI_VERSION has the same SONAME. So what is linked against it, and the Python package,
 *             share the first one that is loaded. dlopen finds that by the SONAME ("libgander.so.4"), but
 *             loads a second one when it is given the path of another copy.
 * C library.  glibc. Go's shared libraries do not start with musl, which is refused below.
 * fork.       The library does not survive fork(). In a child of a process that has loaded it, every
 *             function returns GANDER_ERROR_FORK. Use spawn or forkserver.
 */
#ifndef GANDER_H
#define GANDER_H

#include <stddef.h>
#include <stdint.h>

#include "dlpack.h"

#if defined(__linux__) && __STDC_HOSTED__ && !defined(__GLIBC__)
#error "This C library is not glibc, which libgander needs: compile for glibc, not for musl."
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define GANDER_ABI_VERSION 4

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
  GANDER_ERROR_INTERNAL = 14      /* a bug in gander: please report it */
} gander_status;
/* end of what is generated */

/* The calling thread's last error message (UTF-8; "" before the first error). Valid until the thread's
 * next failing call. */
const char* gander_last_error(void);

/* MAJOR.MINOR.PATCH */
const char* gander_version(void);
/* GANDER_ABI_VERSION of the library. */
int32_t gander_abi_version(void);
/* A JSON object: version, abi_version, commit, go, nvcc, architectures (images in the library), simd (the
 * instruction set for host tensors). After fork() it is empty, unless the parent has called this function. */
const char* gander_build_info(void);

/* Limits the threads that one call on host tensors uses. 0, the default, means all threads of the Go
 * runtime. */
int32_t gander_set_num_threads(int32_t count);

/* Calls task(from, to, context) for ranges that make up [begin, end), on several threads if it can, and
 * returns when all calls have returned. No number may be in two of the ranges; ranges may be left out, and
 * the result is ignored. grain_size, here 1, is the size of a range that is worth a thread. Several threads
 * may call this function at the same time. It must not throw an exception. PyTorch's stable ABI has such a
 * function. */
typedef int32_t (*gander_parallel_for)(int64_t begin, int64_t end, int64_t grain_size,
                                       void (*task)(int64_t from, int64_t to, void* context), void* context);

/* Makes calls on host tensors use the threads of the caller's framework. The library's own, which NULL, the
 * default, stands for, would compete with those for the processors. Results have the same bits. The library
 * goes on using its own where gander_set_num_threads has set more than Go has processors, and calls that run
 * at the same time share Go's processors. The function must stay loaded until the calls that began before
 * another one was set have returned. */
int32_t gander_set_parallel_for(gander_parallel_for parallel_for);

/* Loads all kernels for a device, so that no later call has to. */
int32_t gander_warmup(DLDevice device);

/* A source of temporary device memory. `allocate` returns NULL, or memory on the operands' device that work
 * on the call's stream may use. The caller frees it in stream order, at any time after the call returned.
 * `allocate` is called at most once per call, and never for host tensors. */
typedef struct {
  void* context;
  void* (*allocate)(void* context, size_t bytes);
} gander_allocator;

/* Algorithms that can be requested for softmax and RMSNorm; gander_algorithms() describes them. If one
 * does not support the rows, the call is refused with GANDER_ERROR_UNSUPPORTED. The message says which
 * limit was exceeded and which algorithms support the rows. With GANDER_ALGORITHM_IF_SERVED added to it,
 * auto takes its place instead. Host tensors support auto only. */
/* generated: choices, from internal/operators */
typedef enum {
  GANDER_ALGORITHM_AUTO = 0, /* the one that was fastest in measurements */
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

/* ---- Optional operands and options ----
 * Each function has an option struct with its optional operands and its options. NULL in its place means the
 * defaults. Begin a struct with its initializer, which sets every field to its default:
 *
 *   gander_rmsnorm_forward_options options = GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS;
 *   options.weight = &weight;
 *   options.eps = 0;
 *   if (gander_rmsnorm_forward(&x, &y, &options, stream)) puts(gander_last_error());
 *
 * Then each field means what it says: an eps of 0 is 0, not its default. A struct whose magic is not
 * GANDER_OPTIONS_MAGIC is refused: it may be zeros, of which nobody can tell which were meant. Bindings for
 * other languages set size (of the struct), magic, and the defaults that comments name. All other defaults
 * are 0 and NULL.
 *
 * Later versions add fields at the end. If the caller's struct is shorter than the library's, the fields
 * that it lacks have their defaults. If it is longer, the bytes that the library does not know must be 0;
 * otherwise the call is refused. Each field has 8 bytes, size and magic 4, so there is no padding.
 *
 * batch_invariant: with 1, the bits of a row's results do not depend on the number of rows. This does not
 * apply to sums over rows (dw, a mean). If rows are whole 16-byte vectors, their bits also depend on
 * whether all operands are aligned to 16 bytes. */
#define GANDER_OPTIONS_MAGIC 0x646e6167u /* "gand" */

/* ---- Borrowed tensors: nothing is kept, freed or allocated; outputs are written in place ----
 * All tensors, those in the option struct too, stay the caller's, whatever the status. */

/* generated: borrowed, from internal/operators */
typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t algorithm; /* how a GPU processes the rows: a gander_algorithm */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_softmax_forward_options;
#define GANDER_SOFTMAX_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_softmax_forward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0}

/* y[i] = exp(x[i] - max x) / sum exp(x - max x) for each row.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_softmax_forward(const DLTensor* x, const DLTensor* y,
                               const gander_softmax_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t algorithm; /* how a GPU processes the rows: a gander_algorithm */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_softmax_backward_options;
#define GANDER_SOFTMAX_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_softmax_backward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0}

/* dx = (dy - sum(dy * y)) * y for each row.
 *   dy: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); dy's dtype.
 *   dx: (M, N); dy's dtype; may be dy or y if the dtypes agree. */
int32_t gander_softmax_backward(const DLTensor* dy, const DLTensor* y, const DLTensor* dx,
                                const gander_softmax_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* broadcasts to the first operand's shape; the leading dimensions' strides collapse into three or fewer,
   * the last stride is 1 or 0; bool or uint8; or float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* mask;
  double scale; /* x is multiplied by it before the mask is applied; 1 by default */
  int64_t log; /* y is the logarithm of the softmax */
  int64_t causal; /* also masks the columns after i in row i of each (Q, N), the last two dimensions */
  int64_t masked_zero; /* a row that is masked whole becomes zeros (-inf with log), else NaN */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_masked_softmax_forward_options;
#define GANDER_MASKED_SOFTMAX_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_masked_softmax_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 1, 0, 0, 0, 0}

/* y = exp(h - max h) / sum exp(h - max h) for each row, or with log h - max h - log(sum exp(h - max h)),
 * with h = x * scale, which is not rounded. A bool or uint8 mask lets the elements take part where it is
 * not 0. Any other is added to h, and -inf masks an element. Masked elements count for nothing, whatever
 * they are: their y is 0, or with log -inf. A row is NaN, its masked elements too, if those that take part
 * have a NaN or +inf, or are all -inf.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); float64 if x is, else float16, bfloat16 or float32; may be x if the dtypes agree. */
int32_t gander_masked_softmax_forward(const DLTensor* x, const DLTensor* y,
                                      const gander_masked_softmax_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* broadcasts to the first operand's shape; the leading dimensions' strides collapse into three or fewer,
   * the last stride is 1 or 0; bool or uint8; or float64 if dy is, else float16, bfloat16 or float32 */
  const DLTensor* mask;
  double scale; /* x is multiplied by it before the mask is applied; 1 by default */
  int64_t log; /* y is the logarithm of the softmax */
  int64_t causal; /* also masks the columns after i in row i of each (Q, N), the last two dimensions */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_masked_softmax_backward_options;
#define GANDER_MASKED_SOFTMAX_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_masked_softmax_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 1, 0, 0, 0}

/* dx = scale * (dy - sum(dy * y)) * y for each row, or with log dx = scale * (dy - exp(y) * sum(dy)). The
 * sums are over the elements that take part. dx of a masked element is 0, whatever dy and y are there.
 *   dy: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); float64 if dy is, else float16, bfloat16 or float32.
 *   dx: (M, N); float64 if dy is, else float16, bfloat16 or float32; may be dy or y if the dtypes agree. */
int32_t gander_masked_softmax_backward(const DLTensor* dy, const DLTensor* y, const DLTensor* dx,
                                       const gander_masked_softmax_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32 */
  const DLTensor* weight;
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32; has the shape of weight */
  const DLTensor* bias;
  /* (M, N); float64 if x is, else float16, bfloat16 or float32; has the shape of x */
  const DLTensor* residual;
  /* (M, N); float64 if x is, else float16, bfloat16 or float32; may be residual or x if the dtypes agree */
  const DLTensor* residual_out;
  const DLTensor* rstd; /* M elements, contiguous; float64 if x is, else float32 */
  double eps; /* added to the mean of squares; 1e-06 by default */
  int64_t algorithm; /* how a GPU processes the rows: a gander_algorithm */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  double weight_offset; /* added to each weight; needs a weight */
  /* h * rstd is rounded to x's dtype before the weight is applied, and in backward to dx's */
  int64_t round_normalized;
} gander_rmsnorm_forward_options;
#define GANDER_RMSNORM_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_rmsnorm_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, 1e-06, \
  0, 0, 0, 0}

/* y = h * rstd * (weight + weight_offset) + bias with h = x + residual, which is not rounded, and rstd = 1
 * / sqrt(mean(h^2) + eps) for each row (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019).
 * residual_out receives h. A weight or bias of shape (H, N) is that of each head, and both have it. With
 * them, bias, residual, residual_out, weight_offset or round_normalized the only algorithm is auto.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); float64 if x is, else float16, bfloat16 or float32; may be x if the dtypes agree. */
int32_t gander_rmsnorm_forward(const DLTensor* x, const DLTensor* y,
                               const gander_rmsnorm_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32 */
  const DLTensor* weight;
  const DLTensor* dresidual_out; /* (M, N); float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* dresidual; /* (M, N); float64 if x is, else float16, bfloat16 or float32 */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; weight's dtype; must be NULL without weight;
   * has the shape of weight */
  const DLTensor* dw;
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32; has the shape of weight */
  const DLTensor* db;
  int64_t algorithm; /* how a GPU processes the rows: a gander_algorithm */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  double weight_offset; /* added to each weight; needs a weight */
  /* h * rstd is rounded to x's dtype before the weight is applied, and in backward to dx's */
  int64_t round_normalized;
} gander_rmsnorm_backward_options;
#define GANDER_RMSNORM_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_rmsnorm_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, \
  0, 0}

/* x is forward's residual_out if it wrote one, else its x. With h = x * rstd and g = dout * (weight +
 * weight_offset): dx = (g - h * mean(g * h)) * rstd + dresidual_out for each row. dresidual receives the
 * same numbers as dx. dw = the sum over rows of dout * h, and db = the sum over rows of dout, accumulated
 * in at least float32 in a fixed order. With a weight of shape (H, N) the sums are over the rows of each
 * head. With that, dresidual_out, dresidual, db, weight_offset, round_normalized or a dx of another dtype
 * than x the only algorithm is auto.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dout: (M, N); float64 if x is, else float16, bfloat16 or float32.
 *   rstd: M elements, contiguous; float64 if x is, else float32.
 *   dx: (M, N); float64 if x is, else float16, bfloat16 or float32; may be dout if the dtypes agree. */
int32_t gander_rmsnorm_backward(const DLTensor* x, const DLTensor* dout, const DLTensor* rstd,
                                const DLTensor* dx, const gander_rmsnorm_backward_options* options,
                                void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* rnorm; /* M elements, contiguous; float64 if x is, else float32 */
  double eps; /* added to the sum of squares; 1e-06 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_l2norm_forward_options;
#define GANDER_L2NORM_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_l2norm_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 1e-06, 0}

/* y = x * rnorm with rnorm = 1 / sqrt(sum(x^2) + eps) for each row.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_l2norm_forward(const DLTensor* x, const DLTensor* y,
                              const gander_l2norm_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_l2norm_backward_options;
#define GANDER_L2NORM_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_l2norm_backward_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* dx = (dy - h * sum(dy * h)) * rnorm with h = x * rnorm for each row.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dy: (M, N); x's dtype.
 *   rnorm: M elements, contiguous; float64 if x is, else float32.
 *   dx: (M, N); x's dtype; may be dy if the dtypes agree. */
int32_t gander_l2norm_backward(const DLTensor* x, const DLTensor* dy, const DLTensor* rnorm,
                               const DLTensor* dx, const gander_l2norm_backward_options* options,
                               void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t gelu; /* the activation is GELU, not SiLU */
  int64_t tanh; /* with gelu: by its approximation with a hyperbolic tangent */
  int64_t round_activation; /* act(gate) is rounded to gate's dtype before it is multiplied */
} gander_glu_forward_options;
#define GANDER_GLU_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_glu_forward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* y = act(gate) * up for each element (Shazeer, "GLU Variants Improve Transformer", 2020), where act(v) is
 * v * sigmoid(v), or with gelu v times the normal distribution's share below v.
 *   gate: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   up: (M, N); gate's dtype.
 *   y: (M, N); gate's dtype; may be gate or up if the dtypes agree. */
int32_t gander_glu_forward(const DLTensor* gate, const DLTensor* up, const DLTensor* y,
                           const gander_glu_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t gelu; /* the activation is GELU, not SiLU */
  int64_t tanh; /* with gelu: by its approximation with a hyperbolic tangent */
  int64_t round_activation; /* act(gate) is rounded to gate's dtype before it is multiplied */
} gander_glu_backward_options;
#define GANDER_GLU_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_glu_backward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* dgate = dy * up * act'(gate) and dup = dy * act(gate) for each element.
 *   gate: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   up: (M, N); gate's dtype.
 *   dy: (M, N); gate's dtype.
 *   dgate: (M, N); gate's dtype; may be gate if the dtypes agree.
 *   dup: (M, N); gate's dtype; may be up if the dtypes agree. */
int32_t gander_glu_backward(const DLTensor* gate, const DLTensor* up, const DLTensor* dy,
                            const DLTensor* dgate, const DLTensor* dup,
                            const gander_glu_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t gelu; /* the activation is GELU, not SiLU */
  int64_t tanh; /* with gelu: by its approximation with a hyperbolic tangent */
  int64_t round_activation; /* act(gate) is rounded to gate's dtype before it is multiplied */
} gander_packed_glu_forward_options;
#define GANDER_PACKED_GLU_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_packed_glu_forward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* glu_forward of the two halves of each row: y = act(x[:N / 2]) * x[N / 2:].
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N / 2); x's dtype. */
int32_t gander_packed_glu_forward(const DLTensor* x, const DLTensor* y,
                                  const gander_packed_glu_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t gelu; /* the activation is GELU, not SiLU */
  int64_t tanh; /* with gelu: by its approximation with a hyperbolic tangent */
  int64_t round_activation; /* act(gate) is rounded to gate's dtype before it is multiplied */
} gander_packed_glu_backward_options;
#define GANDER_PACKED_GLU_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_packed_glu_backward_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* dx is dgate and dup of glu_backward, in the two halves of each row.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dy: (M, N / 2); x's dtype.
 *   dx: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_packed_glu_backward(const DLTensor* x, const DLTensor* dy, const DLTensor* dx,
                                   const gander_packed_glu_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* k; /* (B, S, any number, N); q's dtype */
  const DLTensor* offsets; /* one for each sequence, contiguous; int32 or int64 */
  const DLTensor* cu_seqlens; /* one for each sequence and one more, contiguous; int32 or int64 */
  /* (B, S, any number, N); q's dtype; may be k if the dtypes agree; must be NULL without k; has the shape
   * of k */
  const DLTensor* k_out;
  int64_t offset; /* added to the positions of all tokens */
  int64_t interleaved; /* a pair is two adjacent elements, not one of each half */
  /* cos and sin have a number for each element of the part that is rotated, not for each pair */
  int64_t per_element;
  int64_t round_products; /* products are rounded to the rows' dtype before they are added */
} gander_rotary_forward_options;
#define GANDER_ROTARY_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_rotary_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}

/* Each pair of elements (a, b) of a head becomes (a cos - b sin, b cos + a sin), with the numbers of the
 * token's position and of the pair (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
 * Embedding", 2021). The pairs are those of the first R columns, R = 2 W, or with per_element W: elements
 * i and i + R / 2, or with interleaved 2 i and 2 i + 1. With per_element each element has the cos and sin
 * of its column. The other columns are copied. A token's position is its place in its sequence plus
 * offset, and plus its sequence's number of offsets. cu_seqlens has the first token of each of the
 * sequences that lie one after the other, and the end of the last. Tokens of none are copied. A token
 * whose position is not in the table becomes NaN.
 *   q: (B, S, H, N), where B is any dimensions; float16, bfloat16 or float32, on the host also float64.
 *   cos: (T, W): a row for each position; or (B, T, W), a table for each sequence; float64 if q is, else
 *   float16, bfloat16 or float32.
 *   sin: (T, W): a row for each position; or (B, T, W), a table for each sequence; cos's dtype; has the
 *   shape of cos.
 *   q_out: (B, S, H, N), where B is any dimensions; q's dtype; may be q if the dtypes agree. */
int32_t gander_rotary_forward(const DLTensor* q, const DLTensor* cos, const DLTensor* sin,
                              const DLTensor* q_out, const gander_rotary_forward_options* options,
                              void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* dk_out; /* (B, S, any number, N); dq_out's dtype */
  const DLTensor* offsets; /* one for each sequence, contiguous; int32 or int64 */
  const DLTensor* cu_seqlens; /* one for each sequence and one more, contiguous; int32 or int64 */
  /* (B, S, any number, N); dq_out's dtype; may be dk_out if the dtypes agree; must be NULL without dk_out;
   * has the shape of dk_out */
  const DLTensor* dk;
  int64_t offset; /* added to the positions of all tokens */
  int64_t interleaved; /* a pair is two adjacent elements, not one of each half */
  /* cos and sin have a number for each element of the part that is rotated, not for each pair */
  int64_t per_element;
  int64_t round_products; /* products are rounded to the rows' dtype before they are added */
} gander_rotary_backward_options;
#define GANDER_ROTARY_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_rotary_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}

/* The gradients of q and k: each pair (a, b) of the gradients of q_out and k_out becomes (a cos + b sin, b
 * cos - a sin). All else is as in rotary_forward.
 *   dq_out: (B, S, H, N), where B is any dimensions; float16, bfloat16 or float32, on the host also
 *   float64.
 *   cos: (T, W): a row for each position; or (B, T, W), a table for each sequence; float64 if dq_out is,
 *   else float16, bfloat16 or float32.
 *   sin: (T, W): a row for each position; or (B, T, W), a table for each sequence; cos's dtype; has the
 *   shape of cos.
 *   dq: (B, S, H, N), where B is any dimensions; dq_out's dtype; may be dq_out if the dtypes agree. */
int32_t gander_rotary_backward(const DLTensor* dq_out, const DLTensor* cos, const DLTensor* sin,
                               const DLTensor* dq, const gander_rotary_backward_options* options,
                               void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* k; /* (B, S, any number, N); q's dtype */
  const DLTensor* q_weight; /* (N), contiguous; float64 if q is, else float16, bfloat16 or float32 */
  const DLTensor* k_weight; /* (N), contiguous; float64 if q is, else float16, bfloat16 or float32 */
  const DLTensor* offsets; /* one for each sequence, contiguous; int32 or int64 */
  const DLTensor* cu_seqlens; /* one for each sequence and one more, contiguous; int32 or int64 */
  /* (B, S, any number, N); q's dtype; may be k if the dtypes agree; must be NULL without k; has the shape
   * of k */
  const DLTensor* k_out;
  int64_t offset; /* added to the positions of all tokens */
  int64_t interleaved; /* a pair is two adjacent elements, not one of each half */
  /* cos and sin have a number for each element of the part that is rotated, not for each pair */
  int64_t per_element;
  double eps; /* added to the mean of squares; 1e-06 by default */
  double weight_offset; /* added to each weight; needs a weight */
  /* x * rstd is rounded to q's dtype before the weight is applied, and in the weights' gradients */
  int64_t round_normalized;
  /* the normalized head is rounded to q's dtype, and so are products before they are added */
  int64_t round_products;
} gander_qk_norm_rotary_forward_options;
#define GANDER_QK_NORM_ROTARY_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_qk_norm_rotary_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, 0, 0, 0, 1e-06, 0, 0, 0}

/* rotary_forward of n = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) for each
 * head x of q and k, of at most 512 columns. Without weights they are 1.
 *   q: (B, S, H, N), where B is any dimensions; float16, bfloat16 or float32, on the host also float64.
 *   cos: (T, W): a row for each position; or (B, T, W), a table for each sequence; float64 if q is, else
 *   float16, bfloat16 or float32.
 *   sin: (T, W): a row for each position; or (B, T, W), a table for each sequence; cos's dtype; has the
 *   shape of cos.
 *   q_out: (B, S, H, N), where B is any dimensions; q's dtype; may be q if the dtypes agree. */
int32_t gander_qk_norm_rotary_forward(const DLTensor* q, const DLTensor* cos, const DLTensor* sin,
                                      const DLTensor* q_out,
                                      const gander_qk_norm_rotary_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* k; /* (B, S, any number, N); q's dtype */
  const DLTensor* q_weight; /* (N), contiguous; float64 if q is, else float16, bfloat16 or float32 */
  const DLTensor* k_weight; /* (N), contiguous; float64 if q is, else float16, bfloat16 or float32 */
  const DLTensor* offsets; /* one for each sequence, contiguous; int32 or int64 */
  const DLTensor* cu_seqlens; /* one for each sequence and one more, contiguous; int32 or int64 */
  const DLTensor* dk_out; /* (B, S, any number, N); q's dtype; must be NULL without k; has the shape of k */
  /* (B, S, any number, N); q's dtype; may be dk_out if the dtypes agree; must be NULL without dk_out; has
   * the shape of dk_out */
  const DLTensor* dk;
  const DLTensor* dq_weight; /* (N), contiguous; q_weight's dtype; must be NULL without q_weight */
  const DLTensor* dk_weight; /* (N), contiguous; k_weight's dtype; must be NULL without dk_out */
  int64_t offset; /* added to the positions of all tokens */
  int64_t interleaved; /* a pair is two adjacent elements, not one of each half */
  /* cos and sin have a number for each element of the part that is rotated, not for each pair */
  int64_t per_element;
  double eps; /* added to the mean of squares; 1e-06 by default */
  double weight_offset; /* added to each weight; needs a weight */
  /* x * rstd is rounded to q's dtype before the weight is applied, and in the weights' gradients */
  int64_t round_normalized;
  /* the normalized head is rounded to q's dtype, and so are products before they are added */
  int64_t round_products;
} gander_qk_norm_rotary_backward_options;
#define GANDER_QK_NORM_ROTARY_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_qk_norm_rotary_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, 0, 0, 0, 1e-06, 0, 0, 0}

/* With h = x * rstd, dn that of rotary_backward and g = dn * (weight + weight_offset): dx = (g - h *
 * mean(g * h)) * rstd for each head, and a weight's gradient is the sum over heads and tokens of dn * h,
 * accumulated in at least float32 in a fixed order. Without dk_out, k is left alone.
 *   q: (B, S, H, N), where B is any dimensions; float16, bfloat16 or float32, on the host also float64.
 *   cos: (T, W): a row for each position; or (B, T, W), a table for each sequence; float64 if q is, else
 *   float16, bfloat16 or float32.
 *   sin: (T, W): a row for each position; or (B, T, W), a table for each sequence; cos's dtype; has the
 *   shape of cos.
 *   dq_out: (B, S, H, N), where B is any dimensions; q's dtype.
 *   dq: (B, S, H, N), where B is any dimensions; q's dtype; may be dq_out if the dtypes agree. */
int32_t gander_qk_norm_rotary_backward(const DLTensor* q, const DLTensor* cos, const DLTensor* sin,
                                       const DLTensor* dq_out, const DLTensor* dq,
                                       const gander_qk_norm_rotary_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32 */
  const DLTensor* weight;
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32; has the shape of weight */
  const DLTensor* bias;
  /* (M, N); float64 if x is, else float16, bfloat16 or float32; has the shape of x */
  const DLTensor* residual;
  /* (M, N); float64 if x is, else float16, bfloat16 or float32; may be residual or x if the dtypes agree */
  const DLTensor* residual_out;
  const DLTensor* mean; /* M elements, contiguous; float64 if x is, else float32 */
  const DLTensor* rstd; /* M elements, contiguous; float64 if x is, else float32 */
  double eps; /* added to the variance; 1e-06 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_layernorm_forward_options;
#define GANDER_LAYERNORM_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_layernorm_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  1e-06, 0}

/* y = (h - mean) * rstd * weight + bias with h = x + residual and rstd = 1 / sqrt(mean((h - mean)^2) +
 * eps) for each row (Ba, Kiros and Hinton, "Layer Normalization", 2016). h is rounded to the dtype of
 * residual_out, which receives it. If residual_out is absent, that is the dtype which x + residual has in
 * torch: x's, or if residual has another one, float32 (float64 for float64). So y is the same with such a
 * residual_out and without. A weight or bias of shape (H, N) is that of each head, and both have it.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   y: (M, N); float64 if x is, else float16, bfloat16 or float32; may be x if the dtypes agree. */
int32_t gander_layernorm_forward(const DLTensor* x, const DLTensor* y,
                                 const gander_layernorm_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32 */
  const DLTensor* weight;
  const DLTensor* dresidual_out; /* (M, N); float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* dresidual; /* (M, N); float64 if x is, else float16, bfloat16 or float32 */
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; weight's dtype; must be NULL without weight;
   * has the shape of weight */
  const DLTensor* dw;
  /* (N), or (H, N) for rows of shape (..., H, N), contiguous; float64 if x is, else float16, bfloat16 or
   * float32; has the shape of weight */
  const DLTensor* db;
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_layernorm_backward_options;
#define GANDER_LAYERNORM_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_layernorm_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, 0}

/* x is forward's residual_out if it wrote one, else its x. With h = (x - mean) * rstd and g = dout *
 * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd + dresidual_out for each row, where mean(g) and
 * mean(g * h) are of the row. If x is float32, and on the host if it has 16 bits, h also has the digits of
 * x's mean that mean lost when it was rounded to float32. dresidual receives the same numbers as dx. dw =
 * the sum over rows of dout * h, and db = the sum over rows of dout, accumulated in at least float32 in a
 * fixed order. With a weight of shape (H, N) the sums are over the rows of each head.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dout: (M, N); float64 if x is, else float16, bfloat16 or float32.
 *   mean: M elements, contiguous; float64 if x is, else float32.
 *   rstd: M elements, contiguous; float64 if x is, else float32.
 *   dx: (M, N); float64 if x is, else float16, bfloat16 or float32; may be dout if the dtypes agree. */
int32_t gander_layernorm_backward(const DLTensor* x, const DLTensor* dout, const DLTensor* mean,
                                  const DLTensor* rstd, const DLTensor* dx,
                                  const gander_layernorm_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* weight; /* (N), contiguous; float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* divisor; /* one element; float64 if x is, else float32 */
  const DLTensor* upstream; /* one element; float64 if x is, else float32 */
  /* M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: those and the denominator;
   * float64 if x is, else float32 */
  const DLTensor* lse;
  const DLTensor* dx; /* (M, N); x's dtype; may be x if the dtypes agree */
  const DLTensor* denominator; /* one element; float64 if x is, else float32 */
  int64_t ignore_index; /* rows with this target are ignored; -100 by default */
  int64_t reduction; /* how the rows' losses are reduced: a gander_reduction */
  /* forward also computes the gradient, in the same pass over x: dx is the gradient of the reduced loss.
   * backward takes that dx, which must not overlap x, and computes it again only if dloss, a single
   * element, has other bits than upstream, or 1 without one. It compares them on the device, without
   * synchronization. If upstream is NaN, forward may leave dx as it is, and backward computes it. In two
   * parts, the second part of lse is then not the logarithm of a sum but a sum, from which both compute
   * the gradient, on a GPU with the same bits. Not with reduction none */
  int64_t one_pass;
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  double label_smoothing; /* the share of a row's loss that all classes have alike, 0 to 1; not with slice */
  double z_loss; /* the factor of lse^2 in a row's loss, at least 0; not with weight in a mean */
  /* x is mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap to scale * x /
   * temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
} gander_cross_entropy_forward_options;
#define GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_cross_entropy_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, -100, 0, 0, 0, 0, 0, 1, 0, 1}

/* loss[m] = weight[t] * (lse[m] - x[m, t]) with t = target[m] and lse the row's log-sum-exp. loss is the
 * loss of each row, their sum, or their mean: the sum divided by the denominator, which is the sum of the
 * weights of the rows that are not ignored (NaN if all are). A row is ignored if its target is
 * ignore_index or a class of weight 0; its loss and gradient are 0. The loss and gradient of a row whose
 * target is outside of [0, N) are NaN, as is a mean that it takes part in, with all gradients of the mean.
 * dx = weight[t] * (softmax(x) - onehot(t)), the gradient of the sum of the losses, is computed in the
 * same pass over x. With e = label_smoothing and C classes a row's loss is (1 - e) * weight[t] * (lse -
 * x[t]) + e / C * sum(weight[c] * (lse - x[c])) (Szegedy et al., "Rethinking the Inception Architecture
 * for Computer Vision", 2016), also if the target has weight 0; a class of weight 0 counts for nothing,
 * even if its logit is -inf. z_loss adds z_loss * lse^2 (Chowdhery et al., "PaLM: Scaling Language
 * Modeling with Pathways", 2022), also if the target has weight 0. With scale, softcap and temperature dx
 * is still the gradient of x. denominator is written with any reduction. Loss and dx are divided by
 * divisor, which must be NULL with reduction mean. dx is the gradient for an upstream gradient of
 * upstream, which is 1 if absent.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   target: the leading dimensions of the first operand, any stride; int32 or int64.
 *   loss: M elements with reduction none, else one; float64 if x is, else float32. */
int32_t gander_cross_entropy_forward(const DLTensor* x, const DLTensor* target, const DLTensor* loss,
                                     const gander_cross_entropy_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* weight; /* (N), contiguous; float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* divisor; /* one element; float64 if x is, else float32 */
  const DLTensor* upstream; /* one element; float64 if x is, else float32; must be NULL without one_pass */
  const DLTensor* denominator; /* one element; float64 if x is, else float32 */
  int64_t ignore_index; /* rows with this target are ignored; -100 by default */
  int64_t reduction; /* how the rows' losses are reduced: a gander_reduction */
  /* forward also computes the gradient, in the same pass over x: dx is the gradient of the reduced loss.
   * backward takes that dx, which must not overlap x, and computes it again only if dloss, a single
   * element, has other bits than upstream, or 1 without one. It compares them on the device, without
   * synchronization. If upstream is NaN, forward may leave dx as it is, and backward computes it. In two
   * parts, the second part of lse is then not the logarithm of a sum but a sum, from which both compute
   * the gradient, on a GPU with the same bits. Not with reduction none */
  int64_t one_pass;
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  /* x is a slice of each row's classes, and a target counts from the slice's first class; not with
   * one_pass. lse is that of whole rows. In a row whose target is not in the slice nothing is subtracted,
   * and its weight is 1 */
  int64_t slice;
  double label_smoothing; /* the share of a row's loss that all classes have alike, 0 to 1; not with slice */
  double z_loss; /* the factor of lse^2 in a row's loss, at least 0; not with weight in a mean */
  /* x is mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap to scale * x /
   * temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
} gander_cross_entropy_backward_options;
#define GANDER_CROSS_ENTROPY_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_cross_entropy_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, -100, \
  0, 0, 0, 0, 0, 0, 1, 0, 1}

/* dx = dloss * weight[t] * (softmax(x) - onehot(t)), or with e = label_smoothing dloss * ((1 - e) *
 * weight[t] * (softmax(x) - onehot(t)) + e / C * (sum(weight) * softmax(x) - weight)), with z_loss, scale,
 * softcap and temperature the gradient of forward's loss, divided by the denominator with reduction mean.
 * That requires denominator, or an lse that contains it; otherwise denominator must be NULL. With the
 * other reductions it is divided by divisor. upstream is forward's, with one_pass. lse is what forward
 * wrote. Its two parts are more accurate than their sum, which loses digits if logits are large.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   target: the leading dimensions of the first operand, any stride; int32 or int64.
 *   dloss: M elements of any stride, or one for all rows; float64 if x is, else float32.
 *   lse: M elements; (2, M): the maxima and log(sum exp(x - max)); or 2 M + 1: those and the denominator;
 *   float64 if x is, else float32.
 *   dx: (M, N); x's dtype; may be x if the dtypes agree; with one_pass it is also read, and must not
 *   overlap an input. */
int32_t gander_cross_entropy_backward(const DLTensor* x, const DLTensor* target, const DLTensor* dloss,
                                      const DLTensor* lse, const DLTensor* dx,
                                      const gander_cross_entropy_backward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* weight; /* (N), contiguous; float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* divisor; /* one element; float64 if x is, else float32 */
  const DLTensor* state; /* (M, 3), contiguous; float64 if x is, else float32 */
  int64_t reduction; /* how the rows' losses are reduced: a gander_reduction */
  double label_smoothing; /* the share of a row's target that is divided among all classes, 0 to 1 */
  double z_loss; /* the factor of lse^2 in a row's loss, at least 0 */
  /* x is mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap to scale * x /
   * temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_soft_cross_entropy_forward_options;
#define GANDER_SOFT_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_soft_cross_entropy_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, 0, 0, 0, \
  1, 0, 1, 0}

/* Cross-entropy of logits and class probabilities: loss[m] = sum(weight[c] * q[c] * (lse[m] - x[m, c]))
 * with q = target[m] and lse the row's log-sum-exp. A class of weight or q 0 counts for nothing, even if
 * its logit is -inf. q may be any numbers: neither their sign nor their sum is checked. With e =
 * label_smoothing and C classes q is (1 - e) * target[m] + e / C. z_loss adds z_loss * lse^2. With scale,
 * softcap and temperature all is of z. loss is the loss of each row, their sum, or their mean over the M
 * rows, whatever their weights (NaN without rows). It is divided by divisor, which must be NULL with
 * reduction mean. state receives what backward reads of each row: its maximum m, log(sum exp(x - m)), and
 * sum(weight[c] * q[c]).
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   target: (M, N); float64 if x is, else float16, bfloat16 or float32.
 *   loss: M elements with reduction none, else one; float64 if x is, else float32. */
int32_t gander_soft_cross_entropy_forward(const DLTensor* x, const DLTensor* target, const DLTensor* loss,
                                          const gander_soft_cross_entropy_forward_options* options,
                                          void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* weight; /* (N), contiguous; float64 if x is, else float16, bfloat16 or float32 */
  const DLTensor* divisor; /* one element; float64 if x is, else float32 */
  int64_t reduction; /* how the rows' losses are reduced: a gander_reduction */
  double label_smoothing; /* the share of a row's target that is divided among all classes, 0 to 1 */
  double z_loss; /* the factor of lse^2 in a row's loss, at least 0 */
  /* x is mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap to scale * x /
   * temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_soft_cross_entropy_backward_options;
#define GANDER_SOFT_CROSS_ENTROPY_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_soft_cross_entropy_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, 0, 0, 0, 1, \
  0, 1, 0}

/* dx[c] = dloss * (sum(weight * q) * softmax(x)[c] - weight[c] * q[c]) for each row, with z_loss, scale,
 * softcap and temperature the gradient of forward's loss. It is divided by M with reduction mean, with the
 * others by divisor. state is forward's. target gets no gradient.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   target: (M, N); float64 if x is, else float16, bfloat16 or float32.
 *   dloss: M elements of any stride, or one for all rows; float64 if x is, else float32.
 *   state: (M, 3), contiguous; float64 if x is, else float32.
 *   dx: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_soft_cross_entropy_backward(const DLTensor* x, const DLTensor* target, const DLTensor* dloss,
                                           const DLTensor* state, const DLTensor* dx,
                                           const gander_soft_cross_entropy_backward_options* options,
                                           void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* the leading dimensions of the first operand, any stride; int32, int64, bool or uint8 */
  const DLTensor* row_mask;
  const DLTensor* log_prob; /* M elements, contiguous; float64 if logits is, else float32 */
  const DLTensor* entropy; /* M elements, contiguous; float64 if logits is, else float32 */
  const DLTensor* log_sum_sq_probs; /* M elements, contiguous; float64 if logits is, else float32 */
  const DLTensor* mean_logit; /* M elements, contiguous; float64 if logits is, else float32 */
  const DLTensor* is_top1; /* M elements, contiguous; bool */
  const DLTensor* predicted; /* M elements, contiguous; int64 */
  const DLTensor* state; /* (M, 3), contiguous; float64 if logits is, else float32 */
  int64_t ignore_index; /* rows with this index are left out; -100 by default */
  /* logits is mapped to z = softcap * tanh(scale * logits / softcap) / temperature, without a softcap to
   * scale * logits / temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  /* logits is a slice of each row's tokens that begins with this one: index and predicted count from the
   * row's first token */
  int64_t first;
  /* how many tokens there are in all slices, by which mean_logit is divided; the state of a row that is
   * left out is then NaN; -1: logits has whole rows; -1 by default */
  int64_t classes;
} gander_token_statistics_forward_options;
#define GANDER_TOKEN_STATISTICS_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_token_statistics_forward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, -100, 1, 0, 1, 0, 0, -1}

/* Statistics of each row z of logits with p = softmax(z), in one pass: log_prob = log p[index], entropy =
 * -sum p log p, log_sum_sq_probs = log sum p^2, mean_logit = the mean of z, predicted = the first of the
 * largest elements' columns, and is_top1 = whether that is index. Outputs that are NULL are not computed.
 * A row is left out where row_mask is 0, and where index is ignore_index: its results are 0, and predicted
 * is -1. log_prob is NaN where index is outside of [0, N). The results of a row with a NaN or +inf, or of
 * -inf alone, are NaN; with a NaN or +inf predicted is -1. state receives what backward reads of each row:
 * its maximum m, log(sum exp(z - m)), which is -inf for a row of -inf alone, and sum p (m - z).
 *   logits: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   index: the leading dimensions of the first operand, any stride; int32 or int64. */
int32_t gander_token_statistics_forward(const DLTensor* logits, const DLTensor* index,
                                        const gander_token_statistics_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  /* the leading dimensions of the first operand, any stride; int32, int64, bool or uint8 */
  const DLTensor* row_mask;
  /* the leading dimensions of the first operand, any stride; float64 if logits is, else float32 */
  const DLTensor* dlog_prob;
  /* the leading dimensions of the first operand, any stride; float64 if logits is, else float32 */
  const DLTensor* dentropy;
  int64_t ignore_index; /* rows with this index are left out; -100 by default */
  /* logits is mapped to z = softcap * tanh(scale * logits / softcap) / temperature, without a softcap to
   * scale * logits / temperature, and all else is of z; more than 0; 1 by default */
  double scale;
  double softcap; /* see scale; more than 0, or 0 for none */
  double temperature; /* see scale; more than 0; 1 by default */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
  /* logits is a slice of each row's tokens, and an index counts from the slice's first token. state is
   * that of whole rows. Pass -1 for a token before the slice, whose index adds nothing there, as one
   * behind the slice does not: -2 is an index that no slice has, which makes dlog_prob's part of the row's
   * gradient NaN, and a row whose index is ignore_index is left out, so let that be -3. local of
   * gander_sharded_token_statistics_combine is such an index */
  int64_t slice;
} gander_token_statistics_backward_options;
#define GANDER_TOKEN_STATISTICS_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_token_statistics_backward_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, -100, 1, \
  0, 1, 0, 0}

/* The gradient of z is dz[j] = dlog_prob * ([j = index] - p[j]) - dentropy * p[j] * (log p[j] + entropy)
 * for each row, and dlogits is that of logits. One of dlog_prob and dentropy, or both, is given. state is
 * forward's. dlogits of a row that is left out is 0, whatever logits are. It is NaN where index is outside
 * of [0, N) and dlog_prob is given, except with slice.
 *   logits: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   index: the leading dimensions of the first operand, any stride; int32 or int64.
 *   state: (M, 3), contiguous; float64 if logits is, else float32.
 *   dlogits: (M, N); logits's dtype; may be logits if the dtypes agree. */
int32_t gander_token_statistics_backward(const DLTensor* logits, const DLTensor* index, const DLTensor* state,
                                         const DLTensor* dlogits,
                                         const gander_token_statistics_backward_options* options,
                                         void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* losses; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* loss; /* one element; float64 if parts is, else float32 */
  const DLTensor* weights; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* denominator; /* one element; float64 if parts is, else float32 */
  /* how many there are in all slices; -1: unknown, so that the loss of a target behind them is inf, not
   * NaN; -1 by default */
  int64_t classes;
  int64_t ignore_index; /* rows with this target are ignored; -100 by default */
  int64_t mean; /* loss is the sum of losses divided by the denominator */
  int64_t weighted; /* parts has the weights of the targets' classes */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_sharded_cross_entropy_combine_options;
#define GANDER_SHARDED_CROSS_ENTROPY_COMBINE_OPTIONS_DEFAULTS \
  {sizeof(gander_sharded_cross_entropy_combine_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, \
  -1, -100, 0, 0, 0}

/* The cross-entropy of N rows whose classes are divided into R slices, from what cross_entropy_forward
 * computes of each slice. parts is contiguous. For each slice it has the rows' maxima and the logarithms
 * of their sums of exp(x - max), the two parts of lse; then the loss of each row, NaN if the target is not
 * in the slice (a slice without classes has -inf, -inf, NaN); and with weighted the weight of the target's
 * class in the slice that has it, elsewhere 0. target counts the classes of all slices. losses, loss,
 * weights and denominator are as cross_entropy_forward's of whole rows: each row's loss, their sum or
 * mean, each row's weight, and the sum of the weights. max and log_sum are the two parts of the lse of
 * whole rows, except that log_sum is NaN if the target is outside of [0, classes) and the row is not
 * ignored: so is then its gradient in every slice.
 *   parts: (R, 3, N), or (R, 4, N) with weighted; float32, on the host also float64.
 *   target: (N), contiguous; int32 or int64.
 *   max: (N), contiguous; float64 if parts is, else float32.
 *   log_sum: (N), contiguous; float64 if parts is, else float32. */
int32_t gander_sharded_cross_entropy_combine(const DLTensor* parts, const DLTensor* target,
                                             const DLTensor* max, const DLTensor* log_sum,
                                             const gander_sharded_cross_entropy_combine_options* options,
                                             void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* row_mask; /* (N), contiguous; int32, int64, bool or uint8 */
  const DLTensor* log_prob; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* entropy; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* log_sum_sq_probs; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* mean_logit; /* (N), contiguous; float64 if parts is, else float32 */
  const DLTensor* is_top1; /* (N), contiguous; bool */
  const DLTensor* predicted; /* (N), contiguous; int64 */
  const DLTensor* state; /* (N, 3), contiguous; float64 if parts is, else float32 */
  const DLTensor* local; /* (N), contiguous; int64 */
  int64_t ignore_index; /* rows with this index are left out; -100 by default */
  int64_t first; /* the token with which this rank's slice begins */
  /* how many tokens there are in all slices; -1: unknown, so that log_prob of an index behind them is
   * -inf, not NaN; -1 by default */
  int64_t classes;
  /* parts has four numbers of each row, and of the results log_sum_sq_probs, mean_logit, is_top1 and
   * predicted must be absent */
  int64_t narrow;
} gander_sharded_token_statistics_combine_options;
#define GANDER_SHARDED_TOKEN_STATISTICS_COMBINE_OPTIONS_DEFAULTS \
  {sizeof(gander_sharded_token_statistics_combine_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, NULL, NULL, -100, 0, -1, 0}

/* The statistics of N rows whose tokens are divided into R slices, from what token_statistics_forward
 * computes of each slice with first and classes. parts is contiguous. For each slice it has the rows'
 * state, (N, 3), and log_prob; then without narrow log_sum_sq_probs, mean_logit, and predicted, whose
 * int64 take the place of two numbers of each row (if they are of float64, the second half of it is not
 * read). A slice without tokens is as one with a token of -inf, whose first is behind all slices, except
 * that mean_logit is 0. index counts the tokens of all slices. The results are token_statistics_forward's
 * of whole rows, and so is state. Those of a row whose state is NaN in a slice are NaN, and predicted is
 * -1. local receives the index that token_statistics_backward takes with slice: it counts from first, with
 * -1 for any before; it is -2 if no slice has the index, and -3, to pass as backward's ignore_index, in a
 * row that is left out.
 *   parts: (R, 8, N), or (R, 4, N) with narrow; float32, on the host also float64.
 *   index: (N), contiguous; int32 or int64. */
int32_t gander_sharded_token_statistics_combine(
    const DLTensor* parts, const DLTensor* index,
    const gander_sharded_token_statistics_combine_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  const DLTensor* upstream; /* one element; float64 if x is, else float32 */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_rescale_gradient_options;
#define GANDER_RESCALE_GRADIENT_OPTIONS_DEFAULTS \
  {sizeof(gander_rescale_gradient_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 0}

/* y = x * (dloss / upstream): corrects a gradient that was made for another upstream gradient than came.
 * If y is x and dloss has the bits of upstream, which is 1 if absent, x is neither read nor written. Both
 * are compared on the device, without synchronization.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dloss: one element; float64 if x is, else float32.
 *   y: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_rescale_gradient(const DLTensor* x, const DLTensor* dloss, const DLTensor* y,
                                const gander_rescale_gradient_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_logsumexp_forward_options;
#define GANDER_LOGSUMEXP_FORWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_logsumexp_forward_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* lse = log(sum exp(x)) for each row, computed with the maximum subtracted. A row of -inf gives -inf, a
 * row with +inf gives +inf, and a row with a NaN gives NaN.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   lse: M elements, contiguous; float64 if x is, else float32. */
int32_t gander_logsumexp_forward(const DLTensor* x, const DLTensor* lse,
                                 const gander_logsumexp_forward_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator; /* NULL: the driver's stream-ordered memory pool */
  int64_t batch_invariant; /* a row's bits do not depend on how many rows there are */
} gander_logsumexp_backward_options;
#define GANDER_LOGSUMEXP_BACKWARD_OPTIONS_DEFAULTS \
  {sizeof(gander_logsumexp_backward_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* dx = dlse * exp(x - lse) for each row. If lse is +inf, that is NaN where x is +inf, and 0 elsewhere.
 *   x: (M, N); float16, bfloat16 or float32, on the host also float64.
 *   dlse: the leading dimensions of the first operand, any stride; float64 if x is, else float32.
 *   lse: M elements, contiguous; float64 if x is, else float32.
 *   dx: (M, N); x's dtype; may be x if the dtypes agree. */
int32_t gander_logsumexp_backward(const DLTensor* x, const DLTensor* dlse, const DLTensor* lse,
                                  const DLTensor* dx, const gander_logsumexp_backward_options* options,
                                  void* stream);
/* end of what is generated */

/* ---- Owned tensors: inputs are consumed, outputs are new ----
 * Every input's deleter is called exactly once, whatever the status: that of parameters, and that of inputs
 * in the option struct. There are two exceptions. If the struct is refused for its size or magic, nothing
 * else of it is read, and the tensors in it stay the caller's. So does a tensor in a field that the library
 * does not know, for which it refuses the call.
 *
 * Outputs in the option struct are pointers to the caller's variables, or NULL for those that are not
 * needed. Each output has a variable of its own, outside of the struct. All outputs are set to NULL first,
 * apart from those that are not read, and stay so on failure. They are compact, are on x's device, and must
 * be released through their deleter. The memory of CUDA
 * outputs is stream-ordered: use it on `stream`, or order other streams after it. While `stream` is being
 * captured into a graph, these functions return GANDER_ERROR_CUDA; capture calls on borrowed tensors
 * instead. Fields without a comment are as in the struct of the function for borrowed tensors. */

/* generated: owned, from internal/operators */
typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t algorithm;
  int64_t batch_invariant;
} gander_softmax_options;
#define GANDER_SOFTMAX_OPTIONS_DEFAULTS \
  {sizeof(gander_softmax_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0}

/* gander_softmax_forward with owned tensors. */
int32_t gander_softmax(DLManagedTensorVersioned* x, const gander_softmax_options* options, void* stream,
                       DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t algorithm;
  int64_t batch_invariant;
} gander_softmax_grad_options;
#define GANDER_SOFTMAX_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_softmax_grad_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0}

/* gander_softmax_backward with owned tensors. */
int32_t gander_softmax_grad(DLManagedTensorVersioned* dy, DLManagedTensorVersioned* y,
                            const gander_softmax_grad_options* options, void* stream,
                            DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* mask;
  const DLDataType* out_dtype; /* the dtype of y; NULL: x's */
  double scale;
  int64_t log;
  int64_t causal;
  int64_t masked_zero;
  int64_t batch_invariant;
} gander_masked_softmax_options;
#define GANDER_MASKED_SOFTMAX_OPTIONS_DEFAULTS \
  {sizeof(gander_masked_softmax_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, 1, 0, 0, 0, 0}

/* gander_masked_softmax_forward with owned tensors. */
int32_t gander_masked_softmax(DLManagedTensorVersioned* x, const gander_masked_softmax_options* options,
                              void* stream, DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* mask;
  const DLDataType* x_dtype; /* the dtype of dx; NULL: dy's */
  double scale;
  int64_t log;
  int64_t causal;
  int64_t batch_invariant;
} gander_masked_softmax_grad_options;
#define GANDER_MASKED_SOFTMAX_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_masked_softmax_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, 1, 0, 0, 0}

/* gander_masked_softmax_backward with owned tensors. */
int32_t gander_masked_softmax_grad(DLManagedTensorVersioned* dy, DLManagedTensorVersioned* y,
                                   const gander_masked_softmax_grad_options* options, void* stream,
                                   DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* bias;
  DLManagedTensorVersioned* residual;
  DLManagedTensorVersioned** residual_out;
  DLManagedTensorVersioned** rstd;
  const DLDataType* out_dtype; /* the dtype of y; NULL: x's */
  const DLDataType* residual_dtype; /* the dtype of residual_out; NULL: residual's, without it x's */
  double eps;
  int64_t algorithm;
  int64_t batch_invariant;
  double weight_offset;
  int64_t round_normalized;
} gander_rmsnorm_options;
#define GANDER_RMSNORM_OPTIONS_DEFAULTS \
  {sizeof(gander_rmsnorm_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  1e-06, 0, 0, 0, 0}

/* gander_rmsnorm_forward with owned tensors. */
int32_t gander_rmsnorm(DLManagedTensorVersioned* x, const gander_rmsnorm_options* options, void* stream,
                       DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* dresidual_out;
  DLManagedTensorVersioned** dresidual;
  DLManagedTensorVersioned** dw;
  DLManagedTensorVersioned** db;
  const DLDataType* x_dtype; /* the dtype of dx; NULL: x's */
  const DLDataType* residual_dtype; /* the dtype of dresidual; NULL: x's */
  const DLDataType* bias_dtype; /* the dtype of db; NULL: weight's, without it float32 (float64 if x is) */
  int64_t algorithm;
  int64_t batch_invariant;
  double weight_offset;
  int64_t round_normalized;
} gander_rmsnorm_grad_options;
#define GANDER_RMSNORM_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_rmsnorm_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, 0, 0, 0, 0}

/* gander_rmsnorm_backward with owned tensors. */
int32_t gander_rmsnorm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dout,
                            DLManagedTensorVersioned* rstd, const gander_rmsnorm_grad_options* options,
                            void* stream, DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned** rnorm;
  double eps;
  int64_t batch_invariant;
} gander_l2norm_options;
#define GANDER_L2NORM_OPTIONS_DEFAULTS \
  {sizeof(gander_l2norm_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 1e-06, 0}

/* gander_l2norm_forward with owned tensors. */
int32_t gander_l2norm(DLManagedTensorVersioned* x, const gander_l2norm_options* options, void* stream,
                      DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t batch_invariant;
} gander_l2norm_grad_options;
#define GANDER_L2NORM_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_l2norm_grad_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* gander_l2norm_backward with owned tensors. */
int32_t gander_l2norm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dy,
                           DLManagedTensorVersioned* rnorm, const gander_l2norm_grad_options* options,
                           void* stream, DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t gelu;
  int64_t tanh;
  int64_t round_activation;
} gander_glu_options;
#define GANDER_GLU_OPTIONS_DEFAULTS \
  {sizeof(gander_glu_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* gander_glu_forward with owned tensors. */
int32_t gander_glu(DLManagedTensorVersioned* gate, DLManagedTensorVersioned* up,
                   const gander_glu_options* options, void* stream, DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t gelu;
  int64_t tanh;
  int64_t round_activation;
} gander_glu_grad_options;
#define GANDER_GLU_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_glu_grad_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* gander_glu_backward with owned tensors. */
int32_t gander_glu_grad(DLManagedTensorVersioned* gate, DLManagedTensorVersioned* up,
                        DLManagedTensorVersioned* dy, const gander_glu_grad_options* options, void* stream,
                        DLManagedTensorVersioned** dgate, DLManagedTensorVersioned** dup);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t gelu;
  int64_t tanh;
  int64_t round_activation;
} gander_packed_glu_options;
#define GANDER_PACKED_GLU_OPTIONS_DEFAULTS \
  {sizeof(gander_packed_glu_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* gander_packed_glu_forward with owned tensors. */
int32_t gander_packed_glu(DLManagedTensorVersioned* x, const gander_packed_glu_options* options, void* stream,
                          DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t gelu;
  int64_t tanh;
  int64_t round_activation;
} gander_packed_glu_grad_options;
#define GANDER_PACKED_GLU_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_packed_glu_grad_options), GANDER_OPTIONS_MAGIC, NULL, 0, 0, 0}

/* gander_packed_glu_backward with owned tensors. */
int32_t gander_packed_glu_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dy,
                               const gander_packed_glu_grad_options* options, void* stream,
                               DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* k;
  DLManagedTensorVersioned* offsets;
  DLManagedTensorVersioned* cu_seqlens;
  DLManagedTensorVersioned** k_out;
  int64_t offset;
  int64_t interleaved;
  int64_t per_element;
  int64_t round_products;
} gander_rotary_options;
#define GANDER_ROTARY_OPTIONS_DEFAULTS \
  {sizeof(gander_rotary_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}

/* gander_rotary_forward with owned tensors. */
int32_t gander_rotary(DLManagedTensorVersioned* q, DLManagedTensorVersioned* cos,
                      DLManagedTensorVersioned* sin, const gander_rotary_options* options, void* stream,
                      DLManagedTensorVersioned** q_out);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* dk_out;
  DLManagedTensorVersioned* offsets;
  DLManagedTensorVersioned* cu_seqlens;
  DLManagedTensorVersioned** dk;
  int64_t offset;
  int64_t interleaved;
  int64_t per_element;
  int64_t round_products;
} gander_rotary_grad_options;
#define GANDER_ROTARY_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_rotary_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0}

/* gander_rotary_backward with owned tensors. */
int32_t gander_rotary_grad(DLManagedTensorVersioned* dq_out, DLManagedTensorVersioned* cos,
                           DLManagedTensorVersioned* sin, const gander_rotary_grad_options* options,
                           void* stream, DLManagedTensorVersioned** dq);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* k;
  DLManagedTensorVersioned* q_weight;
  DLManagedTensorVersioned* k_weight;
  DLManagedTensorVersioned* offsets;
  DLManagedTensorVersioned* cu_seqlens;
  DLManagedTensorVersioned** k_out;
  int64_t offset;
  int64_t interleaved;
  int64_t per_element;
  double eps;
  double weight_offset;
  int64_t round_normalized;
  int64_t round_products;
} gander_qk_norm_rotary_options;
#define GANDER_QK_NORM_ROTARY_OPTIONS_DEFAULTS \
  {sizeof(gander_qk_norm_rotary_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, \
  0, 0, 1e-06, 0, 0, 0}

/* gander_qk_norm_rotary_forward with owned tensors. */
int32_t gander_qk_norm_rotary(DLManagedTensorVersioned* q, DLManagedTensorVersioned* cos,
                              DLManagedTensorVersioned* sin, const gander_qk_norm_rotary_options* options,
                              void* stream, DLManagedTensorVersioned** q_out);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* k;
  DLManagedTensorVersioned* q_weight;
  DLManagedTensorVersioned* k_weight;
  DLManagedTensorVersioned* offsets;
  DLManagedTensorVersioned* cu_seqlens;
  DLManagedTensorVersioned* dk_out;
  DLManagedTensorVersioned** dk;
  DLManagedTensorVersioned** dq_weight;
  DLManagedTensorVersioned** dk_weight;
  int64_t offset;
  int64_t interleaved;
  int64_t per_element;
  double eps;
  double weight_offset;
  int64_t round_normalized;
  int64_t round_products;
} gander_qk_norm_rotary_grad_options;
#define GANDER_QK_NORM_ROTARY_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_qk_norm_rotary_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, 0, 0, 0, 1e-06, 0, 0, 0}

/* gander_qk_norm_rotary_backward with owned tensors. */
int32_t gander_qk_norm_rotary_grad(DLManagedTensorVersioned* q, DLManagedTensorVersioned* cos,
                                   DLManagedTensorVersioned* sin, DLManagedTensorVersioned* dq_out,
                                   const gander_qk_norm_rotary_grad_options* options, void* stream,
                                   DLManagedTensorVersioned** dq);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* bias;
  DLManagedTensorVersioned* residual;
  DLManagedTensorVersioned** residual_out;
  DLManagedTensorVersioned** mean;
  DLManagedTensorVersioned** rstd;
  const DLDataType* out_dtype; /* the dtype of y; NULL: x's */
  const DLDataType* residual_dtype; /* the dtype of residual_out; NULL: residual's, without it x's */
  double eps;
  int64_t batch_invariant;
} gander_layernorm_options;
#define GANDER_LAYERNORM_OPTIONS_DEFAULTS \
  {sizeof(gander_layernorm_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, 1e-06, 0}

/* gander_layernorm_forward with owned tensors. */
int32_t gander_layernorm(DLManagedTensorVersioned* x, const gander_layernorm_options* options, void* stream,
                         DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* dresidual_out;
  DLManagedTensorVersioned** dresidual;
  DLManagedTensorVersioned** dw;
  DLManagedTensorVersioned** db;
  const DLDataType* x_dtype; /* the dtype of dx; NULL: x's */
  const DLDataType* residual_dtype; /* the dtype of dresidual; NULL: x's */
  const DLDataType* bias_dtype; /* the dtype of db; NULL: weight's, without it float32 (float64 if x is) */
  int64_t batch_invariant;
} gander_layernorm_grad_options;
#define GANDER_LAYERNORM_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_layernorm_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, 0}

/* gander_layernorm_backward with owned tensors. */
int32_t gander_layernorm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dout,
                              DLManagedTensorVersioned* mean, DLManagedTensorVersioned* rstd,
                              const gander_layernorm_grad_options* options, void* stream,
                              DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* divisor;
  DLManagedTensorVersioned* upstream;
  DLManagedTensorVersioned** lse;
  DLManagedTensorVersioned** dx;
  DLManagedTensorVersioned** denominator;
  int64_t ignore_index;
  int64_t reduction;
  int64_t one_pass;
  int64_t batch_invariant;
  double label_smoothing;
  double z_loss;
  double scale;
  double softcap;
  double temperature;
} gander_cross_entropy_options;
#define GANDER_CROSS_ENTROPY_OPTIONS_DEFAULTS \
  {sizeof(gander_cross_entropy_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  -100, 0, 0, 0, 0, 0, 1, 0, 1}

/* gander_cross_entropy_forward with owned tensors. lse has M elements. */
int32_t gander_cross_entropy(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                             const gander_cross_entropy_options* options, void* stream,
                             DLManagedTensorVersioned** loss);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* divisor;
  DLManagedTensorVersioned* upstream;
  DLManagedTensorVersioned* denominator;
  int64_t ignore_index;
  int64_t reduction;
  int64_t one_pass;
  int64_t batch_invariant;
  int64_t slice;
  double label_smoothing;
  double z_loss;
  double scale;
  double softcap;
  double temperature;
} gander_cross_entropy_grad_options;
#define GANDER_CROSS_ENTROPY_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_cross_entropy_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, -100, 0, \
  0, 0, 0, 0, 0, 1, 0, 1}

/* gander_cross_entropy_backward with owned tensors. one_pass is refused: it would read dx. */
int32_t gander_cross_entropy_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                  DLManagedTensorVersioned* dloss, DLManagedTensorVersioned* lse,
                                  const gander_cross_entropy_grad_options* options, void* stream,
                                  DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* divisor;
  DLManagedTensorVersioned** state;
  int64_t reduction;
  double label_smoothing;
  double z_loss;
  double scale;
  double softcap;
  double temperature;
  int64_t batch_invariant;
} gander_soft_cross_entropy_options;
#define GANDER_SOFT_CROSS_ENTROPY_OPTIONS_DEFAULTS \
  {sizeof(gander_soft_cross_entropy_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, 0, 0, 0, 1, 0, \
  1, 0}

/* gander_soft_cross_entropy_forward with owned tensors. */
int32_t gander_soft_cross_entropy(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                  const gander_soft_cross_entropy_options* options, void* stream,
                                  DLManagedTensorVersioned** loss);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* weight;
  DLManagedTensorVersioned* divisor;
  int64_t reduction;
  double label_smoothing;
  double z_loss;
  double scale;
  double softcap;
  double temperature;
  int64_t batch_invariant;
} gander_soft_cross_entropy_grad_options;
#define GANDER_SOFT_CROSS_ENTROPY_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_soft_cross_entropy_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, 0, 0, 0, 1, 0, 1, \
  0}

/* gander_soft_cross_entropy_backward with owned tensors. */
int32_t gander_soft_cross_entropy_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                       DLManagedTensorVersioned* dloss, DLManagedTensorVersioned* state,
                                       const gander_soft_cross_entropy_grad_options* options, void* stream,
                                       DLManagedTensorVersioned** dx);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* row_mask;
  DLManagedTensorVersioned** log_prob;
  DLManagedTensorVersioned** entropy;
  DLManagedTensorVersioned** log_sum_sq_probs;
  DLManagedTensorVersioned** mean_logit;
  DLManagedTensorVersioned** is_top1;
  DLManagedTensorVersioned** predicted;
  DLManagedTensorVersioned** state;
  int64_t ignore_index;
  double scale;
  double softcap;
  double temperature;
  int64_t batch_invariant;
  int64_t first;
  int64_t classes;
} gander_token_statistics_options;
#define GANDER_TOKEN_STATISTICS_OPTIONS_DEFAULTS \
  {sizeof(gander_token_statistics_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, -100, 1, 0, 1, 0, 0, -1}

/* gander_token_statistics_forward with owned tensors. */
int32_t gander_token_statistics(DLManagedTensorVersioned* logits, DLManagedTensorVersioned* index,
                                const gander_token_statistics_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* row_mask;
  DLManagedTensorVersioned* dlog_prob;
  DLManagedTensorVersioned* dentropy;
  int64_t ignore_index;
  double scale;
  double softcap;
  double temperature;
  int64_t batch_invariant;
  int64_t slice;
} gander_token_statistics_grad_options;
#define GANDER_TOKEN_STATISTICS_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_token_statistics_grad_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, -100, 1, 0, \
  1, 0, 0}

/* gander_token_statistics_backward with owned tensors. */
int32_t gander_token_statistics_grad(DLManagedTensorVersioned* logits, DLManagedTensorVersioned* index,
                                     DLManagedTensorVersioned* state,
                                     const gander_token_statistics_grad_options* options, void* stream,
                                     DLManagedTensorVersioned** dlogits);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned** losses;
  DLManagedTensorVersioned** loss;
  DLManagedTensorVersioned** weights;
  DLManagedTensorVersioned** denominator;
  int64_t classes;
  int64_t ignore_index;
  int64_t mean;
  int64_t weighted;
  int64_t batch_invariant;
} gander_sharded_cross_entropy_options;
#define GANDER_SHARDED_CROSS_ENTROPY_OPTIONS_DEFAULTS \
  {sizeof(gander_sharded_cross_entropy_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, -1, \
  -100, 0, 0, 0}

/* gander_sharded_cross_entropy_combine with owned tensors. */
int32_t gander_sharded_cross_entropy(DLManagedTensorVersioned* parts, DLManagedTensorVersioned* target,
                                     const gander_sharded_cross_entropy_options* options, void* stream,
                                     DLManagedTensorVersioned** max, DLManagedTensorVersioned** log_sum);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* row_mask;
  DLManagedTensorVersioned** log_prob;
  DLManagedTensorVersioned** entropy;
  DLManagedTensorVersioned** log_sum_sq_probs;
  DLManagedTensorVersioned** mean_logit;
  DLManagedTensorVersioned** is_top1;
  DLManagedTensorVersioned** predicted;
  DLManagedTensorVersioned** state;
  DLManagedTensorVersioned** local;
  int64_t ignore_index;
  int64_t first;
  int64_t classes;
  int64_t narrow;
} gander_sharded_token_statistics_options;
#define GANDER_SHARDED_TOKEN_STATISTICS_OPTIONS_DEFAULTS \
  {sizeof(gander_sharded_token_statistics_options), GANDER_OPTIONS_MAGIC, NULL, NULL, NULL, NULL, NULL, \
  NULL, NULL, NULL, NULL, NULL, -100, 0, -1, 0}

/* gander_sharded_token_statistics_combine with owned tensors. */
int32_t gander_sharded_token_statistics(DLManagedTensorVersioned* parts, DLManagedTensorVersioned* index,
                                        const gander_sharded_token_statistics_options* options, void* stream);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  DLManagedTensorVersioned* upstream;
  int64_t batch_invariant;
} gander_rescale_options;
#define GANDER_RESCALE_OPTIONS_DEFAULTS \
  {sizeof(gander_rescale_options), GANDER_OPTIONS_MAGIC, NULL, NULL, 0}

/* gander_rescale_gradient with owned tensors. */
int32_t gander_rescale(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dloss,
                       const gander_rescale_options* options, void* stream, DLManagedTensorVersioned** y);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t batch_invariant;
} gander_logsumexp_options;
#define GANDER_LOGSUMEXP_OPTIONS_DEFAULTS \
  {sizeof(gander_logsumexp_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* gander_logsumexp_forward with owned tensors. */
int32_t gander_logsumexp(DLManagedTensorVersioned* x, const gander_logsumexp_options* options, void* stream,
                         DLManagedTensorVersioned** lse);

typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
  int64_t batch_invariant;
} gander_logsumexp_grad_options;
#define GANDER_LOGSUMEXP_GRAD_OPTIONS_DEFAULTS \
  {sizeof(gander_logsumexp_grad_options), GANDER_OPTIONS_MAGIC, NULL, 0}

/* gander_logsumexp_backward with owned tensors. */
int32_t gander_logsumexp_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* dlse,
                              DLManagedTensorVersioned* lse, const gander_logsumexp_grad_options* options,
                              void* stream, DLManagedTensorVersioned** dx);
/* end of what is generated */

/* ---- Which kernel would run ---- */

/* Describes the kernel that a call would run, and why, for aligned compact rows (m, n) of x. op is
 * the name of a softmax, rmsnorm, layernorm, cross_entropy or logsumexp function without "gander_",
 * "cross_entropy_forward_dx", or that of a norm with "_residual" before "_forward" or "_backward". Backward
 * of a norm has a weight, and that of LayerNorm a bias. algorithm and batch_invariant are as in its options.
 * Writes at most capacity bytes, always with a terminating NUL. */
int32_t gander_explain(const char* op, int64_t m, int64_t n, DLDataType dtype, DLDevice device,
                       int32_t algorithm, int32_t batch_invariant, char* text, size_t capacity);

/* gander_explain for a GPU by its name, "a100", "h100" or "h200". The machine need not have it. */
int32_t gander_explain_device(const char* op, int64_t m, int64_t n, DLDataType dtype, const char* device,
                              int32_t algorithm, int32_t batch_invariant, char* text, size_t capacity);

/* gander_explain for rotary_forward, rotary_backward, qk_norm_rotary_forward and qk_norm_rotary_backward.
 * heads is how many a token has, of q and of k together, n how many columns each has, all of which are
 * rotated. Backward of qk_norm_rotary computes the weights' gradients. name: NULL, or that of a GPU as in
 * gander_explain_device, which then replaces device. */
int32_t gander_explain_heads(const char* op, int64_t tokens, int64_t heads, int64_t n, DLDataType dtype,
                             DLDevice device, const char* name, char* text, size_t capacity);

/* A JSON array of an op's algorithms (op as for gander_explain), in the order of gander_algorithm. Each is
 * an object of strings: name, what (it does), limits (which rows it supports). Writes at most capacity
 * bytes, always with a terminating NUL. If that is too little it returns GANDER_ERROR_OPTION. */
int32_t gander_algorithms(const char* op, char* text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
