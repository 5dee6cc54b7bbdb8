package cpu

// pause passes the time of n > 0 PAUSE instructions, which leave a core to its other thread.
//
//go:noescape
func pause(n uint32)
