//go:build !(goexperiment.simd && amd64)

package cpu

func vectorKits() []*kit[float32] { return nil }
