/* gander's kernels for PyTorch's dispatcher, through PyTorch's stable C ABI (torch 2.10 or newer).
 *
 * No header of torch or Python is included. The few functions that are needed are declared here, and looked
 * up in the libtorch and the interpreter that the process has already loaded. So one binary works with every
 * torch that keeps the ABI, CPU or CUDA build, and with every Python. The first kernel that runs loads
 * libgander.
 *
 *   cd python/gander/_torch; gcc -O2 -std=gnu11 -fPIC -shared -fexceptions -fvisibility=hidden \
 *       -I ../../../capi -I ../../../dlpack -I ../_native/c c/kernels.c c/fast.c -o libgander_torch.so \
 *       -ldl -lpthread
 *
 * All operators run through run_operator, which reads the table of operators (operators_gen.h). It owns the
 * handles that it gets. It describes each tensor as a DLTensor, allocates the outputs through torch, calls
 * the C function that borrows them, and deletes the handles. Only then does it report a failure. This throws
 * a C++ exception through the frames of this file (hence -fexceptions), but never through a frame of Go. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "library.h"
#include "torch.h"

/* The version of torch whose ABI this file uses: 2.10.0. */
#define TORCH_ABI (UINT64_C(2) << 56 | UINT64_C(10) << 48)

#define TORCH_FUNCTIONS(F) \
  F(int32_t, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, TorchLibrary*)) \
  F(int32_t, torch_library_impl, (TorchLibrary, const char*, Kernel, uint64_t)) \
  F(void, aoti_torch_check, (bool, const char*, const char*, uint32_t, const char*)) \
  F(int32_t, aoti_torch_delete_tensor_object, (Tensor)) \
  F(int32_t, aoti_torch_is_defined, (Tensor, bool*)) \
  F(int32_t, aoti_torch_get_dim, (Tensor, int64_t*)) \
  F(int32_t, aoti_torch_get_sizes, (Tensor, int64_t**)) \
  F(int32_t, aoti_torch_get_strides, (Tensor, int64_t**)) \
  F(int32_t, aoti_torch_get_dtype, (Tensor, int32_t*)) \
  F(int32_t, aoti_torch_get_device_type, (Tensor, int32_t*)) \
  F(int32_t, aoti_torch_get_device_index, (Tensor, int32_t*)) \
  F(int32_t, torch_get_const_data_ptr, (Tensor, const void**)) \
  F(int32_t, torch_get_mutable_data_ptr, (Tensor, void**)) \
  F(int32_t, aoti_torch_empty_strided, \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*)) \
  F(int32_t, aoti_torch_copy_, (Tensor, Tensor, int32_t)) \
  F(int32_t, torch_get_num_threads, (uint32_t*)) \
  F(int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*)) \
  F(int32_t, aoti_torch_device_type_cpu, (void)) \
  F(int32_t, aoti_torch_device_type_cuda, (void))

#define DECLARE(result, name, arguments) result(*name) arguments;
static struct {
  TORCH_FUNCTIONS(DECLARE)
  int32_t (*current_cuda_stream)(int32_t device, void** stream); /* NULL in a CPU build of torch */
  void (*delete_value)(void*);                                   /* C++'s operator delete */
  int32_t cpu, cuda;                                             /* torch's codes of the device types */
} torch;

struct DType dtypes[] = {
#define DTYPE(name, code, bits) {"aoti_torch_dtype_" #name, -1, {code, bits, 1}, #name, NULL},
    DTYPES(DTYPE)};

/* ---- libgander, loaded by the first kernel ---- */

/* The table of operators uses these functions. */
static const gander_allocator* allocator(const Call* call);
static const DLTensor* optional(const Operand* o) { return o->handle == NULL ? NULL : &o->dl; }

static double as_double(Value value) {
  double number;
  memcpy(&number, &value, sizeof number);
  return number;
}

/* A number that does not fit saturates, so that libgander refuses it. Truncation could make it a valid one.
 */
