/* gander's kernels for PyTorch's dispatcher (torch 2.10 or newer), through PyTorch's stable C ABI, and a shorter way
 * to them from Python.
 *
 * No header of torch or Python is included: the few functions needed are declared here and looked up in the libtorch
 * and the interpreter that the process has already loaded, so one binary serves every torch that keeps the ABI, CPU or
 * CUDA build, and every Python. libgander itself is loaded by the first kernel that runs.
 *
 *   gcc -O2 -std=gnu11 -fPIC -shared -fexceptions -fvisibility=hidden -I capi -I dlpack \
 *       python/gander/_torch.c -o python/gander/_torch.so -ldl -lpthread
 *
 * A kernel owns the handles it is given. It borrows each tensor as a DLTensor, allocates the outputs through
 * torch, calls the borrowed C entry point, deletes the handles and only then reports a failure: that throws a C++
 * exception through the frames of this file (hence -fexceptions), never through a frame of Go. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "gander.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- What is used of torch: torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h ---- */

typedef uint64_t Value; /* StableIValue: an int, a double or a handle; an optional is NULL or a Value* that we delete */
typedef struct AtenTensorOpaque* Tensor;
typedef struct TorchLibraryOpaque* TorchLibrary;
typedef void (*Kernel)(Value* stack, uint64_t inputs, uint64_t outputs);

/* The torch whose schemas and conventions this file was written for: 2.10.0. */
#define TORCH_ABI (UINT64_C(2) << 56 | UINT64_C(10) << 48)

#define TORCH_FUNCTIONS(F)                                                                                      \
  F(int32_t, aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, TorchLibrary*))    \
  F(int32_t, torch_library_impl, (TorchLibrary, const char*, Kernel, uint64_t))                                 \
  F(void, aoti_torch_check, (bool, const char*, const char*, uint32_t, const char*))                            \
  F(int32_t, aoti_torch_delete_tensor_object, (Tensor))                                                         \
  F(int32_t, aoti_torch_get_dim, (Tensor, int64_t*))                                                            \
  F(int32_t, aoti_torch_get_sizes, (Tensor, int64_t**))                                                         \
  F(int32_t, aoti_torch_get_strides, (Tensor, int64_t**))                                                       \
  F(int32_t, aoti_torch_get_dtype, (Tensor, int32_t*))                                                          \
  F(int32_t, aoti_torch_get_device_type, (Tensor, int32_t*))                                                    \
  F(int32_t, aoti_torch_get_device_index, (Tensor, int32_t*))                                                   \
  F(int32_t, torch_get_const_data_ptr, (Tensor, const void**))                                                  \
  F(int32_t, torch_get_mutable_data_ptr, (Tensor, void**))                                                      \
  F(int32_t, aoti_torch_empty_strided,                                                                          \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*))                              \
  F(int32_t, aoti_torch_copy_, (Tensor, Tensor, int32_t))                                                       \
  F(int32_t, torch_get_num_threads, (uint32_t*))                                                                \
  F(int32_t, aoti_torch_device_type_cpu, (void))                                                                \
  F(int32_t, aoti_torch_device_type_cuda, (void))

#define DECLARE(result, name, arguments) result(*name) arguments;
static struct {
  TORCH_FUNCTIONS(DECLARE)
  int32_t (*current_cuda_stream)(int32_t device, void** stream); /* NULL in a CPU build of torch */
  bool (*grad_mode)(void);
  void (*delete_value)(void*);                                   /* C++'s operator delete */
  int32_t cpu, cuda;                                             /* torch's codes of the device types */
} torch;

/* torch's code of each element type beside DLPack's. */
#define DTYPES(F)                                                                                               \
  F(float16, kDLFloat, 16) F(bfloat16, kDLBfloat, 16) F(float32, kDLFloat, 32) F(float64, kDLFloat, 64)         \
  F(int32, kDLInt, 32) F(int64, kDLInt, 64) F(int8, kDLInt, 8) F(int16, kDLInt, 16) F(uint8, kDLUInt, 8)        \
  F(uint16, kDLUInt, 16) F(uint32, kDLUInt, 32) F(uint64, kDLUInt, 64) F(bool, kDLBool, 8)                      \
  F(complex32, kDLComplex, 32) F(complex64, kDLComplex, 64) F(complex128, kDLComplex, 128)
typedef struct _object PyObject;
static struct {
  const char* getter;
  int32_t torch;
  DLDataType dl;
  const char* name;
  PyObject* object; /* torch.float32 and so on; NULL: not for an output */
} dtypes[] = {
#define DTYPE(name, code, bits) {"aoti_torch_dtype_" #name, -1, {code, bits, 1}, #name, NULL},
    DTYPES(DTYPE)};
enum { DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0] };

/* ---- What is used of Python: its limited API, which every interpreter since 3.10 has, and objects of torch ---- */

typedef struct {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, intptr_t count);
  int flags;
  const char* doc;
} PyMethodDef;
enum { METH_FASTCALL = 0x80 };

#define PYTHON_FUNCTIONS(F)                                                              \
  F(void, Py_IncRef, (PyObject*))                                                        \
  F(void, Py_DecRef, (PyObject*))                                                        \
  F(PyObject*, PyObject_Type, (PyObject*))                                               \
  F(PyObject*, PyObject_GetAttr, (PyObject*, PyObject*))                                 \
  F(int, PyObject_SetAttr, (PyObject*, PyObject*, PyObject*))                            \
  F(int, PyObject_IsTrue, (PyObject*))                                                   \
  F(PyObject*, PyObject_CallObject, (PyObject*, PyObject*))                              \
  F(PyObject*, PyObject_CallFunctionObjArgs, (PyObject*, ...))                           \
  F(PyObject*, PyDict_GetItem, (PyObject*, PyObject*))                                   \
  F(PyObject*, PyDict_GetItemString, (PyObject*, const char*))                           \
  F(int, PyDict_SetItemString, (PyObject*, const char*, PyObject*))                      \
  F(PyObject*, PyTuple_New, (intptr_t))                                                  \
  F(int, PyTuple_SetItem, (PyObject*, intptr_t, PyObject*))                              \
  F(PyObject*, PyLong_FromLongLong, (long long))                                         \
  F(long long, PyLong_AsLongLong, (PyObject*))                                           \
  F(double, PyFloat_AsDouble, (PyObject*))                                               \
  F(PyObject*, PyUnicode_InternFromString, (const char*))                                \
  F(PyObject*, PyCapsule_New, (void*, const char*, void (*)(PyObject*)))                 \
  F(void*, PyCapsule_GetPointer, (PyObject*, const char*))                               \
  F(PyObject*, PyCFunction_NewEx, (PyMethodDef*, PyObject*, PyObject*))                  \
  F(PyObject*, PyErr_Occurred, (void))                                                   \
  F(void, PyErr_SetString, (PyObject*, const char*))                                     \
  F(void, PyErr_Clear, (void))                                                           \
  F(void*, PyEval_SaveThread, (void))                                                    \
  F(void, PyEval_RestoreThread, (void*))

