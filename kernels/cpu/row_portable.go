package cpu

import (
	"math"
	"unsafe"

	"github.com/gander-go/gander/kernels"
)

// The row functions in plain Go, for every machine. Sums have four independent accumulators in float64, which
// scalar code computes at almost no extra cost.

var portable32 = rowFuncs[float32]{
	name:        "portable",
	exponential: 256,
	load: [4]func([]float32, unsafe.Pointer){
		kernels.Float16:  loadFloat16,
		kernels.BFloat16: loadBFloat16,
	},
	store: [4]func(unsafe.Pointer, []float32, float32){
		kernels.Float16:  storeFloat16,
		kernels.BFloat16: storeBFloat16,
		kernels.Float32:  storeNative[float32],
	},
	max:         maximum[float32],
	without:     without[float32],
	exp:         exp32Row,
	expScale:    exp32Scale,
	expAll:      expAll,
	log1pAll:    log1pAll,
	dot:         dot[float32],
	dot3:        dot3[float32],
	add:         add,
	addProduct:  addProduct[float32],
	multiply:    multiply[float32],
	softmaxGrad: softmaxGrad[float32],
	sum:         sum[float32],
	subtract:    subtract[float32],
	accumulate:  accumulate[float32],
	sumsAndDot3: sumsAndDot3[float32],
	addBoth:     addBoth[float32],
	moments:     moments[float32],
	normalize:   normalize[float32],
	normGrad:    normGrad[float32],
	gate:        gate[float32],
	gelu:        gelu[float32],
}

var portable64 = rowFuncs[float64]{
	name:        "portable",
	exponential: 256,
	store:       [4]func(unsafe.Pointer, []float64, float64){kernels.Float64: storeNative[float64]},
	max:         maximum[float64],
	without:     without[float64],
	exp:         exp64Row,
	expScale:    exp64Scale,
	expAll:      expAll,
	log1pAll:    log1pAll,
	dot:         dot[float64],
	dot3:        dot3[float64],
	add:         add,
	addProduct:  addProduct[float64],
	multiply:    multiply[float64],
	softmaxGrad: softmaxGrad[float64],
	sum:         sum[float64],
	subtract:    subtract[float64],
	accumulate:  accumulate[float64],
	sumsAndDot3: sumsAndDot3[float64],
	addBoth:     addBoth[float64],
	moments:     moments[float64],
	normalize:   normalize[float64],
	normGrad:    normGrad[float64],
	gate:        gate[float64],
	gelu:        gelu[float64],
}

func loadFloat16(dst []float32, src unsafe.Pointer) {
	for i, h := range unsafe.Slice((*uint16)(src), len(dst)) {
		dst[i] = widenFloat16(h)
	}
}

func loadBFloat16(dst []float32, src unsafe.Pointer) {
	for i, h := range unsafe.Slice((*uint16)(src), len(dst)) {
		dst[i] = widenBFloat16(h)
	}
}

func storeFloat16(dst unsafe.Pointer, src []float32, c float32) {
	out := unsafe.Slice((*uint16)(dst), len(src))
	for i, f := range src {
		out[i] = narrowFloat16(f * c)
	}
}

func storeBFloat16(dst unsafe.Pointer, src []float32, c float32) {
	out := unsafe.Slice((*uint16)(dst), len(src))
	for i, f := range src {
		out[i] = narrowBFloat16(f * c)
	}
}

func storeNative[T float](dst unsafe.Pointer, src []T, c T) {
	out := unsafe.Slice((*T)(dst), len(src))
	for i, f := range src {
		out[i] = f * c
	}
}

func without[T float](dst, x []T, k int) T {
	copy(dst, x)
	dst[k] = T(math.Inf(-1))
	return maximum(dst)
}

func maximum[T float](x []T) T {
	low := T(math.Inf(-1))
	m := [4]T{low, low, low, low}
	for ; len(x) >= 4; x = x[4:] {
		m[0], m[1] = larger(m[0], x[0]), larger(m[1], x[1])
		m[2], m[3] = larger(m[2], x[2]), larger(m[3], x[3])
	}
	for _, v := range x {
		m[0] = larger(m[0], v)
	}
	return larger(larger(m[0], m[1]), larger(m[2], m[3]))
}

func larger[T float](m, v T) T {
	if v > m {
		return v
	}
	return m
}

func exp32(x float32) float32 {
	if x < expLow {
		return 0
	}
	if x > 89 {
		return float32(math.Inf(1))
	}
	t := x*log2E + roundBias
	n := t - roundBias
	r := x - n*ln2High - n*ln2Low
	p := (((exp6*r+exp5)*r+exp4)*r+exp3)*r + exp2
	p = p*r*r + r + 1
	if n < -126 {
		return p * math.Float32frombits((math.Float32bits(t)+expShift)<<23) * (1.0 / (1 << expShift))
	}
	return p * math.Float32frombits(math.Float32bits(t)<<23)
}

func exp32Row(dst, src []float32, m float32) float64 {
	dst = dst[:len(src)]
	var s [2]float64
	for ; len(src) >= 2; src, dst = src[2:], dst[2:] {
		e0, e1 := exp32(src[0]-m), exp32(src[1]-m)
		dst[0], dst[1] = e0, e1
		s[0] += float64(e0)
		s[1] += float64(e1)
	}
	for i, v := range src {
		dst[i] = exp32(v - m)
		s[0] += float64(dst[i])
	}
	return s[0] + s[1]
}

