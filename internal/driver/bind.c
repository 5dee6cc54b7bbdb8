//go:build cuda && cgo && linux && amd64

// Binds libcuda at first use.
//
// A library linked with -lcuda could not be loaded on a machine without a driver. Instead every cu* function
// that this program calls is defined in stubs_gen_amd64.S as a jump through a table. Before
// gander_driver_bind fills the table, these functions return CUDA_ERROR_NOT_INITIALIZED.

#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

// gorgonia.org/cu calls cuInit when the program starts, and ends the process if it fails. This one always
// succeeds. gander_driver_bind calls the driver's cuInit.
#pragma GCC visibility push(hidden)
CUresult cuInit(unsigned int flags) {
  (void)flags;
  return CUDA_SUCCESS;
}
#pragma GCC visibility pop

// The target of functions that this driver lacks.
static CUresult missing(void) { return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND; }

void gander_driver_bind(gander_driver_binding* binding) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CUresult (*init)(unsigned int) = library ? dlsym(library, "cuInit") : NULL;
  if (!init) {
    const char* why = dlerror();
    snprintf(binding->problem, sizeof binding->problem, "%s", why ? why : "libcuda.so.1 has no cuInit");
    return;
  }
  for (size_t i = 0; i < gander_driver_slot_count; i++) {
    void* target = dlsym(library, gander_driver_slots[i].name);
    gander_driver_slots[i].target = target ? target : (void*)missing;
  }
  cuDriverGetVersion(&binding->version);
  binding->init = init(0);
}

const char* gander_driver_error_name(CUresult code) {
  const char* name = NULL;
  return cuGetErrorName(code, &name) == CUDA_SUCCESS && name ? name : "CUDA_ERROR";
}

const char* gander_driver_error_text(CUresult code) {
  const char* text = NULL;
  if (code == CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND)
    return "this driver lacks the function or a library it needs; install a newer NVIDIA driver";
  return cuGetErrorString(code, &text) == CUDA_SUCCESS && text ? text : "the driver has no description";
}
