//go:build goexperiment.simd && amd64

package cpu

import (
	"simd/archsimd"
	"unsafe"
)

// Rows of bfloat16 as they lie in memory, for AVX2. It has no masks for elements of 16 bits, so the last ones
// of a row are taken one by one. These may round differently, without FMA, but which ones they are depends on
// the row's length alone.

// bfloat16s is n elements of a row.
func bfloat16s(p unsafe.Pointer, n int) []uint16 { return unsafe.Slice((*uint16)(p), n) }

// pairs8 converts 16 elements from i on to float32: those with even indices, and those with odd ones. This
// takes half the instructions of a conversion in order.
func (k *constants) pairs8(p unsafe.Pointer, i int) (even, odd f32x8) {
	v := archsimd.LoadInt32x8((*[8]int32)(unsafe.Add(p, 2*i)))
	return v.ShiftLeft(n8(&k.sixteen)).AsFloat32x8(), v.And(n8(&k.highHalf)).AsFloat32x8()
}

func dotBFloat16AVX2(x, y unsafe.Pointer, n int) float64 {
	var s0, s1 f64x4
	k, i := simdConstants, 0
	for ; i+32 <= n; i += 32 {
		x0, x1 := k.pairs8(x, i)
		y0, y1 := k.pairs8(y, i)
		a, b := x0.Mul(y0), x1.Mul(y1)
		x0, x1 = k.pairs8(x, i+16)
		y0, y1 = k.pairs8(y, i+16)
		s0, s1 = accumulate8(s0, s1, x0.MulAdd(y0, a).Add(x1.MulAdd(y1, b)))
	}
	sum := sum4(s0.Add(s1))
	for ys := bfloat16s(y, n); i < n; i++ {
		sum += float64(widenBFloat16(bfloat16s(x, n)[i]) * widenBFloat16(ys[i]))
	}
	return sum
}

// In bfloat16_avx2_amd64.s, for a number of elements that is a positive multiple of 16.
//
//go:noescape
func softmaxGrad16sBFloat16AVX2(dst, dy, y unsafe.Pointer, n int, hi, lo float32)

func softmaxGradBFloat16AVX2(dst, dy, y unsafe.Pointer, n int, hi, lo float32, _ bool) {
	i := n &^ 15
	if i > 0 {
		softmaxGrad16sBFloat16AVX2(dst, dy, y, i, hi, lo)
	}
	for out, ys := bfloat16s(dst, n), bfloat16s(y, n); i < n; i++ {
		out[i] = narrowBFloat16((widenBFloat16(bfloat16s(dy, n)[i]) - hi - lo) * widenBFloat16(ys[i]))
	}
}

// The norms' weights and sums lie beside the elements in float32, so these are converted in order.

// load8x16 converts 8 elements from i on.
func (k *constants) load8x16(p unsafe.Pointer, i int) f32x8 {
	return k.widenBFloat16x8(loadExtended8(p, i))
}

func scaleBFloat16AVX2(dst, x unsafe.Pointer, w []float32, c float32, _ bool) {
	k, n, i := simdConstants, len(w), 0
	cv := archsimd.BroadcastFloat32x8(c)
	for ; i+8 <= n; i += 8 {
		k.narrowBFloat16x8(k.load8x16(x, i).Mul(cv).Mul(load8(w, i))).Store(int16Ptr8(dst, i))
	}
	archsimd.ClearAVXUpperBits()
	for out := bfloat16s(dst, n); i < n; i++ {
		out[i] = narrowBFloat16(widenBFloat16(bfloat16s(x, n)[i]) * c * w[i])
	}
}

func dot3BFloat16AVX2(x, dy unsafe.Pointer, w []float32) float64 {
	var s0, s1 f64x4
	k, n, i := simdConstants, len(w), 0
	for ; i+16 <= n; i += 16 {
		a := k.load8x16(x, i).Mul(k.load8x16(dy, i)).Mul(load8(w, i))
		b := k.load8x16(x, i+8).Mul(k.load8x16(dy, i+8))
		s0, s1 = accumulate8(s0, s1, b.MulAdd(load8(w, i+8), a))
	}
	sum := sum4(s0.Add(s1))
	for dys := bfloat16s(dy, n); i < n; i++ {
		sum += float64(widenBFloat16(bfloat16s(x, n)[i]) * widenBFloat16(dys[i]) * w[i])
	}
	return sum
}

func rmsNormGradBFloat16AVX2(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32) {
	constants, n, i := simdConstants, len(w), 0
	kv, rv := archsimd.BroadcastFloat32x8(-k), archsimd.BroadcastFloat32x8(r)
	for ; i+8 <= n; i += 8 {
		xv, dyv := constants.load8x16(x, i), constants.load8x16(dy, i)
		if sums != nil {
			xv.Mul(rv).MulAdd(dyv, load8(sums, i)).Store(floatPtr8(sums, i))
		}
		g := xv.MulAdd(kv, dyv.Mul(load8(w, i))).Mul(rv)
		constants.narrowBFloat16x8(g).Store(int16Ptr8(dx, i))
	}
	archsimd.ClearAVXUpperBits()
	for out, dys := bfloat16s(dx, n), bfloat16s(dy, n); i < n; i++ {
		xi, dyi := widenBFloat16(bfloat16s(x, n)[i]), widenBFloat16(dys[i])
		if sums != nil {
			sums[i] += xi * r * dyi
		}
		out[i] = narrowBFloat16((dyi*w[i] - xi*k) * r)
	}
}
