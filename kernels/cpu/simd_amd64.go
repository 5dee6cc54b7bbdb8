//go:build goexperiment.simd && amd64

package cpu

import (
	"math"
	"simd/archsimd"
)

// simdRowFuncs are the vector tables that this machine can run, fastest first.
func simdRowFuncs() []*rowFuncs[float32] {
	var k []*rowFuncs[float32]
	if archsimd.X86.AVX512() {
		k = append(k, &avx512)
	}
	if archsimd.X86.AVX2() && archsimd.X86.FMA() {
		k = append(k, &avx2)
	}
	return k
}

var hasAVX = archsimd.X86.AVX()

// clearUpperHalves clears the upper halves of vector registers. While they are in use, Intel processors are
// slow at SSE instructions among AVX ones. Go computes single numbers with both: tests/c/registers_test.c.
func clearUpperHalves() {
	if hasAVX {
		archsimd.ClearAVXUpperBits()
	}
}

// constants holds each constant as a whole vector. Loading one is faster than the broadcast that the compiler
// emits, and a shift by a vector is faster than one by a scalar.
type constants struct {
	log2E, roundBias, minusLn2High, minusLn2Low, expLow floats
	exp6, exp5, exp4, exp3, exp2, one, zero             floats
	small6, small5, small4, small3, small2, small1      floats // exp6 to one, times 2^-expShift
	roundBias128, twentyThree                           ints

	sixteen, bit0, highHalf, bfloat16Half, bfloat16NaN ints
}

type (
	floats [16]float32
	ints   [16]int32
)

// simdConstants is on the heap, where an object of this size starts at a cache line. A global variable need
// not.
var simdConstants = newConstants()

func newConstants() *constants {
	const small = 1.0 / (1 << expShift)
	c := new(constants)
	for p, v := range map[*floats]float32{
		&c.log2E: log2E, &c.roundBias: roundBias + expShift, &c.minusLn2High: -ln2High,
		&c.minusLn2Low: -ln2Low, &c.expLow: expLow,
		&c.exp6: exp6, &c.exp5: exp5, &c.exp4: exp4, &c.exp3: exp3, &c.exp2: exp2, &c.one: 1,
		&c.small6: exp6 * small, &c.small5: exp5 * small, &c.small4: exp4 * small, &c.small3: exp3 * small,
		&c.small2: exp2 * small, &c.small1: small,
	} {
		for i := range p {
			p[i] = v
		}
	}
	for p, v := range map[*ints]int32{
		&c.roundBias128: int32(math.Float32bits(roundBias + 128)), &c.twentyThree: 23,
		&c.sixteen: 16, &c.bit0: 1, &c.highHalf: -1 << 16, &c.bfloat16Half: 0x7fff, &c.bfloat16NaN: 0x7fc00000,
	} {
		for i := range p {
			p[i] = v
		}
	}
	return c
}
