package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// outputs are the new tensors of one owning call. discard must be deferred: it gives back what deliver has not handed
// over.
type outputs struct {
	op     string
	first  *dlpack.Tensor // the operator's first operand, whose shape and device outputs take
	stream uintptr
	made   []output
	err    error // the first failure to make one
}

type output struct {
	tensor *dlpack.ManagedVersioned
	slot   **dlpack.ManagedVersioned // where the caller wants it
}

// outputsFor checks the first operand, so that shapes can be taken from it.
func outputsFor(op, name string, first *dlpack.Tensor, stream uintptr) (*outputs, error) {
	if err := ops.CheckRows(op, name, first); err != nil {
		return nil, err
	}
	return &outputs{op: op, first: first, stream: stream}, nil
}

// may makes an output for the caller's slot and returns it, or nil where the slot is NULL: not wanted.
func (o *outputs) may(name string, slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
	if slot == nil || o.err != nil {
		return nil
	}
	m, err := o.allocate(t, shape)
	if err != nil {
		o.err = fmt.Errorf("%s: %s: %w", o.op, name, err)
		return nil
	}
	o.made = append(o.made, output{m, (**dlpack.ManagedVersioned)(slot)})
	return &m.Tensor
}

// must makes an output that every caller wants.
func (o *outputs) must(name string, slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
	if slot == nil && o.err == nil {
		o.err = refuse(ops.StatusNull, "%s: %s is NULL, expected where to put the output", o.op, name)
	}
	return o.may(name, slot, t, shape)
}

func (o *outputs) allocate(t dlpack.DType, shape []int64) (*dlpack.ManagedVersioned, error) {
	if o.first.Device.Host() {
		return dlpack.NewManaged(t, shape)
	}
	device := dlpack.Device{Type: dlpack.CUDA, ID: o.first.Device.ID}
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

// deliver hands the outputs over once they have been written.
func (o *outputs) deliver() error {
	if !o.first.Device.Host() {
		for _, m := range o.made {
			t := &m.tensor.Tensor
			if err := ops.SealOutput(t.Device.ID, uintptr(t.Data), o.stream); err != nil {
				return err
			}
		}
	}
	for _, m := range o.made {
		*m.slot = m.tensor
	}
	o.made = nil
	return nil
}

// discard gives back what was not delivered.
func (o *outputs) discard() {
	for _, m := range o.made {
		m.tensor.Release()
	}
}

// The shapes of outputs.

func (o *outputs) rows() []int64    { return o.first.Dims() }
func (o *outputs) columns() []int64 { return o.first.Dims()[o.first.Rank()-1:] }
func (o *outputs) perRow() []int64  { return o.first.Dims()[:o.first.Rank()-1] }

// reduced is one element, or with reduction none one for each row.
func (o *outputs) reduced(reduction int32) []int64 {
	if kernels.Reduction(reduction) != kernels.ReduceNone {
		return nil
	}
	return o.perRow()
}

// The dtypes of outputs.

func (o *outputs) dtype() dlpack.DType { return o.first.DType }

// chosen is what the caller asked for.
func (o *outputs) chosen(t dlpack.DType) dlpack.DType {
	if t == (dlpack.DType{}) {
		return o.first.DType
	}
	return t
}

// dtypeOf is the dtype of an operand, which is checked later; any where there is none.
func (o *outputs) dtypeOf(t *dlpack.Tensor) dlpack.DType {
	if t == nil {
		return o.first.DType
	}
	return t.DType
}

// statistic is the dtype of what is computed per row.
func (o *outputs) statistic() dlpack.DType {
	if o.first.DType == dlpack.Float64 {
		return dlpack.Float64
	}
	return dlpack.Float32
}

//export ganderFreeOutput
func ganderFreeOutput(device int32, p uintptr) {
	run(func() error {
		ops.FreeOutput(device, p)
		return nil
	})
}
