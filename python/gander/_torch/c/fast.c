/* The fast path: calls the kernels directly from Python, without PyTorch's dispatcher, which costs host time.
 *
 * It handles eager calls on plain tensors, with no mode or transform active. A call of an operator's function
 * that it does not handle, or that failed, goes through the dispatcher, which runs it or raises its error.
 * gander._torch.fast checks what this file relies on before it uses any function. Until it has, it calls
 * functions of this file that return None in place of asking the dispatcher. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "torch.h"

/* ---- Python's limited API, which every interpreter since 3.10 has, and objects of torch ---- */

typedef struct {
  const char* name;
  void* function; /* see `flags` */
  int flags;
  const char* doc;
} PyMethodDef;
enum { METH_KEYWORDS = 0x2, METH_FASTCALL = 0x80 };

// clang-format off
#define PYTHON_FUNCTIONS(F) \
  F(void, Py_IncRef, (PyObject*)) \
  F(void, Py_DecRef, (PyObject*)) \
  F(PyObject*, PyObject_Type, (PyObject*)) \
  F(PyObject*, PyObject_GetAttr, (PyObject*, PyObject*)) \
  F(int, PyObject_SetAttr, (PyObject*, PyObject*, PyObject*)) \
  F(PyObject*, PyObject_CallFunctionObjArgs, (PyObject*, ...)) \
  F(PyObject*, PyObject_Call, (PyObject*, PyObject*, PyObject*)) \
  F(PyObject*, PyDict_New, (void)) \
  F(int, PyDict_SetItem, (PyObject*, PyObject*, PyObject*)) \
  F(intptr_t, PyTuple_Size, (PyObject*)) \
  F(PyObject*, PyDict_GetItem, (PyObject*, PyObject*)) \
  F(PyObject*, PyDict_GetItemString, (PyObject*, const char*)) \
  F(int, PyDict_SetItemString, (PyObject*, const char*, PyObject*)) \
  F(PyObject*, PyTuple_New, (intptr_t)) \
  F(int, PyTuple_SetItem, (PyObject*, intptr_t, PyObject*)) \
  F(PyObject*, PyTuple_GetItem, (PyObject*, intptr_t)) \
  F(long long, PyLong_AsLongLong, (PyObject*)) \
  F(double, PyFloat_AsDouble, (PyObject*)) \
  F(PyObject*, PyUnicode_InternFromString, (const char*)) \
  F(PyObject*, PyCapsule_New, (void*, const char*, void (*)(PyObject*))) \
  F(void*, PyCapsule_GetPointer, (PyObject*, const char*)) \
  F(PyObject*, PyCFunction_NewEx, (PyMethodDef*, PyObject*, PyObject*)) \
  F(PyObject*, PyErr_Occurred, (void)) \
  F(void, PyErr_SetString, (PyObject*, const char*)) \
  F(void, PyErr_Clear, (void)) \
  F(void*, PyEval_SaveThread, (void)) \
  F(void, PyEval_RestoreThread, (void*))
// clang-format on

#define DECLARE(result, name, arguments) result(*name) arguments;
static struct {
  PYTHON_FUNCTIONS(DECLARE)
} python;

/* Objects that gander._torch.fast passes: types and functions of torch, and a module's dictionary. */
// clang-format off
#define OBJECTS(F) \
  F(Tensor) F(Parameter) F(None) F(False) F(True) F(Ellipsis) F(RuntimeError) F(forward_ad) \
  F(increment_version)
#define NAMES(F) \
  F(requires_grad) F(to_save) F(materialize_grads) F(options) F(dtypes) F(dtype) F(_current_level)
// clang-format on
#define DECLARE_OBJECT(name) PyObject* name;
static struct {
  OBJECTS(DECLARE_OBJECT)
} objects;
static struct {
  NAMES(DECLARE_OBJECT)
} names;

