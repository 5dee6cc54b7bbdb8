//go:build goexperiment.simd && amd64

package cpu

import (
	"math"
	"simd/archsimd"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// The row functions for AVX-512: 16 lanes, and masks for the last elements of a row. Functions with masked
// loads or stores form array pointers that reach beyond the row. The masked lanes are not accessed, but
// checkptr would report the pointers, hence nocheckptr.
//
// Every function clears the upper halves of the registers before it returns. Otherwise the SSE instructions
// that follow took 0.2 us longer (Sapphire Rapids).
//
// The compiler may swap the operands of Max and Min, so their result for a NaN is unspecified.

var avx512 = rowFuncs[float32]{
	name:        "avx512",
	exponential: 4,
	load: [4]func([]float32, unsafe.Pointer){
		kernels.Float16:  loadFloat16AVX512,
		kernels.BFloat16: loadBFloat16AVX512,
	},
	store: [4]func(unsafe.Pointer, []float32, float32){
		kernels.Float16:  storeFloat16AVX512,
		kernels.BFloat16: storeBFloat16AVX512,
		kernels.Float32:  storeFloat32AVX512,
	},
	max:         maxAVX512,
	without:     withoutAVX512,
	exp:         expAVX512,
	expScale:    expScaleAVX512,
	expAll:      expAllAVX512,
	log1pAll:    log1pAllAVX512,
	dot:         dotAVX512,
	dot3:        dot3AVX512,
	add:         addAVX512,
	addProduct:  addProductAVX512,
	multiply:    multiplyAVX512,
	sum:         sumAVX512,
	subtract:    subtractAVX512,
	accumulate:  accumulateAVX512,
	sumsAndDot3: sumsAndDot3AVX512,
	addBoth:     addBothAVX512,
	moments:     momentsAVX512,
	normalize:   normalizeAVX512,
	normGrad:    normGradAVX512,
	gate:        gateAVX512,
	gelu:        geluAVX512,

	expSum:  expSumAVX512,
	expRows: expRowsAVX512,
	dotRaw: [4]func(x, y unsafe.Pointer, n int) float64{
		kernels.Float16:  dotFloat16AVX512,
		kernels.BFloat16: dotBFloat16AVX512,
		kernels.Float32:  dotFloat32AVX512,
	},
	softmaxGradRaw: [4]func(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool){
		kernels.Float16:  softmaxGradFloat16AVX512,
		kernels.BFloat16: softmaxGradBFloat16AVX512,
		kernels.Float32:  softmaxGradFloat32AVX512,
	},
	softmaxGradRows: softmaxGradRowsAVX512,
	scaleRaw: [4]func(dst, x unsafe.Pointer, w []float32, c float32, stream bool){
		kernels.Float16:  scaleFloat16AVX512,
		kernels.BFloat16: scaleBFloat16AVX512,
		kernels.Float32:  scaleFloat32AVX512,
	},
	dot3Raw: [4]func(x, dy unsafe.Pointer, w []float32) float64{
		kernels.Float16:  dot3Float16AVX512,
		kernels.BFloat16: dot3BFloat16AVX512,
	},
	rmsNormGradRaw: [4]func(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32){
		kernels.Float16:  rmsNormGradFloat16AVX512,
		kernels.BFloat16: rmsNormGradBFloat16AVX512,
	},
	rmsNormRows:     rmsNormRowsAVX512,
	rmsNormGradRows: rmsNormGradRowsAVX512,
}

type (
	f32x16 = archsimd.Float32x16
	i32x16 = archsimd.Int32x16
	f64x8  = archsimd.Float64x8
)

// c16 and n16 load a constant.
func c16(c *floats) f32x16 { return archsimd.LoadFloat32x16((*[16]float32)(c)) }
func n16(c *ints) i32x16   { return archsimd.LoadInt32x16((*[16]int32)(c)) }

// floatPtr16 points at elements i to i+15. The pointers below are alike.
func floatPtr16(x []float32, i int) *[16]float32 {
	return (*[16]float32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(x)), 4*i))
}

func int16Ptr16(p unsafe.Pointer, i int) *[16]int16 { return (*[16]int16)(unsafe.Add(p, 2*i)) }

func load16(x []float32, i int) f32x16 { return archsimd.LoadFloat32x16(floatPtr16(x, i)) }

// tailMask16 selects the first n lanes.
func tailMask16(n int) archsimd.Mask32x16 { return archsimd.Mask32x16FromBits(1<<n - 1) }