static int32_t as_int32(Value value) {
  int64_t number = (int64_t)value;
  return number > INT32_MAX ? INT32_MAX : number < INT32_MIN ? INT32_MIN : (int32_t)number;
}

#define LIBRARY_FUNCTIONS(F) \
  F(gander_abi_version) \
  F(gander_last_error) F(gander_set_num_threads) F(gander_set_parallel_for) OPERATOR_FUNCTIONS(F)
static struct {
  LIBRARY_FUNCTIONS(DECLARE_LIBRARY)
} lib;

#define KERNEL(op, index) \
  static void kernel_##op(Value* stack, uint64_t inputs, uint64_t outputs) { \
    (void)inputs, (void)outputs; \
    run_operator(&operators[index], stack, false, true); \
  }

#include "operators_gen.h"

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static pid_t registered_in; /* torch's threads do not exist in a child process, which would wait for them */

DEFINE_LOAD_LIBRARY

static void load(void) {
  if (load_library() && getpid() == registered_in) lib.gander_set_parallel_for(torch.torch_parallel_for);
}

/* ---- One call ---- */

/* The calling thread's last failure. gander._torch reads it to raise the right type of exception. */
static _Thread_local struct {
  int32_t status;
  char message[1024];
} failure;

static void fail(Call* call, int32_t status, const char* format, ...) {
  if (call->failed) return;
  call->failed = true;
  if (call->python) return; /* the dispatcher, which then repeats the call, reports it */
  failure.status = status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.message, sizeof failure.message, format, arguments);
  va_end(arguments);
}

static void own(Call* call, Tensor handle) {
  if (call->owned_count == MAX_OWNED) __builtin_trap(); /* it has room for all operands and their copies */
  call->owned[call->owned_count++] = handle;
}

static DLDataType dl_dtype(int32_t code) {
  for (int i = 0; i < DTYPE_COUNT; i++)
    if (dtypes[i].torch == code) return dtypes[i].dl;
  return (DLDataType){kDLOpaqueHandle, 8, 1}; /* libgander refuses it */
}

static int32_t torch_dtype(DLDataType dtype) {
  for (int i = 0; i < DTYPE_COUNT; i++)
    if (dtypes[i].dl.code == dtype.code && dtypes[i].dl.bits == dtype.bits) return dtypes[i].torch;
  return -1;
}

/* Whether these dimensions collapse into a single one, of `length` elements with one stride. */
static bool collapses(int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t* length,
                      int64_t* stride) {
  int64_t inner = 1; /* the number of elements in the dimensions after i */
  bool ok = true;
  *length = *stride = 1;
  for (int64_t i = rank - 1; i >= 0; i--) {
    *length *= sizes[i];
    if (sizes[i] < 2) continue;
    if (inner == 1) *stride = strides[i];
    ok &= strides[i] == *stride * inner;
    inner *= sizes[i];
  }
  return ok || *length == 0;
}

/* Fills o with a description of the tensor. An undefined one, a None in place of a tensor, stays absent,
 * which libgander refuses. An input's const pointer leaves a copy-on-write tensor shared. */
static void describe(Call* call, Operand* o, Tensor handle, bool written, const char* operator,
                     const char* name) {
  int32_t device = -1, index = 0, bad = 0;
  int64_t rank = 0;
  const void* data = NULL;
  if (call->failed || handle == NULL) return;
  bad |= torch.aoti_torch_get_dim(handle, &rank);
  bad |= torch.aoti_torch_get_sizes(handle, &o->dl.shape);
  bad |= torch.aoti_torch_get_strides(handle, &o->dl.strides);
  bad |= torch.aoti_torch_get_dtype(handle, &o->dtype);
  bad |= torch.aoti_torch_get_device_type(handle, &device);
  bad |= torch.aoti_torch_get_device_index(handle, &index);
  bad |= written ? torch.torch_get_mutable_data_ptr(handle, (void**)&data)
                 : torch.torch_get_const_data_ptr(handle, &data);
  if (bad) {
    bool defined = true;
    torch.aoti_torch_is_defined(handle, &defined);
    if (defined) fail(call, GANDER_ERROR_INTERNAL, "%s: torch could not describe %s", operator, name);
    else fail(call, GANDER_ERROR_NULL, "%s: %s is None, expected a tensor", operator, name);
    return;
  }
  /* The dispatcher chooses no kernel of ours for other devices, and knows tensors without memory. */
  call->failed |= call->python && (data == NULL || (device != torch.cuda && device != torch.cpu));
  o->handle = handle;
  o->dl.data = (void*)data;
  o->dl.ndim = (int32_t)rank;
  o->dl.dtype = dl_dtype(o->dtype);
  o->dl.device.device_type = device == torch.cuda ? kDLCUDA : device == torch.cpu ? kDLCPU : kDLExtDev;
  o->dl.device.device_id = device == torch.cuda ? index : 0;
}

