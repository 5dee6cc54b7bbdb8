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
	minusHalf, density, millsScale                      floats
	mills9, mills8, mills7, mills6, mills5, mills4      floats
	near5, near4, near3, near2, near1                   floats
	mills3, mills2, mills1                              floats

	sixteen, bit0, highHalf, bfloat16Half, bfloat16NaN ints
}

type (
	floats [16]float32
	ints   [16]int32
)

// The share of the normal distribution below -z is exp(-z^2 / 2) m(t), where t = 1 / (1 + millsScale z), and
// m has the coefficients of t to t^9. Up to z = 14.5 its relative error is at most 3.2e-8.
const (
	millsScale = 0.35

	mills1 = 0.139621306
	mills2 = 0.139863529
	mills3 = 0.119821185
	mills4 = 0.105552927
	mills5 = -0.023213394
	mills6 = 0.159321254
	mills7 = -0.255840403
	mills8 = 0.144031611
	mills9 = -0.02915803

	// For |x| up to 1 the share below x is 1/2 + x (densityAt0 + near1 x^2 + ... + near5 x^10), off by 7e-10 of
	// the second term. Only the sum rounds.
	near1 = -6.649035992348e-2
	near2 = 9.973323409631e-3
	near3 = -1.186329941254e-3
	near4 = 1.134863712792e-4
	near5 = -7.654208095755e-6
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
		&c.near1: near1, &c.near2: near2, &c.near3: near3, &c.near4: near4, &c.near5: near5,
		&c.minusHalf: -0.5, &c.density: densityAt0, &c.millsScale: millsScale,
		&c.mills1: mills1, &c.mills2: mills2, &c.mills3: mills3, &c.mills4: mills4, &c.mills5: mills5,
		&c.mills6: mills6, &c.mills7: mills7, &c.mills8: mills8, &c.mills9: mills9,
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
