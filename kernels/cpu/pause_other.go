//go:build !amd64

package cpu

import "runtime"

// pause gives way to other goroutines.
func pause(uint32) { runtime.Gosched() }
