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
	type head struct {
		size, magic uint32 // which C has read
		allocator   unsafe.Pointer
	}
	h := head{allocator: unsafe.Pointer(&allocator)}
	softmax := struct {
		head
		algorithm, invariant int64
	}{head: h}
	forward := struct {
		head
		weight, bias, residual, residualOut, rstd unsafe.Pointer
		eps                                       float64
		algorithm, invariant                      int64
		offset                                    float64
		rounds                                    int64
	}{head: h, weight: weight, rstd: rstd, eps: 1e-6, invariant: 1}
	backward := struct {
		head
		weight, dresidualOut, dresidual, dw, db unsafe.Pointer
		algorithm, invariant                    int64
		offset                                  float64
		rounds                                  int64
	}{head: h, weight: weight, dw: dw}
	losses := struct {
		head
		weight, divisor, upstream, lse, dx, denominator unsafe.Pointer
		ignore, reduction, onePass, invariant           int64
		smoothing, zLoss, scale, softcap, temperature   float64
	}{head: h, weight: weight, lse: lse, dx: dx, denominator: one, ignore: -100, scale: 1, temperature: 1}
	gradients := struct {
		head
		weight, divisor, upstream, denominator        unsafe.Pointer
		ignore, reduction, onePass, invariant, slice  int64
		smoothing, zLoss, scale, softcap, temperature float64
	}{head: h, weight: weight, ignore: -100, scale: 1, temperature: 1}
	so, fo, bo := unsafe.Pointer(&softmax), unsafe.Pointer(&forward), unsafe.Pointer(&backward)
	lo, do := unsafe.Pointer(&losses), unsafe.Pointer(&gradients)
	for name, call := range map[string]func() int32{
		"softmax_forward":       func() int32 { return ganderSoftmaxForward(x, y, so, 0) },
		"softmax_backward":      func() int32 { return ganderSoftmaxBackward(x, y, dx, so, 0) },
		"rmsnorm_forward":       func() int32 { return ganderRMSNormForward(x, y, fo, 0) },
		"rmsnorm_backward":      func() int32 { return ganderRMSNormBackward(x, y, rstd, dx, bo, 0) },
		"cross_entropy_forward": func() int32 { return ganderCrossEntropyForward(x, target, loss, lo, 0) },
		"cross_entropy_backward": func() int32 {
			return ganderCrossEntropyBackward(x, target, loss, lse, dx, do, 0)
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
