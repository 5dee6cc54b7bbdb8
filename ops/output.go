package ops

import (
	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/driver"
)

// CheckRows tells whether t can be an operator's first operand, for callers that make outputs of its shape before they
// call it.
func CheckRows(op, name string, t *dlpack.Tensor) error {
	k := check{op: op}
	k.rows(name, t, anyFloat)
	if k.err != nil {
		return k.err
	}
	return nil
}

// AllocateOutput returns memory of a CUDA device for an output that outlives the call which writes it on
// the stream. SealOutput must follow once that call has returned, or FreeOutput if it failed.
func AllocateOutput(device int32, bytes uint64, stream uintptr) (uintptr, error) {
	d, err := driver.Open(device)
	if err != nil {
		return 0, cudaError(err)
	}
	p, err := d.AllocateOwned(bytes, stream)
	if err != nil {
		return 0, cudaError(err)
	}
	return p, nil
}

// SealOutput marks the point of the stream after which an output is complete.
func SealOutput(device int32, p, stream uintptr) error {
	d, err := driver.Open(device)
	if err != nil {
		return cudaError(err)
	}
	if err := d.Seal(p, stream); err != nil {
		return cudaError(err)
	}
	return nil
}

// FreeOutput gives an output's memory back, at any time and from any thread.
func FreeOutput(device int32, p uintptr) {
	if d, err := driver.Open(device); err == nil {
		d.FreeOwned(p)
	}
}