func loadTail16(x []float32, i int, m archsimd.Mask32x16) f32x16 {
	return archsimd.LoadMaskedFloat32x16(floatPtr16(x, i), m)
}

// accumulate16 adds the lanes of v to sums in float64.
func accumulate16(s0, s1 f64x8, v f32x16) (f64x8, f64x8) {
	return s0.Add(v.GetLo().ConvertToFloat64()), s1.Add(v.GetHi().ConvertToFloat64())
}

func sum16(s0, s1 f64x8) float64 {
	s := s0.Add(s1)
	return sum4(s.GetLo().Add(s.GetHi()))
}

func maxAVX512(x []float32) float32 {
	low := archsimd.BroadcastFloat32x16(float32(math.Inf(-1)))
	m0, m1, m2, m3 := low, low, low, low
	n, i := len(x), 0
	for ; i+64 <= n; i += 64 {
		m0 = m0.Max(load16(x, i))
		m1 = m1.Max(load16(x, i+16))
		m2 = m2.Max(load16(x, i+32))
		m3 = m3.Max(load16(x, i+48))
	}
	for ; i+16 <= n; i += 16 {
		m0 = m0.Max(load16(x, i))
	}
	if i < n {
		m1 = m1.Max(maxTail16(x, i, low))
	}
	return max16(m0.Max(m1).Max(m2.Max(m3)))
}

//go:nocheckptr
func maxTail16(x []float32, i int, low f32x16) f32x16 {
	m := tailMask16(len(x) - i)
	return loadTail16(x, i, m).Merge(low, m)
}

// withoutAVX512 stores whole vectors: after a store of one element, a vector load of it could not be
// forwarded from the store buffer, and would wait.
//
//go:nocheckptr
func withoutAVX512(dst, x []float32, k int) float32 {
	low := archsimd.BroadcastFloat32x16(float32(math.Inf(-1)))
	m := low
	for i := 0; i < len(x); i += 16 {
		is := archsimd.Mask32x16FromBits(uint16(1 << uint(k-i))) // none for a negative number
		tail := tailMask16(min(len(x)-i, 16))
		v := low.Merge(loadTail16(x, i, tail).Merge(low, tail), is)
		v.StoreMasked(floatPtr16(dst, i), tail)
		m = m.Max(v)
	}
	return max16(m)
}

func max16(v f32x16) float32 {
	m := v.GetLo().Max(v.GetHi())
	return max4(m.GetLo().Max(m.GetHi()))
}

// In exp_amd64.s.
//
//go:noescape
func expAVX512(dst, src []float32, m float32) float64

//go:noescape
func expSumAVX512(src []float32, m float32) float64

//go:noescape
func expRowsAVX512(dst, src unsafe.Pointer, n, rows, dstStride, srcStride int, without *int, out *partial)

//go:noescape
func expScaleAVX512(dst, src []float32, m, c float32)

func dotAVX512(x, y []float32) float64 {
	var s0, s1 f64x8
	n, i := len(x), 0
	for ; i+64 <= n; i += 64 {
		a := load16(x, i).Mul(load16(y, i))
		b := load16(x, i+16).Mul(load16(y, i+16))
		a = load16(x, i+32).MulAdd(load16(y, i+32), a)
		b = load16(x, i+48).MulAdd(load16(y, i+48), b)
		s0, s1 = accumulate16(s0, s1, a.Add(b))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		s0 = loadTailWide8(x, i, mask).MulAdd(loadTailWide8(y, i, mask), s0)
	}
	return sum16(s0, s1)
}

func dotFloat32AVX512(x, y unsafe.Pointer, n int) float64 {
	return dotAVX512(unsafe.Slice((*float32)(x), n), unsafe.Slice((*float32)(y), n))
}

//go:nocheckptr
func loadTailWide8(x []float32, i int, m archsimd.Mask32x8) f64x8 {
	return loadTail8(x, i, m).ConvertToFloat64()
}

func dot3AVX512(x, y, z []float32) float64 {
	var s0, s1 f64x8
	n, i := len(x), 0
	for ; i+64 <= n; i += 64 {
		a := load16(y, i).Mul(load16(z, i)).Mul(load16(x, i))
		b := load16(y, i+16).Mul(load16(z, i+16)).Mul(load16(x, i+16))
		a = load16(y, i+32).Mul(load16(z, i+32)).MulAdd(load16(x, i+32), a)
		b = load16(y, i+48).Mul(load16(z, i+48)).MulAdd(load16(x, i+48), b)
		s0, s1 = accumulate16(s0, s1, a.Add(b))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		s0 = loadTailWide8(y, i, mask).Mul(loadTailWide8(z, i, mask)).MulAdd(loadTailWide8(x, i, mask), s0)
	}
	return sum16(s0, s1)
}

