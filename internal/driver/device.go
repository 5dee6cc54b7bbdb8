//go:build cuda && cgo && linux && amd64

package driver

// #cgo LDFLAGS: -L${SRCDIR} -ldl
// #cgo noescape gander_driver_launch
// #cgo nocallback gander_driver_launch
// #include "driver.h"
import "C"

import (
	"cmp"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/cu"

	_ "github.com/gander-go/gander/internal/driver/headers"
	"github.com/gander-go/gander/kernels"
)

// needed is the driver version that images need: those of nvcc 13.0 need driver R580 or newer.
const needed, neededRelease = 13000, "R580"

// gorgonia.org/cu has no name for this attribute.
const sharedPerBlockOptIn cu.DeviceAttribute = C.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

// Where images come from: from the program itself unless OpenImages has succeeded. Tests replace them.
var (
	architectures = kernels.Architectures
	image         = kernels.Image
	openedFolder  string // of OpenImages
)

var forcedPTX = sync.OnceValue(func() string { return os.Getenv("GANDER_FORCE_PTX") })

// Status returns nil if a usable driver was found, else an error that says why not and what to do. The driver
// is looked up once.
func Status() error { return bind().err }

type binding struct {
	version int
	err     error
}

var bind = sync.OnceValue(func() binding {
	var b C.gander_driver_binding
	C.gander_driver_bind(&b)
	version := int(b.version)
	switch {
	case b.problem[0] != 0:
		return binding{version, fmt.Errorf("%w: %s; CUDA tensors need NVIDIA's driver, %s or newer, "+
			"CPU tensors work without", ErrNoDriver, C.GoString(&b.problem[0]), neededRelease)}
	case version < needed:
		return binding{version, fmt.Errorf("%w: it supports CUDA %d.%d, the kernels need %d.%d; "+
			"install driver %s or newer", ErrTooOld, version/1000, version%1000/10, needed/1000,
			needed%1000/10, neededRelease)}
	}
	return binding{version, result("cuInit", b.init)}
})

// result turns a CUDA result into an error.
func result(op string, code C.CUresult) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	return &Error{
		Code: int(code),
		Name: C.GoString(C.gander_driver_error_name(code)),
		Op:   op,
		Text: C.GoString(C.gander_driver_error_text(code)),
	}
}

// resultOf returns the CUDA result in an error of gorgonia.org/cu. The error's unexported type is an integer.
func resultOf(err error) C.CUresult { return C.CUresult(reflect.ValueOf(err).Int()) }

// failed turns an error of gorgonia.org/cu into an *Error.
func failed(op string, err error) error {
	if err == nil {
		return nil
	}
	return result(op, resultOf(err))
}

// Device is one CUDA device, with its primary context and the modules loaded into it. It lives as long as the
// process and may be used by any thread.
type Device struct {
	ordinal   int32
	context   C.uintptr_t
	basics    Facts                 // without Clusters
	facts     atomic.Pointer[Facts] // with Clusters; nil until they are measured
	functions []atomic.Uintptr      // by Variant.Index; 0 until first used

	measuring sync.Mutex

	loading sync.Mutex
	modules [kernels.Families]cu.Module // zero until first used

	memory  sync.Mutex
	owned   map[uintptr]C.uintptr_t // the event after which each output is complete
	pending []uintptr               // outputs that FreeOwned could not free yet
}

var (
	opening sync.Mutex // for devices, and for where images come from
	devices [64]atomic.Pointer[Device]
)

// OpenImages replaces the images that the program embeds by those of a folder. That is possible once, and
// before the first device is opened: a device keeps the images that it was opened with. After an error
// everything is as before.
func OpenImages(folder string) error {
	opening.Lock()
	defer opening.Unlock()
	if openedFolder != "" {
		return fmt.Errorf("folder is %q, but the images of %q are open already, expected one call in a process",
			folder, openedFolder)
	}
	for ordinal := range devices {
		if devices[ordinal].Load() != nil {
			return fmt.Errorf("folder is %q, but device %d has been used with the images that the program embeds, "+
				"expected the call before the first one with CUDA tensors", folder, ordinal)
		}
	}
	images, err := kernels.ReadImages(folder)
	if err != nil {
		return err
	}
	architectures, image, openedFolder = images.Architectures, images.Image, folder
	return nil
}

// Open returns a device by its ordinal among those visible to the process. The first call retains its
// primary context. Later calls cost an atomic load.
func Open(ordinal int32) (*Device, error) {
	if uint32(ordinal) < uint32(len(devices)) {
		if d := devices[ordinal].Load(); d != nil {
			return d, nil
		}
	}
	opening.Lock()
	defer opening.Unlock()
	if len(architectures()) == 0 { // said before anything about the driver: no driver would help
		return nil, ErrNoImages
	}
	if err := Status(); err != nil {
		return nil, err
	}
	if uint32(ordinal) >= uint32(len(devices)) {
		return nil, result(fmt.Sprintf("cuDeviceGet of device %d", ordinal), CodeInvalidDevice)
	}
	if d := devices[ordinal].Load(); d != nil {
		return d, nil
	}
	d, err := open(ordinal)
	if err != nil {
		return nil, err
	}
	devices[ordinal].Store(d)
	return d, nil
}

