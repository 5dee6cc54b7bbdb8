//go:build !(cuda && cgo && linux && amd64)

package driver

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// Device is a CUDA device. This build has none.
type Device struct{}

// Status returns ErrBuiltWithout, as does every function of this build that can fail.
func Status() error { return ErrBuiltWithout }

// OpenImages returns ErrBuiltWithout.
func OpenImages(folder string) error { return ErrBuiltWithout }

// Open returns ErrBuiltWithout.
func Open(ordinal int32) (*Device, error) { return nil, ErrBuiltWithout }

// Facts returns ErrBuiltWithout.
func (d *Device) Facts(family kernels.Family) (*Facts, error) { return nil, ErrBuiltWithout }

// Warmup returns ErrBuiltWithout.
func (d *Device) Warmup() error { return ErrBuiltWithout }

// Launch returns ErrBuiltWithout.
func (d *Device) Launch(v *kernels.Variant, g kernels.Geometry, args unsafe.Pointer,
	bytes, stream uintptr) error {
	return ErrBuiltWithout
}

// Allocate returns ErrBuiltWithout.
func (d *Device) Allocate(bytes uint64, stream uintptr) (uintptr, error) { return 0, ErrBuiltWithout }

// Free does nothing.
func (d *Device) Free(p, stream uintptr) {}

// AllocateOwned returns ErrBuiltWithout.
func (d *Device) AllocateOwned(bytes uint64, stream uintptr) (uintptr, error) {
	return 0, ErrBuiltWithout
}

// Seal returns ErrBuiltWithout.
func (d *Device) Seal(p, stream uintptr) error { return ErrBuiltWithout }

// FreeOwned does nothing.
func (d *Device) FreeOwned(p uintptr) {}
