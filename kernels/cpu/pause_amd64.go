package cpu

// pause executes n > 0 PAUSE instructions. While one waits, the core's other hardware thread runs faster.
//
//go:noescape
func pause(n uint32)