func exp32Scale(dst, src []float32, m, c float32) {
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = exp32(v-m) * c
	}
}

func exp64Scale(dst, src []float64, m, c float64) {
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = math.Exp(v-m) * c
	}
}

// exp64Row adds up 64 elements at a time: an addition rounds in proportion to the sum that it is made to.
func exp64Row(dst, src []float64, m float64) float64 {
	total := 0.0
	dst = dst[:len(src)]
	for lo := 0; lo < len(src); lo += 64 {
		var s [4]float64
		for i, v := range src[lo:min(lo+64, len(src))] {
			e := math.Exp(v - m)
			dst[lo+i] = e
			s[i%len(s)] += e
		}
		total += (s[0] + s[1]) + (s[2] + s[3])
	}
	return total
}

func dot[T float](x, y []T) float64 {
	y = y[:len(x)]
	var s [4]float64
	for ; len(x) >= 4; x, y = x[4:], y[4:] {
		s[0] += float64(x[0]) * float64(y[0])
		s[1] += float64(x[1]) * float64(y[1])
		s[2] += float64(x[2]) * float64(y[2])
		s[3] += float64(x[3]) * float64(y[3])
	}
	for i, v := range x {
		s[i] += float64(v) * float64(y[i])
	}
	return (s[0] + s[1]) + (s[2] + s[3])
}

func dot3[T float](x, y, z []T) float64 {
	y, z = y[:len(x)], z[:len(x)]
	var s [4]float64
	for ; len(x) >= 4; x, y, z = x[4:], y[4:], z[4:] {
		s[0] += float64(x[0]) * float64(y[0]) * float64(z[0])
		s[1] += float64(x[1]) * float64(y[1]) * float64(z[1])
		s[2] += float64(x[2]) * float64(y[2]) * float64(z[2])
		s[3] += float64(x[3]) * float64(y[3]) * float64(z[3])
	}
	for i, v := range x {
		s[i] += float64(v) * float64(y[i]) * float64(z[i])
	}
	return (s[0] + s[1]) + (s[2] + s[3])
}

func add(acc, x []float64) {
	acc = acc[:len(x)]
	for i, v := range x {
		acc[i] += v
	}
}

func addProduct[T float](acc []float64, x, y []T, c, e float64) {
	acc, y = acc[:len(x)], y[:len(x)]
	for i, v := range x {
		acc[i] += (float64(v)*c + e) * float64(y[i])
	}
}

func sumsAndDot3[T float](x, y, z []T) (sum, product, product3 float64) {
	var s [4]float64
	for i, v := range x {
		s[i%len(s)] += float64(v)
	}
	return (s[0] + s[1]) + (s[2] + s[3]), dot(y, z), dot3(x, y, z)
}

func addBoth[T float](products, sums []float64, x, y []T, c, e float64) {
	products, sums, y = products[:len(x)], sums[:len(x)], y[:len(x)]
	for i, v := range x {
		products[i] += (float64(v)*c + e) * float64(y[i])
		sums[i] += float64(y[i])
	}
}

func multiply[T float](dst, x, w []T, c T) {
	dst, w = dst[:len(x)], w[:len(x)]
	for i, v := range x {
		dst[i] = v * c * w[i]
	}
}

func expAll(x []float64) {
	for i, v := range x {
		x[i] = math.Exp(v)
	}
}

func log1pAll(x []float64) {
	for i, v := range x {
		x[i] = log1p(v)
	}
}

// log1p is log(1 + v). math.Log is faster than math.Log1p.
func log1p(v float64) float64 {
	if v >= 1 {
		return math.Log(1 + v)
	}
	return math.Log1p(v)
}

func softmaxGrad[T float](dst, dy, y []T, hi, lo T) {
	dst, y = dst[:len(dy)], y[:len(dy)]
	for i, v := range dy {
		dst[i] = (v - hi - lo) * y[i]
	}
}

func sum[T float](dst, x, y []T) {
	dst, y = dst[:len(x)], y[:len(x)]
	for i, v := range x {
		dst[i] = v + y[i]
	}
}

func subtract[T float](dst, x []T, m T) {
	dst = dst[:len(x)]
	for i, v := range x {
		dst[i] = v - m
	}
}

func accumulate[T float](acc []float64, x []T) {
	acc = acc[:len(x)]
	for i, v := range x {
		acc[i] += float64(v)
	}
}

func moments[T float](x []T, pivot T) (sum, squares float64) {
	p := float64(pivot)
	var s, q [2]float64
	for ; len(x) >= 2; x = x[2:] {
		a, b := float64(x[0])-p, float64(x[1])-p
		s[0] += a
		s[1] += b
		q[0] += a * a
		q[1] += b * b
	}
	for _, v := range x {
		a := float64(v) - p
		s[0] += a
		q[0] += a * a
	}
	return s[0] + s[1], q[0] + q[1]
}

func normalize[T float](dst, x, w, b []T, hi, lo, c T) {
	dst, w, b = dst[:len(x)], w[:len(x)], b[:len(x)]
	for i, v := range x {
		dst[i] = (v-hi-lo)*c*w[i] + b[i]
	}
}

func normGrad[T float](dst, x, w, dout []T, k, m, r float64) {
	dst, w, dout = dst[:len(x)], w[:len(x)], dout[:len(x)]
	for i, v := range x {
		dst[i] = T((float64(dout[i])*float64(w[i]) - float64(v)*k - m) * r)
	}
}
