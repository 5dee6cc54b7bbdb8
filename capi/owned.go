package main

// #include "internal.h"
import "C"

import (
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// outputs are the new tensors of one owning call.
type outputs struct {
	device dlpack.Device
	stream uintptr
	made   []output
	err    error // the first failure to make one
}

type output struct {
	tensor *dlpack.ManagedVersioned
	slot   **dlpack.ManagedVersioned // where the caller wants it
}

// add makes an output for the caller's slot and returns it, or nil where the slot is NULL: not wanted.
func (o *outputs) add(slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
	if slot == nil || o.err != nil {
		return nil
	}
	m, err := o.allocate(t, shape)
	if err != nil {
		o.err = err
		return nil
	}
	o.made = append(o.made, output{m, (**dlpack.ManagedVersioned)(slot)})
	return &m.Tensor
}

// must makes an output that every caller wants.
func (o *outputs) must(name string, slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
	if slot == nil && o.err == nil {
		o.err = refuse(ops.StatusNull, "%s is NULL, expected where to put the output", name)
	}
	return o.add(slot, t, shape)
}

func (o *outputs) allocate(t dlpack.DType, shape []int64) (*dlpack.ManagedVersioned, error) {
	if o.device.Host() {
		return dlpack.NewManaged(t, shape)
	}
	device := dlpack.Device{Type: dlpack.CUDA, ID: o.device.ID}
	m, err := dlpack.NewHeader(device, t, shape)
	if err != nil {
		return nil, err
	}
	p, err := ops.AllocateOutput(device.ID, uint64(m.Tensor.Len()*t.Size()), o.stream)
	if err != nil {
		m.Release()
		return nil, err
	}
	*(*uintptr)(unsafe.Pointer(&m.Tensor.Data)) = p
	m.Deleter = unsafe.Pointer(C.gander_delete_cuda)
	return m, nil
}

// run calls the op on the outputs and hands them over, or takes them back where something failed.
func (o *outputs) run(op func() error) (err error) {
	delivered := false
	defer func() {
		if !delivered {
			for _, m := range o.made {
				m.tensor.Release()
			}
		}
	}()
	if o.err != nil {
		return o.err
	}
	if err := op(); err != nil {
		return err
	}
	for _, m := range o.made {
		if t := &m.tensor.Tensor; !o.device.Host() {
			if err := ops.SealOutput(t.Device.ID, uintptr(t.Data), o.stream); err != nil {
				return err
			}
		}
	}
	for _, m := range o.made {
		*m.slot = m.tensor
	}
	delivered = true
	return nil
}

// begin checks the operand whose device and shape the outputs take.
func begin(op string, x *dlpack.Tensor, stream unsafe.Pointer) (outputs, error) {
	if err := ops.CheckRows(op, x); err != nil {
		return outputs{}, err
	}
	return outputs{device: x.Device, stream: uintptr(stream)}, nil
}

// statistic is the dtype of what is computed per row.
func statistic(x *dlpack.Tensor) dlpack.DType {
	if x.DType == dlpack.Float64 {
		return dlpack.Float64
	}
	return dlpack.Float32
}

// leading is the shape of what has one element per row.
func leading(x *dlpack.Tensor) []int64 { return x.Dims()[:x.Rank()-1] }

//export ganderFreeOutput
func ganderFreeOutput(device int32, p unsafe.Pointer) {
	run(func() error {
		ops.FreeOutput(device, uintptr(p))
		return nil
	})
}

//export ganderSoftmax
func ganderSoftmax(x, options, stream, y unsafe.Pointer) int32 {
	return run(func() error {
		o, err := softmaxOptions(options)
		if err != nil {
			return err
		}
		tx := tensor(x)
		out, err := begin("softmax", tx, stream)
		if err != nil {
			return err
		}
		ty := out.must("y", y, tx.DType, tx.Dims())
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error { return ops.SoftmaxForward(&c, tx, ty) })
	})
}