/* Functions of torch. The first five are not in its stable C ABI. A profiler or a tracer has callbacks. wrap
 * returns a new reference. strided and cuda return the codes of this layout and this device type. */
// clang-format off
#define TORCH_FUNCTIONS(F) \
  F(cpu, bool, function_mode, (void), "_ZN2at4impl27torch_function_mode_enabledEv") \
  F(cpu, bool, callbacks, (void), "_ZN2at12hasCallbacksEv") \
  F(cpu, bool, is_neg, (Tensor), "_ZN2at6native6is_negERKNS_6TensorE") \
  F(cpu, bool, is_inference, (Tensor), "_ZN2at6native12is_inferenceERKNS_6TensorE") \
  F(bindings, PyObject*, wrap, (Tensor), "_Z16THPVariable_WrapRKN2at10TensorBaseE") \
  F(cpu, bool, grad_mode, (void), "aoti_torch_grad_mode_is_enabled") \
  F(cpu, int32_t, delete, (Tensor), "aoti_torch_delete_tensor_object") \
  F(cpu, int32_t, numel, (Tensor, int64_t*), "aoti_torch_get_numel") \
  F(cpu, int32_t, layout, (Tensor, int32_t*), "aoti_torch_get_layout") \
  F(cpu, int32_t, device_type, (Tensor, int32_t*), "aoti_torch_get_device_type") \
  F(cpu, int32_t, strided, (void), "aoti_torch_layout_strided") \
  F(cpu, int32_t, cuda, (void), "aoti_torch_device_type_cuda")
// clang-format on
#define DECLARE_TORCH(library, result, name, arguments, symbol) result(*name) arguments;
static struct {
  TORCH_FUNCTIONS(DECLARE_TORCH)
} torch;

/* A Python object of a tensor contains an at::Tensor at this offset. A handle is a pointer to one. A call
 * does not take another reference to the tensor, which would cost a tenth of its time. So no other thread may
 * let the object have another tensor meanwhile (torch.utils.swap_tensors). */
static int64_t tensor_offset;
static Tensor handle_of(PyObject* object) { return (Tensor)(void*)((char*)object + tensor_offset); }

/* ---- The functions ---- */

/* An operator's functions for Python. `names` and `defaults` are of its arguments: None is the default where
 * there is one, and a required argument has Ellipsis. */
typedef struct {
  const Operator* op;
  PyObject* apply;    /* apply of the autograd.Function, None if the operator cannot be differentiated */
  PyObject* dispatch; /* what calls the dispatcher */
  PyObject* first;    /* what gander._torch.fast calls until it has checked the function, then NULL */
  PyObject* names[MAX_ARGUMENTS];
  PyObject* defaults[MAX_ARGUMENTS]; /* NULL for a required argument */
  PyMethodDef methods[3];            /* try_function, call_lean, call_whole */
} Function;

enum { MAX_FUNCTIONS = 128 };
static Function functions[MAX_FUNCTIONS];
static int64_t one_pass; /* CUDA tensors of this many elements or more: gander._torch.fast.start says why */

/* One call of such a function. */
typedef struct {
  const Function* function;
  PyObject* const* arguments;
  Value stack[MAX_ARGUMENTS], boxes[MAX_ARGUMENTS];
  bool extra; /* an argument that only the gradient uses does not have its default value */
  bool whole; /* results that are not asked for are tensors */
  bool declined;
  int tracked; /* how many results autograd got */
} FastCall;

static _Thread_local FastCall* current; /* the call that forward() runs */

/* torch's dispatch state of this thread: two sets of dispatch keys, which are zero by default. Active modes,
 * transforms, autocast, tracing and guards change it. Inference mode and a backward pass change it too, but
 * do not prevent the fast path. */
typedef struct {
  uint64_t included, excluded;
} State;
static void* libc10;
static State inference, backward;