static struct {
  PYTHON_FUNCTIONS(DECLARE)
} python;

/* What gander._pytorch hands over: types, functions of torch, dictionaries of its modules. */
#define OBJECTS(F)                                                                                               \
  F(Tensor) F(Parameter) F(None) F(False) F(RuntimeError) F(is_neg) F(is_cow) F(contiguous) F(empty_strided_cpu) \
  F(empty_strided_cuda) F(forward_ad)
#define NAMES(F) \
  F(requires_grad) F(to_save) F(materialize_grads) F(options) F(_current_level)
#define DECLARE_OBJECT(name) PyObject* name;
static struct {
  OBJECTS(DECLARE_OBJECT)
} objects;
static struct {
  NAMES(DECLARE_OBJECT)
} names;
static const DLPackExchangeAPI* exchange;

/* ---- libgander, loaded once by the first kernel ---- */

#define GANDER_FUNCTIONS(F)                                                                                      \
  F(gander_abi_version) F(gander_last_error) F(gander_set_num_threads)                                           \
  F(gander_softmax_forward) F(gander_softmax_backward) F(gander_rmsnorm_forward) F(gander_rmsnorm_backward)      \
  F(gander_cross_entropy_forward) F(gander_cross_entropy_backward)
#define DECLARE_GANDER(name) __typeof__(&name) name;
static struct {
  GANDER_FUNCTIONS(DECLARE_GANDER)
} lib;

static char library_path[4096];
static char load_error[1024]; /* empty: loaded */
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

static void load(void) {
  void* handle = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    snprintf(load_error, sizeof load_error, "gander: cannot load its library: %s", dlerror());
    return;
  }
