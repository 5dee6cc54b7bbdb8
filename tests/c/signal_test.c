/* C signal handlers in a process with Go: signal_test LIBRARY WHEN
 *
 * A timer interrupts calls on all threads 1000 times per second. WHEN says how its handler is installed:
 *   before   by signal(), before the library is loaded: Go then adds SA_ONSTACK
 *   onstack  by sigaction() with SA_ONSTACK, after the library is loaded
 * Installed by signal() after the load, it would run on a goroutine's stack and overflow it.
 * The program's handlers for faults, installed before the load, must still be called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "gander.h"

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1); \
    } \
  } while (0)

enum { M = 512, N = 2048, CALLS = 500, USED = 16 << 10 };

static volatile sig_atomic_t ticks;

/* Uses half of the signal stack of Go's threads. */
static void on_tick(int number) {
  volatile char used[USED];
  for (int i = 0; i < USED; ++i) used[i] = (char)number;
  ticks += used[USED - 1] == (char)number;
}

static sigjmp_buf after_fault;

static void on_fault(int number) { siglongjmp(after_fault, number); }

static void check_faults(void) {
  volatile int zero = 0;
  int* volatile nowhere = NULL;
  int number = sigsetjmp(after_fault, 1);
  if (!number) zero = 7 / zero;
  CHECK(number == SIGFPE);
  number = sigsetjmp(after_fault, 1);
  if (!number) zero = *nowhere;
  CHECK(number == SIGSEGV);
  number = sigsetjmp(after_fault, 1);
  if (!number) raise(SIGPIPE);
  CHECK(number == SIGPIPE);
}

int main(int argc, char** argv) {
  static float x[M * N], y[M * N], expected[M * N];
  CHECK(argc == 3);
  int before = strcmp(argv[2], "before") == 0;
  if (before) CHECK(signal(SIGALRM, on_tick) != SIG_ERR);
  const int faults[] = {SIGFPE, SIGSEGV, SIGPIPE};
  for (int i = 0; i < 3; ++i) CHECK(signal(faults[i], on_fault) != SIG_ERR);
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library);
  struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_ONSTACK | SA_RESTART};
  if (!before) CHECK(sigaction(SIGALRM, &action, NULL) == 0);
  CHECK(sigaction(SIGALRM, NULL, &action) == 0);
  CHECK(action.sa_handler == on_tick && action.sa_flags & SA_ONSTACK);

  int32_t (*softmax)(const DLTensor*, const DLTensor*, const gander_softmax_forward_options*, void*);
  *(void**)&softmax = dlsym(library, "gander_softmax_forward");
  CHECK(softmax);
  int64_t shape[] = {M, N};
  DLTensor tx = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, ty = tx;
  for (int i = 0; i < M * N; ++i) x[i] = (float)(i % 61);
  ty.data = expected;
  CHECK(softmax(&tx, &ty, NULL, NULL) == GANDER_OK);
  ty.data = y;
  struct itimerval timer = {{0, 1000}, {0, 1000}};
  CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
  for (int i = 0; i < CALLS || !ticks; ++i) {
    memset(y, 0, sizeof y);
    CHECK(softmax(&tx, &ty, NULL, NULL) == GANDER_OK);
    CHECK(memcmp(y, expected, sizeof y) == 0);
    CHECK(softmax(NULL, &ty, NULL, NULL) == GANDER_ERROR_NULL);
  }
  check_faults();
  printf("ok  %s: %d calls, %d ticks\n", argv[2], CALLS, (int)ticks);
  return 0;
}
