package main

// #include "internal.h"
import "C"

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/kernels/cpu"
	"github.com/gander-go/gander/ops"
)

// running are the calls that use threads of the caller's framework. C gets their indices, because it must not
// keep a pointer of Go's.
var running [64]struct {
	taken   atomic.Bool
	workers cpu.Workers
}

// processors is how many of Go's the workers of running calls need.
var processors atomic.Int64

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
		cpu.SetParallelFor(func(n int, w cpu.Workers) bool { return parallelFor(f, n, w) })
		return nil
	})
}

// parallelFor runs workers by a function that C has set. That may wake all threads of the framework and wait
// for them, so it is used only where Go has a processor for each: a thread that waits for one stops the
// others. While other calls have taken the processors, a call runs on its caller alone.
func parallelFor(f unsafe.Pointer, n int, w cpu.Workers) bool {
	all := runtime.GOMAXPROCS(0)
	if ops.NumThreads() > all {
		return false
	}
	defer processors.Add(-int64(n))
	if processors.Add(int64(n)) > int64(all) {
		return true
	}
	for i := range running {
		if call := &running[i]; call.taken.CompareAndSwap(false, true) {
			call.workers = w
			C.gander_call_parallel_for(f, C.int64_t(n), C.uintptr_t(i))
			call.workers = nil
			call.taken.Store(false)
			break
		}
	}
	return true
}

//export ganderRunWorkers
func ganderRunWorkers(begin, end int64, call uintptr) {
	for i := begin; i < end; i++ {
		running[call].workers.RunWorker(int(i))
	}
}
