package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/sizes"
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

// owned is the tensor in an input of an owning call, or nil.
func owned(p unsafe.Pointer) *dlpack.Tensor {
	if p == nil {
		return nil
	}
	return &(*dlpack.ManagedVersioned)(p).Tensor
}

// outputsFor checks the first operand, which determines the shapes of outputs.
func outputsFor(
	check func(op, name string, t *dlpack.Tensor) error, op, name string, first *dlpack.Tensor, stream uintptr,
) (*outputs, error) {
	if err := check(op, name, first); err != nil {
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

// shape is a form of internal/operators. Its letters stand for the first operand's leading dimensions (L),
// its second last (H) and its last dimension (N).
func (o *outputs) shape(form string) (dims []int64) {
	return sizes.Shape(form, o.first.Dims())
}

// shapeOf is the shape of an optional operand, which is one of the forms. If it is absent or has another
// shape, which will be refused, it is the first form, with nothing where that has any size.
func (o *outputs) shapeOf(t *dlpack.Tensor, forms ...string) []int64 {
	for _, form := range forms {
		if t.Validate() == nil && sizes.Fit(t.Dims(), o.shape(form)) {
			return slices.Clone(t.Dims())
		}
	}
	dims := o.shape(forms[0])
	for i, n := range dims {
		dims[i] = max(n, 0)
	}
	return dims
}

// reduced is the form of a result for each row, or of one for all.
func reduced(reduction int32, each, all string) string {
	if kernels.Reduction(reduction) != kernels.ReduceNone {
		return all
	}
	return each
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

// requestedDType is the dtype that the caller requested, or another one for NULL.
func requestedDType(p unsafe.Pointer, otherwise dlpack.DType) dlpack.DType {
	if p == nil {
		return otherwise
	}
	return *(*dlpack.DType)(p)
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
