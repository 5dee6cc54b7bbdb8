//go:build !(cuda && cgo && linux && amd64)

package driver

import (
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// Device is a CUDA device; there is none in this build.
type Device struct{}

// Status answers ErrBuiltWithout, as does every function of this build that can fail.
func Status() error { return ErrBuiltWithout }

// Open answers ErrBuiltWithout.
func Open(ordinal int32) (*Device, error) { return nil, ErrBuiltWithout }

// Facts answers ErrBuiltWithout.
func (d *Device) Facts(family kernels.Family) (*Facts, error) { return nil, ErrBuiltWithout }

// Warmup answers ErrBuiltWithout.
func (d *Device) Warmup() error { return ErrBuiltWithout }

// Launch answers ErrBuiltWithout.
func (d *Device) Launch(v *kernels.Variant, g kernels.Geometry, args unsafe.Pointer, bytes, stream uintptr) error {
	return ErrBuiltWithout
}

// Allocate answers ErrBuiltWithout.
func (d *Device) Allocate(bytes uint64, stream uintptr) (uintptr, error) { return 0, ErrBuiltWithout }

// Free does nothing.
func (d *Device) Free(p, stream uintptr) {}

// AllocateOwned answers ErrBuiltWithout.
func (d *Device) AllocateOwned(bytes uint64, stream uintptr) (uintptr, error) {
	return 0, ErrBuiltWithout
}

// Seal answers ErrBuiltWithout.
func (d *Device) Seal(p, stream uintptr) error { return ErrBuiltWithout }

// FreeOwned does nothing.
func (d *Device) FreeOwned(p uintptr) {}
