//go:build goexperiment.simd && amd64

package cpu

import (
	"math"
	"simd/archsimd"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// The row functions for AVX2 with FMA: 8 lanes, otherwise like those for AVX-512.

var avx2 = rowFuncs[float32]{
	name:        "avx2",
	exponential: 12,
	load: [4]func([]float32, unsafe.Pointer){
		kernels.Float16:  loadFloat16AVX2,
		kernels.BFloat16: loadBFloat16AVX2,
	},
	store: [4]func(unsafe.Pointer, []float32, float32){
		kernels.Float16:  storeFloat16AVX2,
		kernels.BFloat16: storeBFloat16AVX2,
		kernels.Float32:  storeFloat32AVX2,
	},
	max:         maxAVX2,
	without:     withoutAVX2,
	exp:         expAVX2,
	expScale:    expScaleAVX2,
	expAll:      expAll,
	log1pAll:    log1pAll,
	dot:         dotAVX2,
	dot3:        dot3AVX2,
	add:         addAVX2,
	addProduct:  addProductAVX2,
	multiply:    multiplyAVX2,
	softmaxGrad: softmaxGradAVX2,
	sum:         sumAVX2,
	subtract:    subtractAVX2,
	accumulate:  accumulateAVX2,
	sumsAndDot3: sumsAndDot3AVX2,
	addBoth:     addBothAVX2,
	moments:     momentsAVX2,
	normalize:   normalizeAVX2,
	normGrad:    normGradAVX2,
	gate:        gateAVX2,
	gelu:        geluAVX2,

	dotRaw: [4]func(x, y unsafe.Pointer, n int) float64{
		kernels.BFloat16: dotBFloat16AVX2, kernels.Float32: dotFloat32AVX2,
	},
	softmaxGradRaw: [4]func(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool){
		kernels.BFloat16: softmaxGradBFloat16AVX2,
		kernels.Float32:  softmaxGradFloat32AVX2,
	},
	softmaxGradRows: softmaxGradRowsAVX2,
	scaleRaw: [4]func(dst, x unsafe.Pointer, w []float32, c float32, stream bool){
		kernels.BFloat16: scaleBFloat16AVX2,
	},
	dot3Raw:         [4]func(x, dy unsafe.Pointer, w []float32) float64{kernels.BFloat16: dot3BFloat16AVX2},
	rmsNormRows:     rmsNormRowsAVX2,
	rmsNormGradRows: rmsNormGradRowsAVX2,
	rmsNormGradRaw: [4]func(dx, x, dy unsafe.Pointer, w, sums []float32, k, r float32){
		kernels.BFloat16: rmsNormGradBFloat16AVX2,
	},
}

type (
	f32x8 = archsimd.Float32x8
	i32x8 = archsimd.Int32x8
	f64x4 = archsimd.Float64x4
)

// c8 and n8 load a constant. They use half of its 16 lanes.
func c8(c *floats) f32x8 { return archsimd.LoadFloat32x8((*[8]float32)(c[:])) }
func n8(c *ints) i32x8   { return archsimd.LoadInt32x8((*[8]int32)(c[:])) }

// floatPtr8 points at elements i to i+7. The pointers below are alike.
func floatPtr8(x []float32, i int) *[8]float32 {
	return (*[8]float32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(x)), 4*i))
}

func floatPtr4(x []float32, i int) *[4]float32 {
	return (*[4]float32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(x)), 4*i))
}

func int16Ptr8(p unsafe.Pointer, i int) *[8]int16 { return (*[8]int16)(unsafe.Add(p, 2*i)) }

func load8(x []float32, i int) f32x8 { return archsimd.LoadFloat32x8(floatPtr8(x, i)) }

var iota8 = [8]int32{0, 1, 2, 3, 4, 5, 6, 7}

// tailMask8 selects the first n lanes, or all if n is larger.
func tailMask8(n int) archsimd.Mask32x8 {
	return archsimd.BroadcastInt32x8(int32(n)).Greater(archsimd.LoadInt32x8(&iota8))
}

func loadTail8(x []float32, i int, m archsimd.Mask32x8) f32x8 {
	return archsimd.LoadMaskedFloat32x8(floatPtr8(x, i), m)
}

