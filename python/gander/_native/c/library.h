/* Opens libgander for a library that calls it in a framework's name: gander._torch's kernels, gander.jax's
 * handlers. Such a file lists the functions that it needs, LIBRARY_FUNCTIONS(F), of which the operators' are
 * OPERATOR_FUNCTIONS(F). It declares them with DECLARE_LIBRARY in a struct `lib`, and calls load_library. */
#ifndef GANDER_LIBRARY_H
#define GANDER_LIBRARY_H

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>

#include "functions_gen.h"
#include "gander.h"

#define DECLARE_LIBRARY(name) __typeof__(&name) name;
#define LOOK_UP(name) \
  if ((lib.name = (__typeof__(&name))dlsym(library, #name)) == NULL) { \
    lacks(#name); \
    return false; \
  }
#define STRING(macro) STRING_OF(macro)
#define STRING_OF(text) #text

static char library_path[4096];
static char load_error[1024]; /* empty if libgander was loaded */

static void lacks(const char* name) {
  snprintf(load_error, sizeof load_error,
           "gander: %.800s has no %s, expected libgander in this package's version; install that, or call "
           "gander before the process loads another one",
           library_path, name);
}

/* The libgander that the process has, or else that of library_path. gander._native says why. */
static void* open_library(void) {
  void* handle = dlopen("libgander.so." STRING(GANDER_ABI_VERSION), RTLD_NOW | RTLD_NOLOAD);
  struct link_map* loaded;
  if (handle == NULL) handle = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  else if (dlinfo(handle, RTLD_DI_LINKMAP, &loaded) == 0) /* for messages */
    snprintf(library_path, sizeof library_path, "%s", loaded->l_name);
  if (handle == NULL)
    snprintf(load_error, sizeof load_error, "gander: cannot load its library: %s", dlerror());
  return handle;
}

static bool has_abi_version(int32_t version) {
  if (version != GANDER_ABI_VERSION)
    snprintf(load_error, sizeof load_error,
             "gander: %.800s has ABI version %d, expected %d; reinstall gander", library_path, (int)version,
             GANDER_ABI_VERSION);
  return version == GANDER_ABI_VERSION;
}

/* Fills in `lib`. Returns false, with a message in load_error, if that fails. */
#define DEFINE_LOAD_LIBRARY \
  static bool load_library(void) { \
    void* library = open_library(); \
    if (library == NULL) return false; \
    LIBRARY_FUNCTIONS(LOOK_UP) \
    return has_abi_version(lib.gander_abi_version()); \
  }

#endif