static const State* dispatch_state(void) {
  static _Thread_local const State* state;
  if (state == NULL) state = dlsym(libc10, "_ZN3c104impl26raw_local_dispatch_key_setE");
  return state;
}

/* Whether this thread may bypass the dispatcher. It may not if a profiler or a tracer must see the operator,
 * or if forward-mode differentiation is active, because the operators must refuse dual tensors. */
EXPORT bool gander_torch_may_bypass(void) {
  const State* state = dispatch_state();
  bool known = (state->included | state->excluded) == 0 || memcmp(state, &backward, sizeof backward) == 0 ||
               memcmp(state, &inference, sizeof inference) == 0;
  if (!known || torch.function_mode() || torch.callbacks()) return false;
  PyObject* level = python.PyDict_GetItem(objects.forward_ad, names._current_level);
  return level != NULL && python.PyLong_AsLongLong(level) < 0;
}

static PyObject* new_reference(PyObject* object) {
  python.Py_IncRef(object);
  return object;
}

static PyObject* none(void) { return new_reference(objects.None); }

static bool requires_grad(PyObject* tensor) {
  PyObject* answer = python.PyObject_GetAttr(tensor, names.requires_grad);
  if (answer == NULL) python.PyErr_Clear();
  else python.Py_DecRef(answer);
  return answer == objects.True;
}

/* Whether an object is a plain tensor: no subclass, strided, and no lazy negation. The dispatcher would
 * resolve that before a kernel runs. Asked for the strides of another layout, older releases of torch print
 * an error. */
static bool usable(PyObject* object) {
  PyObject* type = python.PyObject_Type(object);
  python.Py_DecRef(type); /* the object still holds a reference to it */
  if (type != objects.Tensor && type != objects.Parameter) return false;
  Tensor tensor = handle_of(object);
  int32_t layout = -1;
  return torch.layout(tensor, &layout) == 0 && layout == torch.strided() && !torch.is_neg(tensor);
}

/* Puts argument i on the stack. Returns false if the fast path does not support it. */
static bool convert(FastCall* call, int i) {
  PyObject* argument = call->arguments[i];
  double number;
  switch (call->function->op->arguments[i]) {
    case 'T': call->stack[i] = (Value)(uintptr_t)handle_of(argument); return usable(argument);
    case 'O':
      call->boxes[i] = (Value)(uintptr_t)handle_of(argument);
      call->stack[i] = argument == objects.None ? 0 : (Value)(uintptr_t)&call->boxes[i];
      return argument == objects.None || usable(argument);
    case 'd':
      call->stack[i] = argument == objects.None ? 0 : (Value)(uintptr_t)&call->boxes[i];
      for (int j = 0; j < DTYPE_COUNT; j++)
        if (dtypes[j].object == argument) {
          call->boxes[i] = (Value)dtypes[j].torch;
          return true;
        }
      return argument == objects.None;
    case 'b':
      call->stack[i] = argument == objects.True;
      return argument == objects.True || argument == objects.False;
    case 'e':
    case 'E': /* only the gradient uses these */
      call->stack[i] = 0;
      call->extra |= argument != (call->function->op->arguments[i] == 'E' ? objects.None : objects.False);
      return true;
    case 'f':
      number = python.PyFloat_AsDouble(argument);
      memcpy(&call->stack[i], &number, sizeof number);
      break;
    default: call->stack[i] = (Value)python.PyLong_AsLongLong(argument);
  }
  if (python.PyErr_Occurred() == NULL) return true;
  python.PyErr_Clear();
  return false;
}

static PyObject* result(const FastCall* call, int i) { return (PyObject*)(uintptr_t)call->stack[i]; }

/* Runs an operator without the GIL, and puts its results on the stack as new references: None for one that
 * was not computed. */