/* A new contiguous tensor on the first operand's device. None of a rank that libgander refuses. */
static void output(Call* call, Operand* o, int64_t rank, const int64_t* sizes, int32_t dtype) {
  int64_t strides[MAX_RANK], stride = 1;
  Tensor handle = NULL;
  if (call->failed || rank > MAX_RANK) return;
  for (int64_t i = rank - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  if (torch.aoti_torch_empty_strided(rank, sizes, strides, dtype, call->device_type, call->device_index,
                                     &handle)) {
    fail(call, GANDER_ERROR_MEMORY, "gander: torch could not allocate %lld elements", (long long)stride);
    return;
  }
  own(call, handle);
  describe(call, o, handle, true, "gander", "a new tensor");
}

static void copy(Call* call, Tensor to, Tensor from) {
  if (!call->failed && torch.aoti_torch_copy_(to, from, 0))
    fail(call, GANDER_ERROR_MEMORY,
         "gander: torch could not copy a tensor whose strides gander cannot serve");
}

/* Replaces an operand by a contiguous copy of it, of these sizes and this dtype. */
static void convert(Call* call, Operand* o, int64_t rank, const int64_t* sizes, int32_t dtype) {
  Operand from = *o;
  if (call->failed) return;
  *o = (Operand){.given = from.given};
  output(call, o, rank, sizes, dtype);
  copy(call, o->handle, from.handle);
}

/* Whether a mask's rows lie as the kernels need them, see `broadcast` in ops/check.go. Also if it does not
 * broadcast to the shape of x: libgander refuses that. */
static bool is_broadcast(const DLTensor* mask, const DLTensor* x) {
  int32_t missing = x->ndim - mask->ndim, count = 0;
  int64_t stride = 0, extent = 1;
  if (missing < 0 || mask->ndim == 0) return true;
  for (int32_t i = 0; i < mask->ndim; i++)
    if (mask->shape[i] != 1 && mask->shape[i] != x->shape[i + missing]) return true;
  if (mask->shape[mask->ndim - 1] > 1 && mask->strides[mask->ndim - 1] > 1) return false;
  for (int32_t i = x->ndim - 2; i >= 0; i--) {
    int64_t step = i < missing || mask->shape[i - missing] == 1 ? 0 : mask->strides[i - missing];
    if (x->shape[i] == 1) continue;
    if (count == 0 || step != stride * extent) {
      count++;
      stride = step;
      extent = 1;
    }
    extent *= x->shape[i];
  }
  return count <= 3;
}

/* Whether the kernels can use an argument as it lies in memory. x: the first operand. */
static bool is_served(Layout layout, const DLTensor* t, const DLTensor* x) {
  int64_t length, stride, last = t->ndim - 1;
  if (layout == BROADCASTS) return is_broadcast(t, x);
  if (layout == IN_ROWS || layout == IN_HEADS || layout == TABLES) {
    int64_t outer = last - (layout == IN_HEADS ? 2 : layout == TABLES ? 1 : 0); /* dimensions that collapse */
    return outer < 0 || last < 0 ||
           ((t->shape[last] < 2 || t->strides[last] == 1) &&
            collapses(outer, t->shape, t->strides, &length, &stride));
  }
  return collapses(t->ndim, t->shape, t->strides, &length, &stride) &&
         (layout == REGULAR || length < 2 || stride == 1);
}

/* Whether elements may share memory. Also true for interleaved dimensions that do not overlap, such as sizes
 * (3, 2) with strides (2, 3). */
static bool shares_memory(const DLTensor* t) {
  for (int32_t i = 0; i < t->ndim; i++) {
    int64_t reach = 0; /* the largest offset within the dimensions of smaller stride than i */
    for (int32_t j = 0; j < t->ndim; j++)
      if (j != i && t->strides[j] <= t->strides[i]) reach += (t->shape[j] - 1) * t->strides[j];
    if (t->shape[i] > 1 && t->strides[i] <= reach) return true;
  }
  return false;
}

/* The dtype of statistics (loss, lse, rstd). */
static int32_t statistics(const Operand* first) {
  bool wide = first->dl.dtype.code == kDLFloat && first->dl.dtype.bits == 64;
  return torch_dtype((DLDataType){kDLFloat, wide ? 64 : 32, 1});
}

/* Scratch memory on the GPU comes from torch's allocator, which frees it in stream order. */
static void* scratch(void* context, size_t bytes) {
  Call* call = context;
  int64_t size = (int64_t)bytes, stride = 1;
  void* data = NULL;
  if (torch.aoti_torch_empty_strided(1, &size, &stride, torch_dtype((DLDataType){kDLUInt, 8, 1}),
                                     call->device_type, call->device_index, &call->scratch) ||
      torch.torch_get_mutable_data_ptr(call->scratch, &data))
    fail(call, GANDER_ERROR_MEMORY, "gander: torch could not allocate %lld bytes", (long long)size);
  return data;
}

static const gander_allocator* allocator(const Call* call) {
  return call->device_type == torch.cuda ? &call->allocator : NULL;
}

/* Gets the device's current stream, or makes the CPU kernels use as many threads as torch. Returns false if
 * the call has failed. */
static bool prepare(Call* call) {
  static _Atomic uint32_t threads;
  if (call->failed) return false;
  if (call->device_type == torch.cuda) {
    if (torch.current_cuda_stream == NULL || torch.current_cuda_stream(call->device_index, &call->stream))
      fail(call, GANDER_ERROR_CUDA, "gander: torch gave no CUDA stream");
  } else {
    uint32_t count = 0;
    if (torch.torch_get_num_threads(&count) == 0 &&
        count != atomic_load_explicit(&threads, memory_order_relaxed)) {
      atomic_store_explicit(&threads, count, memory_order_relaxed);
      lib.gander_set_num_threads((int32_t)count);
    }
  }
  return !call->failed;
}

/* Deletes all handles except the results', which it puts on the stack. If the call failed it throws, or
 * returns false to a call from Python. */
static bool finish(Call* call, Value* stack, int count, const Tensor* results) {
  for (int i = 0; i < call->owned_count; i++) {
    bool kept = false;
    for (int j = 0; j < count; j++) kept |= call->owned[i] == results[j];
    if (!kept || call->failed) torch.aoti_torch_delete_tensor_object(call->owned[i]);
  }
  if (call->scratch != NULL) torch.aoti_torch_delete_tensor_object(call->scratch);
  if (call->failed && call->python) return false;
  if (call->failed) torch.aoti_torch_check(false, "gander", "kernels.c", 0, failure.message);
  for (int j = 0; j < count; j++) stack[j] = (Value)(uintptr_t)results[j];
  return true;
}

/* ---- Any operator ---- */

/* Reads the arguments out of their boxes: a tensor is its handle or 0, a dtype its code or -1, a bool 0 or 1,
 * or -1 for None. */
static void unpack(Call* call, const Operator* op, const Value* stack, Value* arguments) {
  for (int i = 0; op->arguments[i] != 0; i++) {
    Value value = stack[i];
    bool boxed = strchr("OdE", op->arguments[i]) != NULL;
    if (boxed && value == 0) {
      arguments[i] = op->arguments[i] == 'O' ? 0 : (Value)-1;
      continue;
    }
    arguments[i] = boxed ? *(Value*)(uintptr_t)value : value;
    if (call->python) continue;
    if (boxed) torch.delete_value((void*)(uintptr_t)value);
    if (op->arguments[i] == 'T' || op->arguments[i] == 'O') own(call, (Tensor)(uintptr_t)arguments[i]);
  }
}

/* Whether two operands are slices of one buffer, side by side in the dimension of stride 1, so that they
 * share no element: like ops/check.go, with the bytes that they use within one pitch. */
static bool are_slices(const DLTensor* a, const DLTensor* b) {
  int64_t row = 1, pitch = INT64_MAX, size = a->dtype.bits / 8;
  if (a->ndim != b->ndim || a->dtype.bits != b->dtype.bits) return false;
  for (int32_t i = 0; i < a->ndim; i++) {
    if (a->strides[i] != b->strides[i] || a->shape[i] != b->shape[i]) return false;
    if (a->shape[i] < 2) continue;
    if (a->strides[i] == 1) row = a->shape[i];
    else if (a->strides[i] < pitch) pitch = a->strides[i];
  }
  for (int32_t i = 0; i < a->ndim; i++)
    if (a->shape[i] > 1 && a->strides[i] != 1 && (pitch == 0 || a->strides[i] % pitch != 0)) return false;
  int64_t shift = ((char*)b->data - (char*)a->data) / size % pitch;
  if (shift < 0) shift += pitch;
  return pitch < INT64_MAX && shift >= row && shift + row <= pitch;
}

/* One past the last byte of a tensor. */
static uintptr_t end_of(const DLTensor* t) {
  int64_t last = 0;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) return (uintptr_t)t->data;
    last += (t->shape[i] - 1) * t->strides[i];
  }
  return (uintptr_t)t->data + (uintptr_t)((last + 1) * (t->dtype.bits / 8));
}

