//go:build !(goexperiment.simd && amd64)

package cpu

func clearUpperHalves() {}

func simdRowFuncs() []*rowFuncs[float32] { return nil }