//export ganderSoftmaxGrad
func ganderSoftmaxGrad(dy, y, options, stream, dx unsafe.Pointer) int32 {
	return run(func() error {
		o, err := softmaxOptions(options)
		if err != nil {
			return err
		}
		tdy := tensor(dy)
		out, err := begin("softmax_grad", tdy, stream)
		if err != nil {
			return err
		}
		tdx := out.must("dx", dx, tdy.DType, tdy.Dims())
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error { return ops.SoftmaxBackward(&c, tdy, tensor(y), tdx) })
	})
}

//export ganderRMSNorm
func ganderRMSNorm(x, weight unsafe.Pointer, code, bits uint8, lanes uint16,
	options, stream, y, rstd unsafe.Pointer) int32 {
	return run(func() error {
		o, err := rmsnormOptions(options)
		if err != nil {
			return err
		}
		tx := tensor(x)
		out, err := begin("rmsnorm", tx, stream)
		if err != nil {
			return err
		}
		dtype := dlpack.DType{Code: code, Bits: bits, Lanes: lanes}
		if dtype == (dlpack.DType{}) {
			dtype = tx.DType
		}
		ty := out.must("y", y, dtype, tx.Dims())
		trstd := out.add(rstd, statistic(tx), leading(tx))
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error { return ops.RMSNormForward(&c, tx, tensor(weight), ty, trstd, float64(o.eps)) })
	})
}

//export ganderRMSNormGrad
func ganderRMSNormGrad(x, weight, dout, rstd, options, stream, dx, dw unsafe.Pointer) int32 {
	return run(func() error {
		o, err := rmsnormOptions(options)
		if err != nil {
			return err
		}
		tx, tweight := tensor(x), tensor(weight)
		out, err := begin("rmsnorm_grad", tx, stream)
		if err != nil {
			return err
		}
		tdx := out.must("dx", dx, tx.DType, tx.Dims())
		var tdw *dlpack.Tensor
		switch {
		case dw != nil && weight == nil:
			return refuse(ops.StatusOption, "rmsnorm_grad: dw is asked for without a weight, expected NULL; pass the weight")
		case dw != nil:
			tdw = out.add(dw, tweight.DType, tx.Dims()[tx.Rank()-1:])
		}
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error {
			return ops.RMSNormBackward(&c, tx, tweight, tensor(dout), tensor(rstd), tdx, tdw)
		})
	})
}

//export ganderCrossEntropy
func ganderCrossEntropy(x, target, weight, options, stream, loss, lse, dx unsafe.Pointer) int32 {
	return run(func() error {
		o, co, err := crossEntropyOptions(options)
		if err != nil {
			return err
		}
		tx := tensor(x)
		out, err := begin("cross_entropy", tx, stream)
		if err != nil {
			return err
		}
		shape := leading(tx)
		if co.Reduction != kernels.ReduceNone {
			shape = nil
		}
		tloss := out.must("loss", loss, statistic(tx), shape)
		tlse := out.add(lse, statistic(tx), leading(tx))
		tdx := out.add(dx, tx.DType, tx.Dims())
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error {
			return ops.CrossEntropyForward(&c, tx, tensor(target), tensor(weight), tloss, tlse, tdx, nil, co)
		})
	})
}

//export ganderCrossEntropyGrad
func ganderCrossEntropyGrad(x, target, weight, dloss, lse, options, stream, dx unsafe.Pointer) int32 {
	return run(func() error {
		o, co, err := crossEntropyOptions(options)
		if err != nil {
			return err
		}
		if co.Reduction == kernels.ReduceMean {
			return refuse(ops.StatusOption, "cross_entropy_grad: reduction is mean, expected none or sum; divide dloss by the "+
				"mean's denominator")
		}
		tx := tensor(x)
		out, err := begin("cross_entropy_grad", tx, stream)
		if err != nil {
			return err
		}
		tdx := out.must("dx", dx, tx.DType, tx.Dims())
		c := call(stream, o.allocator, choice(int32(o.algorithm), int32(o.batch_invariant)))
		return out.run(func() error {
			return ops.CrossEntropyBackward(&c, tx, tensor(target), tensor(weight), tensor(dloss), tensor(lse), nil, tdx, co)
		})
	})
}
