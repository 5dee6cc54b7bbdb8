//go:build !unix

package cpu

// Without mmap in the standard library the workspace lies in Go's heap.

func mapMemory(n int) ([]byte, error) { return make([]byte, n), nil }

func unmapMemory([]byte) {}
