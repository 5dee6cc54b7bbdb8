//go:build cuda && cgo && linux && amd64

package driver

// #include "driver.h"
import "C"

import "fmt"

// Allocate returns scratch memory from the device's stream-ordered pool, for work on the stream. On a
// stream that is being captured, the allocation becomes part of the graph. For 0 bytes it returns 0.
func (d *Device) Allocate(bytes uint64, stream uintptr) (uintptr, error) {
	if bytes == 0 {
		return 0, nil
	}
	var p C.uintptr_t
	code := C.gander_driver_allocate(d.context, C.size_t(bytes), C.uintptr_t(stream), &p)
	return uintptr(p), allocation(bytes, code)
}

func allocation(bytes uint64, code C.CUresult) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	return result(fmt.Sprintf("cuMemAllocAsync of %d bytes", bytes), code)
}

// Free frees scratch memory after the work enqueued on the stream so far. It returns no error, because a
// failure, such as a destroyed context, has no remedy.
func (d *Device) Free(p, stream uintptr) {
	if p != 0 {
		C.gander_driver_free(d.context, C.uintptr_t(p), C.uintptr_t(stream))
	}
}

// AllocateOwned returns memory for an output that outlives the call. Its owner frees it with FreeOwned
// at any later time, from any thread, even if the stream no longer exists. Seal must be called after the work
// that writes the memory is enqueued.
//
// On a stream that is being captured it fails with CodeCaptureUnsupported: the memory would belong to the
// graph and be allocated again at each replay. So the caller must allocate the outputs of captured calls.
func (d *Device) AllocateOwned(bytes uint64, stream uintptr) (uintptr, error) {
	if bytes == 0 {
		return 0, nil
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	d.release()
	var p, event C.uintptr_t
	code := C.gander_driver_allocate_owned(d.context, C.size_t(bytes), C.uintptr_t(stream), &p, &event)
	if err := allocation(bytes, code); err != nil {
		return 0, err
	}
	d.owned[uintptr(p)] = event
	return uintptr(p), nil
}

// Seal records the event after which an output of AllocateOwned is complete.
func (d *Device) Seal(p, stream uintptr) error {
	if p == 0 {
		return nil
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	return result("cuEventRecord", C.gander_driver_seal(d.context, d.owned[p], C.uintptr_t(stream)))
}

// FreeOwned frees an output in the order of the legacy default stream: after the work that wrote it, and
// after everything enqueued so far on that stream and on streams that synchronize with it. Readers on
// non-blocking streams must have finished, or be ordered before one of those. The host does not wait.
// While a stream that synchronizes with the legacy one is being captured, the output is freed by
// the next call of AllocateOwned or FreeOwned instead.
func (d *Device) FreeOwned(p uintptr) {
	if p == 0 {
		return
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	d.pending = append(d.pending, p)
	d.release()
}

// release frees the pending outputs. The caller holds d.memory.
func (d *Device) release() {
	for len(d.pending) > 0 {
		p := d.pending[0]
		code := C.gander_driver_free_owned(d.context, C.uintptr_t(p), d.owned[p])
		if code == C.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
			return
		}
		delete(d.owned, p) // after any other failure the context is gone, and the memory with it
		d.pending = d.pending[1:]
	}
}