func sumsAndDot3AVX512(x, y, z []float32) (sum, product, product3 float64) {
	var s0, s1, p0, p1, q0, q1 f64x8
	n, i := len(x), 0
	for ; i+64 <= n; i += 64 {
		x0, x1, x2, x3 := load16(x, i), load16(x, i+16), load16(x, i+32), load16(x, i+48)
		s0, s1 = accumulate16(s0, s1, x0.Add(x2).Add(x1.Add(x3)))
		a, b := load16(y, i).Mul(load16(z, i)), load16(y, i+16).Mul(load16(z, i+16))
		c, d := load16(y, i+32).Mul(load16(z, i+32)), load16(y, i+48).Mul(load16(z, i+48))
		p0, p1 = accumulate16(p0, p1, a.Add(c).Add(b.Add(d)))
		q0, q1 = accumulate16(q0, q1, c.MulAdd(x2, a.Mul(x0)).Add(d.MulAdd(x3, b.Mul(x1))))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		g, v := loadTailWide8(y, i, mask).Mul(loadTailWide8(z, i, mask)), loadTailWide8(x, i, mask)
		s0, p0, q0 = s0.Add(v), p0.Add(g), g.MulAdd(v, q0)
	}
	return sum16(s0, s1), sum16(p0, p1), sum16(q0, q1)
}

func addAVX512(acc, x []float64) {
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		archsimd.LoadFloat64x8(doublePtr8(acc, i)).
			Add(archsimd.LoadFloat64x8(doublePtr8(x, i))).Store(doublePtr8(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	add(acc[i:], x[i:])
}

func doublePtr8(x []float64, i int) *[8]float64 {
	return (*[8]float64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(x)), 8*i))
}

