//go:build cuda && cgo && linux && amd64

package driver

// #include "driver.h"
import "C"

import "fmt"

// Allocate returns scratch memory of the device's stream-ordered pool, to be used by work on the stream. On a
// stream that is being captured it becomes part of the graph. Of no bytes it returns 0.
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

// Free gives scratch memory back after the work enqueued on the stream so far. What fails here (a context
// that is gone) has no remedy, so there is no error.
func (d *Device) Free(p, stream uintptr) {
	if p != 0 {
		C.gander_driver_free(d.context, C.uintptr_t(p), C.uintptr_t(stream))
	}
}

// AllocateOwned returns memory for an output that outlives the call: its owner gives it back with FreeOwned
// at any later time, from any thread, when the stream may no longer exist. Seal must follow once the work
// that writes it is enqueued.
//
// On a stream that is being captured it fails with CodeCaptureUnsupported: the memory would belong to the
// graph and be allocated anew at each replay, so outputs of captured calls must be the caller's.
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

// Seal marks the point of the stream after which an output of AllocateOwned is complete.
func (d *Device) Seal(p, stream uintptr) error {
	if p == 0 {
		return nil
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	return result("cuEventRecord", C.gander_driver_seal(d.context, d.owned[p], C.uintptr_t(stream)))
}

// FreeOwned gives an output back, in the order of the legacy default stream: after the work that made it, and
// after everything enqueued so far on that stream and on streams that synchronise with it. Readers on
// non-blocking streams must be done, or be ordered before one of those, when the owner lets go. Nothing waits
// on the host. While a stream that synchronises with the legacy one is being captured the release is put off
// to the next call of AllocateOwned or FreeOwned.
func (d *Device) FreeOwned(p uintptr) {
	if p == 0 {
		return
	}
	d.memory.Lock()
	defer d.memory.Unlock()
	d.late = append(d.late, p)
	d.release()
}

// release frees the outputs that were let go. d.memory is held.
func (d *Device) release() {
	for len(d.late) > 0 {
		p := d.late[0]
		code := C.gander_driver_free_owned(d.context, C.uintptr_t(p), d.owned[p])
		if code == C.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
			return
		}
		delete(d.owned, p) // on any other failure the context is gone, and the memory with it
		d.late = d.late[1:]
	}
}
