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

/* For owning calls. gander_begin sets the outputs to NULL, and refuses calls in forked children and
 * tensors of other DLPack versions. gander_end releases the inputs and returns the status. */
typedef struct {
  const char* name;
  DLManagedTensorVersioned* tensor; /* may be NULL */
} gander_input;

int32_t gander_begin(const char* function, const gander_input* inputs, size_t count,
                     DLManagedTensorVersioned** const* outputs, size_t output_count);
int32_t gander_end(const gander_input* inputs, size_t count, int32_t status);

/* The tensor of an input that gander_begin has accepted, or NULL. */
static inline void* gander_tensor(DLManagedTensorVersioned* m) { return m ? &m->dl_tensor : NULL; }

/* The deleter of outputs in CUDA memory. */
void gander_delete_cuda(DLManagedTensorVersioned* m);

/* Runs the workers of one of threads.go's running calls. */
void gander_call_parallel_for(void* parallel_for, int64_t workers, uintptr_t call);

void* gander_call_allocator(const gander_allocator* allocator, size_t bytes);

#endif
