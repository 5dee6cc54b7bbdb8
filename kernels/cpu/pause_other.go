//go:build !amd64

package cpu

import "runtime"

// pause yields to other goroutines.
func pause(uint32) { runtime.Gosched() }
