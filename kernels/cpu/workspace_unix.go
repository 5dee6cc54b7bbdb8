//go:build unix

package cpu

import "syscall"

func mapMemory(n int) ([]byte, error) {
	return syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
}

// unmapMemory ignores the error: munmap of a whole mapping does not fail.
func unmapMemory(memory []byte) { _ = syscall.Munmap(memory) }
