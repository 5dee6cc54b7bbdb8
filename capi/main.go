// Command capi is libgander, the C ABI of gander, built with -buildmode=c-shared. gander.h documents it. Each
// function of the header is a C function (*.c). It returns an error in a forked child, and else calls the
// exported Go function of the same name, which converts the arguments and calls package ops.
package main

// #cgo CFLAGS: -I${SRCDIR}/../dlpack -Wall -Wextra
// #include "internal.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func main() {}

// recovered must be deferred. It turns a panic into a status.
func recovered(status *int32) {
	if p := recover(); p != nil {
		*status = report(refuse(ops.StatusInternal, "internal error: %v; please report it", p))
	}
}

// run calls f and turns its error or panic into a status and the thread's last error.
func run(f func() error) (status int32) {
	defer recovered(&status)
	return report(f())
}

// report sets the thread's last error, unless err is nil, and returns the status.
func report(err error) int32 {
	if err == nil {
		return int32(ops.StatusOK)
	}
	status := ops.StatusInternal
	e, ok := errors.AsType[*ops.Error](err)
	switch {
	case ok:
		status = e.Status
	case errors.Is(err, dlpack.ErrMemory):
		status = ops.StatusMemory
	case errors.Is(err, dlpack.ErrShape):
		status = ops.StatusShape
	case errors.Is(err, dlpack.ErrDType):
		status = ops.StatusDType
	}
	message := err.Error()
	C.gander_set_error((*C.char)(unsafe.Pointer(unsafe.StringData(message))), C.size_t(len(message)))
	return int32(status)
}

func refuse(s ops.Status, format string, args ...any) error {
	return &ops.Error{Status: s, Message: fmt.Sprintf(format, args...)}
}

func tensor(p unsafe.Pointer) *dlpack.Tensor { return (*dlpack.Tensor)(p) }

// saturated narrows a choice, so that one that no int32 holds is still refused.
func saturated(v C.int64_t) int32 { return int32(min(max(v, math.MinInt32), math.MaxInt32)) }

// call returns an op's stream and allocator. It must be inlined into the exported function, so that the
// closure does not escape to the heap. So the functions for borrowed tensors defer recovered themselves:
// inside of a closure for run, call would not be inlined.
func call(stream uintptr, a *C.gander_allocator) ops.Call {
	c := ops.Call{Stream: stream}
	if a != nil {
		c.Allocate = func(bytes uint64) (unsafe.Pointer, error) { return allocate(a, bytes) }
	}
	return c
}

func allocate(a *C.gander_allocator, bytes uint64) (unsafe.Pointer, error) {
	if a.allocate == nil {
		return nil, refuse(ops.StatusNull, "options: allocator.allocate is NULL, expected a function; set it, "+
			"or drop the allocator")
	}
	p := C.gander_call_allocator(a, C.size_t(bytes))
	if p == nil {
		return nil, refuse(ops.StatusMemory, "options: the allocator returned NULL for %d bytes", bytes)
	}
	return p, nil
}

// choice converts the arguments of gander_explain.
func choice(algorithm, invariant int32) ops.Choice {
	return ops.Choose(ops.Algorithm(algorithm), invariant != 0)
}