#define LOOK_UP(name)                                                                                  \
  if ((lib.name = (__typeof__(&name))dlsym(handle, #name)) == NULL) {                                  \
    snprintf(load_error, sizeof load_error, "gander: %.800s has no " #name "; reinstall gander", library_path); \
    return;                                                                                            \
  }
  GANDER_FUNCTIONS(LOOK_UP)
  if (lib.gander_abi_version() != GANDER_ABI_VERSION)
    snprintf(load_error, sizeof load_error, "gander: %.800s has ABI version %d, expected %d; reinstall gander",
             library_path, (int)lib.gander_abi_version(), GANDER_ABI_VERSION);
}

/* ---- One kernel call ---- */

enum { MAX_OWNED = 24, MAX_RANK = 64 };

/* The calling thread's last failure, which gander._pytorch raises as the right Python type. */
static _Thread_local struct {
  int32_t status;
  char message[1024];
} failure;

/* The kernel to be called next is called from Python, with the GIL. Its Tensors are then Python's objects; it borrows
 * its inputs, boxes included; and where it fails it throws nothing: it leaves NULL on the stack. */
static _Thread_local bool from_python;

typedef struct {
  bool failed; /* everything after the first failure is skipped */
  bool python; /* from_python */
  void* thread; /* Python's thread state while the GIL is released */
  int owned_count;
  Tensor owned[MAX_OWNED];           /* deleted when the call ends */
  Tensor scratch;                    /* so is this, always a handle */
  int32_t device_type, device_index; /* torch's, of x */
  void* stream;
  gander_allocator allocator;
} Call;

typedef struct {
  Tensor handle; /* NULL: absent. A compact copy where the layout of the given tensor cannot be served. */
  DLTensor dl;
  int32_t dtype;            /* torch's */
  int64_t length, stride;   /* shape and strides of an operand that was flattened to a vector */
} Operand;

static void fail(Call* call, int32_t status, const char* format, ...) {
  if (call->failed) return;
  call->failed = true;
  if (call->python) return; /* whoever asked goes through the dispatcher then, and fails there */
  failure.status = status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.message, sizeof failure.message, format, arguments);
  va_end(arguments);
}

static Tensor own(Call* call, Tensor handle) {
  if (call->owned_count == MAX_OWNED) __builtin_trap(); /* no kernel below comes near it */
  return call->owned[call->owned_count++] = handle;
}

static Tensor take(Call* call, Value value) {
  Tensor handle = (Tensor)(uintptr_t)value;
  return call->python ? handle : own(call, handle);
}

/* Takes an optional's content out of its box. */
static bool unbox(Call* call, Value boxed, Value* content) {
  if (boxed == 0) return false;
  *content = *(Value*)(uintptr_t)boxed;
  if (!call->python) torch.delete_value((void*)(uintptr_t)boxed);
  return true;
}

static Tensor take_optional(Call* call, Value boxed) { return unbox(call, boxed, &boxed) ? take(call, boxed) : NULL; }

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

/* Do these dimensions collapse into `length` elements that lie one stride apart? */
static bool collapses(int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t* length, int64_t* stride) {
  int64_t inner = 1; /* elements in the dimensions inside of i */
  bool ok = true;
  *length = 1;
  *stride = 1;
  for (int64_t i = rank - 1; i >= 0; i--) {
    *length *= sizes[i];
    if (sizes[i] < 2) continue;
    if (inner == 1) *stride = strides[i];
    ok &= strides[i] == *stride * inner;
    inner *= sizes[i];
  }
  return ok || *length == 0;
}

/* Through DLPack, which torch's own type offers as C functions. */
static void describe_object(Call* call, Operand* o, Tensor object) {
  o->handle = object;
  if (exchange->dltensor_from_py_object_no_sync(object, &o->dl)) {
    python.PyErr_Clear();
    call->failed = true;
    o->dl = (DLTensor){0}; /* whatever it had got to */
  } else {
    o->dtype = torch_dtype(o->dl.dtype);
    call->failed |= o->dl.data == NULL; /* empty, or without storage */
  }
}

/* Fills o with a description of the tensor. Outputs are written; inputs are only read, which leaves a
 * copy-on-write tensor shared. */
static void describe(Call* call, Operand* o, Tensor handle, bool written) {
  int32_t device = -1, index = 0, bad = 0;
  int64_t rank = 0;
  const void* data = NULL;
  memset(o, 0, sizeof *o);
  if (call->failed || handle == NULL) return;
  if (call->python) {
    describe_object(call, o, handle);
    return;
  }
  bad |= torch.aoti_torch_get_dim(handle, &rank);
  bad |= torch.aoti_torch_get_sizes(handle, &o->dl.shape);
  bad |= torch.aoti_torch_get_strides(handle, &o->dl.strides);
  bad |= torch.aoti_torch_get_dtype(handle, &o->dtype);
  bad |= torch.aoti_torch_get_device_type(handle, &device);
  bad |= torch.aoti_torch_get_device_index(handle, &index);
  bad |= written ? torch.torch_get_mutable_data_ptr(handle, (void**)&data)
                 : torch.torch_get_const_data_ptr(handle, &data);
  if (bad) fail(call, GANDER_ERROR_INTERNAL, "gander: torch could not describe a tensor");
  o->handle = handle;
  o->dl.data = (void*)data;
  o->dl.ndim = (int32_t)rank;
  o->dl.dtype = dl_dtype(o->dtype);
  o->dl.device.device_type = device == torch.cuda ? kDLCUDA : device == torch.cpu ? kDLCPU : kDLExtDev;
  o->dl.device.device_id = device == torch.cuda ? index : 0;
}

static PyObject* tuple_of(int64_t count, const int64_t* values) {
  PyObject* tuple = python.PyTuple_New(count);
  for (int64_t i = 0; tuple != NULL && i < count; i++)
    python.PyTuple_SetItem(tuple, i, python.PyLong_FromLongLong(values[i]));
  return tuple;
}

/* A new tensor as Python's object, NULL where torch gives none. */
static PyObject* new_object(const Call* call, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  PyObject *type = NULL, *result = NULL;
  for (int i = 0; i < DTYPE_COUNT; i++)
    if (dtypes[i].torch == dtype) type = dtypes[i].object;
  PyObject* arguments = type == NULL ? NULL : python.PyTuple_New(3);
  if (arguments != NULL) {
    python.Py_IncRef(type);
    python.PyTuple_SetItem(arguments, 0, tuple_of(rank, sizes));
    python.PyTuple_SetItem(arguments, 1, tuple_of(rank, strides));
    python.PyTuple_SetItem(arguments, 2, type);
    PyObject* empty = call->device_type == torch.cuda ? objects.empty_strided_cuda : objects.empty_strided_cpu;
    result = python.PyObject_CallObject(empty, arguments);
    python.Py_DecRef(arguments);
  }
  if (result == NULL) python.PyErr_Clear();
  return result;
}

/* A new compact tensor on x's device. */
static void output(Call* call, Operand* o, int64_t rank, const int64_t* sizes, int32_t dtype) {
  int64_t strides[MAX_RANK], stride = 1;
  Tensor handle = NULL;
  if (rank > MAX_RANK) fail(call, GANDER_ERROR_SHAPE, "x: rank %lld, expected at most %d", (long long)rank, MAX_RANK);
  if (!call->failed) {
    for (int64_t i = rank - 1; i >= 0; i--) {
      strides[i] = stride;
      stride *= sizes[i] > 0 ? sizes[i] : 1;
    }
    if (call->python)
      handle = (Tensor)new_object(call, rank, sizes, strides, dtype);
    else
      torch.aoti_torch_empty_strided(rank, sizes, strides, dtype, call->device_type, call->device_index, &handle);
    if (handle == NULL)
      fail(call, GANDER_ERROR_MEMORY, "gander: torch could not allocate %lld elements", (long long)stride);
    else
      own(call, handle);
  }
  describe(call, o, handle, true);
  /* From Python the current device gives the memory, which need not be x's. */
  if (call->device_type == torch.cuda && o->dl.device.device_id != call->device_index)
    fail(call, GANDER_ERROR_DEVICE, "gander: torch allocated on device %d, expected %d", o->dl.device.device_id,
         call->device_index);
}

static void output_like(Call* call, Operand* o, const Operand* model) {
  output(call, o, model->dl.ndim, model->dl.shape, model->dtype);
}

static void copy(Call* call, Tensor to, Tensor from) {
  if (!call->failed && torch.aoti_torch_copy_(to, from, 0))
    fail(call, GANDER_ERROR_MEMORY, "gander: torch could not copy a tensor whose strides gander cannot serve");
}

/* Replaces an operand by a compact copy of it. */
static void compact(Call* call, Operand* o) {
  Operand given = *o;
  if (call->failed) return;
  if (call->python) {
    PyObject* copied = python.PyObject_CallFunctionObjArgs(objects.contiguous, o->handle, NULL);
    if (copied == NULL) {
      python.PyErr_Clear();
      call->failed = true;
      return;
    }
    describe(call, o, own(call, (Tensor)copied), false);
    return;
  }
  output_like(call, o, &given);
  copy(call, o->handle, given.handle);
}

/* Makes rows of o: adjacent elements in the last dimension, rows one stride apart. */
static void arrange(Call* call, Operand* o) {
  int64_t length, stride, last = o->dl.ndim - 1;
  if (last >= 0 && ((o->dl.shape[last] > 1 && o->dl.strides[last] != 1) ||
                    !collapses(last, o->dl.shape, o->dl.strides, &length, &stride)))
    compact(call, o);
}

static void rows(Call* call, Operand* o, Tensor handle, bool written) {
  describe(call, o, handle, written);
  arrange(call, o);
}

/* The rows that say where the call runs. */
static void leading_rows(Call* call, Operand* o, Tensor handle, bool written) {
  describe(call, o, handle, written);
  if (call->python) {
    call->device_type = o->dl.device.device_type == kDLCUDA ? torch.cuda : torch.cpu;
    call->device_index = o->dl.device.device_id;
    call->failed |= o->dl.device.device_type != kDLCUDA && o->dl.device.device_type != kDLCPU;
  } else if (torch.aoti_torch_get_device_type(handle, &call->device_type) ||
             torch.aoti_torch_get_device_index(handle, &call->device_index)) {
    fail(call, GANDER_ERROR_INTERNAL, "gander: torch could not describe a tensor");
  }
  arrange(call, o);
}

/* A vector of adjacent elements. */
static void vector(Call* call, Operand* o, Tensor handle) {
  int64_t length, stride;
  describe(call, o, handle, false);
  if (!collapses(o->dl.ndim, o->dl.shape, o->dl.strides, &length, &stride) || (length > 1 && stride != 1))
    compact(call, o);
}

/* Makes one dimension of all of them: a value for each row, any stride apart. */
static void flatten(Call* call, Operand* o) {
  if (!collapses(o->dl.ndim, o->dl.shape, o->dl.strides, &o->length, &o->stride)) {
    compact(call, o);
    collapses(o->dl.ndim, o->dl.shape, o->dl.strides, &o->length, &o->stride);
  }
  o->dl.ndim = 1;
  o->dl.shape = &o->length;
  o->dl.strides = &o->stride;
}

static const DLTensor* optional(const Operand* o) { return o->handle == NULL ? NULL : &o->dl; }

/* The dtype of statistics (loss, lse, rstd). */
static int32_t statistics(const Operand* x) {
  bool wide = x->dl.dtype.code == kDLFloat && x->dl.dtype.bits == 64;
  return torch_dtype((DLDataType){kDLFloat, wide ? 64 : 32, 1});
}

static int64_t leading_rank(const Operand* x) { return x->dl.ndim > 0 ? x->dl.ndim - 1 : 0; }

/* A statistic of each of x's rows. */
static void output_per_row(Call* call, Operand* o, const Operand* x) {
  output(call, o, leading_rank(x), x->dl.shape, statistics(x));
  flatten(call, o);
}

/* Scratch on the GPU comes from torch's allocator, like everything else; it is freed in stream order. */
static void* scratch(void* context, size_t bytes) {
  Call* call = context; /* without the GIL, if it came from Python */
  int64_t size = (int64_t)bytes, stride = 1;
  void* data = NULL;
  if (torch.aoti_torch_empty_strided(1, &size, &stride, torch_dtype((DLDataType){kDLUInt, 8, 1}), call->device_type,
                                     call->device_index, &call->scratch) ||
      torch.torch_get_mutable_data_ptr(call->scratch, &data))
    fail(call, GANDER_ERROR_MEMORY, "gander: torch could not allocate %lld bytes", (long long)size);
  return data;
}

static void begin(Call* call) {
  call->failed = false;
  call->python = from_python;
  from_python = false;
  call->thread = NULL;
  call->owned_count = 0;
  call->scratch = NULL;
  call->stream = NULL;
  call->allocator = (gander_allocator){call, scratch};
  pthread_once(&load_once, load);
  if (load_error[0] != 0) fail(call, GANDER_ERROR_INTERNAL, "%s", load_error);
}

/* Asks for x's stream, or has the CPU kernels use as many threads as torch does. True: go ahead. */
static bool ready(Call* call) {
  static _Atomic uint32_t threads;
  if (call->failed) return false;
  if (call->device_type == torch.cuda) {
    if (torch.current_cuda_stream == NULL || torch.current_cuda_stream(call->device_index, &call->stream))
      fail(call, GANDER_ERROR_CUDA, "gander: torch gave no CUDA stream");
  } else {
    uint32_t count = 0;
    if (torch.torch_get_num_threads(&count) == 0 && count != atomic_load_explicit(&threads, memory_order_relaxed)) {
      atomic_store_explicit(&threads, count, memory_order_relaxed);
      lib.gander_set_num_threads((int32_t)count);
    }
  }
  if (call->python && !call->failed) call->thread = python.PyEval_SaveThread();
  return !call->failed;
}

static const gander_allocator* allocator(const Call* call) {
  return call->device_type == torch.cuda ? &call->allocator : NULL;
}

static void done(Call* call, int32_t status) {
  if (call->python) python.PyEval_RestoreThread(call->thread);
  if (status != GANDER_OK) fail(call, status, "%s", lib.gander_last_error());
}

/* Deletes all handles but the outputs', which go to the stack. Throws where the call failed. */
static void finish(Call* call, Value* stack, int count, const Tensor* outputs) {
  for (int i = 0; i < call->owned_count; i++) {
    bool kept = false;
    for (int j = 0; j < count; j++) kept |= call->owned[i] == outputs[j];
    if (kept && !call->failed) continue;
    if (call->python)
      python.Py_DecRef((PyObject*)call->owned[i]);
    else
      torch.aoti_torch_delete_tensor_object(call->owned[i]);
  }
  if (call->scratch != NULL) torch.aoti_torch_delete_tensor_object(call->scratch);
  if (call->failed && call->python) {
    stack[0] = 0;
    return;
  }
  if (call->failed) torch.aoti_torch_check(false, "gander", "_torch.c", 0, failure.message);
  for (int j = 0; j < count; j++) stack[j] = (Value)(uintptr_t)outputs[j];
}

static double as_double(Value value) {
  double number;
  memcpy(&number, &value, sizeof number);
  return number;
}

/* ---- The kernels; their schemas are in _pytorch.py ---- */

/* The last two arguments of the ops that are called by algorithm; 0 in the others. */
typedef struct {
  int32_t algorithm;
  bool batch_invariant;
} How;

static How how_of(const Value* arguments) { return (How){(int32_t)arguments[0], arguments[1] != 0}; }

static void softmax_forward(Value* stack, How how) {
  Call call;
  Operand x, y;
  begin(&call);
  leading_rows(&call, &x, take(&call, stack[0]), false);
  output_like(&call, &y, &x);
  if (ready(&call)) {
    gander_softmax_options options = {sizeof options, allocator(&call), how.algorithm, how.batch_invariant};
    done(&call, lib.gander_softmax_forward(&x.dl, &y.dl, &options, call.stream));
  }
  finish(&call, stack, 1, &y.handle);
}

static void softmax_fwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  softmax_forward(stack, (How){0});
}