/* Refuses written operands that may share memory. libgander does so itself, but not where it sees copies. */
static void check_written(Call* call, const Operator* op, const Operand* operands, const Value* arguments) {
  for (int i = 0; i < op->operand_count; i++) {
    if (!op->operands[i].written || operands[i].handle == NULL) continue;
    for (int j = 0; j < i; j++) {
      const Operand *a = &operands[j], *b = &operands[i];
      if (!op->operands[j].written || a->handle == NULL) continue;
      bool copied = a->handle != (Tensor)(uintptr_t)arguments[op->operands[j].argument] ||
                    b->handle != (Tensor)(uintptr_t)arguments[op->operands[i].argument];
      if (copied && (uintptr_t)a->given.data < end_of(&b->given) &&
          (uintptr_t)b->given.data < end_of(&a->given) && !are_slices(&a->given, &b->given))
        fail(call, GANDER_ERROR_OVERLAP,
             "%s: %s overlaps %s, expected separate memory, because both are written; allocate %s separately",
             op->operator, op->operands[i].name, op->operands[j].name, op->operands[i].name);
    }
  }
}

/* Fills an operand that is an argument, or a copy of one whose layout the kernels do not support. An argument
 * is not copied if libgander will refuse it: for its rank, or because it is written and has elements that
 * share memory, to which results could not be copied back. */