func open(ordinal int32) (*Device, error) {
	device, err := cu.GetDevice(int(ordinal))
	if err != nil {
		return nil, failed(fmt.Sprintf("cuDeviceGet of device %d", ordinal), err)
	}
	f := Facts{DriverVersion: bind().version}
	if f.Name, err = device.Name(); err != nil {
		return nil, failed("cuDeviceGetName", err)
	}
	var l2 int
	for attribute, into := range map[cu.DeviceAttribute]*int{
		cu.ComputeCapabilityMajor:           &f.Major,
		cu.ComputeCapabilityMinor:           &f.Minor,
		cu.MultiprocessorCount:              &f.SMs,
		cu.MaxSharedMemoryPerMultiprocessor: &f.SharedPerSM,
		cu.L2CacheSize:                      &l2,
		sharedPerBlockOptIn:                 &f.SharedPerBlock,
	} {
		if *into, err = device.Attribute(attribute); err != nil {
			return nil, failed(fmt.Sprintf("cuDeviceGetAttribute %d", attribute), err)
		}
	}
	f.L2Bytes = int64(l2)
	if f.MemoryGBs, err = memoryGBs(device); err != nil {
		return nil, err
	}
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("device %d (%s): %w", ordinal, f.Name, err)
	}
	use, err := choose(architectures(), f.Major, f.Minor, forcedPTX())
	if err != nil {
		return nil, fmt.Errorf("device %d (%s): %w", ordinal, f.Name, err)
	}
	f.Arch, f.Major, f.Minor = use.arch, use.major, use.minor
	context, err := device.RetainPrimaryCtx()
	if err != nil {
		return nil, failed("cuDevicePrimaryCtxRetain", err)
	}
	return &Device{
		ordinal:   ordinal,
		context:   handle(&context),
		basics:    f,
		functions: make([]atomic.Uintptr, len(kernels.Variants)),
		owned:     map[uintptr]C.uintptr_t{},
	}, nil
}

// conclusive tells whether a result will stay the same: success, or not supported.
// Other failures, such as a lack of memory, may be temporary.
func conclusive(code C.CUresult) bool {
	switch code {
	case C.CUDA_SUCCESS, C.CUDA_ERROR_INVALID_VALUE, C.CUDA_ERROR_NOT_SUPPORTED,
		C.CUDA_ERROR_INVALID_CLUSTER_SIZE:
		return true
	}
	return false
}

// memoryGBs is the memory's peak bandwidth in GB/s, or 0 if the driver does not report it.
func memoryGBs(device cu.Device) (int, error) {
	product := 2 // transfers per clock cycle; the clock rate is in kHz, the bus width in bits
	for _, attribute := range []cu.DeviceAttribute{cu.MemoryClockRate, cu.GlobalMemoryBusWidth} {
		value, err := device.Attribute(attribute)
		switch {
		case err == nil:
			product *= value
		case conclusive(resultOf(err)):
			return 0, nil
		default:
			return 0, failed(fmt.Sprintf("cuDeviceGetAttribute %d", attribute), err)
		}
	}
	return max(product, 0) / 8 / 1e6, nil
}

// handle reads the C handle in a struct of gorgonia.org/cu, whose only field is unexported.
func handle[T cu.CUContext | cu.Function](of *T) C.uintptr_t {
	return *(*C.uintptr_t)(unsafe.Pointer(of))
}

// Facts returns the device's properties for a plan with the family's kernels. On a device that supports
// clusters, the first call loads the family's image to count them. After an error the next call tries again:
// plans without clusters instead would give results with other bits.
func (d *Device) Facts(family kernels.Family) (*Facts, error) {
	if f := d.facts.Load(); f != nil {
		return f, nil
	}
	d.measuring.Lock()
	defer d.measuring.Unlock()
	if f := d.facts.Load(); f != nil {
		return f, nil
	}
	f, err := d.measure(family)
	if err != nil {
		return nil, err
	}
	d.facts.Store(f)
	return f, nil
}

// measure adds Clusters to the facts. Every kernel of the device gives the same counts, because the question
// is asked with so much shared memory that only one CTA fits on an SM. Then only the grouping of SMs matters.
// On an H200 all 827 kernels of sm_90, of 128 to 1024 threads, gave the same counts.
func (d *Device) measure(family kernels.Family) (*Facts, error) {
	f := d.basics
	if f.Major < 9 {
		return &f, nil
	}
	probe := probeOf(family)
	function, err := d.function(probe)
	if err != nil {
		return nil, err
	}
	leave, err := d.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	oneCTAPerSM := C.uint32_t(f.SharedPerSM/2 + 1024)
	for c := 1; c < len(f.Clusters); c++ {
		var count C.int
		code := C.gander_driver_max_clusters(C.uintptr_t(function), C.uint32_t(c), C.uint32_t(probe.Threads),
			oneCTAPerSM, &count)
		if !conclusive(code) {
			op := fmt.Sprintf("cuOccupancyMaxActiveClusters of %s in clusters of %d", probe.Symbol, c)
			return nil, result(op, code)
		}
		f.Clusters[c] = int(count)
	}
	return &f, nil
}