// accumulate8 adds the lanes of v to sums in float64.
func accumulate8(s0, s1 f64x4, v f32x8) (f64x4, f64x4) {
	return s0.Add(v.GetLo().ConvertToFloat64()), s1.Add(v.GetHi().ConvertToFloat64())
}

func sum4(s f64x4) float64 {
	var a [4]float64
	s.Store(&a)
	archsimd.ClearAVXUpperBits()
	return (a[0] + a[1]) + (a[2] + a[3])
}

// sumOf4 adds up lanes that were stored, in the order of sum4.
func sumOf4(s *[4]float64) float64 { return (s[0] + s[1]) + (s[2] + s[3]) }

func max4(v archsimd.Float32x4) float32 {
	var a [4]float32
	v.Store(&a)
	archsimd.ClearAVXUpperBits()
	return larger(larger(a[0], a[1]), larger(a[2], a[3]))
}

//go:nocheckptr
func maxAVX2(x []float32) float32 {
	low := archsimd.BroadcastFloat32x8(float32(math.Inf(-1)))
	m0, m1, m2, m3 := low, low, low, low
	n, i := len(x), 0
	for ; i+32 <= n; i += 32 {
		m0 = m0.Max(load8(x, i))
		m1 = m1.Max(load8(x, i+8))
		m2 = m2.Max(load8(x, i+16))
		m3 = m3.Max(load8(x, i+24))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		m0 = m0.Max(loadTail8(x, i, mask).Merge(low, mask))
	}
	m0 = m0.Max(m1).Max(m2.Max(m3))
	return max4(m0.GetLo().Max(m0.GetHi()))
}

// withoutAVX2 stores whole vectors: after a store of one element, a vector load of it could not be
// forwarded from the store buffer, and would wait.
//
//go:nocheckptr
func withoutAVX2(dst, x []float32, k int) float32 {
	low := archsimd.BroadcastFloat32x8(float32(math.Inf(-1)))
	m := low
	lanes := archsimd.LoadInt32x8(&iota8)
	for i := 0; i < len(x); i += 8 {
		is := lanes.Equal(archsimd.BroadcastInt32x8(int32(k - i)))
		tail := tailMask8(len(x) - i)
		v := low.Merge(loadTail8(x, i, tail).Merge(low, tail), is)
		v.StoreMasked(floatPtr8(dst, i), tail)
		m = m.Max(v)
	}
	return max4(m.GetLo().Max(m.GetHi()))
}

// exp8 computes exp(x) as power * scale, which scaled8 multiplies: each function is small enough to be
// inlined. scale is 2^(n + expShift), made from the low bits of t, or infinity where that is more than 2^127.
// The coefficients of power are so much smaller. So a subnormal result takes no further operation, and is
// rounded once. See row.go for the formula.
func (k *constants) exp8(x f32x8) (power, scale f32x8) {
	t := x.MulAdd(c8(&k.log2E), c8(&k.roundBias))
	n := t.Sub(c8(&k.roundBias))
	r := n.MulAdd(c8(&k.minusLn2Low), n.MulAdd(c8(&k.minusLn2High), x))
	p := c8(&k.small6).MulAdd(r, c8(&k.small5)).MulAdd(r, c8(&k.small4)).MulAdd(r, c8(&k.small3)).
		MulAdd(r, c8(&k.small2)).MulAdd(r, c8(&k.small1)).MulAdd(r, c8(&k.small1))
	return p, t.AsInt32x8().Min(n8(&k.roundBias128)).ShiftLeft(n8(&k.twentyThree)).AsFloat32x8()
}

// scaled8 is power * scale, or 0 where x is below expLow.
func (k *constants) scaled8(x, power, scale f32x8) f32x8 {
	return c8(&k.zero).Merge(power.Mul(scale), x.Less(c8(&k.expLow)))
}