static void fill_input(Call* call, const Operator* op, int i, Operand* operands, Tensor handle) {
  Operand* o = &operands[i];
  const DLTensor* x = &operands[0].dl;
  Layout layout = op->operands[i].layout;
  bool written = op->operands[i].written;
  describe(call, o, handle, written, op->operator, op->operands[i].name);
  if (call->failed) return;
  if (i == 0 && (torch.aoti_torch_get_device_type(handle, &call->device_type) ||
                 torch.aoti_torch_get_device_index(handle, &call->device_index)))
    fail(call, GANDER_ERROR_INTERNAL, "gander: torch could not describe a tensor");
  o->given = o->dl;
  if (op->operands[i].index && o->dl.dtype.code == kDLUInt && o->dl.dtype.bits == 8 &&
      o->dl.ndim <= MAX_RANK && memcmp(&o->dl.device, &x->device, sizeof x->device) == 0)
    convert(call, o, o->dl.ndim, o->dl.shape, torch_dtype((DLDataType){kDLInt, 64, 1})); /* as torch does */
  if (call->failed || o->dl.ndim > MAX_RANK || is_served(layout, &o->dl, x) ||
      (written && shares_memory(&o->dl)))
    return;
  convert(call, o, o->dl.ndim, o->dl.shape, o->dtype);
  if (!call->failed && !is_served(layout, &o->dl, x)) convert(call, o, x->ndim, x->shape, o->dtype);
  if (call->python && written) call->failed = true; /* the dispatcher's call copies the result back */
}

