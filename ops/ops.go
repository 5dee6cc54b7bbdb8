// Package ops says what each op means: it checks the arguments, plans, and dispatches to the CPU or to a
// CUDA device. All ops work over the last dimension of their operands, which are rows (M, N): rank 1 or
// more, N adjacent elements in the last dimension, leading dimensions that collapse into M rows one fixed
// stride apart. M may be 0, N may not. A refused call writes nothing.
//
// Tensors on CUDA devices need a build with the tag cuda.
package ops

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/kernels/cpu"
)

// Status classifies an Error. The numbers are gander_status of gander.h.
type Status int32

// Error is what every function of this package returns when it refuses or fails. Message says which
// argument, what came, what was expected, and what to do.
type Error struct {
	Status  Status
	Message string
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Call is where an operator runs and with whose memory. It matters on CUDA devices only; nil means the legacy default
// stream and the driver's memory pool.
type Call struct {
	Stream uintptr // a CUstream
	// Allocate returns device memory for use in Stream's order, or an error; it is called at most once and
	// keeps what it returned valid until work enqueued on Stream by this call is done.
	Allocate func(bytes uint64) (unsafe.Pointer, error)
}

var defaultCall Call

// orDefault returns the defaults for a nil Call.
func (c *Call) orDefault() *Call {
	if c == nil {
		return &defaultCall
	}
	return c
}

var threads atomic.Int64

// SetNumThreads caps the threads that one call on host tensors uses. 0, the default, and below: all that
// the Go runtime has.
func SetNumThreads(n int) { threads.Store(int64(n)) }

// workers returns how many threads a call may use.
func workers() int {
	all := runtime.GOMAXPROCS(0)
	if n := int(threads.Load()); n > 0 && n < all {
		return n
	}
	return all
}

// Warmup loads everything that ops on d will need, so that no later call pays for it.
func Warmup(d dlpack.Device) error {
	k := check{op: "warmup"}
	k.place("device", d)
	if k.err != nil {
		return k.err
	}
	if d.Host() {
		return nil
	}
	return cudaWarmup(d.ID)
}

// explained names what Explain takes, with the requests that it stands for.
var explained = map[string]request{
	"softmax_forward":          {op: kernels.SoftmaxForward},
	"softmax_backward":         {op: kernels.SoftmaxBackward},
	"rmsnorm_forward":          {op: kernels.RMSNormForward},
	"rmsnorm_backward":         {op: kernels.RMSNormBackward, dw: true},
	"cross_entropy_forward":    {op: kernels.CrossEntropyForward},
	"cross_entropy_forward_dx": {op: kernels.CrossEntropyForwardDX},
	"cross_entropy_backward":   {op: kernels.CrossEntropyBackward},
	"logsumexp_forward":        {op: kernels.CrossEntropyForward},
	"logsumexp_backward":       {op: kernels.CrossEntropyBackward},
}

func (k *check) explained(op string) {
	if _, ok := explained[op]; !ok {
		k.fail(StatusOption, "op is %q, expected softmax_forward, softmax_backward, rmsnorm_forward, "+
			"rmsnorm_backward, cross_entropy_forward, cross_entropy_forward_dx, cross_entropy_backward, logsumexp_forward or "+
			"logsumexp_backward", op)
	}
}

// Explain says in words what would run an op, and why, for aligned compact rows (m, n) of t on d. op is
// "softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward" (with a weight), "cross_entropy_forward",
// "cross_entropy_forward_dx" or "cross_entropy_backward".
func Explain(op string, m, n int64, t kernels.DType, d dlpack.Device, c Choice) (string, error) {
	k := check{op: "explain"}
	r := k.explain(op, m, n, t, d, c)
	if k.err != nil {
		return "", k.err
	}
	if !d.Host() {
		return cudaExplain(d.ID, r)
	}
	accumulator := kernels.Float32
	if t == kernels.Float64 {
		accumulator = kernels.Float64
	}
	return fmt.Sprintf("%s of %d rows of %d %v on %v: Go with %s instructions, accumulated in %v, on the calling "+
		"thread where the operands are small and else spread over up to %d threads", op, m, n, t, d, cpu.SIMD(),
		accumulator, workers()), nil
}

// explain checks what Explain is asked, and returns the request.
func (k *check) explain(op string, m, n int64, t kernels.DType, d dlpack.Device, c Choice) request {
	r := explained[op]
	r.x, r.m, r.n, r.Choice = t, m, n, c
	k.explained(op)
	k.place("device", d)
	k.dtype("dtype", t, anyFloat)
	if m < 0 || n < 1 {
		k.fail(StatusShape, "the shape is (%d, %d), expected M >= 0 rows of N >= 1", m, n)
	}
	k.chosen(c, r.op)
	return r
}