// probeOf returns a kernel that runs in clusters: one of the family, or if that has none, because it reduces
// nothing, the first one.
func probeOf(family kernels.Family) *kernels.Variant {
	i := slices.IndexFunc(kernels.Variants, func(v kernels.Variant) bool {
		return v.Cluster && v.Family == family
	})
	if i < 0 {
		i = slices.IndexFunc(kernels.Variants, func(v kernels.Variant) bool { return v.Cluster })
	}
	return &kernels.Variants[i]
}

// enter makes the device's context current on this thread until leave is called. Until then it also allows
// calls that a stream capture on another thread would otherwise forbid.
func (d *Device) enter() (leave func(), err error) {
	var scope C.gander_driver_scope
	runtime.LockOSThread()
	if err := result("cuCtxPushCurrent", C.gander_driver_enter(d.context, &scope)); err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	return func() {
		C.gander_driver_leave(&scope)
		runtime.UnlockOSThread()
	}, nil
}

// function returns a variant's kernel. It loads the family's image if that is not loaded yet.
func (d *Device) function(v *kernels.Variant) (uintptr, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	slot := &d.functions[v.Index]
	if f := slot.Load(); f != 0 {
		return f, nil
	}
	leave, err := d.enter()
	if err != nil {
		return 0, err
	}
	defer leave()
	module := &d.modules[v.Family]
	if *module == (cu.Module{}) {
		data := image(v.Family, d.basics.Arch)
		if len(data) == 0 {
			return 0, fmt.Errorf("%w: this library has no %s image for %s", ErrArch, v.Family, d.basics.Arch)
		}
		if *module, err = cu.LoadData(unsafe.String(&data[0], len(data))); err != nil {
			*module = cu.Module{}
			return 0, failed(fmt.Sprintf("cuModuleLoadData of %s.%s", v.Family, d.basics.Arch), err)
		}
	}
	function, err := module.Function(v.Symbol)
	if err != nil {
		return 0, failed("cuModuleGetFunction of "+v.Symbol, err)
	}
	cluster := C.int(0)
	if v.Cluster {
		cluster = 1
	}
	f := handle(&function)
	err = result("cuFuncSetAttribute of "+v.Symbol,
		C.gander_driver_prepare(f, C.int(d.basics.SharedPerBlock), cluster))
	if err != nil {
		return 0, err
	}
	slot.Store(uintptr(f))
	return uintptr(f), nil
}

// Warmup loads all kernels in the device's images, so that no later call has to.
func (d *Device) Warmup() error {
	for i := range kernels.Variants {
		v := &kernels.Variants[i]
		if !v.In(d.basics.Arch) {
			continue
		}
		if _, err := d.function(v); err != nil {
			return err
		}
	}
	_, err := d.Facts(kernels.Variants[0].Family)
	return err
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// Launch enqueues a kernel. Its only parameter is the struct of the given size that args points to, which is
// copied before Launch returns.
func (d *Device) Launch(v *kernels.Variant, g kernels.Geometry, args unsafe.Pointer,
	bytes, stream uintptr) error {
	f := d.functions[v.Index].Load()
	if f == 0 {
		var err error
		if f, err = d.function(v); err != nil {
			return err
		}
	}
	threads := cmp.Or(g.Threads, uint32(v.Threads))
	code := C.gander_driver_launch(d.context, C.uintptr_t(f), C.uint32_t(g.Grid), C.uint32_t(g.Cluster),
		C.uint32_t(threads), C.uint32_t(g.Shared), flag(g.Cooperative), flag(g.Dependent),
		C.uintptr_t(stream), args, C.size_t(bytes))
	if code == C.CUDA_SUCCESS {
		return nil
	}
	op := fmt.Sprintf("launch of %s (grid %d, cluster %d, block %d, shared memory %d, arguments %d bytes)",
		v.Symbol, g.Grid, g.Cluster, threads, g.Shared, bytes)
	return result(op, code)
}

// check rejects impossible values of facts that the planner divides by or computes launch sizes from.
func (f *Facts) check() error {
	for _, fact := range []struct {
		name               string
		value, least, most int64
	}{
		{"major compute capability", int64(f.Major), 1, 99},
		{"minor compute capability", int64(f.Minor), 0, 9},
		{"multiprocessors", int64(f.SMs), 1, 1 << 16},
		{"bytes of shared memory per block", int64(f.SharedPerBlock), 48 << 10, 1 << 30},
		{"bytes of shared memory per multiprocessor", int64(f.SharedPerSM), int64(f.SharedPerBlock), 1 << 30},
		{"bytes of L2 cache", f.L2Bytes, 1, 1 << 40},
	} {
		if fact.value < fact.least || fact.value > fact.most {
			return fmt.Errorf("%w: %s: %d, expected %d to %d; reinstall NVIDIA's driver, or use CPU tensors",
				ErrFacts, fact.name, fact.value, fact.least, fact.most)
		}
	}
	return nil
}