/* Whether a result is computed. */
static bool is_demanded(const Operator* op, int i, const Value* arguments) {
  return op->operands[i].demand < 0 || (arguments[op->operands[i].demand] & 1) != 0;
}

/* Fills in the sizes that the letters of a form stand for. Returns how many there are. */
static int64_t fill_sizes(const char* form, const DLTensor* x, int64_t* sizes) {
  int64_t count = 0;
  for (; *form != 0; form++) {
    const Letter* letter = &letters[(unsigned char)*form];
    int64_t from = x->ndim - letter->from, to = x->ndim - letter->to, product = 1;
    for (int64_t i = from < 0 ? 0 : from; i < to; i++) {
      if (letter->times == 0) sizes[count++] = x->shape[i];
      product *= x->shape[i];
    }
    if (letter->times != 0) sizes[count++] = letter->times * product / letter->over + letter->plus;
  }
  return count;
}

/* Allocates an operand that is a new tensor. A result that is not computed has no elements, and its operand
 * stays absent. */
static void make_output(Call* call, const Operator* op, int i, Operand* operands, const Value* arguments,
                        Tensor* nothing) {
  const Operand* first = &operands[0];
  int like = op->operands[i].like, fits = op->operands[i].fits, choice = op->operands[i].choice;
  bool reduces = op->reduction >= 0 && as_int32(arguments[op->reduction]) != GANDER_REDUCTION_NONE;
  int32_t dtype = op->operands[i].statistic ? statistics(first) : first->dtype;
  int64_t sizes[MAX_RANK], rank = 1;
  if (call->failed || first->dl.ndim > MAX_RANK) return;
  if (op->operands[i].dtype.bits != 0) dtype = torch_dtype(op->operands[i].dtype);
  if (like >= 0 && operands[like].handle != NULL) dtype = operands[like].dtype;
  if (choice >= 0 && (int32_t)arguments[choice] >= 0) dtype = (int32_t)arguments[choice];
  if (!is_demanded(op, i, arguments)) {
    static const int64_t none = 0, one = 1;
    if (call->whole && torch.aoti_torch_empty_strided(1, &none, &one, dtype, call->device_type,
                                                      call->device_index, &nothing[i]))
      fail(call, GANDER_ERROR_MEMORY, "gander: torch could not make a tensor without elements");
    else if (call->whole) own(call, nothing[i]);
  } else if (fits >= 0 && operands[fits].handle != NULL) {
    output(call, &operands[i], operands[fits].dl.ndim, operands[fits].dl.shape, dtype);
  } else {
    rank = fill_sizes(op->operands[i].sizes[reduces], &first->dl, sizes);
    output(call, &operands[i], rank, sizes, dtype);
  }
}

