//go:build !unix

package cpu

// The standard library has no mmap here, so the workspace is on Go's heap.

func mapMemory(n int) ([]byte, error) { return make([]byte, n), nil }

func unmapMemory([]byte) {}
