package main

import "C"

import (
	"unsafe"

	"github.com/gander-go/gander/ops"
)

//export ganderSoftmaxForward
func ganderSoftmaxForward(x, y, options, stream unsafe.Pointer) (status int32) {
	defer recovered(&status)
	o, err := softmaxOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.SoftmaxForward(&c, tensor(x), tensor(y))
	}
	return report(err)
}

//export ganderSoftmaxBackward
func ganderSoftmaxBackward(dy, y, dx, options, stream unsafe.Pointer) (status int32) {
	defer recovered(&status)
	o, err := softmaxOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.SoftmaxBackward(&c, tensor(dy), tensor(y), tensor(dx))
	}
	return report(err)
}

//export ganderRMSNormForward
func ganderRMSNormForward(x, weight, y, rstd, options, stream unsafe.Pointer) (status int32) {
	defer recovered(&status)
	o, err := rmsnormOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.RMSNormForward(&c, tensor(x), tensor(weight), tensor(y), tensor(rstd), float64(o.eps))
	}
	return report(err)
}

//export ganderRMSNormBackward
func ganderRMSNormBackward(x, weight, dout, rstd, dx, dw, options, stream unsafe.Pointer) (status int32) {
	defer recovered(&status)
	o, err := rmsnormOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.RMSNormBackward(&c, tensor(x), tensor(weight), tensor(dout), tensor(rstd), tensor(dx), tensor(dw))
	}
	return report(err)
}

//export ganderCrossEntropyForward
func ganderCrossEntropyForward(
	x, target, weight, loss, lse, dx, denominator, options, stream unsafe.Pointer,
) (status int32) {
	defer recovered(&status)
	o, co, err := crossEntropyOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.CrossEntropyForward(&c, tensor(x), tensor(target), tensor(weight), tensor(loss), tensor(lse), tensor(dx),
			tensor(denominator), co)
	}
	return report(err)
}

//export ganderCrossEntropyBackward
func ganderCrossEntropyBackward(
	x, target, weight, dloss, lse, denominator, dx, options, stream unsafe.Pointer,
) (status int32) {
	defer recovered(&status)
	o, co, err := crossEntropyOptions(options)
	if err == nil {
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		err = ops.CrossEntropyBackward(&c, tensor(x), tensor(target), tensor(weight), tensor(dloss), tensor(lse),
			tensor(denominator), tensor(dx), co)
	}
	return report(err)
}