bool run_operator(const Operator* op, Value* stack, bool python, bool whole) {
  Call call = {.python = python, .whole = whole};
  Operand operands[MAX_OPERANDS];
  Value arguments[MAX_ARGUMENTS];
  Tensor results[MAX_OPERANDS], nothing[MAX_OPERANDS] = {NULL};
  memset(operands, 0, sizeof operands[0] * (size_t)op->operand_count);
  call.allocator = (gander_allocator){&call, scratch};
  pthread_once(&load_once, load);
  if (load_error[0] != 0) fail(&call, GANDER_ERROR_INTERNAL, "%s", load_error);
  unpack(&call, op, stack, arguments);
  for (int i = 0; i < op->operand_count; i++) {
    if (op->operands[i].argument >= 0) {
      Tensor handle = (Tensor)(uintptr_t)arguments[op->operands[i].argument];
      if (handle != NULL) fill_input(&call, op, i, operands, handle);
    } else if (op->operands[i].over >= 0) {
      operands[i] = operands[op->operands[i].over];
    } else if (op->operands[i].made) {
      make_output(&call, op, i, operands, arguments, nothing);
    }
  }
  check_written(&call, op, operands, arguments);
  if (prepare(&call)) {
    int32_t status = op->call(&call, operands, arguments);
    if (status != GANDER_OK) fail(&call, status, "%s", lib.gander_last_error());
  }
  for (int i = 0; i < op->operand_count; i++) {
    if (!op->operands[i].written) continue;
    Tensor written = (Tensor)(uintptr_t)arguments[op->operands[i].argument];
    if (operands[i].handle != written) copy(&call, written, operands[i].handle);
  }
  for (int i = 0; i < op->result_count; i++) {
    int at = op->results[i];
    results[i] = operands[at].handle != NULL ? operands[at].handle : nothing[at];
  }
  return finish(&call, stack, op->result_count, results);
}

const Operator* find_operator(int index) { return index < OPERATOR_COUNT ? &operators[index] : NULL; }

/* ---- Functions that gander._torch calls through ctypes ---- */

/* Returns the status of the calling thread's last failed kernel, and clears it. Also returns its message. */
EXPORT int32_t gander_torch_failure(const char** message) {
  int32_t status = failure.status;
  failure.status = GANDER_OK;
  *message = failure.message;
  return status;
}

/* Registers the kernels for both devices. The schemas must have been defined before, in Python. `library` is
 * the path of libgander, which is loaded later. Returns NULL, or a message that says what this torch lacks.
 */
EXPORT const char* gander_torch_register(const char* library) {
  static const char* const keys[] = {"CPU", "CUDA"};
  void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (cpu == NULL) return "libtorch_cpu.so is not loaded";
  registered_in = getpid();
#define LOOK_UP_TORCH(result, name, arguments) \
  if ((torch.name = (__typeof__(torch.name))dlsym(cpu, #name)) == NULL) \
    return "libtorch_cpu.so has no " #name;
  TORCH_FUNCTIONS(LOOK_UP_TORCH)
  if ((torch.delete_value = (__typeof__(torch.delete_value))dlsym(cpu, "_ZdlPv")) == NULL)
    return "libtorch_cpu.so does not link the C++ library";
  if (cuda != NULL)
    torch.current_cuda_stream =
        (__typeof__(torch.current_cuda_stream))dlsym(cuda, "aoti_torch_get_current_cuda_stream");
  for (int i = 0; i < DTYPE_COUNT; i++) {
    int32_t (*getter)(void) = (int32_t (*)(void))dlsym(cpu, dtypes[i].getter);
    if (getter != NULL) dtypes[i].torch = getter();
    else if (dtypes[i].dl.code < kDLFloat8_e3m4) return dtypes[i].getter; /* older torch lacks one of those */
  }
  torch.cpu = torch.aoti_torch_device_type_cpu();
  torch.cuda = torch.aoti_torch_device_type_cuda();
  if (strlen(library) >= sizeof library_path) return "the path of libgander.so is too long";
  strcpy(library_path, library);
  for (int i = 0; i < 2; i++) {
    TorchLibrary registry; /* lives as long as the process */
    if (torch.aoti_torch_library_init_impl("gander", keys[i], "kernels.c", 0, &registry))
      return "torch refused the registration";
    for (int j = 0; j < OPERATOR_COUNT; j++)
      if (torch.torch_library_impl(registry, operators[j].name, kernels[j], TORCH_ABI))
        return "torch refused a kernel";
  }
  return NULL;
}
