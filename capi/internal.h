/* What the C files of the library share. The version script keeps all of it inside of the library. */
#ifndef GANDER_INTERNAL_H
#define GANDER_INTERNAL_H

#include "gander.h"

#define GANDER_VERSION "0.1.0"

/* 1 in a child process after fork(): Go's threads are not there, and a call into Go would hang. */
int gander_forked(void);

/* Set the calling thread's last error. */
void gander_set_error(const char* message, size_t length);
int32_t gander_fail(int32_t status, const char* format, ...);

/* Refuses a call of `function` in a forked child. */
int32_t gander_fail_fork(const char* function);

#define GANDER_ENTER() \
  do { \
    if (gander_forked()) return gander_fail_fork(__func__); \
  } while (0)

/* Owning calls: begin sets the outputs to NULL and refuses forked children and foreign versions; end
 * releases the inputs and hands the status on. */
typedef struct {
  const char* name;
  DLManagedTensorVersioned* tensor; /* NULL: not given */
} gander_input;

int32_t gander_begin(const char* function, const gander_input* inputs, size_t count,
                     DLManagedTensorVersioned** const* outputs, size_t output_count);
int32_t gander_end(const gander_input* inputs, size_t count, int32_t status);

/* The tensor of an input that begin has let pass, or NULL. */
static inline void* gander_tensor(DLManagedTensorVersioned* m) { return m ? &m->dl_tensor : NULL; }

/* The deleter of outputs in CUDA memory. */
void gander_delete_cuda(DLManagedTensorVersioned* m);

void* gander_call_allocator(const gander_allocator* allocator, size_t bytes);

#endif