static void softmax_fwd_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  softmax_forward(stack, how_of(stack + 1));
}

static void softmax_backward(Value* stack, How how) {
  Call call;
  Operand dy, y, dx;
  begin(&call);
  Tensor dy_handle = take(&call, stack[0]), y_handle = take(&call, stack[1]);
  leading_rows(&call, &dy, dy_handle, false);
  rows(&call, &y, y_handle, false);
  output_like(&call, &dx, &dy);
  if (ready(&call)) {
    gander_softmax_options options = {sizeof options, allocator(&call), how.algorithm, how.batch_invariant};
    done(&call, lib.gander_softmax_backward(&dy.dl, &y.dl, &dx.dl, &options, call.stream));
  }
  finish(&call, stack, 1, &dx.handle);
}

static void softmax_bwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  softmax_backward(stack, (How){0});
}

static void softmax_bwd_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  softmax_backward(stack, how_of(stack + 2));
}

static void rmsnorm_forward(Value* stack, bool with_rstd, How how) {
  Call call;
  Operand x, weight, y, rstd = {0};
  Value dtype;
  begin(&call);
  Tensor x_handle = take(&call, stack[0]), weight_handle = take_optional(&call, stack[1]);
  bool cast = unbox(&call, stack[2], &dtype);
  leading_rows(&call, &x, x_handle, false);
  vector(&call, &weight, weight_handle);
  output(&call, &y, x.dl.ndim, x.dl.shape, cast ? (int32_t)dtype : x.dtype);
  if (with_rstd) output_per_row(&call, &rstd, &x);
  if (ready(&call)) {
    gander_rmsnorm_options options = {sizeof options, allocator(&call), as_double(stack[3]), how.algorithm,
                                      how.batch_invariant};
    done(&call, lib.gander_rmsnorm_forward(&x.dl, optional(&weight), &y.dl, optional(&rstd), &options, call.stream));
  }
  finish(&call, stack, with_rstd ? 2 : 1, (Tensor[]){y.handle, rstd.handle});
}

static void rmsnorm_fwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_forward(stack, false, (How){0});
}

static void rmsnorm_fwd_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_forward(stack, false, how_of(stack + 4));
}

static void rmsnorm_fwd_rstd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_forward(stack, true, (How){0});
}

