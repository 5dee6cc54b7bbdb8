/* What handlers.c uses of XLA's C API for foreign functions, which jaxlib has in xla/ffi/api/c_api.h
 * (jax.ffi.include_dir()). It is declared here, so that gander builds without jaxlib. The API only grows at
 * the ends of its structs within a major version. tests/jax compares these declarations with jaxlib's. */
#ifndef GANDER_XLA_H
#define GANDER_XLA_H

#include <stddef.h>
#include <stdint.h>

/* The version of the API that is declared here. XLA refuses to register a handler that needs a newer one. */
enum { XLA_MAJOR = 0, XLA_MINOR = 3 };

/* The codes are those of absl::StatusCode. */
typedef enum { INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8, UNIMPLEMENTED = 12, INTERNAL = 13 } Code;

typedef struct XLA_FFI_Error Error;
typedef struct XLA_FFI_ExecutionContext Context;

/* Element types, by xla::PrimitiveType's numbers. */
enum {
  PRED = 1,
  S8 = 2,
  S16 = 3,
  S32 = 4,
  S64 = 5,
  U8 = 6,
  U16 = 7,
  U32 = 8,
  U64 = 9,
  F16 = 10,
  F32 = 11,
  F64 = 12,
  C64 = 15,
  BF16 = 16,
  C128 = 18,
};

typedef struct Extension {
  size_t struct_size;
  int type; /* METADATA: XLA asks for what handlers.c's describe_handler fills in */
  struct Extension* next;
} Extension;
enum { METADATA = 1 };

typedef struct {
  size_t struct_size;
  Extension* extension;
  int major, minor;
} ApiVersion;

typedef struct {
  size_t struct_size;
  ApiVersion version;
  uint32_t traits;
} Metadata;

typedef struct {
  Extension base;
  Metadata* metadata;
} MetadataExtension;

/* A dense tensor with the last dimension innermost. */
typedef struct {
  size_t struct_size;
  Extension* extension;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
} Buffer;

typedef struct {
  const char* start;
  size_t length;
} Span;

typedef struct {
  int dtype;
  void* value;
} Scalar;

/* Arguments or results. types: BUFFER, the only one that there is. */
typedef struct {
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int* types;
  Buffer** buffers;
} Buffers;
enum { BUFFER = 1 };

typedef struct {
  size_t struct_size;
  Extension* extension;
  int64_t count;
  int* types; /* SCALAR: the value is a Scalar*. TEXT: a Span*. */
  Span** names;
  void** values;
} Attributes;
enum { SCALAR = 3, TEXT = 4 };

struct Api;

typedef struct {
  size_t struct_size;
  Extension* extension;
  const struct Api* api;
  Context* context;
  int stage; /* EXECUTE, or one that nothing is to be done in */
  Buffers arguments, results;
  Attributes attributes;
} Frame;
enum { EXECUTE = 3 };

typedef Error* Handler(Frame* frame);

typedef struct {
  size_t struct_size;
  Extension* extension;
  const char* message;
  Code code;
} ErrorCreate;

typedef struct {
  size_t struct_size;
  Extension* extension;
  Error* error;
} ErrorDestroy;

typedef struct {
  size_t struct_size;
  Extension* extension;
  Context* context;
  void* stream; /* out */
} StreamGet;

typedef struct {
  size_t struct_size;
  Extension* extension;
  Context* context;
  size_t size, alignment;
  void* data; /* out */
} MemoryAllocate;

typedef struct {
  size_t struct_size;
  Extension* extension;
  Context* context;
  size_t size;
  void* data;
} MemoryFree;

typedef struct {
  size_t struct_size;
  Extension* extension;
  Context* context;
  int32_t ordinal; /* out */
} OrdinalGet;

typedef struct Api {
  size_t struct_size;
  Extension* extension;
  ApiVersion version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(ErrorDestroy*);
  void* handler_register;
  Error* (*stream_get)(StreamGet*);
  void *type_register, *context_get, *state_set, *state_get;
  Error* (*memory_allocate)(MemoryAllocate*);
  Error* (*memory_free)(MemoryFree*);
  void *pool_schedule, *pool_count, *future_create, *future_set_available, *future_set_error, *run_id_get;
  Error* (*ordinal_get)(OrdinalGet*);
} Api;

#define SIZE_TO(type, field) (offsetof(type, field) + sizeof(((type*)NULL)->field))

_Static_assert(sizeof(Extension) == 24 && sizeof(ApiVersion) == 24 && sizeof(Buffer) == 48, "64 bits");
_Static_assert(sizeof(Buffers) == 40 && sizeof(Attributes) == 48 && sizeof(Frame) == 168, "64 bits");
_Static_assert(offsetof(Metadata, traits) == 32 && sizeof(Api) == 192, "64 bits");

#endif
