package ops

import (
	"github.com/gander-go/gander/dlpack"
	"github.com/gander-go/gander/internal/driver"
)

// CheckRows checks that t can be an operator's first operand. Callers that allocate outputs of its shape use
// it before they call the operator.
func CheckRows(op, name string, t *dlpack.Tensor) error {
	k := check{op: op}
	k.rows(name, t, typeFloat.narrow)
	return k.failure()
}

// CheckHeads is CheckRows for a first operand of the heads of tokens.
func CheckHeads(op, name string, t *dlpack.Tensor) error {
	k := check{op: op}
	k.heads(name, t, typeFloat.narrow)
	return k.failure()
}

// failure is nil if nothing was refused.
func (k *check) failure() error {
	if k.err == nil { // a nil *Error would be an error
		return nil
	}
	return k.err
}

// AllocateOutput allocates memory of a CUDA device for an output that outlives the call. stream is the stream
// on which the call writes the output. After the call, the caller must call SealOutput, or FreeOutput if the
// call failed.
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

// SealOutput records in the stream the event after which an output is complete.
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

// FreeOutput frees an output's memory. It may be called at any time and from any thread.
func FreeOutput(device int32, p uintptr) {
	if d, err := driver.Open(device); err == nil {
		d.FreeOwned(p)
	}
}
