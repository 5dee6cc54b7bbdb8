/* Loads the library with dlopen, as Python does, twice: load_test LIBRARY */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char** argv) {
  for (int i = 0; i < 2; ++i) {
    void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
      fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: load_test LIBRARY");
      return 1;
    }
    const char* (*info)(void);
    *(void**)&info = dlsym(library, "gander_build_info");
    printf("%s\n", info());
    dlclose(library); /* must not unload it, since Go's runtime cannot be stopped */
  }
  return 0;
}
