/* gander's operators as foreign functions of XLA, through XLA's C API (xla.h).
 *
 * No header of jaxlib or Python is included. gander.jax registers a handler for each operator and platform
 * with XLA. The first call loads libgander.
 *
 *   cd python/gander/jax; gcc -O2 -std=gnu11 -fPIC -shared -fvisibility=hidden -I ../../../capi \
 *       -I ../../../dlpack -I ../_native/c c/handlers.c -o libgander_jax.so -ldl -lpthread
 *
 * A call names the operands that it has, in its attributes `arguments` and `results`, and the options that
 * are not the defaults. So a program that was exported before an operator got another operand or option
 * still means what it did.
 *
 * No handler declares itself fit for command buffers, XLA's word for CUDA graphs. Calls that need scratch
 * memory get it from XLA's allocator for the time of a call, after which it belongs to others. A graph that
 * replays the call's kernels would write to it. Which calls need some depends on shapes and on the device,
 * but a handler declares itself once for all calls. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "library.h"
#include "xla.h"

#define EXPORT __attribute__((visibility("default")))

enum { MAX_OPERANDS = 16, MAX_OPTIONS = 16, MAX_SCRATCH = 4 };

typedef union {
  int64_t integer;
  double real;
} Value;

typedef struct {
  const char* name;
  int32_t (*call)(const DLTensor* const* operands, const Value* options, const gander_allocator* allocator,
                  void* stream);
  int operand_count;
  const char* operands[MAX_OPERANDS];
  int option_count;
  struct {
    const char* name;
    bool real;
    Value value; /* the default */
  } options[MAX_OPTIONS];
} Operator;

typedef struct {
  const Frame* frame;
  const Operator* operator;
  int scratch_count;
  MemoryFree scratch[MAX_SCRATCH];
  Error* refusal; /* of scratch memory, in XLA's words */
} Call;

#define LIBRARY_FUNCTIONS(F) F(gander_abi_version) F(gander_last_error) OPERATOR_FUNCTIONS(F)
static struct {
  LIBRARY_FUNCTIONS(DECLARE_LIBRARY)
} lib;

#define HANDLERS(name, index) \
  static Error* name##_cpu(Frame* frame) { return run(frame, &operators[index], false); } \
  static Error* name##_cuda(Frame* frame) { return run(frame, &operators[index], true); }

static Error* run(Frame* frame, const Operator* operator, bool cuda);

#include "operators_gen.h"

DEFINE_LOAD_LIBRARY

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static void load(void) { load_library(); }

static Error* fail(const Call* call, Code code, const char* format, const char* a, const char* b) {
  char message[1400];
  snprintf(message, sizeof message, format, a, b);
  ErrorCreate args = {sizeof args, NULL, message, code};
  return call->frame->api->error_create(&args);
}

static Code code_of(int32_t status) {
  switch (status) {
    case GANDER_ERROR_MEMORY: return RESOURCE_EXHAUSTED;
    case GANDER_ERROR_UNSUPPORTED: return UNIMPLEMENTED;
    case GANDER_ERROR_CUDA:
    case GANDER_ERROR_INTERNAL: return INTERNAL;
    default: return INVALID_ARGUMENT;
  }
}

/* XLA asks each handler when it is registered. */
static bool describe_handler(const Frame* frame) {
  for (Extension* e = frame->extension; e != NULL; e = e->next)
    if (e->type == METADATA) {
      Metadata* metadata = ((MetadataExtension*)e)->metadata;
      metadata->version.major = XLA_MAJOR;
      metadata->version.minor = XLA_MINOR;
      metadata->traits = 0;
      return true;
    }
  return false;
}

static DLDataType dtype_of(int dtype) {
  switch (dtype) {
    case F16: return (DLDataType){kDLFloat, 16, 1};
    case BF16: return (DLDataType){kDLBfloat, 16, 1};
    case F32: return (DLDataType){kDLFloat, 32, 1};
    case F64: return (DLDataType){kDLFloat, 64, 1};
    case PRED: return (DLDataType){kDLBool, 8, 1};
    case S8: return (DLDataType){kDLInt, 8, 1};
    case S16: return (DLDataType){kDLInt, 16, 1};
    case S32: return (DLDataType){kDLInt, 32, 1};
    case S64: return (DLDataType){kDLInt, 64, 1};
    case U8: return (DLDataType){kDLUInt, 8, 1};
    case U16: return (DLDataType){kDLUInt, 16, 1};
    case U32: return (DLDataType){kDLUInt, 32, 1};
    case U64: return (DLDataType){kDLUInt, 64, 1};
    case C64: return (DLDataType){kDLComplex, 64, 1};
    case C128: return (DLDataType){kDLComplex, 128, 1};
    default: return (DLDataType){kDLOpaqueHandle, 8, 1}; /* libgander refuses it */
  }
}

static bool is(const Span* span, const char* name) {
  return strlen(name) == span->length && memcmp(span->start, name, span->length) == 0;
}

static const void* attribute(const Frame* frame, const char* name, int type) {
  for (int64_t i = 0; i < frame->attributes.count; i++)
    if (frame->attributes.types[i] == type && is(frame->attributes.names[i], name))
      return frame->attributes.values[i];
  return NULL;
}