static bool call_kernel(FastCall* call) {
  const Operator* op = call->function->op;
  void* const thread = python.PyEval_SaveThread();
  call->declined = !run_operator(op, call->stack, true, call->whole);
  python.PyEval_RestoreThread(thread);
  if (call->declined) return false;
  for (int i = 0; i < op->result_count; i++) {
    Tensor handle = (Tensor)(uintptr_t)call->stack[i];
    call->stack[i] = (Value)(uintptr_t)(handle == NULL ? none() : torch.wrap(handle));
    if (handle != NULL) torch.delete(handle);
    call->declined |= result(call, i) == NULL; /* out of memory */
  }
  for (int i = 0; call->declined && i < op->result_count; i++)
    if (result(call, i) != NULL) python.Py_DecRef(result(call, i));
  if (call->declined) python.PyErr_Clear();
  return !call->declined;
}

static bool set(PyObject* object, PyObject* name, PyObject* owned) {
  bool ok = owned != NULL && python.PyObject_SetAttr(object, name, owned) == 0;
  if (owned != NULL) python.Py_DecRef(owned);
  return ok;
}

/* A new tuple of references to objects. */
static PyObject* tuple_of(PyObject* const* items, intptr_t count) {
  PyObject* tuple = python.PyTuple_New(count);
  for (intptr_t i = 0; tuple != NULL && i < count; i++)
    python.PyTuple_SetItem(tuple, i, new_reference(items[i]));
  return tuple;
}

/* The tensors that backward reads, in the order of the table, as new references. */
static PyObject* tuple_of_saved(const FastCall* call) {
  const Operator* op = call->function->op;
  PyObject* saved[MAX_ARGUMENTS];
  for (int i = 0; i < op->saved_count; i++) {
    int from = op->saved[i].result, argument = op->saved[i].argument;
    bool computed = from >= 0 && (argument < 0 || result(call, from) != objects.None);
    saved[i] = computed ? result(call, from) : call->arguments[argument];
  }
  return tuple_of(saved, op->saved_count);
}

/* The arguments that are not tensors. */
static PyObject* tuple_of_options(const FastCall* call) {
  const char* kinds = call->function->op->arguments;
  size_t tensors = strspn(kinds, "TO");
  return tuple_of(call->arguments + tensors, (intptr_t)(strlen(kinds) - tensors));
}

/* The dtypes of the arguments that have a gradient: None for one that is None. */
static PyObject* tuple_of_dtypes(const FastCall* call) {
  const Operator* op = call->function->op;
  int count = 0, n = 0;
  for (int i = 0; op->arguments[i] != 0; i++) count += op->differentiable[i];
  PyObject* tuple = python.PyTuple_New(count);
  for (int i = 0; tuple != NULL && op->arguments[i] != 0; i++) {
    if (!op->differentiable[i]) continue;
    PyObject* tensor = call->arguments[i];
    python.PyTuple_SetItem(tuple, n++,
                           tensor == objects.None ? none() : python.PyObject_GetAttr(tensor, names.dtype));
  }
  return tuple;
}

/* Whether the caller asked for a result. */
static bool is_wanted(const FastCall* call, int i) {
  const Operator* op = call->function->op;
  int demand = op->operands[op->results[i]].demand;
  return demand < 0 || call->arguments[demand] == objects.True;
}

/* A kernel's first results: a single one as it is, several as a tuple. */
static PyObject* take_results(const FastCall* call, int count) {
  if (count == 1) return result(call, 0);
  PyObject* tuple = python.PyTuple_New(count);
  for (int i = 0; i < count; i++) {
    if (tuple != NULL) python.PyTuple_SetItem(tuple, i, result(call, i));
    else python.Py_DecRef(result(call, i));
  }
  return tuple;
}

/* Asks for the results that backward reads. */
static void demand_saved(FastCall* call) {
  const Operator* op = call->function->op;
  for (int i = 0; i < op->result_count; i++) {
    int at = op->results[i], with = op->operands[at].saved_with;
    if (op->operands[at].saved && op->operands[at].demand >= 0 &&
        (with < 0 || call->arguments[with] != objects.None))
      call->stack[op->operands[at].demand] = 1;
  }
}

