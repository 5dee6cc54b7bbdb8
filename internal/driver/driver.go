// Package driver runs the kernels of package kernels on the CUDA devices of this machine. It loads
// images, launches kernels on the caller's stream, and allocates stream-ordered memory.
//
// A program with this package is built and started without any CUDA library: libcuda is loaded at the first
// use (see bind.c). Without a driver, calls return an error. In a build without the tag cuda, they return
// ErrBuiltWithout. The package uses each device's primary context, which it shares with the CUDA runtime and
// with frameworks. It never synchronizes the host with a device.
package driver

import (
	"errors"
	"fmt"
)

//go:generate go run ../cmd/stubgen

var (
	// ErrBuiltWithout: this program was compiled without the tag cuda.
	ErrBuiltWithout = errors.New("built without CUDA: build with -tags cuda (./build.sh build)")
	// ErrNoDriver: libcuda could not be loaded.
	ErrNoDriver = errors.New("no CUDA driver")
	// ErrTooOld: the driver is older than the images need.
	ErrTooOld = errors.New("the NVIDIA driver is too old")
	// ErrArch: no image runs on the device.
	ErrArch = errors.New("no kernels for this device")
	// ErrNoImages: there are no images at all, as in a program that was built from Go's module cache.
	ErrNoImages = fmt.Errorf("%w: this program was built without kernels; call ops.OpenImages before the first "+
		"call with CUDA tensors, with the folder kernels/images that ./build.sh build makes in a checkout of "+
		"gander", ErrArch)
	// ErrFacts: the driver reports impossible properties of a device.
	ErrFacts = errors.New("the driver reports impossible device properties")
)

// Error is a CUDA result other than success.
type Error struct {
	Code int    // CUresult
	Name string // "CUDA_ERROR_OUT_OF_MEMORY"
	Op   string // the driver function, and what it was called on
	Text string // the driver's description of the result
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d): %s", e.Op, e.Name, e.Code, e.Text) }

// CUDA results that callers handle separately.
const (
	CodeOutOfMemory        = 2   // an allocation failed
	CodeInvalidDevice      = 101 // no such device
	CodeCaptureUnsupported = 900 // not allowed while the stream is captured into a graph
)

// Facts are the properties of a device that the planner uses.
type Facts struct {
	// The compute capability that kernels may use: the device's, or that of the PTX image if the device
	// runs PTX.
	Major, Minor   int
	Arch           string // the architecture of the images in use: "sm_90", "compute_80"
	SMs            int
	SharedPerBlock int // bytes: the opt-in maximum of a CTA
	SharedPerSM    int // bytes
	L2Bytes        int64
	MemoryGBs      int // the memory's peak bandwidth in GB/s, or 0 if the driver does not report it
	Name           string
	DriverVersion  int // 13000 for CUDA 13.0
	// Clusters[c] is how many clusters of c CTAs can be resident at once with one CTA per SM, or 0 if that
	// size is not supported.
	Clusters [17]int
}
