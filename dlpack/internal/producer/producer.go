//go:build cgo

// Package producer makes managed tensors in C that count the calls of their deleter. It is for tests, in a
// package because Go does not allow cgo in test files.
package producer

/*
#include <stdlib.h>
#include "../../dlpack.h"

static void delete_versioned(DLManagedTensorVersioned* m) { ++*(int*)m->manager_ctx; }
static void delete_unversioned(DLManagedTensor* m) { ++*(int*)m->manager_ctx; }

static DLManagedTensorVersioned* make_versioned(uint32_t major, int deleter, int* count) {
  DLManagedTensorVersioned* m = calloc(1, sizeof *m);
  m->version.major = major;
  m->manager_ctx = count;
  if (deleter) m->deleter = delete_versioned;
  m->dl_tensor.dtype.bits = 32;
  m->dl_tensor.dtype.lanes = 1;
  m->dl_tensor.data = count;
  return m;
}

static DLManagedTensor* make_unversioned(int deleter, int* count) {
  DLManagedTensor* m = calloc(1, sizeof *m);
  m->manager_ctx = count;
  if (deleter) m->deleter = delete_unversioned;
  m->dl_tensor.dtype.bits = 32;
  m->dl_tensor.dtype.lanes = 1;
  m->dl_tensor.data = count;
  return m;
}
*/
import "C"

import "unsafe"

// Producer makes int32 tensors of rank 0 whose element is the number of deleter calls so far. The deleter
// frees nothing, so that a test can detect a second call. Close frees all tensors.
type Producer struct {
	count  *C.int
	blocks []unsafe.Pointer
}

// New returns a producer.
func New() *Producer {
	return &Producer{count: (*C.int)(C.calloc(1, C.sizeof_int))}
}

// Versioned makes a DLManagedTensorVersioned.
func (p *Producer) Versioned(major uint32, deleter bool) unsafe.Pointer {
	m := unsafe.Pointer(C.make_versioned(C.uint32_t(major), flag(deleter), p.count))
	p.blocks = append(p.blocks, m)
	return m
}

// Unversioned makes a DLManagedTensor.
func (p *Producer) Unversioned(deleter bool) unsafe.Pointer {
	m := unsafe.Pointer(C.make_unversioned(flag(deleter), p.count))
	p.blocks = append(p.blocks, m)
	return m
}

// Deleted returns how often deleters were called.
func (p *Producer) Deleted() int { return int(*p.count) }

// Close frees what the producer made.
func (p *Producer) Close() {
	for _, b := range p.blocks {
		C.free(b)
	}
	C.free(unsafe.Pointer(p.count))
}

// Sizes returns C's sizes of DLTensor, DLManagedTensor and DLManagedTensorVersioned.
func Sizes() [3]uintptr {
	return [3]uintptr{C.sizeof_DLTensor, C.sizeof_DLManagedTensor, C.sizeof_DLManagedTensorVersioned}
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}