static void rmsnorm_fwd_rstd_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_forward(stack, true, how_of(stack + 4));
}

static void rmsnorm_backward(Value* stack, bool with_dw, How how) {
  Call call;
  Operand x, weight, dout, rstd, dx, dw = {0};
  begin(&call);
  Tensor x_handle = take(&call, stack[0]);
  Tensor weight_handle = with_dw ? take(&call, stack[1]) : take_optional(&call, stack[1]);
  Tensor dout_handle = take(&call, stack[2]), rstd_handle = take(&call, stack[3]);
  leading_rows(&call, &x, x_handle, false);
  vector(&call, &weight, weight_handle);
  rows(&call, &dout, dout_handle, false);
  vector(&call, &rstd, rstd_handle);
  flatten(&call, &rstd);
  output_like(&call, &dx, &x);
  if (with_dw) output_like(&call, &dw, &weight);
  if (ready(&call)) {
    gander_rmsnorm_options options = {sizeof options, allocator(&call), 0, how.algorithm, how.batch_invariant};
    done(&call, lib.gander_rmsnorm_backward(&x.dl, optional(&weight), &dout.dl, &rstd.dl, &dx.dl, optional(&dw),
                                            &options, call.stream));
  }
  finish(&call, stack, with_dw ? 2 : 1, (Tensor[]){dx.handle, dw.handle});
}

static void rmsnorm_bwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_backward(stack, false, (How){0});
}

static void rmsnorm_bwd_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_backward(stack, false, how_of(stack + 4));
}

static void rmsnorm_bwd_dw(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_backward(stack, true, (How){0});
}

static void rmsnorm_bwd_dw_by(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  rmsnorm_backward(stack, true, how_of(stack + 4));
}

/* The target has a value for each row of x: the same leading dimensions, not only as many. */
static void targets(Call* call, const char* op, Operand* o, Tensor handle, const Operand* x) {
  describe(call, o, handle, false);
  bool same = call->failed || x->dl.ndim == 0 ||
              (o->dl.ndim == x->dl.ndim - 1 &&
               memcmp(o->dl.shape, x->dl.shape, sizeof(int64_t) * (size_t)o->dl.ndim) == 0);
  if (!same) {
    char text[2][256];
    const DLTensor* shapes[2] = {&o->dl, &x->dl};
    for (int i = 0; i < 2; i++) {
      size_t n = 0;
      for (int64_t j = 0; j < shapes[i]->ndim - i && n < sizeof text[i] - 24; j++)
        n += (size_t)snprintf(text[i] + n, sizeof text[i] - n, "%s%lld", j ? ", " : "", (long long)shapes[i]->shape[j]);
      text[i][n] = 0;
    }
    fail(call, GANDER_ERROR_SHAPE, "%s: target has shape (%s), expected (%s), the leading dimensions of x", op, text[0],
         text[1]);
  }
  flatten(call, o);
}

/* What a forward call gives besides the losses, and how (ONE_PASS, INVARIANT). SAVED is all that backward needs, in one allocation of 2 M + 1
 * elements: each row's maximum, each row's logarithm of the sum, and the denominator. */
enum { LSE = 1, SAVED = 2, DX = 4, IN_PLACE = 8, ONE_PASS = 16, INVARIANT = 32 };

typedef struct {
  int64_t shape[2], strides[2];
  DLTensor lse, denominator;
} Saved;

static void split(Saved* saved, const Operand* o, int64_t rows) {
  *saved = (Saved){{2, rows}, {rows, 1}, o->dl, o->dl};
  saved->lse.ndim = 2;
  saved->lse.shape = saved->shape;
  saved->lse.strides = saved->strides;
  saved->denominator.ndim = 0;
  saved->denominator.byte_offset = (uint64_t)(2 * rows) * (o->dl.dtype.bits / 8u);
}

static void cross_entropy_forward(Value* stack, int32_t reduction, int wanted) {
  Call call;
  Operand x, target, weight, loss, lse = {0}, dx = {0};
  Saved saved;
  Tensor results[3];
  int count = 0;
  begin(&call);
  Tensor x_handle = take(&call, stack[0]), target_handle = take(&call, stack[1]);
  Tensor weight_handle = take_optional(&call, stack[2]);
  int64_t ignore_index = (int64_t)stack[3];
  leading_rows(&call, &x, x_handle, wanted & IN_PLACE);
  targets(&call, "cross_entropy_forward", &target, target_handle, &x);
  vector(&call, &weight, weight_handle);
  if (reduction == GANDER_REDUCTION_NONE)
    output_per_row(&call, &loss, &x);
  else
    output(&call, &loss, 0, NULL, statistics(&x));
  results[count++] = loss.handle;
  if (wanted & LSE) {
    output_per_row(&call, &lse, &x);
    results[count++] = lse.handle;
  }
  if (wanted & SAVED) {
    output(&call, &lse, 1, (int64_t[]){2 * target.length + 1}, statistics(&x));
    results[count++] = lse.handle;
    split(&saved, &lse, target.length);
  }
  if (wanted & DX) {
    output_like(&call, &dx, &x);
    results[count++] = dx.handle;
  }
  if (wanted & IN_PLACE) dx = x;
  if (ready(&call)) {
    gander_cross_entropy_options options = {.size = sizeof options, .allocator = allocator(&call),
                                            .ignore_index = ignore_index, .reduction = reduction,
                                            .one_pass = (wanted & ONE_PASS) != 0,
                                            .batch_invariant = (wanted & INVARIANT) != 0};
    const DLTensor* lse_tensor = wanted & SAVED ? &saved.lse : optional(&lse);
    done(&call, lib.gander_cross_entropy_forward(&x.dl, &target.dl, optional(&weight), &loss.dl, lse_tensor,
                                                 optional(&dx), wanted & SAVED ? &saved.denominator : NULL, &options,
                                                 call.stream));
  }
  if ((wanted & IN_PLACE) && x.handle != x_handle) copy(&call, x_handle, x.handle);
  finish(&call, stack, count, results);
}

static void cross_entropy_fwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, (int32_t)stack[4], 0);
}

static void cross_entropy_fwd_invariant(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, (int32_t)stack[4], INVARIANT);
}

static void cross_entropy_fwd_saved(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, (int32_t)stack[4], SAVED);
}

static void cross_entropy_fwd_saved_invariant(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, (int32_t)stack[4], SAVED | INVARIANT);
}

static void cross_entropy_fwd_one_pass(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, (int32_t)stack[4], SAVED | DX | ONE_PASS);
}

static void cross_entropy_fwd_lse(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE);
}

static void cross_entropy_fwd_lse_invariant(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE | INVARIANT);
}

static void cross_entropy_fwd_dx(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE | DX);
}

static void cross_entropy_fwd_dx_invariant(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE | DX | INVARIANT);
}

