package cpu

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"
)

// A call's workspace is the memory that it needs beside its operands. A pooled call has fixedBytes of it. A
// larger one is mapped: Go's heap ends the process where it cannot grow, while a mapping that is refused is
// an error.
const (
	fixedBytes   = 96 << 10 // enough for rows of a block on one thread
	granularity  = 64 << 10 // sizes are multiples of it, so that similar shapes use the same memory
	maxFreeBytes = 64 << 20 // that may stay allocated between calls: twice the largest partial sums of dw
	cacheLine    = 64
)

// allocate returns memory of a multiple of granularity, release gives it back. Tests replace them.
var allocate, release = mapMemory, unmapMemory

// MemoryError says that there is no memory for a call's workspace. The call has written nothing.
type MemoryError struct {
	Bytes int   // that were asked for
	Err   error // the system's answer
}

func (e *MemoryError) Error() string {
	return fmt.Sprintf("no memory for a workspace of %d bytes (%v)", e.Bytes, e.Err)
}

// Unwrap returns the system's answer.
func (e *MemoryError) Unwrap() error { return e.Err }

// arena deals out memory from its start. Beyond its end it only counts.
type arena struct {
	memory []byte
	used   int
}

// take returns n elements, which hold anything, or nil where the arena is too small.
func take[E float | partial | rowStats](a *arena, n int) []E {
	var e E
	from := a.used
	a.used += (n*int(unsafe.Sizeof(e)) + cacheLine - 1) &^ (cacheLine - 1)
	if n == 0 || a.used > len(a.memory) {
		return nil
	}
	return unsafe.Slice((*E)(unsafe.Pointer(&a.memory[from])), n)
}

// cache is memory that no call uses at the moment. Memory that is new costs a page fault for every 4 KiB.
type freeList struct {
	lock   sync.Mutex
	blocks [][]byte // the oldest first
	bytes  int
}

var freeMemory freeList

// get returns memory of n bytes or more.
func (s *freeList) get(n int) ([]byte, error) {
	if memory := s.find(n); memory != nil {
		return memory, nil
	}
	n = (n + granularity - 1) &^ (granularity - 1)
	memory, err := allocate(n)
	if err != nil && s.shrink(0) {
		memory, err = allocate(n)
	}
	if err != nil {
		return nil, &MemoryError{n, err}
	}
	return memory, nil
}

// find removes the smallest memory that is large enough, or returns nil.
func (s *freeList) find(n int) []byte {
	s.lock.Lock()
	defer s.lock.Unlock()
	best := -1
	for i, memory := range s.blocks {
		if len(memory) >= n && (best < 0 || len(memory) < len(s.blocks[best])) {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	memory := s.blocks[best]
	s.blocks = slices.Delete(s.blocks, best, best+1)
	s.bytes -= len(memory)
	return memory
}

// put keeps memory for a later call, in place of older memory where that is too much together.
func (s *freeList) put(memory []byte) {
	s.lock.Lock()
	s.blocks = append(s.blocks, memory)
	s.bytes += len(memory)
	s.lock.Unlock()
	s.shrink(maxFreeBytes)
}

// shrink releases the oldest memory until at most limit bytes are kept, and tells whether it released any.
func (s *freeList) shrink(limit int) bool {
	s.lock.Lock()
	count := 0
	for ; s.bytes > limit; count++ {
		s.bytes -= len(s.blocks[count])
	}
	old := slices.Clone(s.blocks[:count])
	s.blocks = slices.Delete(s.blocks, 0, count)
	s.lock.Unlock()
	for _, memory := range old {
		release(memory)
	}
	return count > 0
}