/* How many results autograd gets: those that the caller wants, and the rows that backward reads. A saved
 * tensor that is not returned has no history, so a second derivative would take it for a constant. */
static int count_tracked(const FastCall* call) {
  const Operator* op = call->function->op;
  int count = 1;
  for (int i = 1; i < op->result_count; i++) {
    int at = op->results[i];
    bool rows = op->operands[at].saved && op->operands[at].layout == IN_ROWS;
    if (is_wanted(call, i) || (rows && result(call, i) != objects.None)) count = i + 1;
  }
  return count;
}

/* forward() of the autograd.Functions. It reads the arguments other than ctx from the current call. */
static PyObject* forward(PyObject* self, PyObject* const* arguments, intptr_t count) {
  (void)self, (void)count;
  FastCall* call = current;
  current = NULL;
  if (call != NULL) demand_saved(call);
  if (call == NULL || !call_kernel(call)) {
    python.PyErr_SetString(objects.RuntimeError, "gander: left to the dispatcher");
    return NULL;
  }
  const Operator* op = call->function->op;
  PyObject* ctx = arguments[0];
  bool ok = set(ctx, names.to_save, tuple_of_saved(call)) &&
            python.PyObject_SetAttr(ctx, names.materialize_grads, objects.False) == 0 &&
            set(ctx, names.options, tuple_of_options(call)) &&
            (!op->typed || set(ctx, names.dtypes, tuple_of_dtypes(call)));
  call->tracked = count_tracked(call);
  for (int i = call->tracked; i < op->result_count; i++)
    python.Py_DecRef(result(call, i)); /* ctx keeps what it needs */
  PyObject* out = take_results(call, call->tracked);
  if (ok || out == NULL) return out;
  python.Py_DecRef(out);
  return NULL;
}

/* How to run a call. */
typedef enum { WITHOUT_GRADIENT, WITH_GRADIENT, THROUGH_DISPATCHER } Route;

static Route choose_route(const FastCall* call) {
  const Operator* op = call->function->op;
  bool gradient = false;
  if (!torch.grad_mode()) return WITHOUT_GRADIENT;
  for (int i = 0; op->arguments[i] == 'T' || op->arguments[i] == 'O'; i++) {
    if (call->arguments[i] == objects.None || !requires_grad(call->arguments[i])) continue;
    if (!op->differentiable[i]) return THROUGH_DISPATCHER;
    gradient = true;
  }
  if (!gradient) return WITHOUT_GRADIENT;
  if (call->function->apply == NULL || call->extra) return THROUGH_DISPATCHER;
  if (strchr(op->arguments, 'E') != NULL) {
    Tensor x = handle_of(call->arguments[0]);
    int64_t elements = 0;
    int32_t device = -1;
    if (torch.numel(x, &elements) || torch.device_type(x, &device)) return THROUGH_DISPATCHER;
    if (device == torch.cuda() && elements >= one_pass) return THROUGH_DISPATCHER;
  }
  for (int i = 0; call->whole && i < op->result_count; i++)
    if (!is_wanted(call, i)) return THROUGH_DISPATCHER;
  return WITH_GRADIENT;
}

/* All results, of which autograd returned the first: None for those that the caller did not ask for. Takes
 * the reference. */
static PyObject* wanted_results(const FastCall* call, PyObject* tracked) {
  int count = call->function->op->result_count;
  PyObject* results[MAX_OPERANDS];
  for (int i = 0; i < count; i++) {
    if (i >= call->tracked || !is_wanted(call, i)) results[i] = objects.None;
    else results[i] = call->tracked == 1 ? tracked : python.PyTuple_GetItem(tracked, i);
  }
  PyObject* all = tuple_of(results, count);
  python.Py_DecRef(tracked);
  return all;
}

