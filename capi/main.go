// Command capi is libgander, the C ABI of gander: build it with -buildmode=c-shared. gander.h is its
// contract. Each function of the header is a C function (*.c) that refuses to run in a forked child and then
// enters the Go function of the same name, which converts the arguments and calls package ops.
package main

// #cgo CFLAGS: -I${SRCDIR}/../dlpack -Wall -Wextra
// #include "internal.h"
import "C"

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/ops"
)

func main() {}

// recovered, deferred, turns a panic into a status.
func recovered(status *int32) {
	if p := recover(); p != nil {
		*status = report(refuse(ops.StatusInternal, "internal error: %v; please report it", p))
	}
}

// run turns what f returns, or panics with, into a status and the thread's last error.
func run(f func() error) (status int32) {
	defer recovered(&status)
	return report(f())
}

// report sets the thread's last error, if there is one, and returns its status.
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

// An option struct has had its size and an allocator from the start; what claims to be shorter, or much longer than any, has not
// set its size.
const leastOptions, mostOptions = 16, 4096

// readOptions returns the caller's option struct, or the defaults where there is none. What a struct of an older gander lacks has
// its default. One of a newer gander is taken if it asks for nothing that this one does not know.
func readOptions[T any](p unsafe.Pointer, defaults T) (T, error) {
	if p == nil {
		return defaults, nil
	}
	size, known := *(*uintptr)(p), unsafe.Sizeof(defaults)
	if size < leastOptions || size%8 != 0 || size > mostOptions {
		return defaults, refuse(ops.StatusOption, "options: size is %d, expected %d; set it to sizeof(the struct)",
			size, known)
	}
	given := unsafe.Slice((*byte)(p), size)
	if size < known {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&defaults)), size), given)
		return defaults, nil
	}
	for i, b := range given[known:] {
		if b != 0 {
			return defaults, refuse(ops.StatusOption, "options: byte %d is set, beyond the %d that this version knows, "+
				"expected zeros there; leave newer fields zero or load a newer libgander", known+uintptr(i), known)
		}
	}
	return *(*T)(p), nil
}

// call says where an op runs and where its temporary memory comes from. It is to be inlined, so that the
// closure stays on the stack: the borrowing functions defer for themselves, since a closure that run calls
// would keep this from being inlined.
func call(stream uintptr, a *C.gander_allocator) ops.Call {
	c := ops.Call{Stream: stream}
	if a != nil {
		c.Allocate = func(bytes uint64) (unsafe.Pointer, error) { return allocate(a, bytes) }
	}
	return c
}

func allocate(a *C.gander_allocator, bytes uint64) (unsafe.Pointer, error) {
	if a.allocate == nil {
		return nil, refuse(ops.StatusNull, "options: allocator.allocate is NULL, expected a function; set it, or drop the "+
			"allocator")
	}
	p := C.gander_call_allocator(a, C.size_t(bytes))
	if p == nil {
		return nil, refuse(ops.StatusMemory, "options: the allocator returned NULL for %d bytes", bytes)
	}
	return p, nil
}

// choice is what gander_explain is asked about.
func choice(algorithm, invariant int32) ops.Choice {
	return ops.Choose(ops.Algorithm(algorithm), invariant != 0)
}