/* Describes buffers as the operands that an attribute names, in its order. */
static Error* fill_operands(const Call* call, const char* name, const Buffers* buffers, DLDevice device,
                            DLTensor* tensors, const DLTensor** operands) {
  const Span* names = attribute(call->frame, name, TEXT);
  const char *at = names == NULL ? "" : names->start, *end = names == NULL ? at : at + names->length;
  int64_t count = 0;
  while (at < end) {
    const char* space = memchr(at, ' ', (size_t)(end - at));
    Span word = {at, (size_t)((space == NULL ? end : space) - at)};
    at = space == NULL ? end : space + 1;
    int i = 0;
    while (i < call->operator->operand_count && !is(&word, call->operator->operands[i])) i++;
    if (i == call->operator->operand_count || count == buffers->count || buffers->types[count] != BUFFER)
      return fail(call, INVALID_ARGUMENT,
                  "%s: the %s of this call are unknown to this gander; it was exported by another one",
                  call->operator->name, name);
    const Buffer* b = buffers->buffers[count++];
    tensors[i] = (DLTensor){b->data, device, (int32_t)b->rank, dtype_of(b->dtype), b->dims, NULL, 0};
    operands[i] = &tensors[i];
  }
  if (count != buffers->count)
    return fail(call, INVALID_ARGUMENT, "%s: this call does not name all of its %s", call->operator->name,
                name);
  return NULL;
}

/* Fills in the options. An attribute that this gander does not know could change what is computed. */
static Error* fill_options(const Call* call, Value* values) {
  const Attributes* given = &call->frame->attributes;
  const Operator* op = call->operator;
  for (int i = 0; i < op->option_count; i++) values[i] = op->options[i].value;
  for (int64_t j = 0; j < given->count; j++) {
    if (given->types[j] == TEXT && (is(given->names[j], "arguments") || is(given->names[j], "results")))
      continue;
    int i = 0;
    while (i < op->option_count && !is(given->names[j], op->options[i].name)) i++;
    const Scalar* scalar = given->types[j] == SCALAR ? given->values[j] : NULL;
    if (i == op->option_count || scalar == NULL || scalar->dtype != (op->options[i].real ? F64 : S64)) {
      char name[64];
      snprintf(name, sizeof name, "%.*s", (int)given->names[j]->length, given->names[j]->start);
      return fail(call, INVALID_ARGUMENT,
                  "%s: the option %s of this call is unknown to this gander; it was exported by another one",
                  op->name, name);
    }
    memcpy(&values[i], scalar->value, sizeof values[i]);
  }
  return NULL;
}

/* Scratch memory on the GPU: see the head of this file. XLA refuses to promise more than ALIGNMENT. */
enum { ALIGNMENT = 16 };
static void* scratch(void* context, size_t bytes) {
  Call* call = context;
  const Frame* frame = call->frame;
  MemoryAllocate args = {sizeof args, NULL, frame->context, bytes, ALIGNMENT, NULL};
  if (call->scratch_count == MAX_SCRATCH || call->refusal != NULL) return NULL;
  call->refusal = frame->api->memory_allocate(&args);
  if (call->refusal != NULL) return NULL;
  call->scratch[call->scratch_count++] =
      (MemoryFree){sizeof(MemoryFree), NULL, frame->context, bytes, args.data};
  return args.data;
}

/* Gives scratch memory back. What XLA runs next in it runs on the stream of this call, after its kernels. */
static Error* finish(Call* call, Error* error) {
  for (int i = 0; i < call->scratch_count; i++) {
    Error* failure = call->frame->api->memory_free(&call->scratch[i]);
    if (error == NULL) {
      error = failure;
    } else if (failure != NULL) {
      ErrorDestroy destroy = {sizeof destroy, NULL, failure};
      call->frame->api->error_destroy(&destroy);
    }
  }
  return error;
}

static Error* run(Frame* frame, const Operator* operator, bool cuda) {
  if (describe_handler(frame) || frame->stage != EXECUTE) return NULL;
  Call call = {.frame = frame, .operator = operator};
  DLDevice device = {kDLCPU, 0};
  StreamGet get = {sizeof get, NULL, frame->context, NULL};
  DLTensor tensors[MAX_OPERANDS];
  const DLTensor* operands[MAX_OPERANDS] = {NULL};
  Value options[MAX_OPTIONS];
  gander_allocator allocator = {&call, scratch};
  Error* error;

  pthread_once(&load_once, load);
  if (load_error[0] != 0) return fail(&call, INTERNAL, "%s", load_error, NULL);
  if (frame->api->struct_size < SIZE_TO(Api, ordinal_get))
    return fail(&call, INTERNAL, "%s: this jax is too old for gander.jax; install a newer jax",
                operator->name, NULL);
  if (cuda) {
    OrdinalGet ordinal = {sizeof ordinal, NULL, frame->context, 0};
    if ((error = frame->api->stream_get(&get)) != NULL) return error;
    if ((error = frame->api->ordinal_get(&ordinal)) != NULL) return error;
    device = (DLDevice){kDLCUDA, ordinal.ordinal};
  }
  if ((error = fill_operands(&call, "arguments", &frame->arguments, device, tensors, operands)) != NULL ||
      (error = fill_operands(&call, "results", &frame->results, device, tensors, operands)) != NULL ||
      (error = fill_options(&call, options)) != NULL)
    return error;
  int32_t status = operator->call(operands, options, cuda ? &allocator : NULL, get.stream);
  if (call.refusal != NULL) error = call.refusal;
  else if (status != GANDER_OK) error = fail(&call, code_of(status), "%s", lib.gander_last_error(), NULL);
  return finish(&call, error);
}

/* ---- Functions that gander.jax calls through ctypes ---- */

/* The handler of an operator, or NULL if there is none of this name. */
EXPORT Handler* gander_jax_handler(const char* name, bool cuda) {
  for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++)
    if (strcmp(operators[i].name, name) == 0) return handlers[i][cuda];
  return NULL;
}

/* Sets the path of libgander, which is loaded later. Returns NULL, or what is wrong with it. */
EXPORT const char* gander_jax_open(const char* library) {
  if (strlen(library) >= sizeof library_path) return "the path of libgander.so is too long";
  strcpy(library_path, library);
  return NULL;
}
