// The C functions that this package calls from Go. Handles are integers, so that Go can store them in
// atomics.
#ifndef GANDER_DRIVER_H
#define GANDER_DRIVER_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

// The generated jump table, with an entry for each cu* function that this program calls.
typedef struct {
  const char* name;
  void* target;
} gander_driver_slot;
extern gander_driver_slot gander_driver_slots[];
extern const size_t gander_driver_slot_count;

typedef struct {
  char problem[256];  // why libcuda could not be loaded, or ""
  int version;        // from cuDriverGetVersion
  CUresult init;      // from cuInit
} gander_driver_binding;

// Loads libcuda and fills the jump table. Must be called once.
void gander_driver_bind(gander_driver_binding* binding);

const char* gander_driver_error_name(CUresult code);
const char* gander_driver_error_text(CUresult code);

// gander_driver_enter makes a context current on this thread, and gander_driver_leave restores the previous
// one. In between, calls are allowed that a stream capture on another thread would otherwise forbid.
typedef struct {
  int pushed;
  CUstreamCaptureMode mode;
} gander_driver_scope;
CUresult gander_driver_enter(uintptr_t context, gander_driver_scope* scope);
void gander_driver_leave(gander_driver_scope* scope);

// Between enter and leave:
CUresult gander_driver_prepare(uintptr_t function, int shared_per_block, int cluster);
CUresult gander_driver_max_clusters(uintptr_t function, uint32_t cluster, uint32_t block, uint32_t shared,
                                    int* count);

// From any thread, with any current context:
CUresult gander_driver_launch(uintptr_t context, uintptr_t function, uint32_t grid, uint32_t cluster,
                              uint32_t block, uint32_t shared, int cooperative, int dependent,
                              uintptr_t stream, void* args, size_t bytes);
CUresult gander_driver_allocate(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t* p);
CUresult gander_driver_free(uintptr_t context, uintptr_t p, uintptr_t stream);
CUresult gander_driver_allocate_owned(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t* p,
                                      uintptr_t* event);
CUresult gander_driver_seal(uintptr_t context, uintptr_t event, uintptr_t stream);
CUresult gander_driver_free_owned(uintptr_t context, uintptr_t p, uintptr_t event);

#pragma GCC visibility pop

#endif