/* Calls apply, which calls forward(). */
static PyObject* call_apply(FastCall* call) {
  FastCall* outer = current; /* apply runs hooks on saved tensors, which may call these functions again */
  PyObject* inputs[4] = {NULL};
  int count = 0;
  for (int i = 0; call->function->op->arguments[i] != 0; i++)
    if (call->function->op->differentiable[i] && count < 4) inputs[count++] = call->arguments[i];
  current = call;
  PyObject* out = python.PyObject_CallFunctionObjArgs(call->function->apply, inputs[0], inputs[1], inputs[2],
                                                      inputs[3], NULL);
  current = outer;
  if (out != NULL && call->function->op->result_count > 1) return wanted_results(call, out);
  if (out != NULL || !call->declined) return out;
  python.PyErr_Clear();
  return none();
}

/* Increments the versions of the tensors that an operator writes, as autograd expects. torch does not see
 * that our kernels write. Returns false for an inference tensor outside of inference mode. The dispatcher
 * refuses it. */
static bool increment_versions(const FastCall* call) {
  const Operator* op = call->function->op;
  PyObject* written[MAX_OPERANDS];
  int count = 0;
  for (int i = 0; i < op->operand_count; i++) {
    int argument = op->operands[i].argument;
    if (op->operands[i].written && argument >= 0 && call->arguments[argument] != objects.None)
      written[count++] = call->arguments[argument];
  }
  if (count == 0) return true;
  bool may_write_any = memcmp(dispatch_state(), &inference, sizeof inference) == 0;
  for (int i = 0; i < count; i++)
    if (!may_write_any && torch.is_inference(handle_of(written[i]))) return false;
  PyObject *tensors = tuple_of(written, count), *done = NULL;
  if (tensors != NULL) {
    done = python.PyObject_CallFunctionObjArgs(objects.increment_version, tensors, NULL);
    python.Py_DecRef(tensors);
  }
  if (done != NULL) python.Py_DecRef(done);
  else python.PyErr_Clear(); /* the dispatcher raises it again */
  return done != NULL;
}

/* Runs a call with all arguments. None: it is left to the dispatcher. True: the operator has no results.
 * whole: a result that is not asked for is a tensor without elements, as the operator's schema says, else
 * None.
 */
static PyObject* try_call(const Function* f, PyObject* const* arguments, bool whole) {
  FastCall call = {.function = f, .arguments = arguments, .whole = whole};
  if (!gander_torch_may_bypass()) return none();
  for (int i = 0; f->op->arguments[i] != 0; i++)
    if (!convert(&call, i)) return none();
  Route route = choose_route(&call);
  if (route == WITH_GRADIENT) return call_apply(&call);
  if (route == THROUGH_DISPATCHER || !increment_versions(&call) || !call_kernel(&call)) return none();
  return f->op->result_count > 0 ? take_results(&call, f->op->result_count) : new_reference(objects.True);
}

static PyObject* try_function(PyObject* self, PyObject* const* arguments, intptr_t count) {
  const Function* f = python.PyCapsule_GetPointer(self, NULL);
  intptr_t more = count - (intptr_t)strlen(f->op->arguments); /* 1: whole */
  return more == 0 || more == 1 ? try_call(f, arguments, more == 1) : none();
}

/* Calls a function of Python. keywords: names of the last arguments, or NULL. */
static PyObject* call_python(PyObject* function, PyObject* const* arguments, intptr_t count,
                             PyObject* keywords) {
  PyObject *tuple = tuple_of(arguments, count), *named = keywords == NULL ? NULL : python.PyDict_New(), *out;
  if (tuple == NULL || (keywords != NULL && named == NULL)) return NULL;
  for (intptr_t i = 0; named != NULL && i < python.PyTuple_Size(keywords); i++)
    if (python.PyDict_SetItem(named, python.PyTuple_GetItem(keywords, i), arguments[count + i])) return NULL;
  out = python.PyObject_Call(function, tuple, named);
  python.Py_DecRef(tuple);
  if (named != NULL) python.Py_DecRef(named);
  return out;
}

