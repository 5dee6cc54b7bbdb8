package cpu

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"
)

// A call's workspace is the memory that it needs besides its operands. Each pooled call owns fixedBytes of
// it. A larger workspace is mapped: if Go's heap cannot grow the process ends, whereas a failed mapping is an
// error that can be returned.
const (
	fixedBytes   = 96 << 10 // enough for one worker and rows of one block
	granularity  = 64 << 10 // mappings are multiples of it, so that calls on similar shapes can reuse them
	maxFreeBytes = 64 << 20 // the most that stays mapped between calls: twice the largest partial sums of dw
	cacheLine    = 64
)

// allocate maps memory whose size is a multiple of granularity, and release unmaps it. Tests replace them.
var allocate, release = mapMemory, unmapMemory

// MemoryError says that there is no memory for a call's workspace. The call has written nothing.
type MemoryError struct {
	Bytes int   // requested
	Err   error // from the operating system
}

func (e *MemoryError) Error() string {
	return fmt.Sprintf("no memory for a workspace of %d bytes (%v)", e.Bytes, e.Err)
}

// Unwrap returns the operating system's error.
func (e *MemoryError) Unwrap() error { return e.Err }

// arena is a bump allocator. Once memory is used up it only counts bytes, so that a first run with too little
// memory tells how much is needed.
type arena struct {
	memory []byte
	used   int
}

// take returns n uninitialized elements, or nil if the arena is too small.
func take[E float | partial | rowStats | tokenPartial | softPartial](a *arena, n int) []E {
	var e E
	from := a.used
	a.used += (n*int(unsafe.Sizeof(e)) + cacheLine - 1) &^ (cacheLine - 1)
	if n == 0 || a.used > len(a.memory) {
		return nil
	}
	return unsafe.Slice((*E)(unsafe.Pointer(&a.memory[from])), n)
}

// freeList keeps mappings that no call uses for later calls, because new memory costs a page fault per 4 KiB.
type freeList struct {
	lock   sync.Mutex
	blocks [][]byte // the oldest first
	bytes  int
}

var freeMemory freeList

// get returns memory of n bytes or more, mapping it if no free block is large enough.
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

// find removes and returns the smallest block of n bytes or more, or returns nil.
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

// put adds a block, and releases the oldest ones beyond maxFreeBytes.
func (s *freeList) put(memory []byte) {
	s.lock.Lock()
	s.blocks = append(s.blocks, memory)
	s.bytes += len(memory)
	s.lock.Unlock()
	s.shrink(maxFreeBytes)
}

// shrink releases the oldest blocks until at most limit bytes are left. It tells whether it released any.
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