func addProductAVX512(acc []float64, x, y []float32, c, e float64) {
	cv, ev := archsimd.BroadcastFloat64x8(c), archsimd.BroadcastFloat64x8(e)
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		xc := load8(x, i).ConvertToFloat64().MulAdd(cv, ev)
		sum := xc.MulAdd(load8(y, i).ConvertToFloat64(), archsimd.LoadFloat64x8(doublePtr8(acc, i)))
		sum.Store(doublePtr8(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	addProduct(acc[i:], x[i:], y[i:], c, e)
}

func addBothAVX512(products, sums []float64, x, y []float32, c, e float64) {
	cv, ev := archsimd.BroadcastFloat64x8(c), archsimd.BroadcastFloat64x8(e)
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		xc, yv := load8(x, i).ConvertToFloat64().MulAdd(cv, ev), load8(y, i).ConvertToFloat64()
		xc.MulAdd(yv, archsimd.LoadFloat64x8(doublePtr8(products, i))).Store(doublePtr8(products, i))
		yv.Add(archsimd.LoadFloat64x8(doublePtr8(sums, i))).Store(doublePtr8(sums, i))
	}
	archsimd.ClearAVXUpperBits()
	addBoth(products[i:], sums[i:], x[i:], y[i:], c, e)
}

//go:nocheckptr
func multiplyAVX512(dst, x, w []float32, c float32) {
	cv := archsimd.BroadcastFloat32x16(c)
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		load16(x, i).Mul(cv).Mul(load16(w, i)).Store(floatPtr16(dst, i))
	}
	if i < n {
		mask := tailMask16(n - i)
		loadTail16(x, i, mask).Mul(cv).Mul(loadTail16(w, i, mask)).StoreMasked(floatPtr16(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

// gateAVX512 divides once. The sigmoid of v is `above` where v is positive. Else it is 1 minus that, which is
// computed as a difference where that keeps the digits (near), and as a product elsewhere.
//
//go:nocheckptr
func gateAVX512(value, slope, x []float32, a, b float32) {
	k := simdConstants
	av, bv := archsimd.BroadcastFloat32x16(a), archsimd.BroadcastFloat32x16(b)
	b3, far := archsimd.BroadcastFloat32x16(3*b), archsimd.BroadcastFloat32x16(farSquare)
	zero, one := c16(&k.zero), c16(&k.one)
	minusOne := zero.Sub(one)
	for i := 0; i < len(x); i += 16 {
		g := loadUpTo16(x, i)
		square := g.Mul(g).Min(far)
		v := bv.MulAdd(square, av).Mul(g)
		e := k.expOf16(v.Min(zero.Sub(v)))
		// lost is what q has lost to 1 / (1 + e), relative to q.
		sum := one.Add(e)
		q := one.Div(sum)
		minusQ := zero.Sub(q)
		lost := minusQ.MulAdd(e.Sub(sum.Sub(one)), minusQ.MulAdd(sum, one))
		above, near := q.MulAdd(lost, q), minusQ.MulAdd(lost, one.Sub(q))
		below := e.Mul(above)
		s := below.Merge(near, v.Less(minusOne)).Merge(above, v.Less(zero))
		storeUpTo16(value, i, g.Mul(s))
		if slope != nil {
			storeUpTo16(slope, i, below.Mul(above).Mul(g).MulAdd(b3.MulAdd(square, av), s))
		}
	}
	archsimd.ClearAVXUpperBits()
}

// geluAVX512 has the share of the normal distribution by two formulas (simd_amd64.go). Far out, `small` keeps
// its digits. Where that is not small, `near` rounds less.
//
//go:nocheckptr
func geluAVX512(value, slope, x []float32) {
	k := simdConstants
	zero, one := c16(&k.zero), c16(&k.one)
	far := archsimd.BroadcastFloat32x16(20) // where the exponential is 0
	for i := 0; i < len(x); i += 16 {
		g := loadUpTo16(x, i)
		z := g.Max(zero.Sub(g)).Min(far)
		half := z.Mul(c16(&k.minusHalf))
		exponent := z.Mul(half)
		e := k.expOf16(exponent)
		e = e.MulAdd(z.MulAdd(half, zero.Sub(exponent)), e) // what the exponent lost to rounding
		t := one.Div(z.MulAdd(c16(&k.millsScale), one))
		p := c16(&k.mills9).MulAdd(t, c16(&k.mills8)).MulAdd(t, c16(&k.mills7)).MulAdd(t, c16(&k.mills6)).
			MulAdd(t, c16(&k.mills5)).MulAdd(t, c16(&k.mills4)).MulAdd(t, c16(&k.mills3)).
			MulAdd(t, c16(&k.mills2)).MulAdd(t, c16(&k.mills1))
		small := p.Mul(t).Mul(e)
		square := z.Mul(z)
		near := c16(&k.near5).MulAdd(square, c16(&k.near4)).MulAdd(square, c16(&k.near3)).
			MulAdd(square, c16(&k.near2)).MulAdd(square, c16(&k.near1)).MulAdd(square, c16(&k.density)).
			MulAdd(g, zero.Sub(c16(&k.minusHalf)))
		below := near.Merge(small.Merge(one.Sub(small), g.Less(zero)), z.Less(one))
		storeUpTo16(value, i, g.Mul(below))
		if slope != nil {
			storeUpTo16(slope, i, g.Mul(c16(&k.density)).MulAdd(e, below))
		}
	}
	archsimd.ClearAVXUpperBits()
}

// loadUpTo16 loads elements i to i+15, as far as there are so many. storeUpTo16 stores them.
//
//go:nocheckptr
func loadUpTo16(x []float32, i int) f32x16 {
	if i+16 <= len(x) {
		return load16(x, i)
	}
	return loadTail16(x, i, tailMask16(len(x)-i))
}

//go:nocheckptr
func storeUpTo16(x []float32, i int, v f32x16) {
	if i+16 <= len(x) {
		v.Store(floatPtr16(x, i))
		return
	}
	v.StoreMasked(floatPtr16(x, i), tailMask16(len(x)-i))
}

// expOf16 is exp(x) for x up to 0, also for -inf: see row.go for the formula.
func (k *constants) expOf16(x f32x16) f32x16 {
	x = x.Max(c16(&k.expLow))
	t := x.MulAdd(c16(&k.log2E), c16(&k.roundBias))
	n := t.Sub(c16(&k.roundBias))
	r := n.MulAdd(c16(&k.minusLn2Low), n.MulAdd(c16(&k.minusLn2High), x))
	return c16(&k.exp6).MulAdd(r, c16(&k.exp5)).MulAdd(r, c16(&k.exp4)).MulAdd(r, c16(&k.exp3)).
		MulAdd(r, c16(&k.exp2)).MulAdd(r, c16(&k.one)).MulAdd(r, c16(&k.one)).Scale(n)
}

// In softmax_amd64.s.
//
//go:noescape
func dotFloat16AVX512(x, y unsafe.Pointer, n int) float64

//go:noescape
func dotBFloat16AVX512(x, y unsafe.Pointer, n int) float64

//go:noescape
func softmaxGradFloat16AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)

//go:noescape
func softmaxGradBFloat16AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)

//go:noescape
func softmaxGradFloat32AVX512(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)

//go:noescape
func softmaxGradRowsAVX512(dst, dy, y unsafe.Pointer, n, rows, dstStride, dyStride, yStride int)

// In norm_amd64.s.
//
//go:noescape
func scaleFloat16AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)

//go:noescape
func scaleBFloat16AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)

