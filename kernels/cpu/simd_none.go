//go:build !(goexperiment.simd && amd64)

package cpu

func simdRowFuncs() []*rowFuncs[float32] { return nil }
