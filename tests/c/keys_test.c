/* Loads the library in a process that has few or no thread-local storage keys left: keys_test LIBRARY
 * FREE_KEYS  glibc has 1024 keys. The library must not change the values of those that the process created
 * before. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gander.h"

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1); \
    } \
  } while (0)

enum { BYTES = 4096, MOST = 4096 };

static pthread_key_t keys[MOST];
static int count, spare;
static const char* (*last_error)(void);
static int32_t (*softmax)(const DLTensor*, const DLTensor*, const gander_softmax_forward_options*, void*);

/* Checks that every key of this thread has its value in `own`, or NULL without `own`. */
static void check_values(char* const* own) {
  for (int i = 0; i < count; ++i) {
    char* value = pthread_getspecific(keys[i]);
    CHECK(value == (own ? own[i] : NULL));
    for (int j = 0; value && j < BYTES; ++j) CHECK(value[j] == (char)i);
  }
}

static void* refused_and_served(void* own) {
  float x[4] = {0, 0, 0, 0}, y[4] = {0};
  int64_t shape[] = {4};
  DLTensor tx = {x, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, NULL, 0}, ty = tx;
  ty.data = y;
  for (int i = 0; i < 3; ++i) {
    CHECK(softmax(NULL, &ty, NULL, NULL) == GANDER_ERROR_NULL);
    check_values(own);
    CHECK(strstr(last_error(), spare ? "x is NULL" : "no thread-local storage key left"));
    CHECK(softmax(&tx, &ty, NULL, NULL) == GANDER_OK && y[0] == 0.25f);
    check_values(own);
  }
  return NULL;
}

int main(int argc, char** argv) {
  static char* own[MOST];
  CHECK(argc == 3);
  spare = atoi(argv[2]);
  while (count < MOST && pthread_key_create(&keys[count], NULL) == 0) ++count;
  CHECK(count > spare);
  for (int i = 0; i < spare; ++i) CHECK(pthread_key_delete(keys[--count]) == 0);
  for (int i = 0; i < count; ++i) {
    own[i] = malloc(BYTES);
    CHECK(own[i] && pthread_setspecific(keys[i], memset(own[i], i, BYTES)) == 0);
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library);
  *(void**)&last_error = dlsym(library, "gander_last_error");
  *(void**)&softmax = dlsym(library, "gander_softmax_forward");
  CHECK(last_error && softmax);
  CHECK(strcmp(last_error(), "") == 0);
  refused_and_served(own);
  for (int i = 0; i < 4; ++i) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, refused_and_served, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
  }
  check_values(own);
  printf("ok  %d keys, %d free: %s\n", count, spare, last_error());
  return 0;
}
