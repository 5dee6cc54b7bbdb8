package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/kernels"
	"github.com/gander-go/gander/ops"
)

// outputs are the new tensors of one owning call. discard must be deferred. It releases them unless deliver
// has transferred them to the caller.
type outputs struct {
	op     string
	first  *dlpack.Tensor // the operator's first operand, whose shape and device outputs take
	stream uintptr
	made   []output
	err    error // the first failed allocation
}

type output struct {
	tensor *dlpack.ManagedVersioned
	slot   **dlpack.ManagedVersioned // the caller's variable
}

// outputsFor checks the first operand, which determines the shapes of outputs.
func outputsFor(op, name string, first *dlpack.Tensor, stream uintptr) (*outputs, error) {
	if err := ops.CheckRows(op, name, first); err != nil {
		return nil, err
	}
	return &outputs{op: op, first: first, stream: stream}, nil
}

// optional allocates an output for the caller's slot. It returns nil if the slot is NULL.
func (o *outputs) optional(name string, slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
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

// required allocates an output whose slot must not be NULL.
func (o *outputs) required(name string, slot unsafe.Pointer, t dlpack.DType, shape []int64) *dlpack.Tensor {
	if slot == nil && o.err == nil {
		o.err = refuse(ops.StatusNull, "%s: %s is NULL, expected a pointer for the output", o.op, name)
	}
	return o.optional(name, slot, t, shape)
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

// deliver transfers the outputs to the caller, after the work that writes them is enqueued.
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

// discard releases outputs that were not delivered.
func (o *outputs) discard() {
	for _, m := range o.made {
		m.tensor.Release()
	}
}

// The shapes of outputs.

func (o *outputs) rows() []int64    { return o.first.Dims() }
func (o *outputs) columns() []int64 { return o.first.Dims()[o.first.Rank()-1:] }

// headColumns is the shape of a gradient of a norm's weight, or of its bias, which has the weight's shape.
// Another weight will be refused.
func (o *outputs) headColumns(weight *dlpack.Tensor) []int64 {
	heads := o.first.Dims()[max(o.first.Rank()-2, 0):]
	if weight.Validate() == nil && slices.Equal(weight.Dims(), heads) {
		return heads
	}
	return o.columns()
}

func (o *outputs) perRow() []int64 { return o.first.Dims()[:o.first.Rank()-1] }

// reduced is the shape of a loss: one element, or one per row with reduction none.
func (o *outputs) reduced(reduction int32) []int64 {
	if kernels.Reduction(reduction) != kernels.ReduceNone {
		return nil
	}
	return o.perRow()
}

// The dtypes of outputs.

func (o *outputs) dtype() dlpack.DType { return o.first.DType }

// dtypeOf is the dtype of an operand, or another one if the operand is absent or will be refused.
func (o *outputs) dtypeOf(t *dlpack.Tensor, otherwise dlpack.DType) dlpack.DType {
	if t.Validate() != nil {
		return otherwise
	}
	if _, ok := ops.DType(t.DType); !ok {
		return otherwise
	}
	return t.DType
}

// requestedDType is the dtype that the caller requested, or another one for {0, 0, 0}.
func requestedDType(code, bits uint8, lanes uint16, otherwise dlpack.DType) dlpack.DType {
	t := dlpack.DType{Code: code, Bits: bits, Lanes: lanes}
	if t == (dlpack.DType{}) {
		return otherwise
	}
	return t
}

// statistic is the dtype of results per row.
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
