//go:build cgo && !race

// Not with the race detector: sync.Pool then drops objects at random, and the CPU backend allocates new ones.

package main

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gander-go/gander/dlpack"
)

// A call on borrowed tensors, with options and an allocator, allocates nothing.
func TestBorrowedCallsDoNotAllocate(t *testing.T) {
	tensor := func(d dlpack.DType, dims ...int64) unsafe.Pointer {
		v, err := dlpack.New(d, dims...)
		require.NoError(t, err)
		return unsafe.Pointer(v)
	}
	d := dlpack.Float32
	x, y, dx := tensor(d, 2, 8), tensor(d, 2, 8), tensor(d, 2, 8)
	weight, dw, rstd := tensor(d, 8), tensor(d, 8), tensor(d, 2)
	target, loss, lse, one := tensor(dlpack.Int64, 2), tensor(d, 2), tensor(d, 2, 2), tensor(d)
	allocator := [2]unsafe.Pointer{}
	softmax := struct {
		size      uintptr
		allocator unsafe.Pointer
		choice    [2]int32 // algorithm, batch_invariant
	}{24, unsafe.Pointer(&allocator), [2]int32{}}
	rmsnorm := struct {
		size      uintptr
		allocator unsafe.Pointer
		eps       float64
		choice    [2]int32
	}{32, unsafe.Pointer(&allocator), 1e-6, [2]int32{0, 1}}
	entropy := struct {
		size      uintptr
		allocator unsafe.Pointer
		ignore    int64
		numbers   [4]int32 // reduction, one_pass, batch_invariant, padding
	}{40, unsafe.Pointer(&allocator), -100, [4]int32{}}
	so, ro, co := unsafe.Pointer(&softmax), unsafe.Pointer(&rmsnorm), unsafe.Pointer(&entropy)
	for name, call := range map[string]func() int32{
		"softmax_forward":  func() int32 { return ganderSoftmaxForward(x, y, so, 0) },
		"softmax_backward": func() int32 { return ganderSoftmaxBackward(x, y, dx, so, 0) },
		"rmsnorm_forward":  func() int32 { return ganderRMSNormForward(x, weight, nil, nil, y, nil, rstd, ro, 0) },
		"rmsnorm_backward": func() int32 {
			return ganderRMSNormBackward(x, weight, y, nil, rstd, dx, nil, dw, nil, ro, 0)
		},
		"cross_entropy_forward": func() int32 {
			return ganderCrossEntropyForward(x, target, weight, nil, nil, loss, lse, dx, one, co, 0)
		},
		"cross_entropy_backward": func() int32 {
			return ganderCrossEntropyBackward(x, target, weight, loss, lse, nil, nil, nil, dx, co, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Zero(t, testing.AllocsPerRun(100, func() {
				if status := call(); status != 0 {
					panic(status)
				}
			}))
		})
	}
}