/* The position of an argument with this name, or -1. Names in code are interned, as those of the function
 * are. first: where most callers have it, behind the name before. */
static intptr_t find_name(const Function* f, PyObject* name, intptr_t first, intptr_t total) {
  if (first < total && f->names[first] == name) return first;
  for (intptr_t i = 0; i < total; i++)
    if (f->names[i] == name) return i;
  return -1;
}

/* Puts the arguments of a call in order, with defaults. False if one is missing, unknown or given twice. */
static bool arrange(const Function* f, PyObject* const* arguments, intptr_t count, PyObject* keywords,
                    PyObject** all) {
  intptr_t total = (intptr_t)strlen(f->op->arguments), named = 0, at = count;
  if (keywords != NULL) named = python.PyTuple_Size(keywords);
  if (count > total) return false;
  for (intptr_t i = 0; i < total; i++) all[i] = i < count ? arguments[i] : f->defaults[i];
  for (intptr_t k = 0; k < named; k++) {
    at = find_name(f, python.PyTuple_GetItem(keywords, k), at, total);
    if (at < count) return false;
    all[at++] = arguments[count + k];
  }
  for (intptr_t i = 0; i < total; i++)
    if (all[i] == NULL) return false;
  return true;
}

/* An operator's function: takes arguments like the operator, and returns what it returns. */
static PyObject* call_operator(PyObject* self, PyObject* const* arguments, intptr_t count, PyObject* keywords,
                               bool whole) {
  const Function* f = python.PyCapsule_GetPointer(self, NULL);
  PyObject* all[MAX_ARGUMENTS + 1];
  if (arrange(f, arguments, count, keywords, all)) {
    intptr_t total = (intptr_t)strlen(f->op->arguments);
    all[total] = objects.True;
    PyObject* out =
        f->first == NULL ? try_call(f, all, whole) : call_python(f->first, all, total + whole, NULL);
    if (out != objects.None && out != objects.True) return out;
    bool done = out == objects.True;
    python.Py_DecRef(out);
    if (done) return none();
  }
  return call_python(f->dispatch, arguments, count, keywords);
}

static PyObject* call_lean(PyObject* self, PyObject* const* arguments, intptr_t count, PyObject* keywords) {
  return call_operator(self, arguments, count, keywords, false);
}

static PyObject* call_whole(PyObject* self, PyObject* const* arguments, intptr_t count, PyObject* keywords) {
  return call_operator(self, arguments, count, keywords, true);
}

/* ---- Functions that gander._torch.fast calls through ctypes ---- */

/* Reads the dispatch state. Returns false if this torch does not have it under the expected symbol. */
EXPORT bool gander_torch_dispatch_state(State* state) {
  libc10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (libc10 == NULL || dispatch_state() == NULL) return false;
  *state = *dispatch_state();
  return true;
}

/* A new reference to an item of a dictionary, or NULL. */
static PyObject* get_item(PyObject* dictionary, const char* key) {
  PyObject* object = python.PyDict_GetItemString(dictionary, key);
  return object == NULL ? NULL : new_reference(object);
}

/* Makes the functions of an operator: one that returns None in place of asking the dispatcher; one that asks
 * it, and returns None for results that are not asked for; and one that returns all results. */
