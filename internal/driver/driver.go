// Package driver binds the immutable table of package kernels to the CUDA devices of this machine: it loads
// images, launches kernels on the caller's stream and gives out stream-ordered memory.
//
// It needs no CUDA library to build or to load: libcuda is looked up at the first use (see bind.c), and a
// process without a driver gets an error, never a failed load. The real package is behind the build tag cuda;
// without it every call answers ErrBuiltWithout. It works in each device's primary context, which it shares
// with the CUDA runtime and with every framework, and never waits for a device.
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
	// ErrFacts: what the driver says of a device cannot be true.
	ErrFacts = errors.New("the driver describes a device that cannot be")
)

// Error is a CUDA result other than success.
type Error struct {
	Code int    // CUresult
	Name string // "CUDA_ERROR_OUT_OF_MEMORY"
	Op   string // what was tried: the driver's function and what it was called on
	Text string // the driver's description
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d): %s", e.Op, e.Name, e.Code, e.Text) }

// CUDA results that callers tell apart.
const (
	CodeOutOfMemory        = 2   // an allocation failed
	CodeInvalidDevice      = 101 // no such device
	CodeCaptureUnsupported = 900 // not possible while the stream is captured into a graph
)

// Facts is what the planner knows of a device.
type Facts struct {
	// The compute capability that kernels may use: the device's, or that of the PTX image where it is
	// served from one.
	Major, Minor   int
	Arch           string // the images in use: "sm_90", "compute_80"
	SMs            int
	SharedPerBlock int // bytes, the most that a CTA can opt in to
	SharedPerSM    int // bytes
	L2Bytes        int64
	MemoryGBs      int // the memory's peak bandwidth; 0 where the driver does not tell
	Name           string
	DriverVersion  int // 13000 for CUDA 13.0
	// Clusters[c] is how many clusters of c CTAs are resident at once where an SM holds one CTA; 0 where there are none
	// of that size.
	Clusters [17]int
}