//go:nocheckptr
func expAVX2(dst, src []float32, m float32) float64 {
	k := simdConstants
	var s0, s1 f64x4
	low := archsimd.BroadcastFloat32x8(m)
	n, i := len(src), 0
	for ; i+16 <= n; i += 16 {
		x0, x1 := load8(src, i).Sub(low), load8(src, i+8).Sub(low)
		p0, scale0 := k.exp8(x0)
		p1, scale1 := k.exp8(x1)
		e0, e1 := k.scaled8(x0, p0, scale0), k.scaled8(x1, p1, scale1)
		e0.Store(floatPtr8(dst, i))
		e1.Store(floatPtr8(dst, i+8))
		s0, s1 = accumulate8(s0, s1, e0.Add(e1))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		x := loadTail8(src, i, mask).Sub(low)
		p, scale := k.exp8(x)
		e := k.scaled8(x, p, scale).Masked(mask)
		e.StoreMasked(floatPtr8(dst, i), mask)
		s0, s1 = accumulate8(s0, s1, e)
	}
	return sum4(s0.Add(s1))
}

//go:nocheckptr
func expScaleAVX2(dst, src []float32, m, c float32) {
	k := simdConstants
	low, cv := archsimd.BroadcastFloat32x8(m), archsimd.BroadcastFloat32x8(c)
	n, i := len(src), 0
	for ; i+16 <= n; i += 16 {
		x0, x1 := load8(src, i).Sub(low), load8(src, i+8).Sub(low)
		p0, scale0 := k.exp8(x0)
		p1, scale1 := k.exp8(x1)
		k.scaled8(x0, p0, scale0).Mul(cv).Store(floatPtr8(dst, i))
		k.scaled8(x1, p1, scale1).Mul(cv).Store(floatPtr8(dst, i+8))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		x := loadTail8(src, i, mask).Sub(low)
		p, scale := k.exp8(x)
		k.scaled8(x, p, scale).Mul(cv).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

// gateAVX2 divides once. The sigmoid of v is `above` where v is positive. Else it is 1 minus that, which is
// computed as a difference where that keeps the digits (near), and as a product elsewhere.
//
//go:nocheckptr
func gateAVX2(value, slope, x []float32, a, b float32) {
	k := simdConstants
	av, bv := archsimd.BroadcastFloat32x8(a), archsimd.BroadcastFloat32x8(b)
	b3, far := archsimd.BroadcastFloat32x8(3*b), archsimd.BroadcastFloat32x8(farSquare)
	zero, one := c8(&k.zero), c8(&k.one)
	minusOne := zero.Sub(one)
	for i := 0; i < len(x); i += 8 {
		g := loadUpTo8(x, i)
		square := g.Mul(g).Min(far)
		v := bv.MulAdd(square, av).Mul(g)
		e := k.expOf8(v.Min(zero.Sub(v)))
		// lost is what q has lost to 1 / (1 + e), relative to q.
		sum := one.Add(e)
		q := one.Div(sum)
		minusQ := zero.Sub(q)
		lost := minusQ.MulAdd(e.Sub(sum.Sub(one)), minusQ.MulAdd(sum, one))
		above, near := q.MulAdd(lost, q), minusQ.MulAdd(lost, one.Sub(q))
		below := e.Mul(above)
		s := below.Merge(near, v.Less(minusOne)).Merge(above, v.Less(zero))
		storeUpTo8(value, i, g.Mul(s))
		if slope != nil {
			storeUpTo8(slope, i, below.Mul(above).Mul(g).MulAdd(b3.MulAdd(square, av), s))
		}
	}
	archsimd.ClearAVXUpperBits()
}

// geluAVX2 has the share of the normal distribution by two formulas (simd_amd64.go). Far out, `small` keeps
// its digits. Where that is not small, `near` rounds less.
//
//go:nocheckptr
func geluAVX2(value, slope, x []float32) {
	k := simdConstants
	zero, one := c8(&k.zero), c8(&k.one)
	far := archsimd.BroadcastFloat32x8(20) // where the exponential is 0
	for i := 0; i < len(x); i += 8 {
		g := loadUpTo8(x, i)
		z := g.Max(zero.Sub(g)).Min(far)
		half := z.Mul(c8(&k.minusHalf))
		exponent := z.Mul(half)
		e := k.expOf8(exponent)
		e = e.MulAdd(z.MulAdd(half, zero.Sub(exponent)), e) // what the exponent lost to rounding
		t := one.Div(z.MulAdd(c8(&k.millsScale), one))
		p := c8(&k.mills9).MulAdd(t, c8(&k.mills8)).MulAdd(t, c8(&k.mills7)).MulAdd(t, c8(&k.mills6)).
			MulAdd(t, c8(&k.mills5)).MulAdd(t, c8(&k.mills4)).MulAdd(t, c8(&k.mills3)).
			MulAdd(t, c8(&k.mills2)).MulAdd(t, c8(&k.mills1))
		small := p.Mul(t).Mul(e)
		square := z.Mul(z)
		near := c8(&k.near5).MulAdd(square, c8(&k.near4)).MulAdd(square, c8(&k.near3)).
			MulAdd(square, c8(&k.near2)).MulAdd(square, c8(&k.near1)).MulAdd(square, c8(&k.density)).
			MulAdd(g, zero.Sub(c8(&k.minusHalf)))
		below := near.Merge(small.Merge(one.Sub(small), g.Less(zero)), z.Less(one))
		storeUpTo8(value, i, g.Mul(below))
		if slope != nil {
			storeUpTo8(slope, i, g.Mul(c8(&k.density)).MulAdd(e, below))
		}
	}
	archsimd.ClearAVXUpperBits()
}

// loadUpTo8 loads elements i to i+7, as far as there are so many. storeUpTo8 stores them.
//
//go:nocheckptr
func loadUpTo8(x []float32, i int) f32x8 {
	if i+8 <= len(x) {
		return load8(x, i)
	}
	return loadTail8(x, i, tailMask8(len(x)-i))
}

//go:nocheckptr
func storeUpTo8(x []float32, i int, v f32x8) {
	if i+8 <= len(x) {
		v.Store(floatPtr8(x, i))
		return
	}
	v.StoreMasked(floatPtr8(x, i), tailMask8(len(x)-i))
}

// expOf8 is exp(x) for x up to 0, also for -inf.
func (k *constants) expOf8(x f32x8) f32x8 {
	power, scale := k.exp8(x)
	return k.scaled8(x, power, scale)
}

func dotAVX2(x, y []float32) float64 {
	var s0, s1 f64x4
	n, i := len(x), 0
	for ; i+32 <= n; i += 32 {
		a := load8(x, i).Mul(load8(y, i))
		b := load8(x, i+8).Mul(load8(y, i+8))
		a = load8(x, i+16).MulAdd(load8(y, i+16), a)
		b = load8(x, i+24).MulAdd(load8(y, i+24), b)
		s0, s1 = accumulate8(s0, s1, a.Add(b))
	}
	for ; i < n; i += 4 {
		mask := tailMask4(n - i)
		s0 = loadTailWide4(x, i, mask).MulAdd(loadTailWide4(y, i, mask), s0)
	}
	return sum4(s0.Add(s1))
}

func dotFloat32AVX2(x, y unsafe.Pointer, n int) float64 {
	return dotAVX2(unsafe.Slice((*float32)(x), n), unsafe.Slice((*float32)(y), n))
}

func tailMask4(n int) archsimd.Mask32x4 {
	return archsimd.BroadcastInt32x4(int32(n)).Greater(archsimd.LoadInt32x8(&iota8).GetLo())
}

//go:nocheckptr
func loadTailWide4(x []float32, i int, m archsimd.Mask32x4) f64x4 {
	return archsimd.LoadMaskedFloat32x4(floatPtr4(x, i), m).ConvertToFloat64()
}

func dot3AVX2(x, y, z []float32) float64 {
	var s0, s1 f64x4
	n, i := len(x), 0
	for ; i+32 <= n; i += 32 {
		a := load8(y, i).Mul(load8(z, i)).Mul(load8(x, i))
		b := load8(y, i+8).Mul(load8(z, i+8)).Mul(load8(x, i+8))
		a = load8(y, i+16).Mul(load8(z, i+16)).MulAdd(load8(x, i+16), a)
		b = load8(y, i+24).Mul(load8(z, i+24)).MulAdd(load8(x, i+24), b)
		s0, s1 = accumulate8(s0, s1, a.Add(b))
	}
	for ; i < n; i += 4 {
		mask := tailMask4(n - i)
		s0 = loadTailWide4(y, i, mask).Mul(loadTailWide4(z, i, mask)).MulAdd(loadTailWide4(x, i, mask), s0)
	}
	return sum4(s0.Add(s1))
}

func sumsAndDot3AVX2(x, y, z []float32) (sum, product, product3 float64) {
	var s0, s1, p0, p1, q0, q1 f64x4
	n, i := len(x), 0
	for ; i+32 <= n; i += 32 {
		s0, s1 = accumulate8(s0, s1, load8(x, i).Add(load8(x, i+16)).Add(load8(x, i+8).Add(load8(x, i+24))))
		a, b := load8(y, i).Mul(load8(z, i)), load8(y, i+8).Mul(load8(z, i+8))
		c, d := load8(y, i+16).Mul(load8(z, i+16)), load8(y, i+24).Mul(load8(z, i+24))
		p0, p1 = accumulate8(p0, p1, a.Add(c).Add(b.Add(d)))
		a, b = a.Mul(load8(x, i)), b.Mul(load8(x, i+8))
		q0, q1 = accumulate8(q0, q1, c.MulAdd(load8(x, i+16), a).Add(d.MulAdd(load8(x, i+24), b)))
	}
	for ; i < n; i += 4 {
		mask := tailMask4(n - i)
		g, v := loadTailWide4(y, i, mask).Mul(loadTailWide4(z, i, mask)), loadTailWide4(x, i, mask)
		s0, p0, q0 = s0.Add(v), p0.Add(g), g.MulAdd(v, q0)
	}
	return sum4(s0.Add(s1)), sum4(p0.Add(p1)), sum4(q0.Add(q1))
}

func addAVX2(acc, x []float64) {
	n, i := len(x), 0
	for ; i+4 <= n; i += 4 {
		archsimd.LoadFloat64x4(doublePtr4(acc, i)).
			Add(archsimd.LoadFloat64x4(doublePtr4(x, i))).Store(doublePtr4(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	add(acc[i:], x[i:])
}

func doublePtr4(x []float64, i int) *[4]float64 {
	return (*[4]float64)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(x)), 8*i))
}

func addProductAVX2(acc []float64, x, y []float32, c, e float64) {
	cv, ev := archsimd.BroadcastFloat64x4(c), archsimd.BroadcastFloat64x4(e)
	n, i := len(x), 0
	for ; i+4 <= n; i += 4 {
		xc := archsimd.LoadFloat32x4(floatPtr4(x, i)).ConvertToFloat64().MulAdd(cv, ev)
		yv := archsimd.LoadFloat32x4(floatPtr4(y, i)).ConvertToFloat64()
		xc.MulAdd(yv, archsimd.LoadFloat64x4(doublePtr4(acc, i))).Store(doublePtr4(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	addProduct(acc[i:], x[i:], y[i:], c, e)
}

func addBothAVX2(products, sums []float64, x, y []float32, c, e float64) {
	cv, ev := archsimd.BroadcastFloat64x4(c), archsimd.BroadcastFloat64x4(e)
	n, i := len(x), 0
	for ; i+4 <= n; i += 4 {
		xc := archsimd.LoadFloat32x4(floatPtr4(x, i)).ConvertToFloat64().MulAdd(cv, ev)
		yv := archsimd.LoadFloat32x4(floatPtr4(y, i)).ConvertToFloat64()
		xc.MulAdd(yv, archsimd.LoadFloat64x4(doublePtr4(products, i))).Store(doublePtr4(products, i))
		yv.Add(archsimd.LoadFloat64x4(doublePtr4(sums, i))).Store(doublePtr4(sums, i))
	}
	archsimd.ClearAVXUpperBits()
	addBoth(products[i:], sums[i:], x[i:], y[i:], c, e)
}

//go:nocheckptr
func multiplyAVX2(dst, x, w []float32, c float32) {
	cv := archsimd.BroadcastFloat32x8(c)
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		load8(x, i).Mul(cv).Mul(load8(w, i)).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		loadTail8(x, i, mask).Mul(cv).Mul(loadTail8(w, i, mask)).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func softmaxGradAVX2(dst, dy, y []float32, hi, lo float32) {
	hv, lv := archsimd.BroadcastFloat32x8(hi), archsimd.BroadcastFloat32x8(lo)
	n, i := len(y), 0
	for ; i+8 <= n; i += 8 {
		load8(dy, i).Sub(hv).Sub(lv).Mul(load8(y, i)).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		loadTail8(dy, i, mask).Sub(hv).Sub(lv).Mul(loadTail8(y, i, mask)).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

// In softmax_amd64.s.
//
//go:noescape
func softmaxGradFloat32AVX2(dst, dy, y unsafe.Pointer, n int, hi, lo float32, stream bool)

//go:noescape
func softmaxGradRowsAVX2(dst, dy, y unsafe.Pointer, n, rows, dstStride, dyStride, yStride int)

//go:nocheckptr
func sumAVX2(dst, x, y []float32) {
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		load8(x, i).Add(load8(y, i)).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		loadTail8(x, i, mask).Add(loadTail8(y, i, mask)).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func subtractAVX2(dst, x []float32, m float32) {
	mv := archsimd.BroadcastFloat32x8(m)
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		load8(x, i).Sub(mv).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		loadTail8(x, i, mask).Sub(mv).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

func accumulateAVX2(acc []float64, x []float32) {
	n, i := len(x), 0
	for ; i+4 <= n; i += 4 {
		xv := archsimd.LoadFloat32x4(floatPtr4(x, i)).ConvertToFloat64()
		xv.Add(archsimd.LoadFloat64x4(doublePtr4(acc, i))).Store(doublePtr4(acc, i))
	}
	archsimd.ClearAVXUpperBits()
	accumulate(acc[i:], x[i:])
}

func momentsAVX2(x []float32, pivot float32) (sum, squares float64) {
	pv := archsimd.BroadcastFloat64x4(float64(pivot))
	var s0, s1, q0, q1 f64x4
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		a := archsimd.LoadFloat32x4(floatPtr4(x, i)).ConvertToFloat64().Sub(pv)
		b := archsimd.LoadFloat32x4(floatPtr4(x, i+4)).ConvertToFloat64().Sub(pv)
		s0, s1 = s0.Add(a), s1.Add(b)
		q0, q1 = a.MulAdd(a, q0), b.MulAdd(b, q1)
	}
	sum, squares = sum4(s0.Add(s1)), sum4(q0.Add(q1))
	s, q := moments(x[i:], pivot)
	return sum + s, squares + q
}

//go:nocheckptr
func normalizeAVX2(dst, x, w, b []float32, hi, lo, c float32) {
	hv, lv := archsimd.BroadcastFloat32x8(hi), archsimd.BroadcastFloat32x8(lo)
	cv := archsimd.BroadcastFloat32x8(c)
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		load8(x, i).Sub(hv).Sub(lv).Mul(cv).MulAdd(load8(w, i), load8(b, i)).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		xhat := loadTail8(x, i, mask).Sub(hv).Sub(lv).Mul(cv)
		xhat.MulAdd(loadTail8(w, i, mask), loadTail8(b, i, mask)).StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func normGradAVX2(dst, x, w, dout []float32, k, m, r float64) {
	kv, mv := archsimd.BroadcastFloat32x8(float32(-k)), archsimd.BroadcastFloat32x8(float32(-m))
	rv := archsimd.BroadcastFloat32x8(float32(r))
	n, i := len(x), 0
	for ; i+8 <= n; i += 8 {
		mean := load8(x, i).MulAdd(kv, mv)
		load8(dout, i).MulAdd(load8(w, i), mean).Mul(rv).Store(floatPtr8(dst, i))
	}
	if i < n {
		mask := tailMask8(n - i)
		mean := loadTail8(x, i, mask).MulAdd(kv, mv)
		v := loadTail8(dout, i, mask).MulAdd(loadTail8(w, i, mask), mean).Mul(rv)
		v.StoreMasked(floatPtr8(dst, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

//go:nocheckptr
func storeFloat32AVX2(dst unsafe.Pointer, src []float32, c float32) {
	cv := archsimd.BroadcastFloat32x8(c)
	n, i := len(src), 0
	out := unsafe.Slice((*float32)(dst), n)
	for ; i+16 <= n; i += 16 {
		load8(src, i).Mul(cv).Store(floatPtr8(out, i))
		load8(src, i+8).Mul(cv).Store(floatPtr8(out, i+8))
	}
	for ; i < n; i += 8 {
		mask := tailMask8(n - i)
		loadTail8(src, i, mask).Mul(cv).StoreMasked(floatPtr8(out, i), mask)
	}
	archsimd.ClearAVXUpperBits()
}

// In float16_amd64.s, see row_avx512.go. The instructions belong to F16C, which is older than AVX2. n is a
// positive multiple of 8.
//
//go:noescape
func widenFloat16x8(dst *float32, src unsafe.Pointer, n int)

//go:noescape
func narrowFloat16x8(dst unsafe.Pointer, src *float32, n int, factor float32)

func loadFloat16AVX2(dst []float32, src unsafe.Pointer) {
	n := len(dst)
	if n < 8 {
		loadFloat16(dst, src)
		return
	}
	widenFloat16x8(&dst[0], src, n&^7)
	widenFloat16x8(&dst[n-8], unsafe.Add(src, 2*(n-8)), 8)
}

func loadBFloat16AVX2(dst []float32, src unsafe.Pointer) {
	n := len(dst)
	if n < 8 {
		loadBFloat16(dst, src)
		return
	}
	k := simdConstants
	for i := 0; i+8 <= n; i += 8 {
		k.widenBFloat16x8(loadExtended8(src, i)).Store(floatPtr8(dst, i))
	}
	k.widenBFloat16x8(loadExtended8(src, n-8)).Store(floatPtr8(dst, n-8))
	archsimd.ClearAVXUpperBits()
}

func storeFloat16AVX2(dst unsafe.Pointer, src []float32, c float32) {
	n := len(src)
	if n < 8 {
		storeFloat16(dst, src, c)
		return
	}
	narrowFloat16x8(dst, &src[0], n&^7, c)
	narrowFloat16x8(unsafe.Add(dst, 2*(n-8)), &src[n-8], 8, c)
}

// In bfloat16_avx2_amd64.s, for a number of elements that is a positive multiple of 16.
//
//go:noescape
func store16sBFloat16AVX2(dst, src unsafe.Pointer, n int, c float32)

func storeBFloat16AVX2(dst unsafe.Pointer, src []float32, c float32) {
	n := len(src)
	if n < 8 {
		storeBFloat16(dst, src, c)
		return
	}
	k, i := simdConstants, n&^15
	if i > 0 {
		store16sBFloat16AVX2(dst, unsafe.Pointer(&src[0]), i, c)
	}
	cv := archsimd.BroadcastFloat32x8(c)
	if i+8 <= n {
		k.narrowBFloat16x8(load8(src, i).Mul(cv)).Store(int16Ptr8(dst, i))
	}
	k.narrowBFloat16x8(load8(src, n-8).Mul(cv)).Store(int16Ptr8(dst, n-8))
	archsimd.ClearAVXUpperBits()
}

// loadExtended8 loads 8 numbers of 16 bits and extends them with zeros to 32.
func loadExtended8(src unsafe.Pointer, i int) i32x8 {
	return archsimd.LoadInt16x8(int16Ptr8(src, i)).AsUint16x8().ExtendToUint32().AsInt32x8()
}

func (k *constants) widenBFloat16x8(h i32x8) f32x8 { return h.ShiftLeft(n8(&k.sixteen)).AsFloat32x8() }

func (k *constants) narrowBFloat16x8(f f32x8) archsimd.Int16x8 {
	h := k.roundBFloat16x8(f).ShiftRight(n8(&k.sixteen))
	return h.GetLo().SaturateToInt16Concat(h.GetHi())
}

// roundBFloat16x8 rounds to nearest even. The results are in the high halves.
func (k *constants) roundBFloat16x8(f f32x8) i32x8 {
	u := f.AsInt32x8()
	odd := u.ShiftRight(n8(&k.sixteen)).And(n8(&k.bit0))
	return n8(&k.bfloat16NaN).Merge(u.Add(odd).Add(n8(&k.bfloat16Half)), f.IsNaN())
}

func rmsNormRowsAVX2(
	y, x strided, w []float32, over, eps float64, rows int, rstd *[maxTogether]float64,
) {
	var sums [maxTogether][4]float64
	for row := range rows {
		xRow := x.row(row)
		var s0, s1 f64x4
		for i := 0; i < len(w); i += 32 {
			x0, x1, x2, x3 := at8(xRow, i), at8(xRow, i+8), at8(xRow, i+16), at8(xRow, i+24)
			s0, s1 = accumulate8(s0, s1, x2.MulAdd(x2, x0.Mul(x0)).Add(x3.MulAdd(x3, x1.Mul(x1))))
		}
		s0.Add(s1).Store(&sums[row])
	}
	archsimd.ClearAVXUpperBits()
	for row := range rows {
		rstd[row] = 1 / math.Sqrt(sumOf4(&sums[row])/over+eps)
	}
	for row := range rows {
		xRow, yRow := x.row(row), y.row(row)
		r := archsimd.BroadcastFloat32x8(float32(rstd[row]))
		for i := 0; i < len(w); i += 8 {
			storeAt8(yRow, i, at8(xRow, i).Mul(r).Mul(load8(w, i)))
		}
		archsimd.ClearAVXUpperBits()
	}
}

func rmsNormGradRowsAVX2(
	dx, x, dy strided, w []float32, over float64, dw []float64, rows int, rstd *[maxTogether]float64,
) {
	var sums [maxTogether][4]float64
	for row := range rows {
		xRow, dyRow := x.row(row), dy.row(row)
		var s0, s1 f64x4
		for i := 0; i < len(w); i += 32 {
			a := at8(dyRow, i).Mul(load8(w, i)).Mul(at8(xRow, i))
			b := at8(dyRow, i+8).Mul(load8(w, i+8)).Mul(at8(xRow, i+8))
			a = at8(dyRow, i+16).Mul(load8(w, i+16)).MulAdd(at8(xRow, i+16), a)
			b = at8(dyRow, i+24).Mul(load8(w, i+24)).MulAdd(at8(xRow, i+24), b)
			s0, s1 = accumulate8(s0, s1, a.Add(b))
		}
		s0.Add(s1).Store(&sums[row])
	}
	archsimd.ClearAVXUpperBits()
	for row := range rows {
		xRow, dyRow, dxRow := x.row(row), dy.row(row), dx.row(row)
		rowRstd, rowK := rstd[row], rstd[row]*rstd[row]*sumOf4(&sums[row])/over
		r32, k32 := float32(rowRstd), float32(-rowK)
		k, r := archsimd.BroadcastFloat32x8(k32), archsimd.BroadcastFloat32x8(r32)
		wide := archsimd.BroadcastFloat64x4(rowRstd)
		for i := 0; i < len(w); i += 8 {
			xv, dyv := at8(xRow, i), at8(dyRow, i)
			if dw != nil {
				lo, hi := doublePtr4(dw, i), doublePtr4(dw, i+4)
				xLo, xHi := xv.GetLo().ConvertToFloat64().Mul(wide), xv.GetHi().ConvertToFloat64().Mul(wide)
				xLo.MulAdd(dyv.GetLo().ConvertToFloat64(), archsimd.LoadFloat64x4(lo)).Store(lo)
				xHi.MulAdd(dyv.GetHi().ConvertToFloat64(), archsimd.LoadFloat64x4(hi)).Store(hi)
			}
			storeAt8(dxRow, i, dyv.MulAdd(load8(w, i), xv.Mul(k)).Mul(r))
		}
		archsimd.ClearAVXUpperBits()
	}
}

// at8 is elements i to i+7 of a row.
func at8(p unsafe.Pointer, i int) f32x8 {
	return archsimd.LoadFloat32x8((*[8]float32)(unsafe.Add(p, 4*i)))
}

func storeAt8(p unsafe.Pointer, i int, v f32x8) { v.Store((*[8]float32)(unsafe.Add(p, 4*i))) }