static bool make_functions(Function* f, PyObject* given, PyObject* results) {
  PyObject *of = python.PyDict_GetItemString(given, f->op->name), *self = python.PyCapsule_New(f, NULL, NULL);
  PyObject** const kept[] = {&f->apply, &f->dispatch, &f->first};
  if (of == NULL || self == NULL) return false;
  python.Py_IncRef(of); /* for the life of the process, with all that is in it */
  for (int i = 0; i < 3; i++) *kept[i] = python.PyTuple_GetItem(of, i);
  if (f->apply == objects.None) f->apply = NULL;
  for (int i = 0; f->op->arguments[i] != 0; i++) {
    f->names[i] = python.PyTuple_GetItem(python.PyTuple_GetItem(of, 3), i);
    f->defaults[i] = python.PyTuple_GetItem(python.PyTuple_GetItem(of, 4), i);
    if (f->defaults[i] == objects.Ellipsis) f->defaults[i] = NULL;
  }
  f->methods[0] = (PyMethodDef){f->op->name, try_function, METH_FASTCALL, NULL};
  f->methods[1] = (PyMethodDef){f->op->name, call_lean, METH_FASTCALL | METH_KEYWORDS, NULL};
  f->methods[2] = (PyMethodDef){f->op->name, call_whole, METH_FASTCALL | METH_KEYWORDS, NULL};
  PyObject* functions[3];
  for (int i = 0; i < 3; i++)
    if ((functions[i] = python.PyCFunction_NewEx(&f->methods[i], self, NULL)) == NULL) return false;
  PyObject* tuple = tuple_of(functions, 3);
  return tuple != NULL && python.PyDict_SetItemString(results, f->op->name, tuple) == 0;
}

/* Lets an operator's function run without `first`, by its name. */
EXPORT void gander_fast_checked(const char* name) {
  for (int i = 0; i < MAX_FUNCTIONS && functions[i].op != NULL; i++)
    if (strcmp(functions[i].op->name, name) == 0) functions[i].first = NULL;
}

/* Fills the dictionary `results` with "forward", and the functions of each operator by its name.
 *
 * given: OBJECTS, torch's dtypes, "one_pass" and "tensor_offset" (ints), and by operator a tuple of apply,
 * dispatch, first, names and defaults: see Function. states: the dispatch states in inference mode and in a
 * backward pass. Returns NULL, or the name of what is missing. Must be called only once, with the GIL. */
EXPORT const char* gander_fast_functions(PyObject* given, const State* states, PyObject* results) {
  static PyMethodDef forward_method = {"forward", forward, METH_FASTCALL, NULL};
  void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* bindings = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
#define LOOK_UP_PYTHON(result, name, arguments) \
  if ((python.name = (__typeof__(python.name))dlsym(RTLD_DEFAULT, #name)) == NULL) return #name;
  PYTHON_FUNCTIONS(LOOK_UP_PYTHON)
#define LOOK_UP_TORCH(library, result, name, arguments, symbol) \
  if ((torch.name = (__typeof__(torch.name))dlsym(library, symbol)) == NULL) return symbol;
  TORCH_FUNCTIONS(LOOK_UP_TORCH)
#define KEEP(name) \
  if ((objects.name = get_item(given, #name)) == NULL) return #name;
  OBJECTS(KEEP)
#define INTERN(name) \
  if ((names.name = python.PyUnicode_InternFromString(#name)) == NULL) return #name;
  NAMES(INTERN)
  for (int i = 0; i < DTYPE_COUNT; i++) dtypes[i].object = get_item(given, dtypes[i].name);
  inference = states[0];
  backward = states[1];
  one_pass = python.PyLong_AsLongLong(python.PyDict_GetItemString(given, "one_pass"));
  tensor_offset = python.PyLong_AsLongLong(python.PyDict_GetItemString(given, "tensor_offset"));
  for (int i = 0, n = 0; n < MAX_FUNCTIONS - 1 && find_operator(i) != NULL; i++) {
    if (!find_operator(i)->fast) continue;
    functions[n].op = find_operator(i);
    if (!make_functions(&functions[n++], given, results)) return find_operator(i)->name;
  }
  PyObject* function = python.PyCFunction_NewEx(&forward_method, NULL, NULL);
  if (function == NULL || python.PyDict_SetItemString(results, "forward", function)) return "forward";
  return NULL;
}
