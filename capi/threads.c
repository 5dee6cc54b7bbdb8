//go:build cgo

/* The threads of calls on host tensors. */
#include "internal.h"
#include "_cgo_export.h"

int32_t gander_set_num_threads(int32_t count) {
  GANDER_ENTER();
  return ganderSetNumThreads(count);
}

int32_t gander_set_parallel_for(gander_parallel_for parallel_for) {
  GANDER_ENTER();
  return ganderSetParallelFor((void*)parallel_for);
}

static void run_workers(int64_t begin, int64_t end, void* call) {
  ganderRunWorkers(begin, end, (uintptr_t)call);
}

void gander_call_parallel_for(void* parallel_for, int64_t workers, uintptr_t call) {
  ((gander_parallel_for)parallel_for)(0, workers, 1, run_workers, (void*)call);
}
