/* Growth of Go's stack during calls: stack_test HEADER lists the functions, stack_test HEADER FUNCTION
 * tests one.  The first call of a thread starts on a small goroutine stack, which Go copies to a larger
 * one when it is full. Go aborts the process if a pointer in the stack has the value of a small integer,
 * and streams can have such values: 1 is the legacy and 2 the per-thread default stream. So each call runs
 * on a new thread. The threads do not end before the last call, because Go would reuse their large stacks. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>

#include "functions.h"

typedef struct {
  const function* f;
  fault wrong;
  int at;
  void* stream;
} task;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int done, finished;

static void* call_once(void* given) {
  const task* t = given;
  call c;
  CHECK(prepare(&c, t->f, t->wrong, t->at));
  c.a.stream = t->stream;
  check_and_release(&c, t->f, t->wrong, t->at, t->f->call(&c.a));
  pthread_mutex_lock(&lock);
  ++done;
  pthread_cond_broadcast(&changed);
  while (!finished) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void call_all(const function* f) {
  enum { MOST = 1024 };
  static void* const streams[] = {NULL, (void*)1, (void*)2, (void*)7};
  static pthread_t threads[MOST];
  static task tasks[MOST];
  int count = 0;
  for (size_t s = 0; s < sizeof streams / sizeof *streams; ++s) {
    for (int wrong = 0; wrong < FAULTS; ++wrong) {
      for (int at = 0; at < MOST_OPERANDS; ++at) {
        call c;
        if (!prepare(&c, f, wrong, at)) continue;
        CHECK(count < MOST);
        printf("%s, stream %p: %s %d\n", f->name, streams[s], fault_names[wrong], at);
        fflush(stdout);
        tasks[count] = (task){f, wrong, at, streams[s]};
        CHECK(pthread_create(&threads[count], NULL, call_once, &tasks[count]) == 0);
        ++count;
        pthread_mutex_lock(&lock);
        while (done < count) pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
      }
    }
  }
  pthread_mutex_lock(&lock);
  finished = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < count; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  printf("ok  %s: %d calls\n", f->name, count);
}

int main(int argc, char** argv) {
  CHECK(argc == 2 || argc == 3);
  check_functions(argv[1]);
  for (int i = 0; i < FUNCTIONS; ++i) {
    if (argc == 2) {
      puts(functions[i].name);
    } else if (strcmp(functions[i].name, argv[2]) == 0) {
      call_all(&functions[i]);
      return 0;
    }
  }
  return argc == 2 ? 0 : 1;
}