//go:noescape
func scaleFloat32AVX512(dst, x unsafe.Pointer, w []float32, c float32, stream bool)

//go:noescape
func dot3Float16AVX512(x, dy unsafe.Pointer, w []float32) float64

//go:noescape
func dot3BFloat16AVX512(x, dy unsafe.Pointer, w []float32) float64

//go:noescape
func rmsNormGradFloat16AVX512(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32)

//go:noescape
func rmsNormGradBFloat16AVX512(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32)

// The functions of several rows take one step of all rows after the other. So a row's last additions, its
// square root and divisions do not wait for one another.
//
// Steps on single numbers come after ClearAVXUpperBits: see clearUpperHalves. RMSNorm of 16384 x 64 bfloat16
// on one thread takes 0.5 ms, and took 12.9 ms without it (Emerald Rapids).

func rmsNormRowsAVX512(
	y, x strided, w []float32, over, eps float64, rows int, rstd *[maxTogether]float64,
) {
	var sums [maxTogether][8]float64
	for row := range rows {
		xRow := x.row(row)
		var s0, s1 f64x8
		for i := 0; i < len(w); i += 64 {
			x0, x1, x2, x3 := at16(xRow, i), at16(xRow, i+16), at16(xRow, i+32), at16(xRow, i+48)
			s0, s1 = accumulate16(s0, s1, x2.MulAdd(x2, x0.Mul(x0)).Add(x3.MulAdd(x3, x1.Mul(x1))))
		}
		s0.Add(s1).Store(&sums[row])
	}
	archsimd.ClearAVXUpperBits()
	for row := range rows {
		rstd[row] = 1 / math.Sqrt(sumOf8(&sums[row])/over+eps)
	}
	for row := range rows {
		xRow, yRow := x.row(row), y.row(row)
		r := archsimd.BroadcastFloat32x16(float32(rstd[row]))
		for i := 0; i < len(w); i += 16 {
			storeAt16(yRow, i, at16(xRow, i).Mul(r).Mul(load16(w, i)))
		}
		archsimd.ClearAVXUpperBits()
	}
}

func rmsNormGradRowsAVX512(
	dx, x, dy strided, w []float32, over float64, dw []float64, rows int, rstd *[maxTogether]float64,
) {
	var sums [maxTogether][8]float64
	for row := range rows {
		xRow, dyRow := x.row(row), dy.row(row)
		var s0, s1 f64x8
		for i := 0; i < len(w); i += 64 {
			a := at16(dyRow, i).Mul(load16(w, i)).Mul(at16(xRow, i))
			b := at16(dyRow, i+16).Mul(load16(w, i+16)).Mul(at16(xRow, i+16))
			a = at16(dyRow, i+32).Mul(load16(w, i+32)).MulAdd(at16(xRow, i+32), a)
			b = at16(dyRow, i+48).Mul(load16(w, i+48)).MulAdd(at16(xRow, i+48), b)
			s0, s1 = accumulate16(s0, s1, a.Add(b))
		}
		s0.Add(s1).Store(&sums[row])
	}
	archsimd.ClearAVXUpperBits()
	for row := range rows {
		xRow, dyRow, dxRow := x.row(row), dy.row(row), dx.row(row)
		rowRstd, rowK := rstd[row], rstd[row]*rstd[row]*sumOf8(&sums[row])/over
		r32, k32 := float32(rowRstd), float32(-rowK)
		k, r := archsimd.BroadcastFloat32x16(k32), archsimd.BroadcastFloat32x16(r32)
		wide := archsimd.BroadcastFloat64x8(rowRstd)
		for i := 0; i < len(w); i += 16 {
			xv, dyv := at16(xRow, i), at16(dyRow, i)
			if dw != nil {
				lo, hi := doublePtr8(dw, i), doublePtr8(dw, i+8)
				xLo, xHi := xv.GetLo().ConvertToFloat64().Mul(wide), xv.GetHi().ConvertToFloat64().Mul(wide)
				xLo.MulAdd(dyv.GetLo().ConvertToFloat64(), archsimd.LoadFloat64x8(lo)).Store(lo)
				xHi.MulAdd(dyv.GetHi().ConvertToFloat64(), archsimd.LoadFloat64x8(hi)).Store(hi)
			}
			storeAt16(dxRow, i, dyv.MulAdd(load16(w, i), xv.Mul(k)).Mul(r))
		}
		archsimd.ClearAVXUpperBits()
	}
}

