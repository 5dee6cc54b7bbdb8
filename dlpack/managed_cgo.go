//go:build cgo

package dlpack

/*
#include <stdlib.h>
#include <string.h>
#include "dlpack.h"

static void release_versioned(void* m) {
  DLManagedTensorVersioned* t = (DLManagedTensorVersioned*)m;
  if (t->deleter) t->deleter(t);
}

static void release_unversioned(void* m) {
  DLManagedTensor* t = (DLManagedTensor*)m;
  if (t->deleter) t->deleter(t);
}

static void free_block(DLManagedTensorVersioned* m) { free(m); }

// Allocates the struct, the shape, the strides and the elements as one block. The elements are aligned.
static void* make_block(size_t rank, size_t bytes, size_t alignment) {
  size_t head = sizeof(DLManagedTensorVersioned) + 2 * rank * sizeof(int64_t);
  head = (head + alignment - 1) / alignment * alignment;
  size_t total = head + (bytes + alignment - 1) / alignment * alignment;
  DLManagedTensorVersioned* m = (DLManagedTensorVersioned*)aligned_alloc(alignment, total);
  if (!m) return NULL;
  memset(m, 0, sizeof *m);
  m->version.major = DLPACK_MAJOR_VERSION;
  m->version.minor = DLPACK_MINOR_VERSION;
  m->deleter = free_block;
  m->dl_tensor.ndim = (int32_t)rank;
  m->dl_tensor.shape = (int64_t*)(m + 1);
  m->dl_tensor.strides = m->dl_tensor.shape + rank;
  if (bytes) m->dl_tensor.data = (char*)m + head;
  return m;
}
*/
import "C"

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Release calls the producer's deleter. It must be called once; m is invalid afterwards.
func (m *ManagedVersioned) Release() { C.release_versioned(unsafe.Pointer(m)) }

// Release calls the producer's deleter. It must be called once; m is invalid afterwards.
func (m *Managed) Release() { C.release_unversioned(unsafe.Pointer(m)) }

// Owned is a tensor whose ownership the producer has transferred.
type Owned struct {
	Tensor   *Tensor
	release  func()
	released atomic.Bool
}

// Release calls the producer's deleter, the first time only.
func (o *Owned) Release() {
	if !o.released.Swap(true) {
		o.release()
	}
}

// Adopt takes ownership of a managed tensor. If it returns an error, it has released the tensor.
func Adopt(m *ManagedVersioned) (*Owned, error) {
	t, err := m.Import()
	if err == nil {
		return &Owned{Tensor: t, release: m.Release}, nil
	}
	if m != nil {
		m.Release()
	}
	return nil, err
}

// AdoptUnversioned takes ownership of a managed tensor. If it returns an error, it has released the tensor.
func AdoptUnversioned(m *Managed) (*Owned, error) {
	t, err := m.Import()
	if err == nil {
		return &Owned{Tensor: t, release: m.Release}, nil
	}
	if m != nil {
		m.Release()
	}
	return nil, err
}

// NewManaged makes a compact tensor in memory of C's allocator. Its elements are uninitialized. Release, or
// its deleter called from C, frees it.
func NewManaged(t DType, shape []int64) (*ManagedVersioned, error) {
	bytes, err := compact(t, shape)
	if err != nil {
		return nil, err
	}
	return newManaged(Device{Type: CPU}, t, shape, bytes)
}

// NewHeader makes a compact tensor without memory for its elements. The caller must set Data, and a Deleter
// that frees Data and then calls C's free on the managed tensor.
func NewHeader(d Device, t DType, shape []int64) (*ManagedVersioned, error) {
	if _, err := compact(t, shape); err != nil {
		return nil, err
	}
	return newManaged(d, t, shape, 0)
}

func newManaged(d Device, t DType, shape []int64, bytes uint64) (*ManagedVersioned, error) {
	m := (*ManagedVersioned)(C.make_block(C.size_t(len(shape)), C.size_t(bytes), alignment))
	if m == nil {
		return nil, fmt.Errorf("%w: %d bytes of host memory", ErrMemory, bytes)
	}
	m.Tensor.Device, m.Tensor.DType = d, t
	m.Tensor.setCompact(shape)
	return m, nil
}
