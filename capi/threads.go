package main

// #include "internal.h"
import "C"

import (
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/kernels/cpu"
	"github.com/gander-go/gander/ops"
)

// steps are the parallel parts of calls that run on threads of the caller's framework. C gets their indices,
// because it must not keep a pointer of Go's. If all are taken, a call runs on one thread.
var steps [64]struct {
	taken atomic.Bool
	step  interface{ RunWorker(i int) }
}

//export ganderSetNumThreads
func ganderSetNumThreads(count int32) int32 {
	return run(func() error {
		if count < 0 {
			return refuse(ops.StatusOption, "set_num_threads: count is %d, expected 0 (no cap) or more", count)
		}
		ops.SetNumThreads(int(count))
		return nil
	})
}

//export ganderSetParallelFor
func ganderSetParallelFor(f unsafe.Pointer) int32 {
	return run(func() error {
		if f == nil {
			cpu.SetParallelFor(nil)
			return nil
		}
		cpu.SetParallelFor(func(n int, step interface{ RunWorker(i int) }) {
			for i := range steps {
				if s := &steps[i]; s.taken.CompareAndSwap(false, true) {
					s.step = step
					C.gander_call_parallel_for(f, C.int64_t(n), C.uintptr_t(i))
					s.step = nil
					s.taken.Store(false)
					return
				}
			}
		})
		return nil
	})
}

//export ganderRunWorkers
func ganderRunWorkers(begin, end int64, step uintptr) {
	for i := begin; i < end; i++ {
		steps[step].step.RunWorker(int(i))
	}
}