// at16 is elements i to i+15 of a row.
func at16(p unsafe.Pointer, i int) f32x16 {
	return archsimd.LoadFloat32x16((*[16]float32)(unsafe.Add(p, 4*i)))
}

func storeAt16(p unsafe.Pointer, i int, v f32x16) { v.Store((*[16]float32)(unsafe.Add(p, 4*i))) }

// sumOf8 adds up lanes that were stored, in the order of sum16.
func sumOf8(s *[8]float64) float64 {
	return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]))
}

//go:nocheckptr
func sumAVX512(dst, x, y []float32) {
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		load16(x, i).Add(load16(y, i)).Store(floatPtr16(dst, i))
	}
	if i < n {
		mask := tailMask16(n - i)
		loadTail16(x, i, mask).Add(loadTail16(y, i, mask)).StoreMasked(floatPtr16(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func subtractAVX512(dst, x []float32, m float32) {
	mv := archsimd.BroadcastFloat32x16(m)
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		load16(x, i).Sub(mv).Store(floatPtr16(dst, i))
	}
	if i < n {
		mask := tailMask16(n - i)
		loadTail16(x, i, mask).Sub(mv).StoreMasked(floatPtr16(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

func accumulateAVX512(acc []float64, x []float32) {
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		xv := load8(x, i).ConvertToFloat64()
		xv.Add(archsimd.LoadFloat64x8(doublePtr8(acc, i))).Store(doublePtr8(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	accumulate(acc[i:], x[i:])
}

func momentsAVX512(x []float32, pivot float32) (sum, squares float64) {
	pv := archsimd.BroadcastFloat64x8(float64(pivot))
	var s0, s1, q0, q1 f64x8
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		a := load8(x, i).ConvertToFloat64().Sub(pv)
		b := load8(x, i+8).ConvertToFloat64().Sub(pv)
		s0, s1 = s0.Add(a), s1.Add(b)
		q0, q1 = a.MulAdd(a, q0), b.MulAdd(b, q1)
	}
	sum, squares = sum16(s0, s1), sum16(q0, q1)
	s, q := moments(x[i:], pivot)
	return sum + s, squares + q
}

//go:nocheckptr
func normalizeAVX512(dst, x, w, b []float32, hi, lo, c float32) {
	hv, lv := archsimd.BroadcastFloat32x16(hi), archsimd.BroadcastFloat32x16(lo)
	cv := archsimd.BroadcastFloat32x16(c)
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		load16(x, i).Sub(hv).Sub(lv).Mul(cv).MulAdd(load16(w, i), load16(b, i)).Store(floatPtr16(dst, i))
	}
	if i < n {
		mask := tailMask16(n - i)
		xhat := loadTail16(x, i, mask).Sub(hv).Sub(lv).Mul(cv)
		xhat.MulAdd(loadTail16(w, i, mask), loadTail16(b, i, mask)).StoreMasked(floatPtr16(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func normGradAVX512(dst, x, w, dout []float32, k, m, r float64) {
	kv, mv := archsimd.BroadcastFloat32x16(float32(-k)), archsimd.BroadcastFloat32x16(float32(-m))
	rv := archsimd.BroadcastFloat32x16(float32(r))
	n, i := len(x), 0
	for ; i+16 <= n; i += 16 {
		mean := load16(x, i).MulAdd(kv, mv)
		load16(dout, i).MulAdd(load16(w, i), mean).Mul(rv).Store(floatPtr16(dst, i))
	}
	if i < n {
		mask := tailMask16(n - i)
		mean := loadTail16(x, i, mask).MulAdd(kv, mv)
		v := loadTail16(dout, i, mask).MulAdd(loadTail16(w, i, mask), mean).Mul(rv)
		v.StoreMasked(floatPtr16(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func storeFloat32AVX512(dst unsafe.Pointer, src []float32, c float32) {
	cv := archsimd.BroadcastFloat32x16(c)
	n, i := len(src), 0
	out := unsafe.Slice((*float32)(dst), n)
	for ; i+32 <= n; i += 32 {
		load16(src, i).Mul(cv).Store(floatPtr16(out, i))
		load16(src, i+16).Mul(cv).Store(floatPtr16(out, i+16))
	}
	for ; i < n; i += 16 {
		mask := tailMask16(min(n-i, 16))
		loadTail16(src, i, mask).Mul(cv).StoreMasked(floatPtr16(out, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

// In float16_amd64.s, because archsimd lacks the instructions that convert float16. Converting with integer
// arithmetic took three to five times as long. n is a positive multiple of 16.
//
//go:noescape
func widenFloat16x16(dst *float32, src unsafe.Pointer, n int)

//go:noescape
func narrowFloat16x16(dst unsafe.Pointer, src *float32, n int, factor float32)

// The conversions below end with a vector that overlaps the one before it. Converting an element twice is
// harmless, because source and destination do not overlap. The portable code converts rows shorter than a
// vector.

func loadFloat16AVX512(dst []float32, src unsafe.Pointer) {
	n := len(dst)
	if n < 16 {
		loadFloat16(dst, src)
		return
	}
	widenFloat16x16(&dst[0], src, n&^15)
	widenFloat16x16(&dst[n-16], unsafe.Add(src, 2*(n-16)), 16)
}

func storeFloat16AVX512(dst unsafe.Pointer, src []float32, c float32) {
	n := len(src)
	if n < 16 {
		storeFloat16(dst, src, c)
		return
	}
	narrowFloat16x16(dst, &src[0], n&^15, c)
	narrowFloat16x16(unsafe.Add(dst, 2*(n-16)), &src[n-16], 16, c)
}

func loadBFloat16AVX512(dst []float32, src unsafe.Pointer) {
	n := len(dst)
	if n < 16 {
		loadBFloat16(dst, src)
		return
	}
	k := simdConstants
	for i := 0; i+16 <= n; i += 16 {
		k.widenBFloat16x16(int16Ptr16(src, i)).Store(floatPtr16(dst, i))
	}
	k.widenBFloat16x16(int16Ptr16(src, n-16)).Store(floatPtr16(dst, n-16))
	archsimd.ClearAVXUpperBits()
}

func (k *constants) widenBFloat16x16(p *[16]int16) f32x16 {
	return archsimd.LoadInt16x16(p).ExtendToInt32().ShiftLeft(n16(&k.sixteen)).AsFloat32x16()
}

func storeBFloat16AVX512(dst unsafe.Pointer, src []float32, c float32) {
	n := len(src)
	if n < 16 {
		storeBFloat16(dst, src, c)
		return
	}
	k := simdConstants
	cv := archsimd.BroadcastFloat32x16(c)
	for i := 0; i+16 <= n; i += 16 {
		k.narrowBFloat16x16(load16(src, i).Mul(cv)).Store(int16Ptr16(dst, i))
	}
	k.narrowBFloat16x16(load16(src, n-16).Mul(cv)).Store(int16Ptr16(dst, n-16))
	archsimd.ClearAVXUpperBits()
}

func (k *constants) narrowBFloat16x16(f f32x16) archsimd.Int16x16 {
	u := f.AsInt32x16()
	odd := u.ShiftRight(n16(&k.sixteen)).And(n16(&k.bit0))
	u = n16(&k.bfloat16NaN).Merge(u.Add(odd).Add(n16(&k.bfloat16Half)), f.IsNaN())
	return u.ShiftRight(n16(&k.sixteen)).TruncateToInt16()
}

// Functions of float64, for a few numbers of each row. exp(x) is 2^n exp(r) with |r| <= ln 2 / 2, by the
// Taylor series of exp(r), whose first missing term is less than 2^-57. log(u) is e ln 2 + log(m) with m from
// sqrt(1/2) to sqrt(2), by the series of 2 artanh(s) with s = (m - 1) / (m + 1). ln 2 is split as in row.go.
const (
	expTerms    = 13
	artanhTerms = 10

	ln2High64 = 0x1.62e42feep-1
	ln2Low64  = 0x1.a39ef35793c76p-33
)

type doubles [8]float64

// doubleConstants holds each constant as a whole vector, as simdConstants does.
type doubleConstants struct {
	log2E, minusLn2High, minusLn2Low, ln2High, ln2Low, lowest, highest doubles
	one, sqrtHalf                                                      doubles
	factorials                                                         [expTerms + 1]doubles    // 1 / i!
	odd                                                                [artanhTerms + 1]doubles // 2 / (2 i + 1)
}

var simdDoubles = newDoubleConstants()

func newDoubleConstants() *doubleConstants {
	c := new(doubleConstants)
	fill := func(p *doubles, v float64) {
		for i := range p {
			p[i] = v
		}
	}
	for p, v := range map[*doubles]float64{
		&c.log2E: math.Log2E, &c.minusLn2High: -ln2High64, &c.minusLn2Low: -ln2Low64, &c.ln2High: ln2High64,
		&c.ln2Low: ln2Low64, &c.lowest: -700, &c.highest: 1 << 53,
		&c.one: 1, &c.sqrtHalf: math.Sqrt2 / 2,
	} {
		fill(p, v)
	}
	factorial := 1.0
	for i := range c.factorials {
		factorial *= float64(max(i, 1))
		fill(&c.factorials[i], 1/factorial)
	}
	for i := range c.odd {
		fill(&c.odd[i], 2/float64(2*i+1))
	}
	return c
}

func d8(c *doubles) f64x8 { return archsimd.LoadFloat64x8((*[8]float64)(c)) }

// expAllAVX512 takes numbers from -700 to 0 together, and others one by one.
func expAllAVX512(x []float64) {
	c := simdDoubles
	var zero f64x8
	for i := 0; i < len(x); i += 8 {
		v := loadPart8(x[i:])
		inRange := v.GreaterEqual(d8(&c.lowest)).And(v.LessEqual(zero))
		n := v.Mul(d8(&c.log2E)).RoundToEvenScaled(0)
		r := n.MulAdd(d8(&c.minusLn2Low), n.MulAdd(d8(&c.minusLn2High), v))
		p := d8(&c.factorials[expTerms])
		for k := expTerms - 1; k >= 0; k-- {
			p = p.MulAdd(r, d8(&c.factorials[k]))
		}
		storeOr(x[i:], p.Scale(n), inRange.ToBits(), math.Exp)
	}
}

// log1pAllAVX512 takes numbers from 0 to 2^53 together, and others one by one.
func log1pAllAVX512(x []float64) {
	c := simdDoubles
	one := d8(&c.one)
	var zero f64x8
	for i := 0; i < len(x); i += 8 {
		v := loadPart8(x[i:])
		inRange := v.GreaterEqual(zero).And(v.Less(d8(&c.highest)))
		u := v.Add(one)
		rest := v.Sub(u.Sub(one)).Div(u) // what u lost to rounding: log(u + d) = log(u) + d / u
		// m = u / 2^e is in the range of the series.
		exponent := u.AsInt64x8().Sub(d8(&c.sqrtHalf).AsInt64x8()).ShiftAllRight(52)
		e, m := exponent.ConvertToFloat64(), u.AsInt64x8().Sub(exponent.ShiftAllLeft(52)).AsFloat64x8()
		s := m.Sub(one).Div(m.Add(one))
		square := s.Mul(s)
		p := d8(&c.odd[artanhTerms])
		for k := artanhTerms - 1; k >= 0; k-- {
			p = p.MulAdd(square, d8(&c.odd[k]))
		}
		log := e.MulAdd(d8(&c.ln2High), p.MulAdd(s, e.MulAdd(d8(&c.ln2Low), rest)))
		storeOr(x[i:], log, inRange.ToBits(), log1p)
	}
}

// loadPart8 loads the first 8 elements, and zeros in place of those that are not there.
func loadPart8(x []float64) f64x8 {
	if len(x) >= 8 {
		return archsimd.LoadFloat64x8(doublePtr8(x, 0))
	}
	var lanes [8]float64
	copy(lanes[:], x)
	return archsimd.LoadFloat64x8(&lanes)
}

// storeOr stores the lanes of v that have a bit in ok, and f of what is in x for the others.
func storeOr(x []float64, v f64x8, ok uint8, f func(float64) float64) {
	x = x[:min(len(x), 8)]
	var lanes [8]float64
	v.Store(&lanes)
	archsimd.ClearAVXUpperBits()
	for i := range x {
		if ok>>i&1 == 0 {
			lanes[i] = f(x[i])
		}
	}
	copy(x, lanes[:])
}