static void cross_entropy_fwd_dx_(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE | IN_PLACE);
}

static void cross_entropy_fwd_dx_invariant_(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_forward(stack, GANDER_REDUCTION_NONE, LSE | IN_PLACE | INVARIANT);
}

/* Where dx goes: to a new tensor, over x, or over the gradient that the forward pass left there. */
enum { NEW_DX, OVER_X, OVER_DX };

static void cross_entropy_backward(Value* stack, int where) {
  Call call;
  Operand x, target, weight, dloss, lse, dx;
  Saved saved;
  begin(&call);
  Tensor x_handle = take(&call, stack[0]), target_handle = take(&call, stack[1]);
  Tensor weight_handle = take_optional(&call, stack[2]);
  Tensor dloss_handle = take(&call, stack[3]), lse_handle = take(&call, stack[4]);
  Value* rest = stack + 5;
  Tensor dx_handle = where == OVER_DX ? take(&call, *rest++) : NULL;
  int64_t ignore_index = (int64_t)rest[0];
  int32_t reduction = (int32_t)rest[1];
  leading_rows(&call, &x, x_handle, where == OVER_X);
  targets(&call, "cross_entropy_backward", &target, target_handle, &x);
  vector(&call, &weight, weight_handle);
  describe(&call, &dloss, dloss_handle, false);
  flatten(&call, &dloss);
  vector(&call, &lse, lse_handle);
  flatten(&call, &lse);
  bool is_saved = lse.length == 2 * target.length + 1;
  split(&saved, &lse, target.length);
  if (where == NEW_DX) output_like(&call, &dx, &x);
  if (where == OVER_X) dx = x;
  if (where == OVER_DX) describe(&call, &dx, dx_handle, true);
  if (ready(&call)) {
    gander_cross_entropy_options options = {.size = sizeof options, .allocator = allocator(&call),
                                            .ignore_index = ignore_index, .reduction = reduction,
                                            .one_pass = where == OVER_DX};
    const DLTensor* denominator = reduction == GANDER_REDUCTION_MEAN && is_saved ? &saved.denominator : NULL;
    done(&call, lib.gander_cross_entropy_backward(&x.dl, &target.dl, optional(&weight), &dloss.dl,
                                                  is_saved ? &saved.lse : &lse.dl, denominator, &dx.dl, &options,
                                                  call.stream));
  }
  if (where == OVER_X && x.handle != x_handle) copy(&call, x_handle, x.handle);
  finish(&call, stack, where == NEW_DX ? 1 : 0, &dx.handle);
}

static void cross_entropy_bwd(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_backward(stack, NEW_DX);
}

static void cross_entropy_bwd_(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_backward(stack, OVER_X);
}

static void cross_entropy_bwd_one_pass(Value* stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  cross_entropy_backward(stack, OVER_DX);
}

/* ---- From Python straight to the kernels, where the dispatcher has nothing to add ---- */

/* A function for Python. It takes what its operator takes, in order, and gives None where the dispatcher is to decide,
 * which is also where every error is explained. */
typedef struct {
  const char* name;
  const char* arguments; /* T: a tensor, O: a tensor or None, d: a dtype or None, f: a float, i: an int,
                            * -: False, as only the dispatcher's operator does what else there is */
  Kernel kernel;
  int results;
  /* For a differentiable operator, with arguments counted from the first: */
  Kernel saving;     /* the kernel whose last result is for backward */
  int saving_results;
  int inputs;        /* arguments that may require a gradient */
  int saved;         /* arguments that backward needs */
  int options;       /* the first argument that backward finds in ctx.options; 0: none */
  int64_t most;      /* elements on CUDA from which the dispatcher's operator has another way to the gradient */
  PyObject* apply;   /* of the autograd.Function */
  PyMethodDef method;
} Function;

static Function functions[] = {
    {"softmax", "T", softmax_fwd, 1, softmax_fwd, 1, 1, 0, 0, INT64_MAX, NULL, {0}},
    {"rmsnorm", "TOdf", rmsnorm_fwd, 1, rmsnorm_fwd_rstd, 2, 2, 2, 0, INT64_MAX, NULL, {0}},
    {"cross_entropy", "TTOii-", cross_entropy_fwd, 1, cross_entropy_fwd_saved, 2, 1, 3, 3, INT64_MAX, NULL, {0}},
    {.name = "softmax_bwd", .arguments = "TT", .kernel = softmax_bwd, .results = 1},
    {.name = "rmsnorm_bwd", .arguments = "TOTT", .kernel = rmsnorm_bwd, .results = 1},
    {.name = "rmsnorm_bwd_dw", .arguments = "TTTT", .kernel = rmsnorm_bwd_dw, .results = 2},
    {.name = "cross_entropy_bwd", .arguments = "TTOTTii", .kernel = cross_entropy_bwd, .results = 1},
};
enum { FUNCTION_COUNT = sizeof functions / sizeof functions[0], MAX_ARGUMENTS = 8 };

/* One call of such a function. */
typedef struct {
  const Function* function;
  PyObject* const* arguments;
  Value stack[MAX_ARGUMENTS], boxes[MAX_ARGUMENTS];
  bool declined;
} Job;

static _Thread_local Job* current; /* what forward() below is to do */

/* torch's dispatch state of this thread, two words that are zero by default. Modes, transforms, autocast, tracing and
 * guards of every kind show here; inference mode does too, and is no obstacle. */
static void* libc10;
static uint64_t inference[2];
static bool (*torch_function_mode_enabled)(void), (*has_callbacks)(void);

static const uint64_t* dispatch_state(void) {
  static _Thread_local const uint64_t* state;
  if (state == NULL) state = dlsym(libc10, "_ZN3c104impl26raw_local_dispatch_key_setE");
  return state;
}

/* May this thread pass the dispatcher by? Profilers and tracers are to see the operator, a dual tensor is to be refused. */
static bool plain(void) {
  const uint64_t* state = dispatch_state();
  bool known = (state[0] | state[1]) == 0 || (state[0] == inference[0] && state[1] == inference[1]);
  if (!known || torch_function_mode_enabled() || has_callbacks()) return false;
  PyObject* level = python.PyDict_GetItem(objects.forward_ad, names._current_level);
  return level != NULL && python.PyLong_AsLongLong(level) < 0;
}

static PyObject* none(void) {
  python.Py_IncRef(objects.None);
  return objects.None;
}

static bool is_true(PyObject* owned) {
  bool result = owned != NULL && python.PyObject_IsTrue(owned) == 1;
  if (owned == NULL)
    python.PyErr_Clear();
  else
    python.Py_DecRef(owned);
  return result;
}

static bool requires_grad(PyObject* tensor) { return is_true(python.PyObject_GetAttr(tensor, names.requires_grad)); }

