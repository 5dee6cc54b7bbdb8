/* Shared by the C files of the library. The version script does not export any of it. */
#ifndef GANDER_INTERNAL_H
#define GANDER_INTERNAL_H

#include "gander.h"

#define GANDER_VERSION "0.1.0"

/* 1 in a child process after fork(). It has none of Go's threads, so a call of Go would hang. */
int gander_forked(void);

/* Set the calling thread's last error. */
void gander_set_error(const char* message, size_t length);
int32_t gander_fail(int32_t status, const char* format, ...);

/* Sets the error of a call of `function` in a forked child. */
int32_t gander_fail_fork(const char* function);

#define GANDER_ENTER() \
  do { \
    if (gander_forked()) return gander_fail_fork(__func__); \
  } while (0)

/* Declares o, an option struct that has all fields, and the status of reading the caller's. o is the
 * caller's struct, or if that is NULL or of an older version, one with defaults in the place of what is
 * missing. If the caller's cannot be read, o has the defaults alone. */
#define GANDER_OPTIONS(type, initializer) \
  static const type defaults = initializer; \
  type room; \
  int32_t status = GANDER_OK; \
  const type* o = gander_options(__func__, options, &defaults, &room, &status)

/* What every version of every option struct begins with. */
typedef struct {
  uint32_t size, magic;
  const gander_allocator* allocator;
} gander_head;

const void* gander_read_options(const char* function, const gander_head* given, const gander_head* defaults,
                                void* room, int32_t* status);

static inline const void* gander_options(const char* function, const void* given, const void* defaults,
                                         void* room, int32_t* status) {
  const gander_head *head = given, *known = defaults;
  if (head && head->size == known->size && head->magic == GANDER_OPTIONS_MAGIC) return given;
  return gander_read_options(function, head, known, room, status);
}

/* For owning calls. gander_begin sets the outputs to NULL, and refuses calls in forked children, option
 * structs whose status is not GANDER_OK, slots that are not variables of their own, and tensors of other
 * DLPack versions. gander_end releases the inputs and returns the status. */
typedef struct {
  const char* name;
  DLManagedTensorVersioned* tensor; /* may be NULL */
} gander_input;

int32_t gander_begin(const char* function, int32_t status, const gander_head* options,
                     const gander_input* inputs, size_t count, DLManagedTensorVersioned** const* outputs,
                     size_t output_count);
int32_t gander_end(const gander_input* inputs, size_t count, int32_t status);

/* The deleter of outputs in CUDA memory. */
void gander_delete_cuda(DLManagedTensorVersioned* m);

/* Runs the workers of one of threads.go's running calls. */
void gander_call_parallel_for(void* parallel_for, int64_t workers, uintptr_t call);

void* gander_call_allocator(const gander_allocator* allocator, size_t bytes);

#endif