/* A tensor whose memory is what it stands for: no subclass, nothing that the dispatcher resolves before a kernel. */
static bool usable(PyObject* object) {
  PyObject* type = python.PyObject_Type(object);
  python.Py_DecRef(type); /* the object keeps it */
  return (type == objects.Tensor || type == objects.Parameter) &&
         !is_true(python.PyObject_CallFunctionObjArgs(objects.is_neg, object, NULL)) &&
         !is_true(python.PyObject_CallFunctionObjArgs(objects.is_cow, object, NULL));
}

static bool convert(Job* job, int i) {
  PyObject* argument = job->arguments[i];
  double number;
  switch (job->function->arguments[i]) {
    case 'T':
      job->stack[i] = (Value)(uintptr_t)argument;
      return usable(argument);
    case 'O':
      job->boxes[i] = (Value)(uintptr_t)argument;
      job->stack[i] = argument == objects.None ? 0 : (Value)(uintptr_t)&job->boxes[i];
      return argument == objects.None || usable(argument);
    case 'd':
      job->stack[i] = argument == objects.None ? 0 : (Value)(uintptr_t)&job->boxes[i];
      for (int j = 0; j < DTYPE_COUNT; j++)
        if (dtypes[j].object == argument) {
          job->boxes[i] = (Value)dtypes[j].torch;
          return true;
        }
      return argument == objects.None;
    case '-':
      return argument == objects.False;
    case 'f':
      number = python.PyFloat_AsDouble(argument);
      memcpy(&job->stack[i], &number, sizeof number);
      break;
    default:
      job->stack[i] = (Value)python.PyLong_AsLongLong(argument);
  }
  if (python.PyErr_Occurred() == NULL) return true;
  python.PyErr_Clear();
  return false;
}

static bool call_kernel(Job* job, Kernel kernel) {
  from_python = true;
  kernel(job->stack, 0, 0);
  job->declined = job->stack[0] == 0;
  return !job->declined;
}

static PyObject* result(const Job* job, int i) { return (PyObject*)(uintptr_t)job->stack[i]; }

static bool set(PyObject* object, PyObject* name, PyObject* owned) {
  bool ok = owned != NULL && python.PyObject_SetAttr(object, name, owned) == 0;
  if (owned != NULL) python.Py_DecRef(owned);
  return ok;
}

/* A tuple of arguments from `first` to before `last`, and room for one more. */
static PyObject* tuple_of_arguments(const Job* job, int first, int last, int more) {
  PyObject* tuple = python.PyTuple_New(last - first + more);
  for (int i = first; tuple != NULL && i < last; i++) {
    python.Py_IncRef(job->arguments[i]);
    python.PyTuple_SetItem(tuple, i - first, job->arguments[i]);
  }
  return tuple;
}

/* forward() of the autograd.Functions, whose arguments other than ctx are those of the current call. */
static PyObject* forward(PyObject* self, PyObject* const* arguments, intptr_t count) {
  (void)self, (void)count;
  Job* job = current;
  const Function* f = job == NULL ? NULL : job->function;
  current = NULL;
  if (job == NULL || !call_kernel(job, f->saving)) {
    python.PyErr_SetString(objects.RuntimeError, "gander: left to the dispatcher");
    return NULL;
  }
  PyObject *ctx = arguments[0], *out = result(job, 0), *last = result(job, f->saving_results - 1);
  PyObject* saved = tuple_of_arguments(job, 0, f->saved, 1);
  if (last == out) python.Py_IncRef(last);
  if (saved != NULL)
    python.PyTuple_SetItem(saved, f->saved, last);
  else
    python.Py_DecRef(last);
  bool ok = set(ctx, names.to_save, saved) && python.PyObject_SetAttr(ctx, names.materialize_grads, objects.False) == 0;
  if (ok && f->options)
    ok = set(ctx, names.options, tuple_of_arguments(job, f->options, (int)strlen(f->arguments), 0));
  if (ok) return out;
  python.Py_DecRef(out);
  return NULL;
}

/* Decides what a call of a differentiable operator needs: 1 its gradient, 0 no gradient, -1 the dispatcher. */
static int wanted(const Job* job) {
  const Function* f = job->function;
  bool gradient = false;
  if (f->saving == NULL || !torch.grad_mode()) return 0;
  for (int i = 0; f->arguments[i] != 0; i++) {
    bool tensor = f->arguments[i] == 'O' ? job->arguments[i] != objects.None : i < f->inputs;
    if (!tensor || !requires_grad(job->arguments[i])) continue;
    if (i >= f->inputs) return -1;
    gradient = true;
  }
  if (gradient && f->most < INT64_MAX) {
    DLTensor x;
    int64_t elements = 1;
    if (exchange->dltensor_from_py_object_no_sync(job->arguments[0], &x)) {
      python.PyErr_Clear();
      return -1;
    }
    for (int32_t i = 0; i < x.ndim; i++) elements *= x.shape[i];
    if (x.device.device_type == kDLCUDA && elements >= f->most) return -1;
  }
  return gradient;
}

static PyObject* differentiable(Job* job) {
  Job* outer = current; /* hooks on saved tensors run inside of apply, and may call us */
  PyObject* second = job->function->inputs > 1 ? job->arguments[1] : NULL;
  current = job;
  PyObject* out = python.PyObject_CallFunctionObjArgs(job->function->apply, job->arguments[0], second, NULL);
  current = outer;
  if (out != NULL || !job->declined) return out;
  python.PyErr_Clear();
  return none();
}

static PyObject* call_function(PyObject* self, PyObject* const* arguments, intptr_t count) {
  const Function* f = python.PyCapsule_GetPointer(self, NULL);
  Job job = {.function = f, .arguments = arguments};
  if (count != (intptr_t)strlen(f->arguments) || !plain()) return none();
  for (int i = 0; i < count; i++)
    if (!convert(&job, i)) return none();
  int gradient = wanted(&job);
  if (gradient > 0) return differentiable(&job);
  if (gradient < 0 || !call_kernel(&job, f->kernel)) return none();
  if (f->results == 1) return result(&job, 0);
  PyObject* tuple = python.PyTuple_New(f->results);
  for (int i = 0; i < f->results; i++) {
    if (tuple != NULL)
      python.PyTuple_SetItem(tuple, i, result(&job, i));
    else
      python.Py_DecRef(result(&job, i));
  }
  return tuple;
}

/* ---- What gander._pytorch calls through ctypes ---- */

/* Reads the dispatch state. Returns whether this torch has one where it is expected. */
EXPORT bool gander_torch_dispatch_state(uint64_t* words) {
  libc10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (libc10 == NULL || dispatch_state() == NULL) return false;
  memcpy(words, dispatch_state(), sizeof inference);
  return true;
}

static PyObject* kept(PyObject* dictionary, const char* key) {
  PyObject* object = python.PyDict_GetItemString(dictionary, key);
  if (object != NULL) python.Py_IncRef(object);
  return object;
}

/* Fills a dictionary with the functions above. given: OBJECTS, torch's dtypes, "exchange" (the capsule of DLPack's C
 * functions), "most" (an int), and for each differentiable operator its Function's apply. state: the dispatch state in
 * inference mode. Returns NULL, or what is missing. To be called once, with the GIL. */
EXPORT const char* gander_torch_functions(PyObject* given, const uint64_t* state, PyObject* results) {
  static PyMethodDef forward_method = {"forward", forward, METH_FASTCALL, NULL};
  void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
#define LOOK_UP_PYTHON(result, name, arguments) \
  if ((python.name = (__typeof__(python.name))dlsym(RTLD_DEFAULT, #name)) == NULL) return #name;
  PYTHON_FUNCTIONS(LOOK_UP_PYTHON)
  torch.grad_mode = (__typeof__(torch.grad_mode))dlsym(cpu, "aoti_torch_grad_mode_is_enabled");
  torch_function_mode_enabled = (bool (*)(void))dlsym(cpu, "_ZN2at4impl27torch_function_mode_enabledEv");
  has_callbacks = (bool (*)(void))dlsym(cpu, "_ZN2at12hasCallbacksEv");
  if (torch.grad_mode == NULL || torch_function_mode_enabled == NULL || has_callbacks == NULL) return "libtorch_cpu.so";
#define KEEP(name) \
  if ((objects.name = kept(given, #name)) == NULL) return #name;
  OBJECTS(KEEP)
#define INTERN(name) \
  if ((names.name = python.PyUnicode_InternFromString(#name)) == NULL) return #name;
  NAMES(INTERN)
  for (int i = 0; i < DTYPE_COUNT; i++) dtypes[i].object = kept(given, dtypes[i].name);
  PyObject* capsule = python.PyDict_GetItemString(given, "exchange");
  exchange = capsule == NULL ? NULL : python.PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (exchange == NULL || exchange->header.version.major != DLPACK_MAJOR_VERSION ||
      exchange->dltensor_from_py_object_no_sync == NULL)
    return "exchange";
  memcpy(inference, state, sizeof inference);
  for (int i = 0; i < FUNCTION_COUNT; i++) {
    Function* f = &functions[i];
    f->method = (PyMethodDef){f->name, call_function, METH_FASTCALL, NULL};
    if (f->saving != NULL && (f->apply = kept(given, f->name)) == NULL) return f->name;
    if (f->options) f->most = python.PyLong_AsLongLong(python.PyDict_GetItemString(given, "most"));
    PyObject* self = python.PyCapsule_New(f, NULL, NULL);
    PyObject* function = python.PyCFunction_NewEx(&f->method, self, NULL);
    if (function == NULL || python.PyDict_SetItemString(results, f->name, function)) return f->name;
  }
  PyObject* function = python.PyCFunction_NewEx(&forward_method, NULL, NULL);
  if (function == NULL || python.PyDict_SetItemString(results, "forward", function)) return "forward";
  return NULL;
}

/* The status of the calling thread's last failed kernel, which is then forgotten, and its message. */
EXPORT int32_t gander_torch_failure(const char** message) {
  int32_t status = failure.status;
  failure.status = GANDER_OK;
  *message = failure.message;
  return status;
}

/* Registers the kernels of both devices; library is the path of libgander, loaded later. Returns NULL, or what
 * this torch lacks. Schemas are defined first, in Python. */
EXPORT const char* gander_torch_register(const char* library) {
  static const char* const keys[] = {"CPU", "CUDA"};
  static const struct {
    const char* name;
    Kernel kernel;
  } kernels[] = {
#define KERNEL(name) {#name, name}
      KERNEL(softmax_fwd),           KERNEL(softmax_bwd),           KERNEL(rmsnorm_fwd),
      KERNEL(rmsnorm_fwd_rstd),      KERNEL(rmsnorm_bwd),           KERNEL(rmsnorm_bwd_dw),
      KERNEL(cross_entropy_fwd),     KERNEL(cross_entropy_fwd_lse), KERNEL(cross_entropy_fwd_saved),
      KERNEL(cross_entropy_fwd_dx),  KERNEL(cross_entropy_fwd_dx_), KERNEL(cross_entropy_fwd_one_pass),
      KERNEL(cross_entropy_bwd),     KERNEL(cross_entropy_bwd_),    KERNEL(cross_entropy_bwd_one_pass),
      KERNEL(softmax_fwd_by),        KERNEL(softmax_bwd_by),        KERNEL(rmsnorm_fwd_by),
      KERNEL(rmsnorm_fwd_rstd_by),   KERNEL(rmsnorm_bwd_by),        KERNEL(rmsnorm_bwd_dw_by),
      KERNEL(cross_entropy_fwd_invariant),
      KERNEL(cross_entropy_fwd_lse_invariant),
      KERNEL(cross_entropy_fwd_saved_invariant),
      KERNEL(cross_entropy_fwd_dx_invariant),
      KERNEL(cross_entropy_fwd_dx_invariant_),
  };
  void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (cpu == NULL) return "libtorch_cpu.so is not loaded";
#define LOOK_UP_TORCH(result, name, arguments) \
  if ((torch.name = (__typeof__(torch.name))dlsym(cpu, #name)) == NULL) return "libtorch_cpu.so has no " #name;
  TORCH_FUNCTIONS(LOOK_UP_TORCH)
  if ((torch.delete_value = (__typeof__(torch.delete_value))dlsym(cpu, "_ZdlPv")) == NULL)
    return "libtorch_cpu.so does not link the C++ library";
  if (cuda != NULL)
    torch.current_cuda_stream =
        (__typeof__(torch.current_cuda_stream))dlsym(cuda, "aoti_torch_get_current_cuda_stream");
  for (int i = 0; i < DTYPE_COUNT; i++) {
    int32_t (*getter)(void) = (int32_t(*)(void))dlsym(cpu, dtypes[i].getter);
    if (getter == NULL) return dtypes[i].getter;
    dtypes[i].torch = getter();
  }
  torch.cpu = torch.aoti_torch_device_type_cpu();
  torch.cuda = torch.aoti_torch_device_type_cuda();
  if (strlen(library) >= sizeof library_path) return "the path of libgander.so is too long";
  strcpy(library_path, library);
  for (int i = 0; i < 2; i++) {
    TorchLibrary registry; /* lives as long as the process */
    if (torch.aoti_torch_library_init_impl("gander", keys[i], "_torch.c", 0, &registry))
      return "torch refused the registration";
    for (size_t j = 0; j < sizeof kernels / sizeof kernels[0]; j++)
      if (torch.torch_library_impl(registry, kernels[j].name, kernels[j].kernel, TORCH_ABI))
        return "torch refused a kernel";
  }
  return NULL;
}
